import { EMPTY_CHOICE, sameChoice } from "./form";
import type { KernelQuestionBody, KernelState, NotebookLink } from "./host";
import { NoExtension } from "./host";
import { OtherVersion } from "./messages";
import type { Choice, KernelAnswer, PanelKernel, KernelReply, PanelPlan, PanelVariables } from "./messages";

/** Delay between the last change of the form and the request for a plan. */
const PLAN_PAUSE_MS = 300;
/** Minimum interval between requests for the kernel's state, and the interval while packages are being installed. */
const ASK_PAUSE_MS = 300;
const INSTALLING_PAUSE_MS = 1_500;

/** Why the kernel's state is unknown. */
export interface KernelProblem {
  readonly kind: "no-extension" | "other-version" | "unanswered";
  /** A sentence. */
  readonly text: string;
}

/** The action whose request is pending, "" if there is none. */
export type PendingAction = "" | "apply" | "accept" | "disconnect";

type Timer = "ask" | "plan" | "install" | "variables";

const UNAVAILABLE: ReadonlySet<KernelState> = new Set(["none", "starting", "restarting", "dead", "disconnected"]);

interface PlanQuestion {
  readonly choice: Choice;
  readonly connect: boolean;
  /** How many of the requested devices are free. */
  readonly free: number;
}

/** One notebook: its kernel's state, the user's draft of a choice, and the plan for it. */
export class NotebookModel {
  kernel: PanelKernel | null = null;
  kernelProblem: KernelProblem | null = null;
  /** The user's changed choice, null if nothing was changed. */
  draft: Choice | null = null;
  plan: PanelPlan | null = null;
  /** Whether a plan for the current form is pending, so that `plan` is out of date. */
  isPlanning = false;
  pendingAction: PendingAction = "";
  isInstalling = false;
  /** Why the last action failed, "" if it did not. */
  refusal = "";
  /** What the last action did. */
  notice = "";
  /** The variables on the ranks of the current session, as the kernel listed them last; null if unknown. */
  variables: PanelVariables | null = null;
  /** Why they could not be listed, "" if they could. */
  variablesError = "";
  /** Whether the user makes their own choice instead of confirming the notebook's. */
  overridesChoice = false;

  private kernelId: string;
  private kernelState: KernelState;
  private generation = 0;
  private isAsking = false;
  private askAgain = false;
  private lastPlanQuestion: PlanQuestion | null = null;
  private planNumber = 0;
  private showsVariables = false;
  private readonly timers = new Map<Timer, ReturnType<typeof setTimeout>>();
  private readonly unsubscribe: () => void;
  private closed = false;

  /**
   * @param link: The notebook.
   * @param resolve: Returns a choice with the pool's defaults filled in, as the form shows it.
   * @param countFree: Returns how many of the devices that a resolved choice requests are free.
   * @param onChange: Called after every change.
   */
  constructor(
    readonly link: NotebookLink,
    private readonly resolve: (choice: Choice) => Choice,
    private readonly countFree: (choice: Choice) => number,
    private readonly onChange: () => void,
  ) {
    this.kernelId = link.kernel;
    this.kernelState = link.kernelState;
    this.unsubscribe = link.onChange(() => this.onLinkChange());
    this.askKernel();
  }

  /** Whether the kernel can't answer in its present state. */
  get isKernelUnavailable(): boolean {
    return UNAVAILABLE.has(this.link.kernelState);
  }

  /** The choice in effect. */
  get choiceInEffect(): Choice {
    return this.kernel?.choice ?? EMPTY_CHOICE;
  }

  /** The choice that the form shows. */
  get form(): Choice {
    return this.resolve(this.draft ?? (this.isUnconfirmed ? EMPTY_CHOICE : this.choiceInEffect));
  }

  /** Whether the notebook's choice was neither made nor confirmed by this user. */
  get isUnconfirmed(): boolean {
    return (this.kernel?.choice ?? null) !== null && this.kernel?.confirmed === false;
  }

