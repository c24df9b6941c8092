import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";

import type { Question, FeedUpdate } from "../src/run_view/messages";
import type { LinkState } from "../src/run_view/transport";
import { WidgetTransport } from "../src/run_view/widget_transport";
import { REQUEST_TIMEOUT_MS, CHANNEL_TIMEOUT_MS } from "../src/shared/widget_requests";
import { eventually } from "./eventually";
import { snapshot } from "./samples";

type Callback = (...args: never[]) => void;

class FakeSignal<T> {
  readonly slots = new Set<(sender: unknown, value: T) => void>();
  connect(slot: (sender: unknown, value: T) => void) {
    this.slots.add(slot);
  }
  disconnect(slot: (sender: unknown, value: T) => void) {
    this.slots.delete(slot);
  }
  emit(value: T) {
    for (const slot of [...this.slots]) slot(this, value);
  }
}

interface ControlMessage {
  readonly header: Readonly<Record<string, unknown>>;
  readonly channel: string;
  readonly content: { readonly model_id: string; readonly question: Question };
}

class FakeFuture {
  onReply: (message: { content: object }) => void = () => undefined;
  readonly done = new Promise<void>(() => undefined);
  constructor(readonly message: ControlMessage) {}
}

class FakeKernel {
  clientId = "client";
  username = "";
  status = "busy";
  readonly statusChanged = new FakeSignal<string>();
  readonly connectionStatusChanged = new FakeSignal<string>();
  readonly disposed = new FakeSignal<unknown>();
  readonly futures: FakeFuture[] = [];
  interrupts = 0;
  sendControlMessage?: (message: ControlMessage) => FakeFuture;

  constructor(readonly supportsSubshells: boolean, control = true) {
    if (control) {
      this.sendControlMessage = (message) => {
        const future = new FakeFuture(message);
        this.futures.push(future);
        return future;
      };
    }
  }

  interrupt() {
    this.interrupts += 1;
    return Promise.resolve();
  }
}

class FakeModel {
  readonly sent: Question[] = [];
  readonly callbacks = new Map<string, Set<Callback>>();
  readonly widget_manager: unknown;

  constructor(
    readonly traits: Record<string, unknown>,
    kernel: FakeKernel | null,
  ) {
    this.widget_manager = kernel ? { kernel } : {};
  }

  get(name: string) {
    return this.traits[name];
  }
  send(content: unknown) {
    this.sent.push(content as Question);
  }
  on(name: string, callback: Callback) {
    this.callbacks.set(name, (this.callbacks.get(name) ?? new Set()).add(callback));
  }
  off(name: string, callback: Callback) {
    this.callbacks.get(name)?.delete(callback);
  }
  emit(name: string, value?: unknown) {
    for (const callback of this.callbacks.get(name) ?? []) (callback as (value: unknown) => void)(value);
  }
}

function createTransport(kernel: FakeKernel | null, comms = "subshell") {
  const model = new FakeModel({ snapshot: snapshot(), comms, model_key: "model-1" }, kernel);
  const transport = new WidgetTransport(model);
  const states: LinkState[] = [];
  const updates: FeedUpdate[] = [];
  transport.onLink((state) => states.push(state));
  transport.onUpdate((message) => updates.push(message));
  return { model, transport, states, news: updates };
}

const text = (n: number) => ({ kind: "text", n, lines: ["done"] });

beforeEach(() => {
  vi.useFakeTimers();
  // question numbers start at a random number
  vi.spyOn(Math, "random").mockReturnValue(0);
});
afterEach(() => {
  vi.restoreAllMocks();
  vi.useRealTimers();
});

