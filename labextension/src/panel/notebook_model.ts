import { NOTHING, sameChoice } from "./form";
import type { KernelAsk, KernelState, NotebookLink } from "./host";
import { NoExtension } from "./host";
import { OtherVersion } from "./messages";
import type { Choice, KernelAnswer, KernelPicture, KernelReply, PlanPicture } from "./messages";

/** Delay between the last change of the form and the request for a plan. */
export const PLAN_PAUSE_MS = 300;
/** Minimum interval between requests for the kernel's state, and the interval while packages are being installed. */
export const ASK_PAUSE_MS = 300;
export const INSTALLING_PAUSE_MS = 1_500;

/** Why the kernel's state is unknown. */
export interface Trouble {
  readonly kind: "no-extension" | "other-version" | "unanswered";
  /** A sentence. */
  readonly text: string;
}

/** The button whose request is pending. */
export type Doing = "" | "apply" | "accept" | "disconnect";

const AWAY: ReadonlySet<KernelState> = new Set(["none", "starting", "restarting", "dead", "disconnected"]);

/** One notebook: its kernel's state, what the user is choosing, and what applying that would do. */
export class NotebookModel {
  kernel: KernelPicture | null = null;
  trouble: Trouble | null = null;
  /** What the user is choosing; null until something is changed. */
  draft: Choice | null = null;
  plan: PlanPicture | null = null;
  /** A plan for the current form is pending; `plan` is out of date. */
  isPlanning = false;
  doing: Doing = "";
  installing = false;
  /** Why the last button's action failed, "" if it did not. */
  refusal = "";
  /** What the last button did. */
  notice = "";
  /** The user makes a choice of their own instead of confirming the notebook's. */
  chooses = false;

  private kernelId: string;
  private kernelState: KernelState;
  private incarnation = 0;
  private asking = false;
  private askAgain = false;
  private planned: { readonly choice: Choice; readonly connect: boolean; readonly incarnation: number } | null = null;
  private planNumber = 0;
  private readonly timers = new Map<"ask" | "plan" | "install", ReturnType<typeof setTimeout>>();
  private readonly unlisten: () => void;
  private closed = false;

  /**
   * @param link: The notebook.
   * @param wanted: Returns the choice that the form shows for a choice, with the pool's defaults filled in.
   * @param changed: Called after every change.
   */
  constructor(
    readonly link: NotebookLink,
    private readonly wanted: (choice: Choice) => Choice,
    private readonly changed: () => void,
  ) {
    this.kernelId = link.kernel;
    this.kernelState = link.kernelState;
    this.unlisten = link.onChange(() => this.linkChanged());
    this.askKernel();
  }

  /** The kernel can't answer in this state. */
  get isAway(): boolean {
    return AWAY.has(this.link.kernelState);
  }

  /** The choice in effect. */
  get effect(): Choice {
    return this.kernel?.choice ?? NOTHING;
  }

  /** The choice that the form shows. */
  get form(): Choice {
    return this.wanted(this.draft ?? (this.isForeign ? NOTHING : this.effect));
  }

  /** The notebook's choice was not made or confirmed by this user. */
  get isForeign(): boolean {
    return (this.kernel?.choice ?? null) !== null && this.kernel?.confirmed === false;
  }

  /** A choice from an untrusted notebook needs confirmation. */
  get asksToConfirm(): boolean {
    return this.isForeign && !this.chooses && this.draft === null;
  }

  /** The form differs from the choice in effect. */
  get isChanged(): boolean {
    return this.draft !== null && !sameChoice(this.wanted(this.draft), this.wanted(this.effect));
  }

  /** The run id of the session that bare cells run in, "" if the kernel has none or has not answered. */
  get currentSession(): string {
    return this.kernel?.sessions.find(({ current }) => current)?.run_id ?? "";
  }

  choose(choice: Choice): void {
    this.draft = choice;
    this.refusal = "";
    this.notice = "";
    this.planSoon();
    this.changed();
  }

  /** Reverts all changes of the form. */
  reset(): void {
    this.draft = null;
    this.refusal = "";
    this.notice = "";
    this.planSoon();
    this.changed();
  }

  chooseMyself(): void {
    this.chooses = true;
    this.planSoon();
    this.changed();
  }

