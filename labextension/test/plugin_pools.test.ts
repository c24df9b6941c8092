import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";

import type { PoolLinkState } from "../src/panel/host";
import { VERSION } from "../src/panel/messages";
import type { PanelUpdate } from "../src/panel/messages";
import { ABSENT_PAUSE_MS, PanelPools, PAUSE_MS, PoolConnection } from "../src/plugin/pool_connection";
import { FakeSocket } from "./fake_socket";
import { poolSnapshot, run, SESSION } from "./panel_samples";

const POOL: PanelUpdate = { kind: "pool", snapshot: poolSnapshot() };
const RUNS: PanelUpdate = { kind: "runs", pool: "local", whole: true, changed: [SESSION], gone: [] };
const POOLS: PanelUpdate = { kind: "pools", runs: [], pools: [{ name: "local", about: "this machine", reserved: false, default: true, reachable: true }] };
const ALL = { pools: POOLS, pool: POOL, runs: RUNS };

/** A Jupyter server; `status` is the HTTP status of its replies, null when it is down. */
class FakeServer {
  readonly sockets: FakeSocket[] = [];
  readonly requests: { path: string; init: RequestInit }[] = [];
  status: number | null = 200;
  body: unknown = ALL;

  readonly open = (): FakeSocket => {
    const socket = new FakeSocket();
    this.sockets.push(socket);
    return socket;
  };

  readonly request = (path: string, init: RequestInit): Promise<Response> => {
    this.requests.push({ path, init });
    if (this.status === null) return Promise.reject(new TypeError("no network"));
    return Promise.resolve(new Response(JSON.stringify(this.body), { status: this.status }));
  };

  get socket(): FakeSocket {
    const found = this.sockets.at(-1);
    if (!found) throw new Error("no socket was opened");
    return found;
  }
}

let server: FakeServer;
let controller: AbortController;
let connection: PoolConnection;
let updates: PanelUpdate[];
let links: PoolLinkState[];

beforeEach(() => {
  vi.useFakeTimers();
  server = new FakeServer();
  controller = new AbortController();
  connection = new PoolConnection(server, controller.signal);
  updates = [];
  links = [];
  connection.addListener({ onUpdate: (each) => updates.push(each), onLinkChange: (each) => links.push(each) });
});

afterEach(() => {
  controller.abort();
  expect(vi.getTimerCount()).toBe(0);
  vi.useRealTimers();
});

/** Lets pending promises resolve, and advances the clock by `ms`. */
const advance = (ms = 0): Promise<unknown> => vi.advanceTimersByTimeAsync(ms);

