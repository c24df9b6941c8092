import type { Activity } from "../shared/activity";
import { NoAnswer } from "../shared/widget_requests";
import { costOf, formatMoney } from "../shared/units";
import { LogModel } from "./log_model";
import type { Tab } from "./log_model";
import type { Answer, FindAnswer, LogAnswer, Snapshot, FeedUpdate } from "./messages";
import type { Ask, LinkState, Transport } from "./transport";

/** A page that was hidden for longer requests the run's state when it is shown again. */
const LONG_HIDDEN_MS = 5_000;
/** Lines that a snapshot counts and that have not arrived after this delay are requested. */
const UNTOLD_MS = 1_500;
/** How long Cancel waits for the kernel's answer before it interrupts: on the main shell, and on other transports. */
const CANCEL_PATIENCE_MS = { shell: 700, other: 4_500 };

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
  /** Buttons whose request is pending. */
  readonly waiting = new Set<"cancel" | "stacks">();
  private received_ms = 0;
  private helloAsked = false;
  private untold: ReturnType<typeof setTimeout> | undefined;
  private readonly listeners = new Set<() => void>();
  private frame: number | undefined;
  private dirty = false;

  constructor(
    readonly transport: Transport,
    private readonly activity: Activity,
    private readonly signal: AbortSignal,
  ) {
    this.log = new LogModel(
      async (first, count, rank) => {
        const answer = await transport.ask({ kind: "lines", first, count, rank });
        return answer.kind === "lines-answer" ? answer : null;
      },
      () => this.changed(),
    );
    transport.onUpdate((message) => this.onUpdate(message));
    transport.onLink?.((link) => this.linked(link));
    transport.onSnapshot((snapshot) => this.drawn(snapshot));
    activity.onChange(() => this.flush());
    activity.onReturn((hidden_ms) => {
      if (hidden_ms > LONG_HIDDEN_MS) this.hello();
    });
    signal.addEventListener("abort", () => this.close(), { once: true });
    this.hello();
  }

  /** Seconds since the ranks started; 0 before. */
  get elapsed_s(): number {
    return this.hasStarted ? this.clock_s : 0;
  }

  /** Seconds from the lease until the ranks started, or until now. */
  get starting_s(): number {
    return this.hasStarted ? (this.snapshot?.starting_s ?? 0) : this.clock_s;
  }

  /** What the running clock shows: how long the ranks have run or, before that, how long they have been starting. */
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
   * The kernel answers only when its cell has ended.
   *
   * On the main shell, only a late answer shows this: kernels that handle comms in a subshell of their own answer.
   */
  get isMute(): boolean {
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

  changed(): void {
    this.dirty = true;
    if (this.frame !== undefined || !this.activity.active || this.signal.aborted) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = undefined;
      this.flush();
    });
  }

  /** Requests that the run is cancelled, and interrupts the kernel if it does not answer. */
  async cancel(): Promise<void> {
    await this.pressed("cancel", async () => {
      const asked = this.ask({ kind: "cancel" });
      const interrupt = this.transport.interrupt;
      if (!interrupt || !this.interrupts) return asked;
      const patience_ms = this.transport.kind === "shell" ? CANCEL_PATIENCE_MS.shell : CANCEL_PATIENCE_MS.other;
      const first = await Promise.race([asked, this.pause(patience_ms)]);
      if (first) return first;
      await interrupt();
      return ["The kernel did not answer and was interrupted: that cancels the run of its cell."];
    });
  }

  /** Shows every rank's stack. */
  async stacks(): Promise<void> {
    await this.pressed("stacks", () => this.ask({ kind: "stacks" }));
  }

  dismiss(): void {
    this.notice = null;
    this.changed();
  }

  say(...lines: string[]): void {
    this.notice = { lines, isStacks: false };
    this.changed();
  }

  /** Finds lines; throws `NoAnswer`. */
  async find(text: string, tab: Tab): Promise<FindAnswer> {
    const answer = await this.transport.ask({ kind: "find", text, rank: rankOf(tab) });
    return answer.kind === "find-answer" ? answer : none(answer);
  }

  /** Returns a piece of the whole log; throws `NoAnswer`. */
  async piece(offset: number, tab: Tab): Promise<LogAnswer> {
    const answer = await this.transport.ask({ kind: "log", offset, rank: rankOf(tab) });
    return answer.kind === "log-answer" ? answer : none(answer);
  }

  private async pressed(button: "cancel" | "stacks", act: () => Promise<readonly string[]>): Promise<void> {
    if (this.waiting.has(button)) return;
    this.waiting.add(button);
    this.changed();
    try {
      const lines = await act();
      this.notice = lines.length ? { lines, isStacks: button === "stacks" } : null;
    } catch (error) {
      this.notice = { lines: [`${button}: ${textOf(error)}`], isStacks: false };
    }
    this.waiting.delete(button);
    this.changed();
  }

  private async ask(question: Ask): Promise<readonly string[]> {
    const answer = await this.transport.ask(question);
    return answer.kind === "text" ? answer.lines : none(answer);
  }

  private hello(): void {
    if (this.helloAsked) return;
    this.helloAsked = true;
    this.transport.ask({ kind: "hello", over: this.transport.kind }).then(
      (answer) => {
        this.helloAsked = false;
        if (answer.kind !== "hello") return;
        this.drawn(answer.snapshot);
        this.log.hello(answer.seq, answer.snapshot.lines);
      },
      () => {
        this.helloAsked = false;
      },
    );
  }

  private onUpdate(message: FeedUpdate): void {
    if (message.kind === "gone") this.linked({ ...this.link, ended: message.text });
    else if (!this.log.add(message)) this.hello();
  }

  private drawn(snapshot: Snapshot): void {
    if (this.snapshot && snapshot.seq < this.snapshot.seq) return;
    this.snapshot = snapshot;
    this.received_ms = performance.now();
    // lines arrive before or soon after the snapshot that counts them; otherwise their message was lost
    if (snapshot.final) this.log.grow(snapshot.lines);
    else this.untold ??= setTimeout(() => this.takeUntold(snapshot.lines), UNTOLD_MS);
    this.changed();
  }

  private takeUntold(lines: readonly number[]): void {
    this.untold = undefined;
    this.log.grow(lines);
  }

  private linked(link: LinkState): void {
    const back = this.link.away && !link.away;
    // a link that has ended never reopens
    this.link = { ...link, ended: link.ended || this.link.ended };
    if (back) this.hello();
    this.changed();
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
    clearTimeout(this.untold);
    if (this.frame !== undefined) cancelAnimationFrame(this.frame);
    this.listeners.clear();
    this.transport.dispose();
  }
}

export function textOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

function rankOf(tab: Tab): number | null {
  return tab === "all" ? null : tab;
}

function none(answer: Answer): never {
  throw new NoAnswer(answer.kind === "refusal" ? answer.text : "the kernel sent an unexpected answer");
}
