import type { Activity } from "../shared/activity";
import { NoAnswer } from "../shared/widget_requests";
import { costOf, formatMoney } from "../shared/units";
import { LogModel } from "./log_model";
import type { Tab } from "./log_model";
import type { Answer, FindAnswer, LineRow, LogAnswer, Snapshot, FeedUpdate } from "./messages";
import type { QuestionBody, LinkState, Transport } from "./transport";
import { endOfLog } from "./view_state";
import type { ViewPosition, ViewState } from "./view_state";

/** A page that was hidden for longer than this requests the run's state when it is shown again. */
const LONG_HIDDEN_MS = 5_000;
/** Delay after which lines that a snapshot counts, but that have not arrived, are requested. */
const MISSING_LINES_MS = 1_500;
/** Lines from the top of the log's view that another view of the run shows at once. */
const SEEN_LINES = 60;
/** How long Cancel waits for the kernel's answer before it interrupts: on the main shell, and on other channels. */
const CANCEL_TIMEOUT_MS = { shell: 700, other: 4_500 };

type Action = "cancel" | "end session" | "stacks";

/** The result of a button's action. */
export interface Notice {
  readonly lines: readonly string[];
  readonly isStacks: boolean;
}

/** A run's state and actions; the view renders it. */
export class RunModel {
  snapshot: Snapshot | null = null;
  readonly log: LogModel;
  link: LinkState = { busy: false, away: false, ended: "" };
  notice: Notice | null = null;
  readonly position: ViewPosition;
  /** Whether the view continues another view of the run. */
  readonly isContinued: boolean;
  /** Actions whose request is pending. */
  readonly pendingActions = new Set<Action>();
  private received_ms = 0;
  private isHelloPending = false;
  private growTimer: ReturnType<typeof setTimeout> | undefined;
  private readonly listeners = new Set<() => void>();
  private frame: number | undefined;
  private dirty = false;

  constructor(
    readonly transport: Transport,
    private readonly activity: Activity,
    private readonly signal: AbortSignal,
    previous: ViewState | null = null,
  ) {
    this.isContinued = previous !== null;
    this.position = previous ? { ...previous.position } : endOfLog();
    this.log = new LogModel(
      async (first, count, rank) => {
        const answer = await transport.ask({ kind: "lines", first, count, rank });
        return answer.kind === "lines-answer" ? answer : null;
      },
      () => this.requestRedraw(),
    );
    if (previous) this.restore(previous);
    transport.onUpdate((message) => this.onUpdate(message));
    transport.onLink?.((link) => this.onLinkChange(link));
    transport.onSnapshot((snapshot) => this.onSnapshot(snapshot));
    activity.onChange(() => this.flush());
    activity.onReturn((hidden_ms) => {
      if (hidden_ms > LONG_HIDDEN_MS) this.sendHello();
    });
    signal.addEventListener("abort", () => this.close(), { once: true });
    this.sendHello();
  }

  /** Seconds since the ranks started; 0 before. */
  get elapsed_s(): number {
    return this.hasStarted ? this.clock_s : 0;
  }

  /** Seconds from the lease until the ranks started, or until now. */
  get starting_s(): number {
    return this.hasStarted ? (this.snapshot?.starting_s ?? 0) : this.clock_s;
  }

  /** Seconds that the clock shows: since the ranks started or, before that, since the lease. */
  get clock_s(): number {
    if (!this.snapshot) return 0;
    const seconds = this.hasStarted ? this.snapshot.elapsed_s : this.snapshot.starting_s;
    return seconds + (this.isTicking ? (performance.now() - this.received_ms) / 1000 : 0);
  }

  private get hasStarted(): boolean {
    return this.snapshot !== null && this.snapshot.elapsed_s > 0;
  }

  /** The run's cost so far; "" if there is none to show. */
  get cost(): string {
    const cost = this.snapshot?.cost;
    if (!cost) return "";
    if (!this.isTicking || cost.per_s === 0) return cost.text;
    const seconds = cost.seconds + (performance.now() - this.received_ms) / 1000;
    return formatMoney(costOf(cost.per_s, seconds), cost.currency) + cost.mark;
  }

  get isTicking(): boolean {
    return this.snapshot !== null && this.snapshot.ticking && !this.snapshot.final && this.link.ended === "";
  }

  /**
   * Whether the kernel answers only after its cell.
   *
   * This shows only in a late answer on the main shell: kernels that handle comms in their own subshell answer in time.
   */
  get isKernelBlocked(): boolean {
    return this.transport.kind === "shell" && this.link.busy;
  }

  get canCancel(): boolean {
    return this.snapshot?.can_cancel === true && !this.snapshot.final && this.link.ended === "";
  }

  /** Whether an interrupt of the kernel also stops the run: a session continues when its cell is interrupted. */
  get interrupts(): boolean {
    return this.snapshot?.stop === "Cancel";
  }

  /** Calls back after changes, at most once a frame, and only while the view is visible. */
  subscribe(callback: () => void): () => void {
    this.listeners.add(callback);
    return () => this.listeners.delete(callback);
  }

