import { kernelConnectionOf } from "../shared/kernel_connection";
import type { KernelConnection, Signal } from "../shared/kernel_connection";
import { WidgetRequests, NoAnswer, readOrNull } from "../shared/widget_requests";
import type { WidgetModel } from "../shared/widget_requests";
import { readAnswer, readSnapshot, readUpdate } from "./messages";
import type { Answer, Snapshot, FeedUpdate } from "./messages";
import type { Ask, LinkState, Transport, TransportKind } from "./transport";

const RESTARTING = new Set(["restarting", "autorestarting"]);

/** A transport over anywidget's model: the snapshot is a synced trait, the rest are custom messages. */
export class WidgetTransport implements Transport {
  private readonly questions: WidgetRequests<Answer>;
  private readonly undo: (() => void)[] = [];
  private readonly kernel: KernelConnection | null;
  private updated: (message: FeedUpdate) => void = () => undefined;
  private drawn: (snapshot: Snapshot) => void = () => undefined;
  private linked: (state: LinkState) => void = () => undefined;
  private link: LinkState = { busy: false, away: false, ended: "" };

  constructor(private readonly model: WidgetModel) {
    this.kernel = kernelConnectionOf(model.widget_manager);
    this.questions = new WidgetRequests({
      model,
      kernel: this.kernel,
      modelId: () => this.modelKey,
      read: (content) => readOrNull(() => readAnswer(content)),
      onBusy: (busy) => this.setLink({ busy }),
    });
    this.listen("change:snapshot", () => this.readSnapshot());
    this.listen("msg:custom", (content: never) => this.receive(content));
    this.watch(this.kernel?.statusChanged, (status) => this.kernelIs(status));
    this.watch(this.kernel?.connectionStatusChanged, (status) => this.setLink({ away: status !== "connected" }));
    this.watch(this.kernel?.disposed, () => this.setLink({ ended: "the notebook has another kernel now" }));
  }

  get kind(): TransportKind {
    return this.questions.channel;
  }

  get interrupt(): (() => Promise<void>) | undefined {
    const kernel = this.kernel;
    return kernel?.interrupt ? () => kernel.interrupt?.() ?? Promise.resolve() : undefined;
  }

  onUpdate(callback: (update: FeedUpdate) => void): void {
    this.updated = callback;
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
    return this.link.ended ? Promise.reject(new NoAnswer(this.link.ended)) : this.questions.ask(asked);
  }

  dispose(): void {
    for (const undo of this.undo.splice(0)) undo();
    this.updated = this.drawn = this.linked = () => undefined;
    this.questions.close("the view is closed");
  }

  private get modelKey(): string {
    const key = this.model.get("model_key");
    return typeof key === "string" ? key : "";
  }

  private receive(content: unknown): void {
    const kind = typeof content === "object" && content !== null ? content : {};
    if ("n" in kind) {
      this.questions.receive(content);
      return;
    }
    const message = readOrNull(() => readUpdate(content));
    if (!message) return;
    if (message.kind === "gone") this.setLink({ ended: message.text });
    this.updated(message);
  }

  private readSnapshot(): void {
    const value = this.model.get("snapshot");
    if (typeof value !== "object" || value === null || Object.keys(value).length === 0) return;
    const snapshot = readOrNull(() => readSnapshot(value), (text) => this.setLink({ ended: text }));
    if (snapshot) this.drawn(snapshot);
  }

  private kernelIs(status: string): void {
    if (RESTARTING.has(status)) this.end("the kernel was restarted");
    else if (status === "dead") this.end("the kernel has died");
    else if (status === "terminating") this.end("the kernel was shut down");
  }

  private end(text: string): void {
    this.setLink({ ended: text });
    this.questions.rejectAll(text);
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
