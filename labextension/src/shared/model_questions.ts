import { askOverControl } from "./kernel_link";
import type { KernelConnection } from "./kernel_link";

/** Timeout of each channel: comm before the control channel is tried, the last one before the kernel counts as busy. */
export const PATIENCE_MS = 2_000;
/** Timeout of a request, so that the caller can retry. Requests on the main shell have none: they wait for the cell. */
export const EXPIRY_MS = 30_000;

/** No answer will come; the text says why. */
export class NoAnswer extends Error {}

/** The part of a widget's model that anywidget provides. */
export interface WidgetModel {
  get(name: string): unknown;
  send(content: unknown): void;
  on(name: string, callback: (...args: never[]) => void): void;
  off(name: string, callback: (...args: never[]) => void): void;
  readonly widget_manager?: unknown;
}

/** The channel of a widget's requests: the kernel's comm subshell, its control channel, or its main shell. */
export type ModelWay = "subshell" | "control" | "shell";

interface Pending<A> {
  readonly resolve: (answer: A) => void;
  readonly reject: (reason: Error) => void;
  readonly timers: Set<ReturnType<typeof setTimeout>>;
  late: boolean;
}

interface Options<A> {
  readonly model: WidgetModel;
  readonly kernel: KernelConnection | null;
  /** The model's id for requests on the control channel, "" when the channel can't be used. */
  readonly modelId: () => string;
  /** Returns the reply, null for any other message. */
  readonly read: (content: unknown) => A | null;
  /** Called with whether any request is overdue, whenever that may have changed. */
  readonly onBusy: (busy: boolean) => void;
}

/**
 * A widget's requests to its kernel.
 *
 * They use a channel on which the kernel replies while a cell runs: comm messages if the kernel handles those on a
 * subshell and the front end sends them there, else the control channel. Without either, they are comm messages on the
 * main shell, and the kernel replies when the cell ends.
 */
export class ModelQuestions<A extends { readonly n: number }> {
  private readonly pending = new Map<number, Pending<A>>();
  // two views of one model receive each other's replies: their request numbers must differ
  private count = Math.floor(Math.random() * 2 ** 40);
  private closed = "";

  constructor(private readonly options: Options<A>) {}

  get way(): ModelWay {
    if (this.options.kernel?.supportsSubshells === true && this.options.model.get("comms") === "subshell") return "subshell";
    return this.hasControl ? "control" : "shell";
  }

  /**
   * Sends a request, and resolves with the reply.
   *
   * @throws NoAnswer: No reply came within `expiry_ms`, or none will come.
   */
  ask(asked: object, expiry_ms = EXPIRY_MS): Promise<A> {
    if (this.closed) return Promise.reject(new NoAnswer(this.closed));
    const n = ++this.count;
    const question = { ...asked, n };
    return new Promise((resolve, reject) => {
      const pending: Pending<A> = { resolve, reject, timers: new Set(), late: false };
      this.pending.set(n, pending);
      const { way } = this;
      if (way === "control") {
        this.sendOverControl(question);
        this.after(pending, PATIENCE_MS, () => this.isLate(pending));
      } else {
        this.options.model.send(question);
        this.after(pending, PATIENCE_MS, () => {
          if (!this.hasControl) {
            this.isLate(pending);
            return;
          }
          this.sendOverControl(question);
          this.after(pending, PATIENCE_MS, () => this.isLate(pending));
        });
      }
      if (way !== "shell") {
        this.after(pending, expiry_ms, () => this.settle(n, new NoAnswer("the kernel has not answered")));
      }
    });
  }

  /** Handles a reply. */
  receive(content: unknown): void {
    const answer = this.options.read(content);
    if (answer) this.settle(answer.n, answer);
  }

  /** Fails all pending requests. */
  drop(reason: string): void {
    for (const n of [...this.pending.keys()]) this.settle(n, new NoAnswer(reason));
  }

  /** Fails all pending requests, and rejects any later one. */
  close(reason: string): void {
    this.closed = reason;
    this.drop(reason);
  }

  private get hasControl(): boolean {
    return typeof this.options.kernel?.sendControlMessage === "function" && this.options.modelId() !== "";
  }

  private sendOverControl(question: { readonly n: number }): void {
    if (!this.options.kernel) return;
    askOverControl(this.options.kernel, this.options.modelId(), question).then(
      (answer) => this.receive(answer),
      (reason: unknown) => {
        // a kernel without the handler may refuse at once, and still reply by comm when the cell has ended
        const pending = this.pending.get(question.n);
        if (!pending) return;
        if (this.way === "control") this.options.model.send(question);
        console.debug("sgpu: no answer on the control channel:", reason instanceof Error ? reason.message : reason);
        this.isLate(pending);
      },
    );
  }

  private settle(n: number, outcome: A | Error): void {
    const pending = this.pending.get(n);
    if (!pending) return;
    this.pending.delete(n);
    for (const timer of pending.timers) clearTimeout(timer);
    if (outcome instanceof Error) pending.reject(outcome);
    else pending.resolve(outcome);
    this.updateBusy();
  }

  private isLate(pending: Pending<A>): void {
    pending.late = true;
    this.updateBusy();
  }

  private updateBusy(): void {
    this.options.onBusy([...this.pending.values()].some(({ late }) => late));
  }

  private after(pending: Pending<A>, delay_ms: number, then: () => void): void {
    const timer = setTimeout(() => {
      pending.timers.delete(timer);
      then();
    }, delay_ms);
    pending.timers.add(timer);
  }
}

/** Returns the parsed message; logs a warning and returns null if it can't be parsed. */
export function readOrNull<T>(parse: () => T, tell?: (text: string) => void): T | null {
  try {
    return parse();
  } catch (error) {
    const text = error instanceof Error ? error.message : String(error);
    console.warn("sgpu: can't read a message:", text);
    tell?.(text);
    return null;
  }
}
