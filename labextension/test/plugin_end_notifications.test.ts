import { Notification as LabNotification } from "@jupyterlab/apputils";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";

import { interpolate } from "../src/panel/widget_host";
import type { RunRow } from "../src/panel/messages";
import { EndNotifications, endText } from "../src/plugin/end_notifications";
import { PanelSettings } from "../src/plugin/panel_settings";
import { FakeSocket } from "./fake_socket";
import { KERNEL, NOW, run } from "./panel_samples";

vi.mock("@jupyterlab/apputils", () => ({ Notification: { emit: vi.fn(), info: vi.fn(), warning: vi.fn() } }));

interface Action {
  readonly label: string;
  callback(): void;
}

interface Shown {
  readonly text: string;
  readonly actions: readonly Action[];
}

function shownIn(call: "emit" | "info" | "warning"): Shown[] {
  return vi.mocked(LabNotification[call]).mock.calls.map((args: unknown[]) => {
    const { actions = [] } = (args.at(-1) ?? {}) as { actions?: readonly Action[] };
    return { text: String(args[0]), actions };
  });
}

/** Returns the pool that a connection watches. */
function poolOf(socket: FakeSocket): string {
  return (socket.sent.at(-1) as { pool: string } | undefined)?.pool ?? "";
}

/** The browser's desktop notifications. */
class FakeNotification {
  static permission: NotificationPermission = "default";
  static answer: NotificationPermission = "granted";
  static shown: FakeNotification[] = [];
  static readonly requestPermission = vi.fn(() => Promise.resolve((FakeNotification.permission = FakeNotification.answer)));
  onclick: () => void = () => undefined;
  readonly close = vi.fn();

  constructor(
    readonly title: string,
    readonly options: NotificationOptions,
  ) {
    FakeNotification.shown.push(this);
  }
}

const LONG = { submitted_at: NOW - 720, started_at: NOW - 720 };

let sockets: FakeSocket[];
let settings: PanelSettings;
let controller: AbortController;
let kernels: string[];
let isPageFocused: boolean;
const openRun = vi.fn();

function send(update: unknown, pool = ""): void {
  const socket = sockets.find((each) => poolOf(each) === pool && !each.closed);
  if (!socket) throw new Error(`no socket for ${pool}`);
  socket.emitMessage(update);
}

function sendRuns(changed: readonly RunRow[], { whole = false, pool = "local" } = {}): void {
  send({ kind: "runs", pool, whole, changed, gone: [] }, pool === "local" ? "" : pool);
}

function ended(id: string, change: Partial<RunRow> = {}): RunRow {
  return run(id, { ...LONG, state: "succeeded", tone: "good", final: true, ended_at: NOW, ...change });
}

function failed(id: string, change: Partial<RunRow> = {}): RunRow {
  return ended(id, { state: "failed", tone: "bad", reason: "rank 3: ValueError: bad batch", ...change });
}

function start(stored = true): void {
  settings.apply({ notifyRunEnd: stored });
  const server = {
    open: () => {
      const socket = new FakeSocket();
      sockets.push(socket);
      queueMicrotask(() => socket.emitOpen());
      return socket;
    },
    request: () => Promise.reject(new TypeError("no network")),
  };
  new EndNotifications(
    { server, settings, translate: interpolate, kernelIds: () => kernels, openRun },
    controller.signal,
  );
}

beforeEach(() => {
  sockets = [];
  settings = new PanelSettings();
  controller = new AbortController();
  kernels = [KERNEL];
  isPageFocused = false;
  vi.clearAllMocks();
  FakeNotification.permission = "granted";
  FakeNotification.answer = "granted";
  FakeNotification.shown = [];
  vi.stubGlobal("Notification", FakeNotification);
  vi.spyOn(document, "hasFocus").mockImplementation(() => isPageFocused);
  Object.defineProperty(window, "isSecureContext", { value: true, configurable: true });
  document.title = "train.ipynb";
});

afterEach(() => {
  controller.abort();
  vi.unstubAllGlobals();
});