describe("the channel of a question", () => {
  it("is the comm if the kernel handles comms on a subshell", async () => {
    const { model, transport } = createTransport(new FakeKernel(true));
    expect(transport.kind).toBe("subshell");
    const answer = transport.ask({ kind: "stacks" });
    expect(model.sent).toEqual([{ kind: "stacks", n: 1 }]);
    model.emit("msg:custom", text(1));
    await expect(answer).resolves.toEqual(text(1));
  });

  it("is the control channel if comms wait for the cell", async () => {
    const kernel = new FakeKernel(true);
    const { model, transport } = createTransport(kernel, "blocking");
    expect(transport.kind).toBe("control");
    const answer = transport.ask({ kind: "cancel" });
    expect(model.sent).toEqual([]);
    const message = kernel.futures[0]?.message;
    expect(message?.channel).toBe("control");
    expect(message?.header).toMatchObject({ msg_type: "sgpu_request", session: "client", subshell_id: null });
    expect(message?.content).toEqual({ model_id: "model-1", question: { kind: "cancel", n: 1 } });
    kernel.futures[0]?.onReply({ content: { status: "ok", answer: text(1) } });
    await expect(answer).resolves.toEqual(text(1));
  });

  it.each([
    ["a kernel without subshells", new FakeKernel(false), "control"],
    ["a front end without a control channel", new FakeKernel(false, false), "shell"],
    ["a front end that shows no kernel", null, "shell"],
  ])("is right for %s", (_name, kernel, kind) => {
    expect(createTransport(kernel).transport.kind).toBe(kind);
  });

  it("changes to the control channel if the comm is silent, then reports busy", async () => {
    const kernel = new FakeKernel(true);
    const { transport, states } = createTransport(kernel);
    const answer = transport.ask({ kind: "stacks" });
    vi.advanceTimersByTime(CHANNEL_TIMEOUT_MS - 1);
    expect(kernel.futures).toHaveLength(0);
    vi.advanceTimersByTime(1);
    expect(kernel.futures[0]?.message.content.question).toEqual({ kind: "stacks", n: 1 });
    expect(states.at(-1)?.busy).toBe(false);
    vi.advanceTimersByTime(CHANNEL_TIMEOUT_MS);
    expect(states.at(-1)?.busy).toBe(true);
    kernel.futures[0]?.onReply({ content: { status: "ok", answer: text(1) } });
    await answer;
    expect(states.at(-1)?.busy).toBe(false);
  });

  it("times out, so that the caller can retry", async () => {
    const { transport } = createTransport(new FakeKernel(true));
    const answer = expect(transport.ask({ kind: "stacks" })).rejects.toThrow("the kernel has not answered");
    vi.advanceTimersByTime(REQUEST_TIMEOUT_MS);
    await answer;
  });

  it("is the main shell as a last resort, and the kernel is reported as busy", async () => {
    const { model, transport, states } = createTransport(null);
    const answer = transport.ask({ kind: "lines", first: 0, count: 200, rank: null });
    vi.advanceTimersByTime(REQUEST_TIMEOUT_MS * 10);
    expect(states.at(-1)?.busy).toBe(true);
    model.emit("msg:custom", { kind: "lines-answer", n: 1, first: 0, rows: [], total: 0 });
    await expect(answer).resolves.toMatchObject({ total: 0 });
    expect(states.at(-1)?.busy).toBe(false);
  });

  it("is the comm if the control channel does not know the message", async () => {
    const kernel = new FakeKernel(false);
    const { model, transport } = createTransport(kernel);
    const answer = transport.ask({ kind: "stacks" });
    kernel.futures[0]?.onReply({ content: { status: "error", evalue: "unknown message" } });
    await eventually(() => expect(model.sent).toEqual([{ kind: "stacks", n: 1 }]));
    model.emit("msg:custom", text(1));
    await expect(answer).resolves.toEqual(text(1));
  });
});

describe("updates from the kernel", () => {
  it("include the model's snapshot, now and when it changes", () => {
    const { model, transport } = createTransport(null);
    const drawn: number[] = [];
    transport.onSnapshot(({ seq }) => drawn.push(seq));
    model.traits["snapshot"] = snapshot({ seq: 2 });
    model.emit("change:snapshot");
    model.traits["snapshot"] = {};
    model.emit("change:snapshot");
    expect(drawn).toEqual([1, 2]);
  });

  it("are passed on unless they are malformed", () => {
    const warn = vi.spyOn(console, "warn").mockReturnValue();
    const { model, news } = createTransport(null);
    model.emit("msg:custom", { kind: "lines", seq: 1, first: 0, rows: [], ranks: [] });
    model.emit("msg:custom", { kind: "lines", seq: "1" });
    model.emit("msg:custom", "text");
    expect(news).toEqual([{ kind: "lines", seq: 1, first: 0, rows: [], ranks: [] }]);
    expect(warn).toHaveBeenCalledTimes(2);
    warn.mockRestore();
  });

  it.each([
    ["restarting", "the kernel was restarted"],
    ["autorestarting", "the kernel was restarted"],
    ["dead", "the kernel has died"],
  ])("include the end of the kernel: %s", async (status, ended) => {
    const kernel = new FakeKernel(true);
    const { transport, states } = createTransport(kernel);
    const answer = expect(transport.ask({ kind: "stacks" })).rejects.toThrow(ended);
    kernel.statusChanged.emit(status);
    await answer;
    expect(states.at(-1)?.ended).toBe(ended);
    await expect(transport.ask({ kind: "stacks" })).rejects.toThrow(ended);
  });

  it("include the loss and the recovery of the link", () => {
    const kernel = new FakeKernel(true);
    const { states } = createTransport(kernel);
    kernel.connectionStatusChanged.emit("connecting");
    expect(states.at(-1)?.away).toBe(true);
    kernel.connectionStatusChanged.emit("connected");
    expect(states.at(-1)?.away).toBe(false);
  });
});

describe("a disposed transport", () => {
  it("leaves no listener and no timer", async () => {
    const kernel = new FakeKernel(true);
    const { model, transport } = createTransport(kernel);
    const answer = expect(transport.ask({ kind: "stacks" })).rejects.toThrow("the view is closed");
    transport.dispose();
    await answer;
    for (const callbacks of model.callbacks.values()) expect(callbacks.size).toBe(0);
    for (const signal of [kernel.statusChanged, kernel.connectionStatusChanged, kernel.disposed]) {
      expect(signal.slots.size).toBe(0);
    }
    expect(vi.getTimerCount()).toBe(0);
    await expect(transport.ask({ kind: "stacks" })).rejects.toThrow("the view is closed");
  });
});

describe("two views of one model", () => {
  it("ignore each other's answers", async () => {
    vi.mocked(Math.random).mockReturnValueOnce(0.25).mockReturnValueOnce(0.5);
    const model = new FakeModel({ comms: "subshell", model_key: "key" }, null);
    const first = new WidgetTransport(model);
    const second = new WidgetTransport(model);
    const waiting = [first.ask({ kind: "stacks" }), second.ask({ kind: "stacks" })];
    const numbers = model.sent.map((question) => (question).n);
    expect(new Set(numbers).size).toBe(2);
    for (const n of [...numbers].reverse()) model.emit("msg:custom", text(n));
    expect((await Promise.all(waiting)).map((answer) => answer.n)).toEqual(numbers);
  });
});