  /** Requests a plan for the form after `PLAN_PAUSE_MS` without further changes. */
  planSoon(): void {
    this.stop("plan");
    if (!this.kernel || this.closed) return;
    this.isPlanning = true;
    this.later("plan", PLAN_PAUSE_MS, () => void this.askPlan());
  }

  /** Requests a new plan if the form resolves differently now: the pool's types have arrived, a session has ended. */
  planIfStale(): void {
    if (this.isPlanning || !this.kernel || this.isAway || !this.planned) return;
    const { choice, connect } = this.planQuestion();
    if (!sameChoice(choice, this.planned.choice) || connect !== this.planned.connect) this.planSoon();
  }

  async apply(connect: boolean): Promise<void> {
    // the user has not seen the plan for this form yet
    if (this.isPlanning) return;
    const { form } = this;
    const answer = await this.does("apply", {
      kind: "apply",
      choice: form,
      connect,
      confirmed: this.plan?.loses === true,
    });
    if (answer) {
      this.draft = null;
      this.chooses = false;
      this.planSoon();
      this.changed();
    }
  }

  /** Connects a session with `gpus` devices of a type; the rest is taken from the choice in effect, if confirmed. */
  async reconnect(gpus: number, type: string): Promise<void> {
    const answer = await this.does("apply", {
      kind: "apply",
      choice: { ...(this.isForeign ? NOTHING : this.effect), gpus, type },
      connect: true,
      confirmed: false,
    });
    if (answer) {
      this.planSoon();
      this.changed();
    }
  }

  /** Confirms the choice of an untrusted notebook. */
  async accept(): Promise<void> {
    const choice = this.kernel?.choice;
    if (!choice || this.isPlanning) return;
    const answer = await this.does("accept", {
      kind: "apply",
      choice,
      connect: false,
      confirmed: this.plan?.loses === true,
    });
    if (answer) {
      this.planSoon();
      this.changed();
    }
  }

  /** Ends the session; false when the kernel can't do it now. */
  async disconnect(name: string): Promise<boolean> {
    if (!this.kernel || this.isAway) return false;
    try {
      await this.asked("disconnect", { kind: "disconnect", name });
    } catch {
      return false;
    }
    return true;
  }

  /** Requests the kernel's state now, or soon if a request is pending or recent. */
  askKernel(): void {
    if (this.closed || this.isAway) return;
    if (this.asking || this.timers.has("ask")) {
      this.askAgain = true;
      return;
    }
    this.asking = true;
    const { incarnation } = this;
    this.link
      .ask({ kind: "kernel", kept: this.link.kept })
      .then(
        (reply) => this.isOf(incarnation) && this.takeReply(reply),
        (error: unknown) => this.isOf(incarnation) && this.takeTrouble(error),
      )
      .finally(() => {
        this.asking = false;
        this.later("ask", ASK_PAUSE_MS, () => {
          if (!this.askAgain) return;
          this.askAgain = false;
          this.askKernel();
        });
      });
  }

  /** Clears the error and asks the kernel again, for a button. */
  retry(): void {
    this.trouble = null;
    this.askKernel();
    this.changed();
  }

  /** Closes the message about the last button's action. */
  dismissNotice(): void {
    this.notice = "";
    this.changed();
  }

  /** Shows why a button's action failed. */
  failed(error: unknown): void {
    this.refusal = error instanceof Error ? error.message : String(error);
    this.changed();
  }

  close(): void {
    this.closed = true;
    this.unlisten();
    for (const name of [...this.timers.keys()]) this.stop(name);
  }

  // ---------------------------------------------------------------- replies

  private linkChanged(): void {
    const { kernel, kernelState } = this.link;
    const wasState = this.kernelState;
    const isOther = kernel !== this.kernelId || (this.isAway && kernelState !== "disconnected");
    this.kernelId = kernel;
    this.kernelState = kernelState;
    if (isOther) this.forgetKernel();
    // the start of a cell changes nothing, and the answer would only arrive late
    const hasBegun = kernelState === "busy" && wasState === "idle";
    if (!hasBegun) this.askKernel();
    this.changed();
  }

  private forgetKernel(): void {
    this.incarnation += 1;
    this.kernel = null;
    this.trouble = null;
    this.plan = null;
    this.planned = null;
    this.isPlanning = false;
    this.installing = false;
    this.doing = "";
    this.refusal = "";
    this.notice = "";
    this.chooses = false;
    this.stop("plan");
    this.stop("install");
  }

