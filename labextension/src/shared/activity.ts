/**
* Tracks whether a view is visible: its page is shown, and the view is attached and in the viewport.
 *
* Views keep their state while they are hidden, but draw nothing.
 */
export class Activity {
  private isPageVisible = !document.hidden;
  private isOnScreen = true;
  private hiddenSince_ms = document.hidden ? performance.now() : null;
  private readonly callbacks = new Set<() => void>();
  private readonly returnCallbacks = new Set<(hidden_ms: number) => void>();

  constructor(element: Element, signal: AbortSignal) {
    document.addEventListener("visibilitychange", () => this.onVisibilityChange(), { signal });
    if (typeof IntersectionObserver !== "undefined") {
      // notebooks detach cells that are scrolled far away; these are reported as off-screen
      const observer = new IntersectionObserver((entries) => {
        const last = entries.at(-1);
        if (last) this.onIntersection(last.isIntersecting);
      });
      observer.observe(element);
      signal.addEventListener("abort", () => observer.disconnect(), { once: true });
    }
    signal.addEventListener("abort", () => this.clear(), { once: true });
  }

  get active(): boolean {
    return this.isPageVisible && this.isOnScreen;
  }

  /** Calls back whenever `active` changes. Returns a function that removes the callback. */
  onChange(callback: () => void): () => void {
    this.callbacks.add(callback);
    return () => this.callbacks.delete(callback);
  }

  /** Calls back when the page is shown again, with how long it was hidden. */
  onReturn(callback: (hidden_ms: number) => void): void {
    this.returnCallbacks.add(callback);
  }

  private onVisibilityChange(): void {
    const wasActive = this.active;
    this.isPageVisible = !document.hidden;
    if (document.hidden) this.hiddenSince_ms ??= performance.now();
    else if (this.hiddenSince_ms !== null) {
      const hidden_ms = performance.now() - this.hiddenSince_ms;
      this.hiddenSince_ms = null;
      for (const callback of this.returnCallbacks) callback(hidden_ms);
    }
    if (wasActive !== this.active) this.notify();
  }

  private onIntersection(isOnScreen: boolean): void {
    const wasActive = this.active;
    this.isOnScreen = isOnScreen;
    if (wasActive !== this.active) this.notify();
  }

  private notify(): void {
    for (const callback of this.callbacks) callback();
  }

  private clear(): void {
    this.callbacks.clear();
    this.returnCallbacks.clear();
  }
}
