import { kernelConnectionOf } from "../shared/kernel_connection";
import type { KernelConnection, Signal } from "../shared/kernel_connection";
import { WidgetRequests, NoAnswer, readOrNull } from "../shared/widget_requests";
import type { WidgetModel } from "../shared/widget_requests";
import type { KernelQuestionBody, KernelState, NotebookLink, PanelHost, PanelSettings, PoolLink, PoolLinkState, Translate } from "./host";
import { OtherVersion, readReply, readUpdate } from "./messages";
import type { KernelReply, PanelOrder, PanelUpdate } from "./messages";

/** Interval of the heartbeat to the kernel, which is not notified when a page is closed. */
export const HEARTBEAT_MS = 20_000;
/** Timeout for questions that may install packages, connect or disconnect, which take longer than the others. */
const SLOW_TIMEOUT_MS = 60_000;

const STATES: Readonly<Record<string, KernelState>> = {
  idle: "idle",
  busy: "busy",
  starting: "starting",
  restarting: "restarting",
  autorestarting: "restarting",
  dead: "dead",
  terminating: "dead",
};

/** A restarted kernel has lost its widgets and sends no more updates. */
const KERNEL_ENDED = "This panel belongs to a kernel that has ended. %sgpu_env --panel shows a new one.";
/** Includes `starting`: it is the only status that is reported when another client restarts the kernel. */
const END_STATES = new Set(["starting", "restarting", "autorestarting", "dead", "terminating"]);

/** Inserts values into a sentence without translating it. */
export const interpolate: Translate = (text, ...values) =>
  text.replace(/%(\d)/g, (found, number: string) => String(values[Number(number) - 1] ?? found));

/**
 * Host of a panel in a notebook's output: one widget's messages carry both the pools' and the kernel's.
 *
 * The notebook's metadata can be neither read nor written from a widget.
 */
export class WidgetPanelHost implements PanelHost {
  readonly settings: PanelSettings = { showPrices: true };
  readonly translate = interpolate;
  readonly firstPool: string;
  readonly pools: PoolLink;
  readonly notebook: NotebookLink;
  readonly storage: PanelHost["storage"];
  private readonly requests: WidgetRequests<KernelReply>;
  private readonly connection: KernelConnection | null;
  private readonly kernelCallbacks = new Set<() => void>();
  private updateCallback: (update: PanelUpdate) => void = () => undefined;
  private linkCallback: (state: PoolLinkState) => void = () => undefined;
  private link: PoolLinkState = { kind: "connecting", text: "" };
  private watchOrder: PanelOrder | null = null;
  private hasEnded = false;
  private timer: ReturnType<typeof setInterval> | undefined;

  constructor(
    private readonly model: WidgetModel,
    private readonly signal: AbortSignal,
  ) {
    this.connection = kernelConnectionOf(model.widget_manager);
    this.firstPool = this.textTrait("pool");
    this.requests = new WidgetRequests({
      model,
      kernel: this.connection,
      modelId: () => this.textTrait("model_key"),
      read: (content) => this.parseOrNull(() => readReply(content)),
      onBusy: () => this.notifyKernelChange(),
    });
    this.pools = {
      order: (order) => this.order(order),
      onUpdate: (callback) => {
        this.updateCallback = callback;
      },
      onLink: (callback) => {
        this.linkCallback = callback;
        callback(this.link);
      },
      retry: () => {
        if (this.watchOrder) this.order(this.watchOrder);
      },
    };
    this.notebook = this.notebookLink();
    this.storage = new PageStorage();
    this.listen("msg:custom", (content: never) => this.receive(content));
    for (const trait of ["notebook", "kernel"]) this.listen(`change:${trait}`, () => this.notifyKernelChange());
    this.connectSignal(this.connection?.statusChanged, (status) => {
      if (END_STATES.has(status)) this.onKernelEnd();
      this.notifyKernelChange();
    });
    this.connectSignal(this.connection?.disposed, () => this.onKernelEnd());
    this.connectSignal(this.connection?.connectionStatusChanged, (status) => {
      if (this.hasEnded) return;
      const away = status !== "connected";
      this.setLink(away ? { kind: "away", text: "The link to the kernel is down." } : { kind: "open", text: "" });
      this.notifyKernelChange();
    });
    signal.addEventListener("abort", () => this.close(), { once: true });
  }