  /** Whether to ask the user to confirm the notebook's choice before anything else. */
  get needsConfirmation(): boolean {
    return this.isUnconfirmed && !this.overridesChoice && this.draft === null;
  }

  /** Whether the form differs from the choice in effect. */
  get isChanged(): boolean {
    return this.draft !== null && !sameChoice(this.resolve(this.draft), this.resolve(this.choiceInEffect));
  }

  /** The run id of the session that cells without options run in, "" if there is none or it is unknown. */
  get currentSession(): string {
    return this.kernel?.sessions.find(({ current }) => current)?.run_id ?? "";
  }

  choose(choice: Choice): void {
    this.draft = choice;
    this.refusal = "";
    this.notice = "";
    this.planSoon();
    this.onChange();
  }

  /** Reverts all changes of the form. */
  reset(): void {
    this.draft = null;
    this.refusal = "";
    this.notice = "";
    this.planSoon();
    this.onChange();
  }

  overrideChoice(): void {
    this.overridesChoice = true;
    this.planSoon();
    this.onChange();
  }

  /** Requests a plan for the form after `PLAN_PAUSE_MS` without further changes. */
  planSoon(): void {
    this.clearTimer("plan");
    if (!this.kernel || this.closed) return;
    this.isPlanning = true;
    this.setTimer("plan", PLAN_PAUSE_MS, () => void this.askPlan());
  }

  /** Requests a new plan if the pool's state changes it: types have arrived, a session has ended, devices were freed. */
  planIfStale(): void {
    if (this.isPlanning || !this.kernel || this.isKernelUnavailable || !this.lastPlanQuestion) return;
    const last = this.lastPlanQuestion;
    const { choice, connect, free } = this.planQuestion();
    if (!sameChoice(choice, last.choice) || connect !== last.connect || free !== last.free) this.planSoon();
  }

  async apply(connect: boolean): Promise<void> {
    // the user has not seen the plan for this form yet
    if (this.isPlanning) return;
    const { form } = this;
    const answer = await this.runAction("apply", {
      kind: "apply",
      choice: form,
      connect,
      confirmed: this.plan?.loses === true,
    });
    if (answer) {
      this.draft = null;
      this.overridesChoice = false;
      this.planSoon();
      this.onChange();
    }
  }

  /** Connects a session with `gpus` devices of a type; the rest is taken from the choice in effect, if confirmed. */
  async reconnect(gpus: number, type: string): Promise<void> {
    const answer = await this.runAction("apply", {
      kind: "apply",
      choice: { ...(this.isUnconfirmed ? EMPTY_CHOICE : this.choiceInEffect), gpus, type },
      connect: true,
      confirmed: false,
    });
    if (answer) {
      this.planSoon();
      this.onChange();
    }
  }

  /** Confirms the notebook's choice. */
  async accept(): Promise<void> {
    const choice = this.kernel?.choice;
    if (!choice || this.isPlanning) return;
    const answer = await this.runAction("accept", {
      kind: "apply",
      choice,
      connect: false,
      confirmed: this.plan?.loses === true,
    });
    if (answer) {
      this.planSoon();
      this.onChange();
    }
  }

  /** Ends the session; returns false if the kernel can't do it now. */
  async disconnect(name: string): Promise<boolean> {
    if (!this.kernel || this.isKernelUnavailable) return false;
    try {
      await this.sendAction("disconnect", { kind: "disconnect", name });
    } catch {
      return false;
    }
    return true;
  }

  /** Requests the kernel's state now, or soon if a request is pending or recent. */
  askKernel(): void {
    if (this.closed || this.isKernelUnavailable) return;
    if (this.isAsking || this.timers.has("ask")) {
      this.askAgain = true;
      return;
    }
    this.isAsking = true;
    const { generation } = this;
    this.link
      .ask({ kind: "kernel", kept: this.link.savedChoice })
      .then(
        (reply) => this.isCurrent(generation) && this.applyReply(reply),
        (error: unknown) => this.isCurrent(generation) && this.onKernelError(error),
      )
      .finally(() => {
        this.isAsking = false;
        this.setTimer("ask", ASK_PAUSE_MS, () => {
          if (!this.askAgain) return;
          this.askAgain = false;
          this.askKernel();
        });
      });
  }

