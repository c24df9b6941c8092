import { askOverControl } from "./kernel_link";
import type { KernelConnection, Signal } from "./kernel_link";
import { readAnswer, readSnapshot, readTold } from "./messages";
import type { Answer, Question, Snapshot, Told } from "./messages";
import { NoAnswer } from "./transport";
import type { Ask, LinkState, Transport, TransportKind } from "./transport";

/** How long the first way may take before the control channel is tried, and that before the kernel counts as busy. */
export const PATIENCE_MS = 2_000;
/** After this an unanswered question is given up, so that it can be asked again. On the main shell it only waits. */
export const EXPIRY_MS = 30_000;

/** What anywidget gives of a widget's model. */
export interface WidgetModel {
  get(name: string): unknown;
  send(content: unknown): void;
  on(name: string, callback: (...args: never[]) => void): void;
  off(name: string, callback: (...args: never[]) => void): void;
  readonly widget_manager?: unknown;
}

interface Pending {
  readonly resolve: (answer: Answer) => void;
  readonly reject: (reason: Error) => void;
  readonly timers: Set<ReturnType<typeof setTimeout>>;
  late: boolean;
}

const RESTARTING = new Set(["restarting", "autorestarting"]);

/**
 * The way through anywidget's model: the snapshot is a synced trait, the rest custom messages.
 *
 * Questions go where the kernel can answer while a cell runs: by comm when the kernel answers those on a subshell and
 * the front end sends them there, else on the control channel, else by comm all the same, answered when the cell ends.
 */
export class WidgetTransport implements Transport {
  private readonly pending = new Map<number, Pending>();
  private readonly undo: (() => void)[] = [];
  private readonly kernel: KernelConnection | null;
  private told: (message: Told) => void = () => undefined;
  private drawn: (snapshot: Snapshot) => void = () => undefined;
  private linked: (state: LinkState) => void = () => undefined;
  private link: LinkState = { busy: false, away: false, ended: "" };
  // two views of one model hear each other's answers: their questions' numbers must differ
  private count = Math.floor(Math.random() * 2 ** 40);
  private disposed = false;

  constructor(private readonly model: WidgetModel) {
    this.kernel = kernelOf(model);
    this.listen("change:snapshot", () => this.readSnapshot());
    this.listen("msg:custom", (content: never) => this.receive(content));
    this.watch(this.kernel?.statusChanged, (status) => this.kernelIs(status));
    this.watch(this.kernel?.connectionStatusChanged, (status) => this.setLink({ away: status !== "connected" }));
    this.watch(this.kernel?.disposed, () => this.setLink({ ended: "the notebook has another kernel now" }));
  }

  get kind(): TransportKind {
    if (this.kernel?.supportsSubshells === true && this.model.get("comms") === "subshell") return "subshell";
    return this.hasControl ? "control" : "shell";
  }

  get interrupt(): (() => Promise<void>) | undefined {
    const kernel = this.kernel;
    return kernel?.interrupt ? () => kernel.interrupt?.() ?? Promise.resolve() : undefined;
  }

  onTold(callback: (told: Told) => void): void {
    this.told = callback;
  }

  onSnapshot(callback: (snapshot: Snapshot) => void): void {
    this.drawn = callback;
    this.readSnapshot();
  }

  onLink(callback: (state: LinkState) => void): void {
    this.linked = callback;
    callback(this.link);
  }

  ask(asked: Ask): Promise<Answer> {
    if (this.disposed || this.link.ended) return Promise.reject(new NoAnswer(this.link.ended || "the view is closed"));
    const question: Question = { ...asked, n: ++this.count };
    return new Promise((resolve, reject) => {
      const pending: Pending = { resolve, reject, timers: new Set(), late: false };
      this.pending.set(question.n, pending);
      const kind = this.kind;
      if (kind === "control") {
        this.sendOverControl(question);
        this.after(pending, PATIENCE_MS, () => this.isLate(pending));
      } else {
        this.model.send(question);
        this.after(pending, PATIENCE_MS, () => {
          if (!this.hasControl) {
            this.isLate(pending);
            return;
          }
          this.sendOverControl(question);
          this.after(pending, PATIENCE_MS, () => this.isLate(pending));
        });
      }
      if (kind !== "shell") {
        this.after(pending, EXPIRY_MS, () => this.settle(question.n, new NoAnswer("the kernel has not answered")));
      }
    });
  }