  onChange(): () => void {
    return () => undefined;
  }

  private notebookLink(): NotebookLink {
    // eslint-disable-next-line @typescript-eslint/no-this-alias -- the getters below have a `this` of their own
    const host = this;
    return {
      get name() {
        return host.textTrait("notebook");
      },
      get kernel() {
        return host.textTrait("kernel");
      },
      get kernelState() {
        return host.kernelState;
      },
      savedChoice: null,
      onChange: (callback) => {
        host.kernelCallbacks.add(callback);
        return () => host.kernelCallbacks.delete(callback);
      },
      ask: (question) => host.ask(question),
      saveChoice: () => undefined,
    };
  }

  private get kernelState(): KernelState {
    const { connection } = this;
    if (this.hasEnded) return "dead";
    if (!connection) return "idle";
    if (this.link.kind === "away") return "disconnected";
    return STATES[connection.status ?? "idle"] ?? "idle";
  }

  private async ask(question: KernelQuestionBody): Promise<KernelReply> {
    const isSlow = question.kind === "apply" || question.kind === "disconnect";
    try {
      return await this.requests.ask(question, isSlow ? SLOW_TIMEOUT_MS : undefined);
    } catch (error) {
      if (!(error instanceof NoAnswer) || this.hasEnded || this.signal.aborted) throw error;
      // an idle kernel that does not answer was restarted by another client, and does not know this panel
      const isOther = this.kernelState === "idle" && this.connection !== null;
      throw new Error(
        isOther
          ? "The kernel does not know this panel. If it was restarted, %sgpu_env --panel shows a new one."
          : "The kernel has not answered. It answers when its cell has ended.",
      );
    }
  }

  private onKernelEnd(): void {
    if (this.hasEnded) return;
    this.hasEnded = true;
    clearInterval(this.timer);
    this.requests.close(KERNEL_ENDED);
    this.setLink({ kind: "refused", text: KERNEL_ENDED });
    this.notifyKernelChange();
  }

  private order(order: PanelOrder): void {
    if (this.hasEnded) return;
    this.model.send(order);
    clearInterval(this.timer);
    if (order.kind === "watch") this.watchOrder = order;
    if (order.kind === "rest") this.watchOrder = null;
    if (this.watchOrder && !this.signal.aborted) this.timer = setInterval(() => this.model.send({ kind: "here" }), HEARTBEAT_MS);
  }

  private receive(content: unknown): void {
    if (typeof content === "object" && content !== null && "n" in content) {
      this.requests.receive(content);
      return;
    }
    const update = this.parseOrNull(() => readUpdate(content));
    if (!update || this.hasEnded) return;
    this.setLink({ kind: "open", text: "" });
    this.updateCallback(update);
  }

  private parseOrNull<T>(parse: () => T): T | null {
    return readOrNull(() => {
      try {
        return parse();
      } catch (error) {
        if (error instanceof OtherVersion) this.setLink({ kind: "refused", text: error.message });
        throw error;
      }
    });
  }

  private setLink(link: PoolLinkState): void {
    if (link.kind === this.link.kind && link.text === this.link.text) return;
    this.link = link;
    this.linkCallback(link);
  }

  private notifyKernelChange(): void {
    for (const callback of [...this.kernelCallbacks]) callback();
  }

  private textTrait(trait: string): string {
    const value = this.model.get(trait);
    return typeof value === "string" ? value : "";
  }

  private listen(name: string, callback: (...args: never[]) => void): void {
    this.model.on(name, callback);
    this.signal.addEventListener("abort", () => this.model.off(name, callback), { once: true });
  }

  private connectSignal<T>(signal: Signal<T> | undefined, callback: (value: T) => void): void {
    if (!signal) return;
    const slot = (_sender: unknown, value: T): void => callback(value);
    signal.connect(slot);
    this.signal.addEventListener("abort", () => void signal.disconnect(slot), { once: true });
  }

  private close(): void {
    clearInterval(this.timer);
    this.kernelCallbacks.clear();
    this.updateCallback = this.linkCallback = () => undefined;
    this.requests.close("the panel is closed");
  }
}

/** Stores values until the page is closed or reloaded. */
class PageStorage {
  private readonly values = new Map<string, string>();

  get(key: string): string | null {
    return this.values.get(key) ?? null;
  }

  set(key: string, value: string): void {
    this.values.set(key, value);
  }
}
