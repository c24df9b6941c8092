import type { Activity } from "./activity";

/** Calls its callbacks once a second, aligned to the clock's full seconds, while the view is visible. */
export class Ticker {
  private readonly callbacks = new Set<() => void>();
  private timer: ReturnType<typeof setTimeout> | undefined;

  /** @param now_s: Returns the time, in seconds since the epoch. */
  constructor(
    private readonly now_s: () => number,
    private readonly activity: Activity,
    private readonly signal: AbortSignal,
  ) {
    activity.onChange(() => {
      if (activity.active) this.tick();
      else this.stop();
    });
    signal.addEventListener("abort", () => this.stop(), { once: true });
  }

  /** Calls back every second. Returns a function that removes the callback. */
  subscribe(callback: () => void): () => void {
    this.callbacks.add(callback);
    this.schedule();
    return () => {
      this.callbacks.delete(callback);
      if (this.callbacks.size === 0) this.stop();
    };
  }

  private tick(): void {
    for (const callback of [...this.callbacks]) callback();
    this.schedule();
  }

  private schedule(): void {
    if (this.timer !== undefined || this.callbacks.size === 0 || !this.activity.active || this.signal.aborted) return;
    // a little after the full second, so that no second is shown twice or skipped
    const left_ms = 1000 - ((this.now_s() * 1000) % 1000) + 5;
    this.timer = setTimeout(() => {
      this.timer = undefined;
      this.tick();
    }, left_ms);
  }

  private stop(): void {
    clearTimeout(this.timer);
    this.timer = undefined;
  }
}