  /** Requests the variables now and after each cell, until it is called with false. */
  showVariables(isShown: boolean): void {
    this.showsVariables = isShown;
    if (isShown) void this.askVariables();
    else this.clearTimer("variables");
  }

  /** Clears the error and asks the kernel again. */
  retry(): void {
    this.kernelProblem = null;
    this.askKernel();
    this.onChange();
  }

  /** Closes the message about the last action. */
  dismissNotice(): void {
    this.notice = "";
    this.onChange();
  }

  /** Shows why an action failed. */
  showError(error: unknown): void {
    this.refusal = error instanceof Error ? error.message : String(error);
    this.onChange();
  }

  close(): void {
    this.closed = true;
    this.unsubscribe();
    for (const name of [...this.timers.keys()]) this.clearTimer(name);
  }

  // ---------------------------------------------------------------- replies

  private onLinkChange(): void {
    const { kernel, kernelState } = this.link;
    const previousState = this.kernelState;
    const isOther = kernel !== this.kernelId || (this.isKernelUnavailable && kernelState !== "disconnected");
    this.kernelId = kernel;
    this.kernelState = kernelState;
    if (isOther) this.resetKernel();
    // the start of a cell changes nothing, and the answer would arrive only after it
    const cellStarted = kernelState === "busy" && previousState === "idle";
    if (!cellStarted) {
      this.askKernel();
      this.askVariablesSoon();
    }
    this.onChange();
  }

  private resetKernel(): void {
    this.generation += 1;
    this.kernel = null;
    this.kernelProblem = null;
    this.plan = null;
    this.lastPlanQuestion = null;
    this.isPlanning = false;
    this.isInstalling = false;
    this.pendingAction = "";
    this.refusal = "";
    this.notice = "";
    this.overridesChoice = false;
    this.variables = null;
    this.variablesError = "";
    this.clearTimer("plan");
    this.clearTimer("install");
    this.clearTimer("variables");
  }

  private applyReply(reply: KernelReply): void {
    if (reply.kind === "kernel-answer") {
      this.applyAnswer(reply);
    } else if (reply.kind === "panel-refusal" && this.kernel) {
      this.refusal = reply.text;
      if (this.isInstalling) {
        // the installation has ended, after the reply to the button's request
        this.isInstalling = false;
        this.askAgain = true;
        this.planSoon();
      }
    } else if (reply.kind === "panel-refusal") {
      this.kernelProblem = { kind: "unanswered", text: reply.text };
    }
    this.onChange();
  }

  private applyAnswer(answer: KernelAnswer): void {
    const isFirst = this.kernel === null;
    const before = this.choiceInEffect;
    const wasInstalling = this.isInstalling;
    this.kernel = answer.snapshot;
    this.kernelProblem = null;
    this.isInstalling = answer.installing;
    if (answer.notice) this.notice = answer.notice;
    else if (!sameChoice(before, this.choiceInEffect)) this.notice = "";
    // write only a difference: each write of the metadata triggers another request
    if (answer.kept && JSON.stringify(answer.kept) !== JSON.stringify(this.link.savedChoice)) this.link.saveChoice(answer.kept);
    if (this.draft && sameChoice(this.resolve(this.draft), this.resolve(this.choiceInEffect))) this.draft = null;
    if (isFirst || !sameChoice(before, this.choiceInEffect) || (wasInstalling && !this.isInstalling)) this.planSoon();
    this.clearTimer("install");
    if (this.isInstalling) this.setTimer("install", INSTALLING_PAUSE_MS, () => this.askKernel());
  }

  private onKernelError(error: unknown): void {
    const text = error instanceof Error ? error.message : String(error);
    if (error instanceof NoExtension) {
      this.kernelProblem = { kind: "no-extension", text };
      this.kernel = null;
    } else if (error instanceof OtherVersion) {
      this.kernelProblem = { kind: "other-version", text };
      this.kernel = null;
    } else {
      this.kernelProblem = { kind: "unanswered", text };
    }
    this.onChange();
  }

