import { afterEach, describe, expect, it, vi } from "vitest";

import { RunFeed } from "../src/plugin/run_feed";
import { RunServer } from "../src/plugin/run_server";
import { ServerTransport } from "../src/plugin/server_transport";
import { VERSION } from "../src/run_view/messages";
import type { Snapshot, FeedUpdate } from "../src/run_view/messages";

function snapshot(seq: number, final = false): Snapshot {
  return {
    version: VERSION,
    seq,
    run_id: "0123abcd",
    short_id: "0123",
    name: "cell 1",
    mark: "",
    state: final ? "succeeded" : "running",
    tone: "busy",
    final,
    devices: "",
    pool: "local",
    host: "",
    attempt: "",
    elapsed_s: 1,
    starting_s: 0,
    ticking: !final,
    cost: null,
    meta: [],
    preparing: [],
    bar: null,
    ranks: [],
    metrics: [],
    metrics_text: "",
    more_metrics: "",
    only: [],
    idle: [],
    warnings: [],
    notes: [],
    stall: [],
    failure: null,
    others: [],
    footer: [],
    tracked: null,
    lines: [2],
    can_cancel: true,
    own_sessions: [],
    stop: "Cancel",
    attach: "",
  };
}

function lines(seq: number, first: number, ...texts: string[]): unknown {
  return { kind: "lines", seq, first, rows: texts.map((text, at) => [0, first + at, text, false]), ranks: [first + texts.length] };
}

function changes(parts: Record<string, unknown>): unknown {
  return { snapshot: null, updates: [], seq: 0, lines: 0, displays: 0, final: false, ...parts };
}

/** A server that sends the given answers in order, and records the requests. Without an answer, a request waits. */
class FakeServer {
  readonly requests: { path: string; init: RequestInit }[] = [];
  constructor(private readonly answers: (() => Response | Promise<Response>)[]) {}

  readonly request = (path: string, init: RequestInit): Promise<Response> => {
    this.requests.push({ path, init });
    const answer = this.answers.shift();
    if (answer) return Promise.resolve(answer());
    return new Promise((_, reject) => {
      init.signal?.addEventListener("abort", () => reject(new DOMException("aborted", "AbortError")));
    });
  };

  query(at: number): URLSearchParams {
    return new URLSearchParams(this.requests[at]?.path.split("?")[1]);
  }
}

function json(body: unknown, status = 200): () => Response {
  return () => new Response(JSON.stringify(body), { status });
}

const controllers: AbortController[] = [];

function feed(server: FakeServer, pauses: number[] = []): { feed: RunFeed; runs: RunServer; end: AbortController } {
  const end = new AbortController();
  controllers.push(end);
  const runs = new RunServer(server.request);
  const pause = (ms: number): Promise<void> => {
    pauses.push(ms);
    return Promise.resolve();
  };
  return { feed: new RunFeed(runs, "0123abcd", end.signal, pause), runs, end };
}

afterEach(() => {
  for (const end of controllers.splice(0)) end.abort();
});

