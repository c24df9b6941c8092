import { askOverControl } from "./kernel_connection";
import type { KernelConnection } from "./kernel_connection";

/** Timeout of the comm until the control channel is tried, and of the last channel until the kernel is reported busy. */
export const CHANNEL_TIMEOUT_MS = 2_000;
/** Timeout of a request. Requests on the main shell have none: they wait for the end of the cell. */
export const REQUEST_TIMEOUT_MS = 30_000;

/** A request will not be answered; the text says why. */
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
export type RequestChannel = "subshell" | "control" | "shell";

interface Pending<A> {
  readonly resolve: (answer: A) => void;
  readonly reject: (reason: Error) => void;
  readonly timers: Set<ReturnType<typeof setTimeout>>;
  isOverdue: boolean;
}

interface Options<A> {
  readonly model: WidgetModel;
  readonly kernel: KernelConnection | null;
  /** Returns the model's id for requests on the control channel, "" if the channel can't be used. */
  readonly modelId: () => string;
  /** Returns the reply, null for any other message. */
  readonly read: (content: unknown) => A | null;
  /** Called with whether any request is overdue, whenever this may have changed. */
  readonly onBusy: (busy: boolean) => void;
}

/**
 * A widget's requests to its kernel.
 *
 * They use a channel on which the kernel replies while a cell runs: comm messages if the kernel handles those on a
 * subshell and the front end sends them there, else the control channel. Without either, they are comm messages on the
 * main shell, and the kernel replies when the cell ends.
 */
export class WidgetRequests<A extends { readonly n: number }> {
  private readonly pending = new Map<number, Pending<A>>();
  // two views of one model receive each other's replies: their request numbers must differ
  private lastNumber = Math.floor(Math.random() * 2 ** 40);
  private closeReason = "";

  constructor(private readonly options: Options<A>) {}

  get channel(): RequestChannel {
    if (this.options.kernel?.supportsSubshells === true && this.options.model.get("comms") === "subshell") return "subshell";
    return this.hasControl ? "control" : "shell";
  }

  /**
   * Sends a request, and resolves with the reply.
   *
   * @throws NoAnswer: No reply came within `timeout_ms`, or none will come.
   */
  ask(body: object, timeout_ms = REQUEST_TIMEOUT_MS): Promise<A> {
    if (this.closeReason) return Promise.reject(new NoAnswer(this.closeReason));
    const n = ++this.lastNumber;
    const question = { ...body, n };
    return new Promise((resolve, reject) => {
      const pending: Pending<A> = { resolve, reject, timers: new Set(), isOverdue: false };
      this.pending.set(n, pending);
      const { channel } = this;
      if (channel === "control") {
        this.sendOverControl(question);
        this.setTimer(pending, CHANNEL_TIMEOUT_MS, () => this.markOverdue(pending));
      } else {
        this.options.model.send(question);
        this.setTimer(pending, CHANNEL_TIMEOUT_MS, () => {
          if (!this.hasControl) {
            this.markOverdue(pending);
            return;
          }
          this.sendOverControl(question);
          this.setTimer(pending, CHANNEL_TIMEOUT_MS, () => this.markOverdue(pending));
        });
      }
      if (channel !== "shell") {
        this.setTimer(pending, timeout_ms, () => this.settle(n, new NoAnswer("the kernel has not answered")));
      }
    });
  }

  /** Handles a reply. */
  receive(content: unknown): void {
    const answer = this.options.read(content);
    if (answer) this.settle(answer.n, answer);
  }

  /** Fails all pending requests. */
  rejectAll(reason: string): void {
    for (const n of [...this.pending.keys()]) this.settle(n, new NoAnswer(reason));
  }

  /** Fails all pending requests, and rejects any later one. */
  close(reason: string): void {
    this.closeReason = reason;
    this.rejectAll(reason);
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
        if (this.channel === "control") this.options.model.send(question);
        console.debug("sgpu: no answer on the control channel:", reason instanceof Error ? reason.message : reason);
        this.markOverdue(pending);
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

  private markOverdue(pending: Pending<A>): void {
    pending.isOverdue = true;
    this.updateBusy();
  }

  private updateBusy(): void {
    this.options.onBusy([...this.pending.values()].some(({ isOverdue }) => isOverdue));
  }

  private setTimer(pending: Pending<A>, delay_ms: number, callback: () => void): void {
    const timer = setTimeout(() => {
      pending.timers.delete(timer);
      callback();
    }, delay_ms);
    pending.timers.add(timer);
  }
}

/** Returns the parsed message; logs a warning and returns null if it can't be parsed. */
export function readOrNull<T>(parse: () => T, onError?: (text: string) => void): T | null {
  try {
    return parse();
  } catch (error) {
    const text = error instanceof Error ? error.message : String(error);
    console.warn("sgpu: can't read a message:", text);
    onError?.(text);
    return null;
  }
}
