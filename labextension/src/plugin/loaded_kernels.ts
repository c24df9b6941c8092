const KEY = "sgpu-magic:loaded-kernels";
const MOST = 100;

/** The part of the browser's storage that is used here. */
export type Store = Pick<Storage, "getItem" | "setItem">;

/**
 * The kernels that have loaded sgpu-magic. Others get no requests on their control channel: they would log each one as
 * an unknown message.
 *
 * Kept in the browser's storage: after a page reload, a busy kernel can't report whether it has loaded sgpu-magic.
 */
export class LoadedKernels {
  private readonly known: Set<string>;

  constructor(private readonly store: Store | null) {
    this.known = new Set(read(store));
  }

  has(kernel: string): boolean {
    return this.known.has(kernel);
  }

  add(kernel: string): void {
    if (kernel === "" || this.known.has(kernel)) return;
    this.known.add(kernel);
    this.write();
  }

  /** Called when the kernel's process was replaced, or has unloaded sgpu-magic. */
  forget(kernel: string): void {
    if (this.known.delete(kernel)) this.write();
  }

  private write(): void {
    try {
      this.store?.setItem(KEY, JSON.stringify([...this.known].slice(-MOST)));
    } catch {
      // storage is full or forbidden: this page keeps them in memory
    }
  }
}

function read(store: Store | null): string[] {
  try {
    const kept: unknown = JSON.parse(store?.getItem(KEY) ?? "[]");
    return Array.isArray(kept) ? kept.filter((id): id is string => typeof id === "string") : [];
  } catch {
    return [];
  }
}

/** Returns the page's storage, null where the browser forbids it. */
export function pageStore(): Store | null {
  try {
    return window.localStorage;
  } catch {
    return null;
  }
}
