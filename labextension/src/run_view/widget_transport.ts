import { kernelConnectionOf } from "../shared/kernel_connection";
import type { KernelConnection, Signal } from "../shared/kernel_connection";
import { WidgetRequests, NoAnswer, readOrNull } from "../shared/widget_requests";
import type { WidgetModel } from "../shared/widget_requests";
import { readAnswer, readSnapshot, readUpdate } from "./messages";
import type { Answer, Snapshot, FeedUpdate } from "./messages";
import type { QuestionBody, LinkState, Transport, TransportKind } from "./transport";

const RESTARTING = new Set(["restarting", "autorestarting"]);

/** A transport over anywidget's model: snapshots are a synced trait, all else is sent as custom messages. */
export class WidgetTransport implements Transport {
  private readonly requests: WidgetRequests<Answer>;
  private readonly disposers: (() => void)[] = [];
  private readonly kernel: KernelConnection | null;
  private updateCallback: (message: FeedUpdate) => void = () => undefined;
  private snapshotCallback: (snapshot: Snapshot) => void = () => undefined;
  private linkCallback: (state: LinkState) => void = () => undefined;
  private link: LinkState = { busy: false, away: false, ended: "" };

  constructor(private readonly model: WidgetModel) {
    this.kernel = kernelConnectionOf(model.widget_manager);
    this.requests = new WidgetRequests({
      model,
      kernel: this.kernel,
      modelId: () => this.modelKey,
      read: (content) => readOrNull(() => readAnswer(content)),
      onBusy: (busy) => this.setLink({ busy }),
    });
    this.listen("change:snapshot", () => this.readSnapshot());
    this.listen("msg:custom", (content: never) => this.receive(content));
    this.connectSignal(this.kernel?.statusChanged, (status) => this.onKernelStatus(status));
    this.connectSignal(this.kernel?.connectionStatusChanged, (status) => this.setLink({ away: status !== "connected" }));
    this.connectSignal(this.kernel?.disposed, () => this.setLink({ ended: "the notebook has another kernel now" }));
  }

  get kind(): TransportKind {
    return this.requests.channel;
  }

  get interrupt(): (() => Promise<void>) | undefined {
    const kernel = this.kernel;
    return kernel?.interrupt ? () => kernel.interrupt?.() ?? Promise.resolve() : undefined;
  }

  onUpdate(callback: (update: FeedUpdate) => void): void {
    this.updateCallback = callback;
  }

  onSnapshot(callback: (snapshot: Snapshot) => void): void {
    this.snapshotCallback = callback;
    this.readSnapshot();
  }

  onLink(callback: (state: LinkState) => void): void {
    this.linkCallback = callback;
    callback(this.link);
  }

  ask(question: QuestionBody): Promise<Answer> {
    return this.link.ended ? Promise.reject(new NoAnswer(this.link.ended)) : this.requests.ask(question);
  }

  dispose(): void {
    for (const dispose of this.disposers.splice(0)) dispose();
    this.updateCallback = this.snapshotCallback = this.linkCallback = () => undefined;
    this.requests.close("the view is closed");
  }

  private get modelKey(): string {
    const key = this.model.get("model_key");
    return typeof key === "string" ? key : "";
  }

  private receive(content: unknown): void {
    const kind = typeof content === "object" && content !== null ? content : {};
    if ("n" in kind) {
      this.requests.receive(content);
      return;
    }
    const message = readOrNull(() => readUpdate(content));
    if (!message) return;
    if (message.kind === "gone") this.setLink({ ended: message.text });
    this.updateCallback(message);
  }

  private readSnapshot(): void {
    const value = this.model.get("snapshot");
    if (typeof value !== "object" || value === null || Object.keys(value).length === 0) return;
    const snapshot = readOrNull(() => readSnapshot(value), (text) => this.setLink({ ended: text }));
    if (snapshot) this.snapshotCallback(snapshot);
  }

  private onKernelStatus(status: string): void {
    if (RESTARTING.has(status)) this.endLink("the kernel was restarted");
    else if (status === "dead") this.endLink("the kernel has died");
    else if (status === "terminating") this.endLink("the kernel was shut down");
  }

  private endLink(text: string): void {
    this.setLink({ ended: text });
    this.requests.rejectAll(text);
  }

  private setLink(change: Partial<LinkState>): void {
    const link = { ...this.link, ...change };
    if (link.busy === this.link.busy && link.away === this.link.away && link.ended === this.link.ended) return;
    this.link = link;
    this.linkCallback(link);
  }

  private listen(name: string, callback: (...args: never[]) => void): void {
    this.model.on(name, callback);
    this.disposers.push(() => this.model.off(name, callback));
  }

  private connectSignal<T>(signal: Signal<T> | undefined, callback: (value: T) => void): void {
    if (!signal) return;
    const slot = (_sender: unknown, value: T): void => callback(value);
    signal.connect(slot);
    this.disposers.push(() => void signal.disconnect(slot));
  }
}
