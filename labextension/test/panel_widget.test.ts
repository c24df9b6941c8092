import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";

import panel from "../src/panel/widget_entry";
import { HEARTBEAT_MS, WidgetPanelHost, interpolate } from "../src/panel/widget_host";
import { REQUEST_TIMEOUT_MS, CHANNEL_TIMEOUT_MS } from "../src/shared/widget_requests";
import { eventually } from "./eventually";
import { KERNEL, PLAN, RUNS, SESSION, kernelAnswer, kernelSnapshot, poolSnapshot } from "./panel_samples";

type Callback = (...args: never[]) => void;

interface SentMessage {
  readonly kind: string;
  readonly n?: number;
}

/** anywidget's model; `kernel` is the connection that some front ends provide. */
class FakeModel {
  readonly sent: SentMessage[] = [];
  readonly listeners = new Map<string, Set<Callback>>();
  readonly widget_manager: unknown;

  constructor(
    private readonly traits: Readonly<Record<string, unknown>>,
    kernel?: object,
  ) {
    this.widget_manager = { kernel };
  }

  get(name: string): unknown {
    return this.traits[name];
  }

  send(content: unknown): void {
    this.sent.push(content as SentMessage);
  }

  on(name: string, callback: Callback): void {
    this.listeners.set(name, (this.listeners.get(name) ?? new Set()).add(callback));
  }

  off(name: string, callback: Callback): void {
    this.listeners.get(name)?.delete(callback);
  }

  emit(content: unknown): void {
    for (const callback of [...(this.listeners.get("msg:custom") ?? [])]) callback(content as never);
  }

  get listenerCount(): number {
    return [...this.listeners.values()].reduce((sum, each) => sum + each.size, 0);
  }
}

const TRAITS = { pool: "local", notebook: "train.ipynb", kernel: KERNEL, comms: "subshell", model_key: "key" };

let controller: AbortController;

beforeEach(() => {
  controller = new AbortController();
  vi.useFakeTimers();
});
afterEach(() => {
  controller.abort();
  document.body.replaceChildren();
  vi.useRealTimers();
});

