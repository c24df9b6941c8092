import { kernelConnectionOf } from "../shared/kernel_connection";
import type { KernelConnection, Signal } from "../shared/kernel_connection";
import { WidgetRequests, NoAnswer, readOrNull } from "../shared/widget_requests";
import type { WidgetModel } from "../shared/widget_requests";
import type { KernelAsk, KernelState, NotebookLink, PanelHost, PanelSettings, PoolLink, PoolLinkState, Translate } from "./host";
import { OtherVersion, readReply, readUpdate } from "./messages";
import type { KernelReply, PanelOrder, PanelUpdate } from "./messages";

/** Interval of the heartbeat to the kernel, which is not notified when a page is closed. */
export const HERE_MS = 20_000;
/** Timeout for questions that may install packages, connect or disconnect, which take longer than the others. */
export const SLOW_MS = 60_000;

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
const GONE = "This panel belongs to a kernel that has ended. %sgpu_env --panel shows a new one.";
/** Includes `starting`: it is the only status that is reported when another client restarts the kernel. */
const ENDS = new Set(["starting", "restarting", "autorestarting", "dead", "terminating"]);

/** Inserts a sentence's values without translating it. */
export const plainly: Translate = (text, ...values) =>
  text.replace(/%(\d)/g, (found, place: string) => String(values[Number(place) - 1] ?? found));

/**
 * Host of a panel in a notebook's output: pools and kernel are both reached through one widget's messages.
 *
 * The notebook's metadata can be neither read nor written from a widget.
 */
export class WidgetPanelHost implements PanelHost {
  readonly settings: PanelSettings = { showPrices: true };
  readonly translate = plainly;
  readonly firstPool: string;
  readonly pools: PoolLink;
  readonly notebook: NotebookLink;
  readonly memory: PanelHost["memory"];
  private readonly questions: WidgetRequests<KernelReply>;
  private readonly connection: KernelConnection | null;
  private readonly kernelChanged = new Set<() => void>();
  private updated: (update: PanelUpdate) => void = () => undefined;
  private linked: (state: PoolLinkState) => void = () => undefined;
  private link: PoolLinkState = { kind: "connecting", text: "" };
  private watched: PanelOrder | null = null;
  private hasEnded = false;
  private timer: ReturnType<typeof setInterval> | undefined;

  constructor(
    private readonly model: WidgetModel,
    private readonly signal: AbortSignal,
  ) {
    this.connection = kernelConnectionOf(model.widget_manager);
    this.firstPool = this.text("pool");
    this.questions = new WidgetRequests({
      model,
      kernel: this.connection,
      modelId: () => this.text("model_key"),
      read: (content) => this.read(() => readReply(content)),
      onBusy: () => this.tellKernel(),
    });
    this.pools = {
      order: (order) => this.order(order),
      onUpdate: (callback) => {
        this.updated = callback;
      },
      onLink: (callback) => {
        this.linked = callback;
        callback(this.link);
      },
      retry: () => {
        if (this.watched) this.order(this.watched);
      },
    };
    this.notebook = this.notebookLink();
    this.memory = new PageMemory();
    this.listen("msg:custom", (content: never) => this.receive(content));
    for (const trait of ["notebook", "kernel"]) this.listen(`change:${trait}`, () => this.tellKernel());
    this.watch(this.connection?.statusChanged, (status) => {
      if (ENDS.has(status)) this.ended();
      this.tellKernel();
    });
    this.watch(this.connection?.disposed, () => this.ended());
    this.watch(this.connection?.connectionStatusChanged, (status) => {
      if (this.hasEnded) return;
      const away = status !== "connected";
      this.setLink(away ? { kind: "away", text: "The link to the kernel is down." } : { kind: "open", text: "" });
      this.tellKernel();
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
        return host.text("notebook");
      },
      get kernel() {
        return host.text("kernel");
      },
      get kernelState() {
        return host.kernelState;
      },
      kept: null,
      onChange: (callback) => {
        host.kernelChanged.add(callback);
        return () => host.kernelChanged.delete(callback);
      },
      ask: (question) => host.ask(question),
      keep: () => undefined,
    };
  }

  private get kernelState(): KernelState {
    const { connection } = this;
    if (this.hasEnded) return "dead";
    if (!connection) return "idle";
    if (this.link.kind === "away") return "disconnected";
    return STATES[connection.status ?? "idle"] ?? "idle";
  }

  private async ask(question: KernelAsk): Promise<KernelReply> {
    const isSlow = question.kind === "apply" || question.kind === "disconnect";
    try {
      return await this.questions.ask(question, isSlow ? SLOW_MS : undefined);
    } catch (error) {
      if (!(error instanceof NoAnswer) || this.hasEnded || this.signal.aborted) throw error;
      // an idle kernel that does not answer does not know this panel: another client has restarted it unnoticed
      const isOther = this.kernelState === "idle" && this.connection !== null;
      throw new Error(
        isOther
          ? "The kernel does not know this panel. If it was restarted, %sgpu_env --panel shows a new one."
          : "The kernel has not answered. It answers when its cell has ended.",
      );
    }
  }

  private ended(): void {
    if (this.hasEnded) return;
    this.hasEnded = true;
    clearInterval(this.timer);
    this.questions.close(GONE);
    this.setLink({ kind: "refused", text: GONE });
    this.tellKernel();
  }

  private order(order: PanelOrder): void {
    if (this.hasEnded) return;
    this.model.send(order);
    clearInterval(this.timer);
    if (order.kind === "watch") this.watched = order;
    if (order.kind === "rest") this.watched = null;
    if (this.watched && !this.signal.aborted) this.timer = setInterval(() => this.model.send({ kind: "here" }), HERE_MS);
  }

  private receive(content: unknown): void {
    if (typeof content === "object" && content !== null && "n" in content) {
      this.questions.receive(content);
      return;
    }
    const update = this.read(() => readUpdate(content));
    if (!update || this.hasEnded) return;
    this.setLink({ kind: "open", text: "" });
    this.updated(update);
  }

  private read<T>(parse: () => T): T | null {
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
    this.linked(link);
  }

  private tellKernel(): void {
    for (const callback of [...this.kernelChanged]) callback();
  }

  private text(trait: string): string {
    const value = this.model.get(trait);
    return typeof value === "string" ? value : "";
  }

  private listen(name: string, callback: (...args: never[]) => void): void {
    this.model.on(name, callback);
    this.signal.addEventListener("abort", () => this.model.off(name, callback), { once: true });
  }

  private watch<T>(signal: Signal<T> | undefined, then: (value: T) => void): void {
    if (!signal) return;
    const slot = (_sender: unknown, value: T): void => then(value);
    signal.connect(slot);
    this.signal.addEventListener("abort", () => void signal.disconnect(slot), { once: true });
  }

  private close(): void {
    clearInterval(this.timer);
    this.kernelChanged.clear();
    this.updated = this.linked = () => undefined;
    this.questions.close("the panel is closed");
  }
}

/** Keeps values until the page is closed or reloaded. */
class PageMemory {
  private readonly kept = new Map<string, string>();

  get(key: string): string | null {
    return this.kept.get(key) ?? null;
  }

  set(key: string, value: string): void {
    this.kept.set(key, value);
  }
}