describe("EndNotifications", () => {
  it("reports a long run once: in the page, on the desktop, and in the title until the page is focused", async () => {
    start();
    await Promise.resolve();
    sendRuns([run("a", LONG)], { whole: true });
    sendRuns([ended("a")]);
    // the server sends all runs again after a reconnect
    sendRuns([ended("a")], { whole: true });
    const [shown, ...others] = shownIn("emit");
    expect(others).toEqual([]);
    expect(shown?.text).toBe("train_digits succeeded after 12 min");
    expect(FakeNotification.shown.map(({ title, options }) => [title, options])).toEqual([
      ["train_digits succeeded after 12 min", { body: "train.ipynb", tag: "sgpu-run-a" }],
    ]);
    expect(document.title).toBe("● train.ipynb");
    // JupyterLab changes the title
    document.title = "other.ipynb";
    await vi.waitFor(() => expect(document.title).toBe("● other.ipynb"));
    window.dispatchEvent(new Event("focus"));
    expect(document.title).toBe("● other.ipynb");
    isPageFocused = true;
    window.dispatchEvent(new Event("focus"));
    expect(document.title).toBe("other.ipynb");
    FakeNotification.shown[0]?.onclick();
    shown?.actions[0]?.callback();
    expect(openRun.mock.calls.map(([opened]) => (opened as RunRow).run_id)).toEqual(["a", "a"]);
  });

  it("ignores short runs, sessions, other notebooks, and runs that end while the page is focused", async () => {
    start();
    await Promise.resolve();
    const short = { submitted_at: NOW - 59 };
    const rows = { short, session: { kind: "session" }, push: { kind: "push" }, other: { kernel: "other" } };
    sendRuns(Object.entries(rows).map(([id, change]) => run(id, { ...LONG, ...change })), { whole: true });
    // ended before the page was loaded
    sendRuns([ended("old")]);
    sendRuns(Object.entries(rows).map(([id, change]) => ended(id, change)));
    sendRuns([run("seen", LONG)]);
    isPageFocused = true;
    sendRuns([ended("seen")]);
    isPageFocused = false;
    sendRuns([ended("seen")]);
    expect(shownIn("emit")).toEqual([]);
    expect(FakeNotification.shown).toEqual([]);
    expect(document.title).toBe("train.ipynb");
  });

  it("reports runs of a closed notebook, and of every pool", async () => {
    start();
    await Promise.resolve();
    const local = { name: "local", about: "", reserved: false, default: true, reachable: true };
    const team = { ...local, name: "team", default: false };
    send({ kind: "pools", runs: [], pools: [local, team, { ...team, name: "down", reachable: false }] });
    await Promise.resolve();
    expect(sockets.map(poolOf)).toEqual(["", "team"]);
    sendRuns([run("t", LONG)], { whole: true, pool: "team" });
    kernels = [];
    sendRuns([failed("t")], { pool: "team" });
    expect(shownIn("emit").map(({ text }) => text)).toEqual(["train_digits failed: rank 3: ValueError: bad batch"]);
  });

  it("is off by default, and disconnects when it is switched off", async () => {
    start(false);
    expect(sockets).toEqual([]);
    settings.apply({ notifyRunEnd: true });
    await Promise.resolve();
    expect(sockets).toHaveLength(1);
    settings.apply({ notifyRunEnd: true, refreshSeconds: 5 });
    expect(sockets).toHaveLength(1);
    settings.apply({});
    expect(sockets[0]?.closed).toBe(true);
  });

  it("asks for the browser's permission only when the user switches it on", async () => {
    FakeNotification.permission = "default";
    start(true);
    expect(shownIn("info")).toEqual([]);
    settings.apply({ notifyRunEnd: false });
    settings.apply({ notifyRunEnd: true });
    expect(FakeNotification.requestPermission).not.toHaveBeenCalled();
    const [question] = shownIn("info");
    expect(question?.actions.map(({ label }) => label)).toEqual(["Allow"]);
    FakeNotification.answer = "denied";
    question?.actions[0]?.callback();
    expect(FakeNotification.requestPermission).toHaveBeenCalledOnce();
    await vi.waitFor(() => expect(shownIn("warning")[0]?.text).toMatch(/^The browser blocks desktop notifications/));
    await Promise.resolve();
    sendRuns([run("a", LONG)], { whole: true });
    sendRuns([ended("a")]);
    expect(FakeNotification.shown).toEqual([]);
    expect(shownIn("emit")).toHaveLength(1);
  });

  it("says why a page without HTTPS has no desktop notifications", () => {
    Object.defineProperty(window, "isSecureContext", { value: false, configurable: true });
    start(false);
    settings.apply({ notifyRunEnd: true });
    expect(shownIn("warning")[0]?.text).toMatch(/only of pages with HTTPS/);
  });
});

describe("endText", () => {
  it.each([
    [ended("a", { started_at: NOW - 30 }), "train_digits succeeded after 30 s"],
    [failed("a"), "train_digits failed: rank 3: ValueError: bad batch"],
    [failed("a", { reason: "" }), "train_digits failed after 12 min"],
    [ended("a", { state: "cancelled", tone: "plain" }), "train_digits cancelled after 12 min"],
    [ended("abcdef", { state: "timed out", tone: "bad", name: "", started_at: null }), "abcd timed out after 12 min"],
  ])("describes the end of a run: case %#", (row, text) => {
    expect(endText(row, NOW, interpolate)).toBe(text);
  });
});