  dispose(): void {
    this.disposed = true;
    for (const undo of this.undo.splice(0)) undo();
    for (const n of [...this.pending.keys()]) this.settle(n, new NoAnswer("the view is closed"));
    this.told = this.drawn = this.linked = () => undefined;
  }

  private get hasControl(): boolean {
    return typeof this.kernel?.sendControlMessage === "function" && this.modelKey !== "";
  }

  private get modelKey(): string {
    const key = this.model.get("model_key");
    return typeof key === "string" ? key : "";
  }

  private sendOverControl(question: Question): void {
    if (!this.kernel) return;
    askOverControl(this.kernel, this.modelKey, question).then(
      (answer) => this.receiveAnswer(answer),
      (reason: unknown) => {
        // a kernel without our handler says so at once, and may still answer by comm when the cell has ended
        const pending = this.pending.get(question.n);
        if (!pending || this.disposed) return;
        if (this.kind === "control") this.model.send(question);
        console.debug("sgpu: no answer on the control channel:", reason instanceof Error ? reason.message : reason);
        this.isLate(pending);
      },
    );
  }

  private receive(content: unknown): void {
    const kind = typeof content === "object" && content !== null ? content : {};
    if ("n" in kind) {
      this.receiveAnswer(content);
      return;
    }
    const message = read(() => readTold(content));
    if (!message) return;
    if (message.kind === "gone") this.setLink({ ended: message.text });
    this.told(message);
  }

  private receiveAnswer(content: unknown): void {
    const answer = read(() => readAnswer(content));
    if (answer) this.settle(answer.n, answer);
  }

  private settle(n: number, outcome: Answer | Error): void {
    const pending = this.pending.get(n);
    if (!pending) return;
    this.pending.delete(n);
    for (const timer of pending.timers) clearTimeout(timer);
    if (outcome instanceof Error) pending.reject(outcome);
    else pending.resolve(outcome);
    this.updateBusy();
  }

  private isLate(pending: Pending): void {
    pending.late = true;
    this.updateBusy();
  }

  private updateBusy(): void {
    this.setLink({ busy: [...this.pending.values()].some(({ late }) => late) });
  }

  private after(pending: Pending, delay_ms: number, then: () => void): void {
    const timer = setTimeout(() => {
      pending.timers.delete(timer);
      then();
    }, delay_ms);
    pending.timers.add(timer);
  }

  private readSnapshot(): void {
    const value = this.model.get("snapshot");
    if (typeof value !== "object" || value === null || Object.keys(value).length === 0) return;
    const snapshot = read(() => readSnapshot(value), (text) => this.setLink({ ended: text }));
    if (snapshot) this.drawn(snapshot);
  }

  private kernelIs(status: string): void {
    if (RESTARTING.has(status)) this.end("the kernel was restarted");
    else if (status === "dead") this.end("the kernel has died");
    else if (status === "terminating") this.end("the kernel was shut down");
  }

  private end(text: string): void {
    this.setLink({ ended: text });
    for (const n of [...this.pending.keys()]) this.settle(n, new NoAnswer(text));
  }

  private setLink(change: Partial<LinkState>): void {
    const link = { ...this.link, ...change };
    if (link.busy === this.link.busy && link.away === this.link.away && link.ended === this.link.ended) return;
    this.link = link;
    this.linked(link);
  }

  private listen(name: string, callback: (...args: never[]) => void): void {
    this.model.on(name, callback);
    this.undo.push(() => this.model.off(name, callback));
  }

  private watch<T>(signal: Signal<T> | undefined, then: (value: T) => void): void {
    if (!signal) return;
    const slot = (_sender: unknown, value: T): void => then(value);
    signal.connect(slot);
    this.undo.push(() => void signal.disconnect(slot));
  }
}

function kernelOf(model: WidgetModel): KernelConnection | null {
  const manager = model.widget_manager;
  if (typeof manager !== "object" || manager === null) return null;
  const kernel = (manager as { kernel?: unknown }).kernel;
  return typeof kernel === "object" && kernel !== null ? kernel : null;
}

function read<T>(parse: () => T, tell?: (text: string) => void): T | null {
  try {
    return parse();
  } catch (error) {
    const text = error instanceof Error ? error.message : String(error);
    console.warn("sgpu: a message that this view can't read:", text);
    tell?.(text);
    return null;
  }
}
