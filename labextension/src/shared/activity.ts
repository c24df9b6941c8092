/**
 * Whether a view is visible: its page is shown, and the view is attached and not scrolled away.
 *
 * Views of hidden pages keep their state and draw nothing.
 */
export class Activity {
  private pageShown = !document.hidden;
  private onScreen = true;
  private hiddenSince = document.hidden ? performance.now() : null;
  private readonly callbacks = new Set<() => void>();
  private readonly returned = new Set<(hidden_ms: number) => void>();

  constructor(element: Element, signal: AbortSignal) {
    document.addEventListener("visibilitychange", () => this.pageChanged(), { signal });
    if (typeof IntersectionObserver !== "undefined") {
      // notebooks detach cells that are scrolled far away: these count as off the screen
      const observer = new IntersectionObserver((entries) => {
        const last = entries.at(-1);
        if (last) this.screenChanged(last.isIntersecting);
      });
      observer.observe(element);
      signal.addEventListener("abort", () => observer.disconnect(), { once: true });
    }
    signal.addEventListener("abort", () => this.forget(), { once: true });
  }

  get active(): boolean {
    return this.pageShown && this.onScreen;
  }

  /** Calls back whenever `active` changes. Returns a function that removes the callback. */
  onChange(callback: () => void): () => void {
    this.callbacks.add(callback);
    return () => this.callbacks.delete(callback);
  }

  /** Calls back when the page is shown again, with how long it was hidden. */
  onReturn(callback: (hidden_ms: number) => void): void {
    this.returned.add(callback);
  }

  private pageChanged(): void {
    const was = this.active;
    this.pageShown = !document.hidden;
    if (document.hidden) this.hiddenSince ??= performance.now();
    else if (this.hiddenSince !== null) {
      const hidden_ms = performance.now() - this.hiddenSince;
      this.hiddenSince = null;
      for (const callback of this.returned) callback(hidden_ms);
    }
    if (was !== this.active) this.tell();
  }

  private screenChanged(onScreen: boolean): void {
    const was = this.active;
    this.onScreen = onScreen;
    if (was !== this.active) this.tell();
  }

  private tell(): void {
    for (const callback of this.callbacks) callback();
  }

  private forget(): void {
    this.callbacks.clear();
    this.returned.clear();
  }
}