  // ---------------------------------------------------------------- requests

  private planQuestion(): PlanQuestion {
    const choice = this.kernel?.choice;
    if (this.needsConfirmation && choice) return { choice, connect: false, free: this.countFree(this.resolve(choice)) };
    return { choice: this.form, connect: true, free: this.countFree(this.form) };
  }

  private async askPlan(): Promise<void> {
    const question = this.planQuestion();
    const number = ++this.planNumber;
    const { generation } = this;
    this.lastPlanQuestion = question;
    let plan: PanelPlan | null = null;
    let problem = "";
    try {
      const reply = await this.link.ask({ kind: "plan", choice: question.choice, connect: question.connect });
      if (reply.kind === "plan-answer") plan = reply.plan;
      else if (reply.kind === "panel-refusal") problem = reply.text;
    } catch (error) {
      problem = error instanceof Error ? error.message : String(error);
    }
    if (number !== this.planNumber || !this.isCurrent(generation) || this.timers.has("plan")) return;
    this.plan = plan ?? { sentences: [], loses: false, problem, button: "" };
    this.isPlanning = false;
    this.onChange();
  }

  /** Requests the variables unless a cell has begun by then, whose end requests them again. */
  private askVariablesSoon(): void {
    if (!this.showsVariables) return;
    this.setTimer("variables", ASK_PAUSE_MS, () => {
      if (this.link.kernelState !== "busy") void this.askVariables();
    });
  }

  private async askVariables(): Promise<void> {
    if (!this.kernel || this.isKernelUnavailable) return;
    const { generation } = this;
    let error = "";
    try {
      const reply = await this.link.ask({ kind: "variables" });
      if (!this.isCurrent(generation)) return;
      if (reply.kind === "variables-answer") this.takeVariables(reply.variables);
      else if (reply.kind === "panel-refusal") error = reply.text;
    } catch (reason) {
      error = reason instanceof Error ? reason.message : String(reason);
    }
    if (!this.isCurrent(generation)) return;
    this.variablesError = error;
    this.onChange();
  }

  /** Keeps the variables that were listed before the running cell. */
  private takeVariables(found: PanelVariables): void {
    const isKept = found.busy && this.variables?.session === found.session;
    this.variables = isKept && this.variables ? { ...this.variables, busy: true } : found;
  }

  private async runAction(action: PendingAction, question: KernelQuestionBody): Promise<KernelAnswer | null> {
    if (this.pendingAction !== "") return null;
    try {
      return await this.sendAction(action, question);
    } catch (error) {
      this.showError(error);
      return null;
    }
  }

  /** Sends an action's request. Throws if the kernel does not answer; shows a refusal and returns null. */
  private async sendAction(action: PendingAction, question: KernelQuestionBody): Promise<KernelAnswer | null> {
    const { generation } = this;
    this.pendingAction = action;
    this.refusal = "";
    this.notice = "";
    this.onChange();
    try {
      const reply = await this.link.ask(question);
      if (!this.isCurrent(generation)) return null;
      if (reply.kind === "panel-refusal") this.refusal = reply.text;
      if (reply.kind !== "kernel-answer") return null;
      this.applyAnswer(reply);
      return reply;
    } finally {
      if (this.isCurrent(generation)) this.pendingAction = "";
      this.onChange();
    }
  }

  private isCurrent(generation: number): boolean {
    return !this.closed && generation === this.generation;
  }

  private setTimer(name: Timer, delay_ms: number, callback: () => void): void {
    this.clearTimer(name);
    if (this.closed) return;
    this.timers.set(
      name,
      setTimeout(() => {
        this.timers.delete(name);
        callback();
      }, delay_ms),
    );
  }

  private clearTimer(name: Timer): void {
    clearTimeout(this.timers.get(name));
    this.timers.delete(name);
  }
}