describe("a run's feed", () => {
  it("requests the changes since the last ones until the run ends, and passes them on", async () => {
    const server = new FakeServer([
      json(changes({ snapshot: snapshot(4), updates: [lines(1, 0, "a", "b")], seq: 1, lines: 2 })),
      json(changes({ updates: [lines(2, 2, "c")], seq: 2, lines: 3, displays: 1 })),
      json(changes({ snapshot: snapshot(9, true), seq: 2, lines: 3, displays: 1, final: true })),
    ]);
    const { feed: run } = feed(server);
    const updates: FeedUpdate[] = [];
    const drawn: number[] = [];
    const displayed = vi.fn();
    const final = vi.fn();
    run.addListener({ onUpdate: (message) => updates.push(message), onSnapshot: ({ seq }) => drawn.push(seq), onDisplay: displayed, onFinal: final });
    await run.poll();
    expect(updates.map((message) => message.kind === "lines" && message.rows.map((row) => row[2]))).toEqual([["a", "b"], ["c"]]);
    expect(drawn).toEqual([4, 9]);
    expect(displayed).toHaveBeenCalledTimes(1);
    expect(final).toHaveBeenCalledTimes(1);
    expect(server.requests[0]?.path).toMatch(/^sgpu\/runs\/0123abcd\/news\?/);
    expect(Object.fromEntries(server.query(2))).toEqual({ wait: "15", after: "2", lines: "3", drawn: "4", displays: "1" });
  });

  it("retries after failures with longer pauses, and reports the lost link", async () => {
    const fails = (): Response => {
      throw new TypeError("Failed to fetch");
    };
    const server = new FakeServer([fails, json({}, 502), fails, json(changes({ final: true, snapshot: snapshot(1, true) }))]);
    const pauses: number[] = [];
    const { feed: run } = feed(server, pauses);
    const away: boolean[] = [];
    run.addListener({ onLinkChange: (link) => away.push(link.away) });
    await run.poll();
    expect(pauses).toEqual([1000, 2000, 4000]);
    expect(away).toEqual([true, true, true, false]);
    expect(run.isFinal).toBe(true);
  });

  it("ends with the server's message if the run no longer exists", async () => {
    const server = new FakeServer([json({ message: "this machine has no directory for run 0123" }, 404)]);
    const { feed: run } = feed(server);
    await run.poll();
    expect(run.link.ended).toBe("this machine has no directory for run 0123");
    expect(server.requests).toHaveLength(1);
  });

  it("stops when its signal aborts", async () => {
    const server = new FakeServer([]);
    const { feed: run, end } = feed(server);
    const done = run.poll();
    end.abort();
    await done;
    expect(server.requests).toHaveLength(1);
    expect(server.requests[0]?.init.signal?.aborted).toBe(true);
  });

  it("uses at most three of the browser's connections", async () => {
    const waiting = new FakeServer([]);
    const held = [1, 2, 3].map(() => feed(waiting));
    for (const { feed: run } of held) void run.poll();
    const pauses: number[] = [];
    const server = new FakeServer([json(changes({})), json(changes({ final: true }))]);
    await feed(server, pauses).feed.poll();
    expect(server.query(0).get("wait")).toBe("0");
    expect(pauses).toEqual([1000]);
    expect(waiting.query(0).get("wait")).toBe("15");
  });
});

describe("ServerTransport", () => {
  it("posts numbered questions and returns the answers", async () => {
    const server = new FakeServer([json({ kind: "text", n: 1, lines: ["run 0123 is being stopped"] })]);
    const { feed: run, runs } = feed(server);
    const transport = new ServerTransport(runs, run);
    await expect(transport.ask({ kind: "cancel" })).resolves.toMatchObject({ lines: ["run 0123 is being stopped"] });
    expect(server.requests[0]).toMatchObject({ path: "sgpu/runs/0123abcd/ask", init: { method: "POST" } });
    expect(server.requests[0]?.init.body).toBe('{"kind":"cancel","n":1}');
  });

  it("replaces the sequence number of an answer with that of its feed", async () => {
    const server = new FakeServer([
      json(changes({ updates: [lines(1, 0, "a")], seq: 1, lines: 1, final: true, snapshot: snapshot(3) })),
      json({ kind: "hello", n: 1, snapshot: snapshot(5), seq: 0 }),
    ]);
    const { feed: run, runs } = feed(server);
    await run.poll();
    const transport = new ServerTransport(runs, run);
    const drawn: number[] = [];
    transport.onSnapshot(({ seq }) => drawn.push(seq));
    await expect(transport.ask({ kind: "hello", over: "server" })).resolves.toMatchObject({ seq: 1 });
    // a view that is opened later receives the last snapshot at once
    expect(drawn).toEqual([3]);
  });

  it("reports why a question has no answer", async () => {
    const server = new FakeServer([
      json({ message: "no local pool is running." }, 500),
      () => {
        throw new TypeError("Failed to fetch");
      },
    ]);
    const { feed: run, runs } = feed(server);
    const transport = new ServerTransport(runs, run);
    await expect(transport.ask({ kind: "stacks" })).rejects.toThrow("no local pool is running.");
    await expect(transport.ask({ kind: "stacks" })).rejects.toThrow("the Jupyter server does not answer: Failed to fetch");
  });

  it("gets no updates after it is disposed", async () => {
    const server = new FakeServer([json(changes({ updates: [lines(1, 0, "a")], seq: 1, lines: 1, final: true }))]);
    const { feed: run, runs } = feed(server);
    const transport = new ServerTransport(runs, run);
    const updates = vi.fn();
    transport.onUpdate(updates);
    transport.dispose();
    await run.poll();
    expect(updates).not.toHaveBeenCalled();
  });
});
