const KEY = "sgpu-magic:loaded-kernels";
const MAX_KERNELS = 100;

/** The part of the browser's storage that is used here. */
export type BrowserStorage = Pick<Storage, "getItem" | "setItem">;

/**
 * The kernels that have loaded sgpu-magic. Others get no requests on their control channel, because they would log each
 * one as an unknown message.
 *
 * Stored in the browser, because a busy kernel can't report after a page reload whether it has loaded sgpu-magic.
 */
export class LoadedKernels {
  private readonly ids: Set<string>;

  constructor(private readonly storage: BrowserStorage | null) {
    this.ids = new Set(readKernels(storage));
  }

  has(kernel: string): boolean {
    return this.ids.has(kernel);
  }

  add(kernel: string): void {
    if (kernel === "" || this.ids.has(kernel)) return;
    this.ids.add(kernel);
    this.save();
  }

  /** To be called when the kernel's process was replaced, or has unloaded sgpu-magic. */
  delete(kernel: string): void {
    if (this.ids.delete(kernel)) this.save();
  }

  private save(): void {
    try {
      this.storage?.setItem(KEY, JSON.stringify([...this.ids].slice(-MAX_KERNELS)));
    } catch {
      // storage is full or disabled; the ids last as long as the page
    }
  }
}

function readKernels(storage: BrowserStorage | null): string[] {
  try {
    const stored: unknown = JSON.parse(storage?.getItem(KEY) ?? "[]");
    return Array.isArray(stored) ? stored.filter((id): id is string => typeof id === "string") : [];
  } catch {
    return [];
  }
}

/** Returns the page's storage, null if the browser disables it. */
export function browserStorage(): BrowserStorage | null {
  try {
    return window.localStorage;
  } catch {
    return null;
  }
}