describe("the panel's widget", () => {
  it("sends questions to its kernel, and draws answers and updates", async () => {
    vi.useRealTimers();
    const model = new FakeModel(TRAITS);
    const el = document.createElement("div");
    document.body.append(el);
    const stop = panel.render({ model, el, signal: controller.signal });
    expect(model.sent.map(({ kind }) => kind).sort()).toEqual(["kernel", "watch"]);
    expect(model.sent).toContainEqual({ kind: "watch", pool: "local" });
    const question = model.sent.find(({ kind }) => kind === "kernel");
    expect(question).toMatchObject({ kind: "kernel", kept: null });
    model.emit({ kind: "pool", snapshot: poolSnapshot() });
    model.emit({ kind: "runs", pool: "local", whole: true, changed: [...RUNS, SESSION], gone: [] });
    model.emit(kernelAnswer(kernelSnapshot(), { n: question?.n ?? 0 }));
    await eventually(() => expect(el.textContent).toContain("nothing saved in the notebook"));
    expect(el.textContent.replaceAll("\u00a0", " ")).toContain("Connected: 2 × A10 · local");
    const plan = () => model.sent.find(({ kind }) => kind === "plan");
    await eventually(() => expect(plan()).toMatchObject({ connect: true }));
    model.emit({ kind: "plan-answer", n: plan()?.n ?? 0, plan: PLAN });
    stop();
    expect(el.childNodes.length).toBe(0);
    expect(model.listenerCount).toBe(0);
    expect(model.sent.at(-1)).toEqual({ kind: "rest" });
  });

  it("sends a heartbeat while it watches a pool", () => {
    const model = new FakeModel(TRAITS);
    const host = new WidgetPanelHost(model, controller.signal);
    vi.advanceTimersByTime(HEARTBEAT_MS * 3);
    expect(model.sent).toEqual([]);
    host.pools.order({ kind: "watch", pool: "" });
    vi.advanceTimersByTime(HEARTBEAT_MS * 2);
    expect(model.sent.map(({ kind }) => kind)).toEqual(["watch", "here", "here"]);
    host.pools.order({ kind: "start-pool", pool: "" });
    vi.advanceTimersByTime(HEARTBEAT_MS);
    expect(model.sent.at(-1)).toEqual({ kind: "here" });
    host.pools.order({ kind: "rest" });
    vi.advanceTimersByTime(HEARTBEAT_MS * 3);
    expect(model.sent.at(-1)).toEqual({ kind: "rest" });
    host.pools.order({ kind: "watch", pool: "team" });
    controller.abort();
    expect(vi.getTimerCount()).toBe(0);
  });

  it("uses the control channel, with the widget's key, if comms wait for the cell", async () => {
    const asked: { model_id: string; question: { kind: string; n: number } }[] = [];
    const kernel = {
      status: "busy",
      sendControlMessage: (message: { content: (typeof asked)[number] }) => {
        asked.push(message.content);
        const future: { onReply: (reply: object) => void; done: Promise<void> } = {
          onReply: () => undefined,
          done: new Promise(() => undefined),
        };
        const answer = kernelAnswer(kernelSnapshot(), { n: message.content.question.n });
        setTimeout(() => future.onReply({ content: { status: "ok", answer } }), 5);
        return future;
      },
    };
    const model = new FakeModel({ ...TRAITS, comms: "blocking" }, kernel);
    const host = new WidgetPanelHost(model, controller.signal);
    expect(host.notebook.kernelState).toBe("busy");
    const answer = host.notebook.ask({ kind: "kernel", kept: null });
    await vi.advanceTimersByTimeAsync(10);
    expect(await answer).toMatchObject({ kind: "kernel-answer", snapshot: { packages: 166 } });
    expect(asked.map(({ model_id, question }) => [model_id, question.kind])).toEqual([["key", "kernel"]]);
    expect(model.sent).toEqual([]);
  });

  it("waits on the main shell without other channels, until it is closed", async () => {
    const model = new FakeModel({ ...TRAITS, comms: "blocking" });
    const host = new WidgetPanelHost(model, controller.signal);
    const answer = host.notebook.ask({ kind: "kernel", kept: null });
    const failed = expect(answer).rejects.toThrow("the panel is closed");
    await vi.advanceTimersByTimeAsync(CHANNEL_TIMEOUT_MS * 100);
    expect(model.sent.length).toBe(1);
    controller.abort();
    await failed;
  });

  it("explains why an idle kernel may not answer", async () => {
    const model = new FakeModel(TRAITS, { status: "idle", supportsSubshells: true });
    const host = new WidgetPanelHost(model, controller.signal);
    const failed = expect(host.notebook.ask({ kind: "kernel", kept: null })).rejects.toThrow("If it was restarted");
    await vi.advanceTimersByTimeAsync(REQUEST_TIMEOUT_MS);
    await failed;
  });

  it.each(["starting", "restarting", "dead"])("ends when its kernel is %s", async (status) => {
    vi.useRealTimers();
    const slots = new Set<(sender: unknown, status: string) => void>();
    const statusChanged = {
      connect: (slot: (sender: unknown, status: string) => void) => slots.add(slot),
      disconnect: (slot: (sender: unknown, status: string) => void) => slots.delete(slot),
    };
    const model = new FakeModel(TRAITS, { status: "idle", supportsSubshells: true, statusChanged });
    const el = document.createElement("div");
    document.body.append(el);
    const stop = panel.render({ model, el });
    const sent = model.sent.length;
    for (const slot of slots) slot(null, status);
    for (const slot of slots) slot(null, "idle");
    await eventually(() => expect(el.textContent).toContain("%sgpu_env --panel shows a new one."));
    expect(el.textContent).toContain("The kernel has died.");
    stop();
    expect(model.sent.length).toBe(sent);
    expect(slots.size).toBe(0);
  });

  it("reports messages of another version", () => {
    const warned = vi.spyOn(console, "warn").mockImplementation(() => undefined);
    const model = new FakeModel(TRAITS);
    const host = new WidgetPanelHost(model, controller.signal);
    const states: string[] = [];
    host.pools.onLink(({ kind, text }) => states.push(`${kind} ${text}`));
    model.emit({ kind: "pool", snapshot: { ...poolSnapshot(), version: 99 } });
    model.emit("nonsense");
    expect(states.length).toBe(2);
    expect(states[1]).toContain("refused This page has another version of sgpu-magic");
    expect(warned).toHaveBeenCalledTimes(2);
    warned.mockRestore();
  });

  it("interpolates values, including one that looks like a placeholder", () => {
    expect(interpolate("%1 of %2 free", 3, "%1")).toBe("3 of %1 free");
    expect(interpolate("100 %")).toBe("100 %");
    expect(interpolate("Run %load_ext sgpu_magic")).toBe("Run %load_ext sgpu_magic");
  });
});