describe("PoolConnection", () => {
  it("is shared by the panel and the chips, and watches a pool while there is a subscription", () => {
    const chips = {};
    connection.subscribe(chips);
    expect(server.sockets).toHaveLength(1);
    server.socket.emitOpen();
    expect(server.socket.sent).toEqual([{ kind: "watch", pool: "" }]);
    const panel = new PanelPools(connection, controller.signal);
    panel.order({ kind: "watch", pool: "team" });
    expect(server.socket.sent.at(-1)).toEqual({ kind: "watch", pool: "team" });
    panel.order({ kind: "rest" });
    // the chips are still subscribed
    expect(server.socket.sent.at(-1)).toEqual({ kind: "watch", pool: "team" });
    connection.unsubscribe(chips);
    expect(server.socket.sent.at(-1)).toEqual({ kind: "rest" });
    expect(server.sockets).toHaveLength(1);
    connection.subscribe(chips);
    expect(server.socket.sent.at(-1)).toEqual({ kind: "watch", pool: "team" });
    controller.abort();
    expect(server.socket.closed).toBe(true);
  });

  it("applies updates and passes them on", () => {
    connection.watch({}, "");
    server.socket.emitOpen();
    for (const each of [POOLS, POOL, RUNS]) server.socket.emitMessage(each);
    expect(updates).toEqual([POOLS, POOL, RUNS]);
    expect(connection.link).toEqual({ kind: "open", text: "" });
    expect(connection.model.sessionOf(SESSION.kernel, "")?.run_id).toBe(SESSION.run_id);
    const warned = vi.spyOn(console, "warn").mockImplementation(() => undefined);
    server.socket.emitMessage({ kind: "weather" });
    expect(warned).toHaveBeenCalledOnce();
    warned.mockRestore();
    expect(connection.link.kind).toBe("open");
  });

  it("watches the user's default pool first", () => {
    connection.defaultPool = "team";
    connection.subscribe({});
    server.socket.emitOpen();
    expect(server.socket.sent).toEqual([{ kind: "watch", pool: "team" }]);
  });

  it("reconnects after the server was down, and watches the pool again", async () => {
    connection.watch({}, "");
    server.socket.emitOpen();
    server.socket.emitMessage(POOL);
    server.status = null;
    server.socket.emitClose();
    await advance();
    expect(connection.link).toEqual({ kind: "away", text: "The Jupyter server does not answer." });
    for (const pause of [PAUSE_MS, 2 * PAUSE_MS, 4 * PAUSE_MS]) {
      const { length } = server.sockets;
      await advance(pause - 1);
      expect(server.sockets).toHaveLength(length);
      await advance(1);
      expect(server.sockets).toHaveLength(length + 1);
      server.socket.emitClose();
      await advance();
    }
    server.status = 200;
    await advance(8 * PAUSE_MS);
    server.socket.emitOpen();
    expect(server.socket.sent).toEqual([{ kind: "watch", pool: "" }]);
    server.socket.emitMessage(POOL);
    expect(connection.link.kind).toBe("open");
  });

  it("reconnects at once on retry", async () => {
    server.status = null;
    connection.watch({}, "");
    server.socket.emitClose();
    await advance();
    connection.retry();
    expect(server.sockets).toHaveLength(2);
    expect(connection.link.kind).toBe("connecting");
  });

  it("reports a server without sgpu-magic, and tries again after a long pause", async () => {
    server.status = 404;
    connection.watch({}, "");
    server.socket.emitClose();
    await advance();
    expect(connection.link).toEqual({ kind: "absent", text: "This Jupyter server has no sgpu-magic." });
    await advance(ABSENT_PAUSE_MS);
    expect(server.sockets).toHaveLength(2);
  });

  it("stays refused for a user without access", async () => {
    server.status = 403;
    connection.watch({}, "");
    server.socket.emitClose();
    await advance();
    expect(connection.link.kind).toBe("refused");
    await advance(10 * ABSENT_PAUSE_MS);
    expect(server.sockets).toHaveLength(1);
    connection.watch({}, "");
    expect(server.sockets).toHaveLength(1);
    server.status = 200;
    connection.retry();
    expect(server.sockets).toHaveLength(2);
  });

  it("stops if the server has another version", () => {
    connection.watch({}, "");
    server.socket.emitOpen();
    vi.spyOn(console, "warn").mockImplementationOnce(() => undefined);
    server.socket.emitMessage({ kind: "pool", snapshot: { ...poolSnapshot(), version: VERSION + 1 } });
    expect(connection.link.kind).toBe("refused");
    expect(connection.link.text).toContain("another version of sgpu-magic than the Jupyter server");
    expect(server.socket.closed).toBe(true);
  });

  it("polls and posts orders after three websockets without a message", async () => {
    connection.pollInterval_ms = 5_000;
    const user = {};
    connection.watch(user, "");
    for (const pause of [PAUSE_MS, 2 * PAUSE_MS]) {
      server.socket.emitClose();
      await advance();
      expect(connection.link.kind).toBe("open");
      await advance(pause);
    }
    server.socket.emitClose();
    await advance();
    const sockets = server.sockets.length;
    const { length } = server.requests;
    await advance(15_000);
    expect(server.requests.length - length).toBe(3);
    expect(server.requests.at(-1)?.path).toBe("sgpu/panel?pool=");
    expect(server.sockets).toHaveLength(sockets);
    // the server replies to an order
    server.body = { kind: "command-result", text: "Run 0123 is being cancelled.", ok: true };
    connection.order({ kind: "cancel-run", run_id: "0123", pool: "local" });
    await advance();
    expect(server.requests.at(-1)).toMatchObject({ path: "sgpu/panel/orders", init: { method: "POST" } });
    expect(updates.at(-1)).toEqual(server.body);
    server.status = 500;
    server.body = { message: "the disk is full" };
    connection.order({ kind: "start-pool", pool: "" });
    await advance();
    expect(updates.at(-1)).toEqual({ kind: "command-result", ok: false, text: "The disk is full." });
    // no requests without a subscriber
    server.status = 200;
    server.body = ALL;
    connection.unsubscribe(user);
    const requests = server.requests.length;
    await advance(60_000);
    expect(server.requests).toHaveLength(requests);
    expect(server.sockets).toHaveLength(sockets);
  });

  it("tries websockets again after the server was restarted", async () => {
    connection.watch({}, "");
    for (const pause of [PAUSE_MS, 2 * PAUSE_MS, 0]) {
      server.socket.emitClose();
      await advance(pause);
    }
    const sockets = server.sockets.length;
    server.status = null;
    await advance(20_000);
    expect(connection.link.kind).toBe("away");
    expect(server.sockets.length).toBeGreaterThan(sockets);
  });

  it("ignores messages of a previous socket", () => {
    connection.watch({}, "");
    const before = server.socket;
    before.emitOpen();
    connection.retry();
    expect(before.closed).toBe(true);
    expect(before.onmessage).toBeNull();
    server.socket.emitOpen();
    server.socket.emitMessage({ ...RUNS, changed: [run("run-9")] });
    expect(connection.model.runs.map(({ run_id }) => run_id)).toEqual(["run-9"]);
  });
});