  requestRedraw(): void {
    this.dirty = true;
    if (this.frame !== undefined || !this.activity.active || this.signal.aborted) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = undefined;
      this.flush();
    });
  }

  /** Returns the view's position and visible content, null before the first snapshot. */
  get viewState(): ViewState | null {
    if (!this.snapshot) return null;
    const { position } = this;
    const lines = this.log.lines(position.tab);
    const first = position.line ?? Math.max(lines.total - SEEN_LINES, 0);
    const rows: (readonly [number, LineRow])[] = [];
    for (let line = first; line < first + SEEN_LINES; line++) {
      const row = lines.get(line);
      if (row) rows.push([line, row]);
    }
    return { position: { ...position }, snapshot: this.snapshot, rows };
  }

  /** Requests the run's cancellation, and interrupts the kernel if it does not answer. */
  async cancel(): Promise<void> {
    await this.runAction("cancel", async () => {
      const asked = this.ask({ kind: "cancel" });
      const interrupt = this.transport.interrupt;
      if (!interrupt || !this.interrupts) return asked;
      const timeout_ms = this.transport.kind === "shell" ? CANCEL_TIMEOUT_MS.shell : CANCEL_TIMEOUT_MS.other;
      const first = await Promise.race([asked, this.pause(timeout_ms)]);
      if (first) return first;
      await interrupt();
      return ["The kernel did not answer and was interrupted: that cancels the run of its cell."];
    });
  }

  /** Ends a session that holds devices for which the run waits. */
  async endSession(session: string): Promise<void> {
    await this.runAction("end session", () => this.ask({ kind: "end-session", session }));
  }

  /** Shows every rank's stack. */
  async stacks(): Promise<void> {
    await this.runAction("stacks", () => this.ask({ kind: "stacks" }));
  }

  dismissNotice(): void {
    this.notice = null;
    this.requestRedraw();
  }

  showNotice(...lines: string[]): void {
    this.notice = { lines, isStacks: false };
    this.requestRedraw();
  }

  /** Finds lines; throws `NoAnswer`. */
  async find(text: string, tab: Tab): Promise<FindAnswer> {
    const answer = await this.transport.ask({ kind: "find", text, rank: rankOf(tab) });
    return answer.kind === "find-answer" ? answer : throwNoAnswer(answer);
  }

  /** Returns a piece of the whole log; throws `NoAnswer`. */
  async readLog(offset: number, tab: Tab): Promise<LogAnswer> {
    const answer = await this.transport.ask({ kind: "log", offset, rank: rankOf(tab) });
    return answer.kind === "log-answer" ? answer : throwNoAnswer(answer);
  }

  private async runAction(action: Action, send: () => Promise<readonly string[]>): Promise<void> {
    if (this.pendingActions.has(action)) return;
    this.pendingActions.add(action);
    this.requestRedraw();
    try {
      const lines = await send();
      this.notice = lines.length ? { lines, isStacks: action === "stacks" } : null;
    } catch (error) {
      this.notice = { lines: [`${action}: ${errorText(error)}`], isStacks: false };
    }
    this.pendingActions.delete(action);
    this.requestRedraw();
  }

  private async ask(question: QuestionBody): Promise<readonly string[]> {
    const answer = await this.transport.ask(question);
    return answer.kind === "text" ? answer.lines : throwNoAnswer(answer);
  }

  private restore({ position, snapshot, rows }: ViewState): void {
    // this transport numbers its snapshots from 1 again
    this.snapshot = { ...snapshot, seq: 0 };
    this.received_ms = performance.now();
    this.log.grow(snapshot.lines);
    for (const [line, row] of rows) this.log.lines(position.tab).put(line, row);
  }

  private sendHello(): void {
    if (this.isHelloPending) return;
    this.isHelloPending = true;
    this.transport.ask({ kind: "hello", over: this.transport.kind }).then(
      (answer) => {
        this.isHelloPending = false;
        if (answer.kind !== "hello") return;
        this.onSnapshot(answer.snapshot);
        this.log.onHello(answer.seq, answer.snapshot.lines);
      },
      () => {
        this.isHelloPending = false;
      },
    );
  }

  private onUpdate(message: FeedUpdate): void {
    if (message.kind === "gone") this.onLinkChange({ ...this.link, ended: message.text });
    else if (!this.log.add(message)) this.sendHello();
  }

  private onSnapshot(snapshot: Snapshot): void {
    if (this.snapshot && snapshot.seq < this.snapshot.seq) return;
    this.snapshot = snapshot;
    this.received_ms = performance.now();
    // lines arrive before or soon after the snapshot that counts them, unless their message was lost
    if (snapshot.final) this.log.grow(snapshot.lines);
    else this.growTimer ??= setTimeout(() => this.growLog(snapshot.lines), MISSING_LINES_MS);
    this.requestRedraw();
  }

  private growLog(lines: readonly number[]): void {
    this.growTimer = undefined;
    this.log.grow(lines);
  }

  private onLinkChange(link: LinkState): void {
    const hasRecovered = this.link.away && !link.away;
    // a link that has ended never reopens
    this.link = { ...link, ended: link.ended || this.link.ended };
    if (hasRecovered) this.sendHello();
    this.requestRedraw();
  }

  private flush(): void {
    if (!this.dirty || !this.activity.active || this.signal.aborted) return;
    this.dirty = false;
    for (const listener of this.listeners) listener();
  }

  private pause(delay_ms: number): Promise<null> {
    return new Promise((resolve) => {
      const timer = setTimeout(() => resolve(null), delay_ms);
      this.signal.addEventListener("abort", () => clearTimeout(timer), { once: true });
    });
  }

  private close(): void {
    clearTimeout(this.growTimer);
    if (this.frame !== undefined) cancelAnimationFrame(this.frame);
    this.listeners.clear();
    this.transport.dispose();
  }
}

export function errorText(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

function rankOf(tab: Tab): number | null {
  return tab === "all" ? null : tab;
}

function throwNoAnswer(answer: Answer): never {
  throw new NoAnswer(answer.kind === "refusal" ? answer.text : "the kernel sent an unexpected answer");
}