  private takeReply(reply: KernelReply): void {
    if (reply.kind === "kernel-answer") {
      this.takeAnswer(reply);
    } else if (reply.kind === "panel-refusal" && this.kernel) {
      this.refusal = reply.text;
      if (this.installing) {
        // the installation has ended, after the reply to the button's request
        this.installing = false;
        this.askAgain = true;
        this.planSoon();
      }
    } else if (reply.kind === "panel-refusal") {
      this.trouble = { kind: "unanswered", text: reply.text };
    }
    this.changed();
  }

  private takeAnswer(answer: KernelAnswer): void {
    const isFirst = this.kernel === null;
    const before = this.effect;
    const wasInstalling = this.installing;
    this.kernel = answer.picture;
    this.trouble = null;
    this.installing = answer.installing;
    if (answer.notice) this.notice = answer.notice;
    else if (!sameChoice(before, this.effect)) this.notice = "";
    // write only a difference: each write of the metadata triggers another request
    if (answer.kept && JSON.stringify(answer.kept) !== JSON.stringify(this.link.kept)) this.link.keep(answer.kept);
    if (this.draft && sameChoice(this.wanted(this.draft), this.wanted(this.effect))) this.draft = null;
    if (isFirst || !sameChoice(before, this.effect) || (wasInstalling && !this.installing)) this.planSoon();
    this.stop("install");
    if (this.installing) this.later("install", INSTALLING_PAUSE_MS, () => this.askKernel());
  }

  private takeTrouble(error: unknown): void {
    const text = error instanceof Error ? error.message : String(error);
    if (error instanceof NoExtension) {
      this.trouble = { kind: "no-extension", text };
      this.kernel = null;
    } else if (error instanceof OtherVersion) {
      this.trouble = { kind: "other-version", text };
      this.kernel = null;
    } else {
      this.trouble = { kind: "unanswered", text };
    }
    this.changed();
  }

  // ---------------------------------------------------------------- requests

  private planQuestion(): { readonly choice: Choice; readonly connect: boolean } {
    const choice = this.kernel?.choice;
    return this.asksToConfirm && choice ? { choice, connect: false } : { choice: this.form, connect: true };
  }

  private async askPlan(): Promise<void> {
    const question = this.planQuestion();
    const number = ++this.planNumber;
    const { incarnation } = this;
    this.planned = { ...question, incarnation };
    let plan: PlanPicture | null = null;
    let problem = "";
    try {
      const reply = await this.link.ask({ kind: "plan", ...question });
      if (reply.kind === "plan-answer") plan = reply.plan;
      else if (reply.kind === "panel-refusal") problem = reply.text;
    } catch (error) {
      problem = error instanceof Error ? error.message : String(error);
    }
    if (number !== this.planNumber || !this.isOf(incarnation) || this.timers.has("plan")) return;
    this.plan = plan ?? { sentences: [], loses: false, problem, button: "" };
    this.isPlanning = false;
    this.changed();
  }

  private async does(doing: Doing, question: KernelAsk): Promise<KernelAnswer | null> {
    if (this.doing !== "") return null;
    try {
      return await this.asked(doing, question);
    } catch (error) {
      this.failed(error);
      return null;
    }
  }

  /** Sends a button's request. Throws if the kernel does not answer; shows a refusal and returns null. */
  private async asked(doing: Doing, question: KernelAsk): Promise<KernelAnswer | null> {
    const { incarnation } = this;
    this.doing = doing;
    this.refusal = "";
    this.notice = "";
    this.changed();
    try {
      const reply = await this.link.ask(question);
      if (!this.isOf(incarnation)) return null;
      if (reply.kind === "panel-refusal") this.refusal = reply.text;
      if (reply.kind !== "kernel-answer") return null;
      this.takeAnswer(reply);
      return reply;
    } finally {
      if (this.isOf(incarnation)) this.doing = "";
      this.changed();
    }
  }

  private isOf(incarnation: number): boolean {
    return !this.closed && incarnation === this.incarnation;
  }

  private later(name: "ask" | "plan" | "install", delay_ms: number, then: () => void): void {
    this.stop(name);
    if (this.closed) return;
    this.timers.set(
      name,
      setTimeout(() => {
        this.timers.delete(name);
        then();
      }, delay_ms),
    );
  }

  private stop(name: "ask" | "plan" | "install"): void {
    clearTimeout(this.timers.get(name));
    this.timers.delete(name);
  }
}
