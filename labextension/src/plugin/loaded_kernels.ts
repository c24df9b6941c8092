const KEY = "sgpu-magic:loaded-kernels";
const MOST = 100;

/** What is used of the browser's storage. */
export type Store = Pick<Storage, "getItem" | "setItem">;

/**
 * Which kernels have loaded sgpu-magic. No other kernel is asked over its control channel: it would log each question as
 * an unknown message.
 *
 * The browser remembers them, because a kernel that is busy answers no question about itself when a page is reloaded.
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

  /** The kernel is another process, or has unloaded it. */
  forget(kernel: string): void {
    if (this.known.delete(kernel)) this.write();
  }

  private write(): void {
    try {
      this.store?.setItem(KEY, JSON.stringify([...this.known].slice(-MOST)));
    } catch {
      // no room, or forbidden: this page knows them all the same
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
