import type { Snapshot, FeedUpdate } from "../run_view/messages";
import type { LinkState } from "../run_view/transport";
import { ServerError } from "./run_server";
import type { RunChanges, RunServer } from "./run_server";

/** Timeout of a long poll: the server replies after this time even without changes. */
const LONG_POLL_S = 15;
/** Maximum number of concurrent long polls, out of the six connections that a browser opens to a server. */
const MAX_LONG_POLLS = 3;
/** Pause after a short poll and after a failure; each further failure doubles it, up to `MAX_PAUSE_MS`. */
const PAUSE_MS = 1_000;
const MAX_PAUSE_MS = 8_000;

/** Receives the updates of a feed. */
export interface FeedListener {
  onUpdate?(update: FeedUpdate): void;
  onSnapshot?(snapshot: Snapshot): void;
  onLinkChange?(link: LinkState): void;
  /** The ranks have displayed new output. */
  onDisplay?(): void;
  /** The run has ended, and no more updates follow. */
  onFinal?(): void;
}

const PERMANENT_ERRORS = new Set([400, 401, 403, 404, 405]);

let longPolls = 0;

/**
 * Polls the server for a run's changes. Views that share a feed share its connection.
 *
 * Polling ends with the run, when the server permanently refuses the request, or when the signal aborts.
 */
export class RunFeed {
  /** Number of the last `NewLines` that listeners received. */
  seq = 0;
  snapshot: Snapshot | null = null;
  link: LinkState = { busy: false, away: false, ended: "" };
  isFinal = false;
  private lines = 0;
  private displays = 0;
  private readonly listeners = new Set<FeedListener>();

  constructor(
    private readonly server: RunServer,
    readonly run: string,
    readonly signal: AbortSignal,
    private readonly pause: (ms: number, signal: AbortSignal) => Promise<void> = sleep,
  ) {}

  addListener(listener: FeedListener): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Polls until the feed ends. */
  async poll(): Promise<void> {
    let pause_ms = PAUSE_MS;
    while (this.isOpen()) {
      try {
        this.apply(await this.requestChanges());
        pause_ms = PAUSE_MS;
      } catch (error) {
        if (!this.isOpen()) return;
        const text = error instanceof Error ? error.message : String(error);
        if (error instanceof ServerError && PERMANENT_ERRORS.has(error.status)) {
          this.setLink({ ...this.link, ended: text });
          return;
        }
        this.setLink({ ...this.link, away: true });
        await this.pause(pause_ms, this.signal);
        pause_ms = Math.min(2 * pause_ms, MAX_PAUSE_MS);
      }
    }
  }

  private isOpen(): boolean {
    return !this.signal.aborted && !this.isFinal && !this.link.ended;
  }

  private async requestChanges(): Promise<RunChanges> {
    const known = { after: this.seq, lines: this.lines, drawn: this.snapshot?.seq ?? 0, displays: this.displays };
    if (longPolls >= MAX_LONG_POLLS) {
      const changes = await this.server.changes(this.run, known, 0, this.signal);
      if (!changes.final) await this.pause(PAUSE_MS, this.signal);
      return changes;
    }
    longPolls += 1;
    try {
      return await this.server.changes(this.run, known, LONG_POLL_S, this.signal);
    } finally {
      longPolls -= 1;
    }
  }

  private apply(changes: RunChanges): void {
    if (this.signal.aborted) return;
    if (this.link.away) this.setLink({ ...this.link, away: false });
    for (const update of changes.updates) {
      if (update.kind === "lines") this.seq = update.seq;
      else this.link = { ...this.link, ended: update.text };
      this.notify((listener) => listener.onUpdate?.(update));
    }
    this.lines = changes.lines;
    if (changes.snapshot) {
      const { snapshot } = changes;
      this.snapshot = snapshot;
      this.notify((listener) => listener.onSnapshot?.(snapshot));
    }
    if (changes.displays !== this.displays) {
      this.displays = changes.displays;
      this.notify((listener) => listener.onDisplay?.());
    }
    if (changes.final) {
      this.isFinal = true;
      this.notify((listener) => listener.onFinal?.());
    }
  }

  private setLink(link: LinkState): void {
    this.link = link;
    this.notify((listener) => listener.onLinkChange?.(link));
  }

  private notify(call: (listener: FeedListener) => void): void {
    for (const listener of [...this.listeners]) call(listener);
  }
}

/** Resolves after `ms`, or as soon as the signal aborts. */
export function sleep(ms: number, signal: AbortSignal): Promise<void> {
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
