import type { Snapshot, FeedUpdate } from "../run_view/messages";
import type { LinkState } from "../run_view/transport";
import { Refused } from "./run_server";
import type { News, RunServer } from "./run_server";

/** Timeout of a long poll: the server replies after this time if there is no news. */
export const WAIT_S = 15;
/** More feeds than this do not long-poll: a browser opens six connections to a server, and other requests need some. */
export const MAX_WAITING = 3;
/** Pause after a short poll, and after a failure; each further failure doubles it, up to the longest. */
export const PAUSE_MS = 1_000;
export const LONGEST_PAUSE_MS = 8_000;

/** Receives the updates of a feed. */
export interface Listener {
  onUpdate?(update: FeedUpdate): void;
  drawn?(snapshot: Snapshot): void;
  linked?(link: LinkState): void;
  /** The ranks have displayed something since the last call. */
  displayed?(): void;
  /** Nothing changes any more. */
  final?(): void;
}

const REFUSED_FOR_GOOD = new Set([400, 401, 403, 404, 405]);

let waiting = 0;

/**
 * Polls the server for the news of a run. Views that share a feed share its connection.
 *
 * Ends with the signal, with the run, or when the server refuses the run for good.
 */
export class RunFeed {
  /** Number of the last `NewLines` that listeners received. */
  seq = 0;
  snapshot: Snapshot | null = null;
  link: LinkState = { busy: false, away: false, ended: "" };
  isFinal = false;
  private lines = 0;
  private displays = 0;
  private readonly listeners = new Set<Listener>();

  constructor(
    private readonly server: RunServer,
    readonly run: string,
    readonly signal: AbortSignal,
    private readonly pause: (ms: number, signal: AbortSignal) => Promise<void> = paused,
  ) {}

  listen(listener: Listener): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Polls until the feed ends. */
  async follow(): Promise<void> {
    let pause_ms = PAUSE_MS;
    while (this.isOpen()) {
      try {
        this.take(await this.ask());
        pause_ms = PAUSE_MS;
      } catch (error) {
        if (!this.isOpen()) return;
        const text = error instanceof Error ? error.message : String(error);
        if (error instanceof Refused && REFUSED_FOR_GOOD.has(error.status)) {
          this.setLink({ ...this.link, ended: text });
          return;
        }
        this.setLink({ ...this.link, away: true });
        await this.pause(pause_ms, this.signal);
        pause_ms = Math.min(2 * pause_ms, LONGEST_PAUSE_MS);
      }
    }
  }

  private isOpen(): boolean {
    return !this.signal.aborted && !this.isFinal && !this.link.ended;
  }

  private async ask(): Promise<News> {
    const known = { after: this.seq, lines: this.lines, drawn: this.snapshot?.seq ?? 0, displays: this.displays };
    if (waiting >= MAX_WAITING) {
      const news = await this.server.news(this.run, known, 0, this.signal);
      if (!news.final) await this.pause(PAUSE_MS, this.signal);
      return news;
    }
    waiting += 1;
    try {
      return await this.server.news(this.run, known, WAIT_S, this.signal);
    } finally {
      waiting -= 1;
    }
  }

  private take(news: News): void {
    if (this.signal.aborted) return;
    if (this.link.away) this.setLink({ ...this.link, away: false });
    for (const update of news.updates) {
      if (update.kind === "lines") this.seq = update.seq;
      else this.link = { ...this.link, ended: update.text };
      this.tell((listener) => listener.onUpdate?.(update));
    }
    this.lines = news.lines;
    if (news.snapshot) {
      const { snapshot } = news;
      this.snapshot = snapshot;
      this.tell((listener) => listener.drawn?.(snapshot));
    }
    if (news.displays !== this.displays) {
      this.displays = news.displays;
      this.tell((listener) => listener.displayed?.());
    }
    if (news.final) {
      this.isFinal = true;
      this.tell((listener) => listener.final?.());
    }
  }

  private setLink(link: LinkState): void {
    this.link = link;
    this.tell((listener) => listener.linked?.(link));
  }

  private tell(call: (listener: Listener) => void): void {
    for (const listener of [...this.listeners]) call(listener);
  }
}

/** Resolves after `ms`, or as soon as the signal aborts. */
export function paused(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    if (signal.aborted) {
      resolve();
      return;
    }
    const done = (): void => {
      clearTimeout(timer);
      signal.removeEventListener("abort", done);
      resolve();
    };
    const timer = setTimeout(done, ms);
    signal.addEventListener("abort", done);
  });
}
