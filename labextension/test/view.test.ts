import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";

import { placeDetails } from "../src/run_view/components/details";
import { mountRunView } from "../src/run_view/index";
import type { Snapshot } from "../src/run_view/messages";
import { addElement, button, press, query, setPageHidden, typeInto } from "./dom";
import { eventually } from "./eventually";
import { TestTransport, respondingWith, card, never, snapshot, refusing, newLines, line } from "./samples";

let controllers: AbortController[] = [];

function mounted(transport: TestTransport) {
  const el = addElement();
  const end = new AbortController();
  controllers.push(end);
  mountRunView(el, transport, end.signal);
  return { el, end, transport };
}

async function shown(change: Partial<Snapshot> = {}, total = 0, text?: (at: number) => string) {
  const view = mounted(new TestTransport(respondingWith(total, change, text)));
  await eventually(() => expect(view.el.querySelector(".sgpu-state")).not.toBeNull());
  return view;
}

beforeEach(() => {
  controllers = [];
});
afterEach(() => {
  for (const end of controllers) end.abort();
  document.body.replaceChildren();
  vi.useRealTimers();
});

describe("the snapshot", () => {
  it("shows the states of the run and its ranks as text", async () => {
    const { el } = await shown({
      meta: ["2 min left"],
      ranks: [card(0), card(1, { state: "failed", tone: "bad" }), card(2, { idle: "GPU under 5 % for 60 s" })],
    });
    expect(query(el, ".sgpu-state").textContent).toBe("running");
    expect(query(el, ".sgpu-meta").textContent).toBe("4 ranks · cpu, gloo · local · 2 min 14 s · start 3 s · 2 min left");
    expect(query(el, '[data-rank="1"] .sgpu-word').textContent).toBe("failed");
    expect(query(el, '[data-rank="2"] .sgpu-word').textContent).toBe("idle");
    expect(query(el, ".sgpu-foot").textContent).toBe("shipped model · 45.1 MB · run 7f3a");
    expect(query(el, "[data-lm-suppress-shortcuts]").dataset["lmSuppressShortcuts"]).toBe("true");
    expect(query(el, '[role="status"]').getAttribute("aria-live")).toBe("polite");
  });

  it("names each node if there is more than one", async () => {
    const { el } = await shown({ ranks: [card(0, { host: "ml-1" }), card(1), card(2, { host: "ml-2" }), card(3)] });
    const listed = [...query(el, ".sgpu-grid").children].map((child) => child.getAttribute("data-rank") ?? child.textContent);
    expect(listed).toEqual(["ml-1", "0", "1", "ml-2", "2", "3"]);
  });

  it("updates the cost of an active run every second", async () => {
    vi.useFakeTimers({ toFake: ["performance", "setTimeout", "clearTimeout"] });
    const { el, transport } = mounted(new TestTransport(never));
    const cost = { text: "$0.37 (simulated)", per_s: 0.01, seconds: 36.2, currency: "USD", mark: " (simulated)" };
    transport.sendSnapshot(snapshot({ cost, elapsed_s: 35.0, seq: 2 }));
    await vi.advanceTimersByTimeAsync(100);
    expect(query(el, ".sgpu-meta").textContent).toBe("4 ranks · cpu, gloo · local · 35 s · start 3 s · $0.37 (simulated)");
    await vi.advanceTimersByTimeAsync(5_000);
    expect(query(el, ".sgpu-cost").textContent).toBe("$0.42 (simulated)");
    // the cost of a session's cell does not grow
    transport.sendSnapshot(snapshot({ cost: { ...cost, text: "$0.05 of its session", per_s: 0 }, seq: 3 }));
    await vi.advanceTimersByTimeAsync(3_000);
    expect(query(el, ".sgpu-cost").textContent).toBe("$0.05 of its session");
    transport.sendSnapshot(snapshot({ final: true, ticking: false, meta: ["$0.44 for 44 GPU s"], seq: 4 }));
    await vi.advanceTimersByTimeAsync(100);
    expect(el.querySelector(".sgpu-cost")).toBeNull();
    expect(query(el, ".sgpu-meta").textContent).toContain("$0.44 for 44 GPU s");
  });

  it("shows the cost before the ranks start, and none without a price", async () => {
    const cost = { text: "$0.02", per_s: 0.01, seconds: 1.2, currency: "USD", mark: "" };
    const starting = await shown({ cost, elapsed_s: 0, starting_s: 0, ticking: false, state: "starting" });
    expect(query(starting.el, ".sgpu-meta").textContent).toBe("4 ranks · cpu, gloo · local · $0.02");
    expect((await shown()).el.querySelector(".sgpu-cost")).toBeNull();
  });

  it("links to MLflow only if the URL is a web page", async () => {
    const tracked = { text: "MLflow run digits/train <b>", url: "http://server:5000/#/experiments/1/runs/0a1b" };
    const { el } = await shown({ final: true, ticking: false, tracked });
    const link = query(el, ".sgpu-foot a");
    expect(link.textContent).toBe("MLflow run digits/train <b>");
    expect([link.getAttribute("href"), link.getAttribute("rel")]).toEqual([tracked.url, "noopener noreferrer"]);
    const other = await shown({ final: true, ticking: false, tracked: { text: "x", url: "javascript:alert(1)" } });
    expect(other.el.querySelector(".sgpu-foot a")).toBeNull();
  });

  it("shows the first failure, and its whole traceback on request", async () => {
    const { el } = await shown({
      state: "failed",
      tone: "bad",
      final: true,
      failure: {
        rank: 1,
        lines: [
          { text: "ValueError on rank 1", kind: "title" },
          { text: "---> 14     raise ValueError", kind: "culprit" },
        ],
        whole: [{ text: "Traceback (most recent call last)", kind: "text" }],
        memory: null,
      },
    });
    expect(query(el, ".sgpu-failure-title b").textContent).toBe("ValueError");
    expect(query(el, ".sgpu-failure-culprit").textContent).toBe("---> 14     raise ValueError");
    button(el, "the whole traceback").click();
    await eventually(() => expect(query(el, ".sgpu-failure").textContent).toContain("Traceback"));
    expect(el.querySelector(".sgpu-buttons")).toBeNull();
  });

  it("marks a cell that %sgpu_auto sent", async () => {
    const { el } = await shown({ mark: "auto" });
    expect(query(el, ".sgpu-title").firstElementChild?.textContent).toBe("auto");
    const plain = await shown();
    expect(plain.el.querySelector(".sgpu-mark")).toBeNull();
  });

  it("has a tab and a card for each selected rank", async () => {
    const ranks = [0, 2, 3].map((rank) => card(rank));
    const { el } = await shown({ ranks, only: [0, 2, 3], lines: [1, 0, 4, 2], devices: "3 of 4 ranks · session work" });
    expect([...el.querySelectorAll('[role="tab"]')].map((tab) => tab.textContent)).toEqual(["all", "0", "2", "3"]);
    expect([...el.querySelectorAll(".sgpu-card")].map((each) => each.getAttribute("data-rank"))).toEqual(["0", "2", "3"]);
    expect(query(el, ".sgpu-count").textContent).toBe("7 lines");
  });

  it("shows each rank's memory, and the largest tensors of the culprit", async () => {
    const heads = ["rank", "device", "used", "reserved", "free", "total"];
    const row = (rank: number, culprit: boolean) => ({
      rank,
      cells: [`cuda:${rank}`, "21.8 GB", "22.9 GB", "0.3 GB", "24.0 GB"],
      shares: [0.9, 0.05, 0],
      culprit,
    });
    const tensors = [{ name: "<b>cache[0]", cells: ["(4096, 4096)", "float32", "67.1 MB"] }];
    const memory = { title: "memory when it failed", heads, rows: [row(1, true), row(0, false)], more: "", largest: "largest", tensors };
    const lines = [{ text: "OutOfMemoryError on rank 1", kind: "title" as const }];
    const { el } = await shown({ failure: { rank: 1, lines, whole: [], memory } });
    const rows = [...el.querySelectorAll(".sgpu-ranks tbody tr")];
    expect(rows.map((each) => each.firstElementChild?.textContent)).toEqual(["1", "0"]);
    expect(query(el, ".sgpu-culprit").textContent).toBe("1cuda:121.8 GB22.9 GB0.3 GB24.0 GB");
    expect(query(el, ".sgpu-culprit i").style.width).toBe("90%");
    expect(query(el, ".sgpu-memory table:not(.sgpu-ranks)").textContent).toBe("<b>cache[0](4096, 4096)float3267.1 MB");
    expect(el.querySelector(".sgpu-memory b")).toBeNull();
  });

  it("shows the whole text of a failure without a traceback", async () => {
    const text = "rank 2 of 4 was killed by SIGKILL: most likely out of memory";
    const { el } = await shown({
      failure: { rank: 2, lines: [{ text, kind: "title" }, { text: "NaN in batch 118", kind: "error" }], whole: [], memory: null },
    });
    expect(query(el, ".sgpu-failure-title b").textContent).toBe(text);
    expect(query(el, ".sgpu-failure-error").innerHTML).toBe("NaN in batch 118");
  });

  it("shows progress as text, until the run ends", async () => {
    const bar = { fraction: 0.43, text: "epoch 2 of 3, 43 %" };
    const { el } = await shown({ bar });
    expect(query(el, ".sgpu-meta").textContent).toContain(" · epoch 2 of 3, 43 %");
    expect(query(el, '[aria-label="progress of the run"]').getAttribute("aria-valuenow")).toBe("43");
    const ended = await shown({ bar, final: true, ticking: false });
    expect(query(ended.el, ".sgpu-meta").textContent).not.toContain("epoch");
  });

  it("shows a card's details after the pointer has stayed on it", async () => {
    vi.useFakeTimers();
    const { el } = mounted(new TestTransport(respondingWith(0)));
    await vi.advanceTimersByTimeAsync(100);
    const first = query(el, '[data-rank="0"]');
    first.dispatchEvent(new PointerEvent("pointerenter"));
    await vi.advanceTimersByTimeAsync(300);
    expect(el.querySelector(".sgpu-details")).toBeNull();
    await vi.advanceTimersByTimeAsync(200);
    expect(query(el, ".sgpu-details").textContent).toContain("rank 0 · running");
    first.dispatchEvent(new PointerEvent("pointerleave"));
    await vi.advanceTimersByTimeAsync(50);
    expect(el.querySelector(".sgpu-details")).toBeNull();
    // a pointer that only passes over the card
    first.dispatchEvent(new PointerEvent("pointerenter"));
    await vi.advanceTimersByTimeAsync(300);
    first.dispatchEvent(new PointerEvent("pointerleave"));
    await vi.advanceTimersByTimeAsync(1_000);
    expect(el.querySelector(".sgpu-details")).toBeNull();
  });

  it.each([
    ["above the card where there is room", { left: 0, top: 300, width: 240, height: 88 }, { left: 4, top: 170 }],
    ["within the width", { left: 760, top: 300, width: 240, height: 88 }, { left: 696, top: 170 }],
    ["beside a card below the header", { left: 0, top: 45, width: 240, height: 88 }, { left: 244, top: 7 }],
    ["on the other side of the last one", { left: 760, top: 45, width: 240, height: 88 }, { left: 456, top: 7 }],
    ["over a card as wide as the output", { left: 0, top: 45, width: 1000, height: 88 }, { left: 696, top: 7 }],
  ])("places the details %s", (_, box, place) => {
    expect(placeDetails(box, { width: 300, height: 126 }, { left: 0, top: 0, width: 1000, height: 500 })).toEqual(place);
  });

  it("aligns details with the output's top if they are taller", () => {
    const output = { left: 0, top: 20, width: 1000, height: 260 };
    expect(placeDetails({ left: 0, top: 65, width: 240, height: 88 }, { width: 300, height: 400 }, output).top).toBe(24);
  });

  it.each([
    [2, "2", "2"],
    [4, "4", "2"],
    [6, "4", "3"],
    [8, "4", "4"],
  ])("has fewer columns for %i ranks in a narrow output", async (count, columns, narrow) => {
    const { el } = await shown({ ranks: Array.from({ length: count }, (_, rank) => card(rank)) });
    const { dataset } = query(el, ".sgpu-grid");
    expect([dataset["columns"], dataset["narrow"]]).toEqual([columns, narrow]);
  });

  it("has one tab stop in the grid, and moves between ranks with arrow keys", async () => {
    const { el } = await shown();
    const stops = () => [...el.querySelectorAll<SVGElement>(".sgpu-grid [tabindex='0']")];
    expect(stops()).toHaveLength(1);
    stops()[0]?.focus();
    press(stops()[0] ?? el, "ArrowDown");
    await eventually(() => expect(stops().map((each) => each.getAttribute("aria-label"))).toEqual(["GPU of rank 1"]));
    expect(document.activeElement).toBe(stops()[0]);
    await eventually(() => expect(query(el, ".sgpu-details").textContent).toContain("rank 1 · running · A10"));
    press(stops()[0] ?? el, "Escape");
    await eventually(() => expect(el.querySelector(".sgpu-details")).toBeNull());
  });

  it("shows preparation without an empty log", async () => {
    const { el, transport } = await shown({ state: "queued", ranks: [], preparing: ["position 2 in the queue"] });
    expect(query(el, ".sgpu-preparing").textContent).toBe("position 2 in the queue");
    expect(el.querySelector(".sgpu-log")).toBeNull();
    transport.sendSnapshot(snapshot({ seq: 2, state: "starting", preparing: ["starting 4 ranks"] }));
    await eventually(() => expect(query(el, ".sgpu-log").textContent).toBe("no output yet"));
  });

  it("has small cards above eight ranks", async () => {
    const { el } = await shown({ ranks: Array.from({ length: 9 }, (_, rank) => card(rank)) });
    expect(query(el, ".sgpu-grid").className).toBe("sgpu-grid sgpu-dense");
    expect(query(el, ".sgpu-grid").dataset["columns"]).toBe("8");
  });

  it("ignores an older snapshot", async () => {
    const { el, transport } = await shown({ seq: 5, state: "running" });
    transport.sendSnapshot(snapshot({ seq: 4, state: "starting" }));
    transport.sendSnapshot(snapshot({ seq: 6, name: "newer" }));
    await eventually(() => expect(query(el, ".sgpu-name").textContent).toBe("newer"));
    expect(query(el, ".sgpu-state").textContent).toBe("running");
  });
});

describe("text from ranks", () => {
  it("is never interpreted as HTML", async () => {
    const evil = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>';
    const { el } = await shown(
      {
        name: evil,
        warnings: [evil],
        notes: [evil],
        stall: [evil],
        footer: [evil],
        ranks: [card(0, { last: evil, use: evil, details: [evil], idle: evil })],
        failure: { rank: 0, lines: [{ text: evil, kind: "error" }], whole: [], memory: null },
      },
      8,
      (at) => (at % 2 ? `\x1b[31m${evil}\x1b[0m` : evil),
    );
    await eventually(() => expect(query(el, ".sgpu-log").textContent).toContain(`[0]${evil}[1]${evil}`));
    button(el, "find").click();
    const input = await eventually(() => query(el, ".sgpu-find input") as HTMLInputElement);
    typeInto(input, "<img src=x");
    await eventually(() => expect(query(el, "mark").textContent).toBe("<img src=x"));
    query(el, ".sgpu-card").dispatchEvent(new PointerEvent("pointerenter"));
    await eventually(() => expect(query(el, ".sgpu-details").textContent).toContain(evil));
    expect(el.querySelectorAll("img, script")).toHaveLength(0);
    expect("hacked" in window).toBe(false);
  });
});

describe("the log", () => {
  it("draws only the lines in view out of 1,000,000, and requests them", async () => {
    const { el, transport } = await shown({}, 1_000_000);
    await eventually(() => expect(query(el, ".sgpu-log").textContent).toContain("line 999999"));
    expect(query(el, ".sgpu-count").textContent).toBe("1,000,000 lines");
    expect(el.querySelectorAll(".sgpu-row").length).toBeLessThan(200);
    expect(Number.parseFloat(query(el, ".sgpu-tall").style.height)).toBeLessThanOrEqual(10_000_000);
    press(query(el, ".sgpu-log"), "Home");
    await eventually(() => expect(query(el, ".sgpu-log").textContent).toContain("[0]line 0["));
    expect(el.querySelectorAll(".sgpu-row").length).toBeLessThan(200);
    const requests = transport.questions.filter(({ kind }) => kind === "lines");
    expect(requests.length).toBeLessThan(6);
  });

  it("has three rows when empty, grows until it is full, and never shrinks", async () => {
    const { el, transport } = await shown({}, 0);
    const log = () => query(el, ".sgpu-log");
    expect([log().style.minHeight, log().className]).toEqual(["54px", "sgpu-log"]);
    transport.sendUpdate(newLines(1, 0, Array.from({ length: 7 }, (_, at) => line(at)), [2, 2, 2, 1]));
    await eventually(() => expect(log().style.minHeight).toBe("126px"));
    query(el, '[role="tab"][aria-label="rank 3"]').click();
    await eventually(() => expect(log().getAttribute("aria-label")).toBe("lines of rank 3"));
    expect(log().style.minHeight).toBe("126px");
    transport.sendUpdate(newLines(2, 7, Array.from({ length: 90 }, (_, at) => line(7 + at)), [25, 24, 24, 24]));
    await eventually(() => expect(log().className).toBe("sgpu-log sgpu-full"));
    expect(log().style.getPropertyValue("--full")).toBe("252px");
  });

  it("has fewer rows below the cards of many ranks", async () => {
    const { el } = await shown({ ranks: Array.from({ length: 9 }, (_, rank) => card(rank)) }, 400);
    await eventually(() => expect(query(el, ".sgpu-full").style.getPropertyValue("--full")).toBe("180px"));
  });

  it("keeps its dragged height when the tab changes", async () => {
    const { el } = await shown({}, 400);
    await eventually(() => expect(query(el, ".sgpu-full")).not.toBeNull());
    query(el, ".sgpu-log").style.height = "400px";
    query(el, '[role="tab"][aria-label="rank 2"]').click();
    await eventually(() => expect(query(el, ".sgpu-log").getAttribute("aria-label")).toBe("lines of rank 2"));
    expect(query(el, ".sgpu-log").style.height).toBe("400px");
  });

  it("follows new lines, except between scrolling up and End", async () => {
    const { el, transport } = await shown({}, 400);
    await eventually(() => expect(query(el, ".sgpu-log").textContent).toContain("line 399"));
    transport.sendUpdate(newLines(1, 400, [line(400)], [101, 100, 100, 100]));
    await eventually(() => expect(query(el, ".sgpu-log").textContent).toContain("line 400"));
    press(query(el, ".sgpu-log"), "PageUp");
    await eventually(() => expect(query(el, ".sgpu-follow").getAttribute("aria-pressed")).toBe("false"));
    transport.sendUpdate(newLines(2, 401, Array.from({ length: 90 }, (_, at) => line(401 + at)), [123, 123, 123, 122]));
    await eventually(() => expect(query(el, ".sgpu-newer").textContent).toBe("↓ 90 new lines"));
    expect(query(el, ".sgpu-log").textContent).not.toContain("line 490");
    press(query(el, ".sgpu-log"), "End");
    await eventually(() => expect(query(el, ".sgpu-log").textContent).toContain("line 490"));
    expect(el.querySelector(".sgpu-newer")).toBeNull();
  });

  it("requests the run's state again when a message is missing", async () => {
    const { transport } = await shown({}, 4);
    const helloCount = () => transport.questions.filter(({ kind }) => kind === "hello").length;
    expect(helloCount()).toBe(1);
    transport.sendUpdate(newLines(1, 4, [line(4)], [2, 1, 1, 1]));
    expect(helloCount()).toBe(1);
    transport.sendUpdate(newLines(3, 6, [line(6)], [2, 2, 2, 1]));
    expect(helloCount()).toBe(2);
  });

  it("has a tab for each rank, selected with the arrow keys", async () => {
    const { el } = await shown({}, 40);
    const chosen = () => query(el, '[role="tab"][aria-selected="true"]');
    expect(chosen().textContent).toBe("all");
    press(chosen(), "ArrowRight");
    await eventually(() => expect(chosen().textContent).toBe("0"));
    expect(document.activeElement).toBe(chosen());
    expect([...el.querySelectorAll<HTMLElement>('[role="tab"]')].filter((tab) => tab.tabIndex === 0)).toEqual([chosen()]);
    press(chosen(), "End");
    await eventually(() => expect(chosen().textContent).toBe("3"));
    await eventually(() => expect(query(el, ".sgpu-log").textContent).toContain("line 39"));
    expect(query(el, ".sgpu-log").textContent).not.toContain("line 38");
    expect(query(el, ".sgpu-count").textContent).toBe("10 lines");
    press(chosen(), "ArrowRight");
    await eventually(() => expect(chosen().textContent).toBe("all"));
  });

  it("has buttons that scroll to hidden tabs", async () => {
    const { el } = await shown({ ranks: Array.from({ length: 64 }, (_, rank) => card(rank)), lines: Array<number>(64).fill(1) });
    const tabs = query(el, '[role="tablist"]');
    expect(el.querySelector(".sgpu-turn")).toBeNull();
    Object.defineProperties(tabs, { clientWidth: { value: 300 }, scrollWidth: { value: 1000 } });
    tabs.dispatchEvent(new Event("scroll"));
    await eventually(() => expect(button(el, "tabs after")).toBeTruthy());
    expect([tabs.className, el.querySelectorAll(".sgpu-turn").length]).toEqual(["sgpu-tabs sgpu-after", 1]);
    button(el, "tabs after").click();
    expect(tabs.scrollLeft).toBe(240);
    tabs.dispatchEvent(new Event("scroll"));
    await eventually(() => expect(tabs.className).toBe("sgpu-tabs sgpu-before sgpu-after"));
    tabs.scrollLeft = 700;
    tabs.dispatchEvent(new Event("scroll"));
    await eventually(() => expect(tabs.className).toBe("sgpu-tabs sgpu-before"));
    expect(button(el, "tabs before").tabIndex).toBe(-1);
  });

  it("is searched where it is stored, with next, previous and a count", async () => {
    const { el, transport } = await shown({}, 5_000, (at) => (at % 1000 === 7 ? `needle ${at}` : `hay ${at}`));
    button(el, "find").click();
    const input = await eventually(() => query(el, ".sgpu-find input") as HTMLInputElement);
    typeInto(input, "needle");
    await eventually(() => expect(query(el, ".sgpu-found").textContent).toBe("5 of 5"));
    await eventually(() => expect(query(el, ".sgpu-current mark").textContent).toBe("needle"));
    press(input, "Enter", { shiftKey: true });
    await eventually(() => expect(query(el, ".sgpu-found").textContent).toBe("4 of 5"));
    await eventually(() => expect(query(el, ".sgpu-current").textContent).toContain("needle 3007"));
    expect(transport.questions.filter(({ kind }) => kind === "find")).toHaveLength(1);
    press(input, "Escape");
    await eventually(() => expect(el.querySelector(".sgpu-find, mark")).toBeNull());
  });

  it("is copied without colours if it is small enough", async () => {
    const copied = vi.spyOn(navigator.clipboard, "writeText").mockResolvedValue();
    let size = 1;
    const usual = respondingWith(4);
    const transport = new TestTransport((question) =>
      question.kind === "log"
        ? { kind: "log-answer", n: 0, text: "\x1b[31mx\x1b[0m".repeat(size), next_offset: question.offset < 9 ? question.offset + 9 : null }
        : usual(question),
    );
    const { el } = mounted(transport);
    await eventually(() => expect(el.querySelector(".sgpu-log")).not.toBeNull());
    button(el, "copy").click();
    await eventually(() => expect(query(el, ".sgpu-count").textContent).toBe("copied 0.0 MB"));
    expect(copied).toHaveBeenCalledWith("xx");
    size = 300_000;
    button(el, "copy").click();
    await eventually(() => expect(query(el, ".sgpu-count").textContent).toContain("download it instead"));
    expect(copied).toHaveBeenCalledTimes(1);
    copied.mockRestore();
  });
});

describe("the buttons", () => {
  it("cancel the run and show stacks", async () => {
    const { el } = await shown();
    button(el, "Stacks").click();
    await eventually(() => expect(query(el, ".sgpu-stacks").textContent).toContain("rank 1   is in load_batch"));
    button(el, "close").click();
    await eventually(() => expect(el.querySelector(".sgpu-stacks")).toBeNull());
    button(el, "Cancel").click();
    await eventually(() => expect(query(el, ".sgpu-notice").textContent).toContain("cancelling run 7f3a"));
  });

  it("end the notebook's sessions that hold the devices", async () => {
    const held = [
      { run_id: "5e55", name: "session walk" },
      { run_id: "5e56", name: "session talk" },
      { run_id: "5e57", name: "session third" },
    ];
    const transport = new TestTransport(respondingWith(0, { state: "queued", own_sessions: held }));
    const { el } = mounted(transport);
    await eventually(() => button(el, "End session walk"));
    const labels = [...el.querySelectorAll(".sgpu-buttons button")].map((each) => each.textContent);
    expect(labels.slice(-3)).toEqual(["End session walk", "End session talk", "Cancel"]);
    button(el, "End session talk").click();
    await eventually(() => expect(query(el, ".sgpu-notice").textContent).toContain("session 5e56 is being ended"));
    transport.sendSnapshot(snapshot({ state: "running", own_sessions: [] }));
    await eventually(() => expect(el.textContent).not.toContain("End session"));
  });

  it("interrupt a kernel that does not answer", async () => {
    const usual = respondingWith(0);
    const transport = new TestTransport((question) => (question.kind === "cancel" ? never() : usual(question)), "shell");
    transport.interrupt = () => {
      transport.interrupted += 1;
      return Promise.resolve();
    };
    const { el } = mounted(transport);
    await eventually(() => expect(el.querySelector(".sgpu-state")).not.toBeNull());
    transport.setLink({ busy: true, away: false, ended: "" });
    await eventually(() => expect(button(el, "Cancel").title).toBe("Stop this run (interrupts the kernel)"));
    button(el, "Cancel").click();
    await eventually(() => expect(query(el, ".sgpu-notice").textContent).toContain("was interrupted"));
    expect(transport.interrupted).toBe(1);
  });

  it("disconnect a session without an interrupt, which would stop the cell", async () => {
    const transport = new TestTransport(
      (question) =>
        question.kind === "cancel" ? never() : respondingWith(0, { stop: "End session", state: "connected", tone: "good" })(question),
      "shell",
    );
    transport.interrupt = () => {
      transport.interrupted += 1;
      return Promise.resolve();
    };
    const { el } = mounted(transport);
    await eventually(() => expect(button(el, "End session").title).toBe("End this session and free its devices"));
    expect(query(el, ".sgpu-state").textContent).toBe("connected");
    expect(el.querySelector(".sgpu-log")).toBeNull();
    vi.useFakeTimers();
    button(el, "End session").click();
    await vi.advanceTimersByTimeAsync(10_000);
    expect(transport.questions.at(-1)?.kind).toBe("cancel");
    expect(transport.interrupted).toBe(0);
  });

  it("are replaced by a hint if a busy kernel can't be interrupted", async () => {
    const { el, transport } = mounted(new TestTransport(respondingWith(0), "shell"));
    await eventually(() => expect(button(el, "Cancel").disabled).toBe(false));
    transport.setLink({ busy: true, away: false, ended: "" });
    await eventually(() => expect(query(el, ".sgpu-hint").textContent).toBe("to cancel, use the notebook's Interrupt button"));
    expect([...el.querySelectorAll("button")].map((each) => each.textContent)).not.toContain("Cancel");
    transport.setLink({ busy: false, away: false, ended: "" });
    await eventually(() => expect(button(el, "Cancel").disabled).toBe(false));
  });

  it("have no stacks before there are ranks", async () => {
    const { el } = await shown({ state: "queued", ranks: [], preparing: ["position 2 in the queue"] });
    expect([...el.querySelectorAll(".sgpu-buttons button")].map((each) => each.textContent)).toEqual(["Cancel"]);
  });

  it("report why there is no answer", async () => {
    const usual = respondingWith(0);
    const { el } = mounted(
      new TestTransport((question) => (question.kind === "stacks" ? refusing("no stacks from this pool") : usual(question))),
    );
    await eventually(() => expect(el.querySelector(".sgpu-state")).not.toBeNull());
    button(el, "Stacks").click();
    await eventually(() => expect(query(el, ".sgpu-notice").textContent).toContain("stacks: no stacks from this pool"));
  });
});

describe("a lost link", () => {
  it("shows the command that attaches the run again, and stops the clock", async () => {
    const { el, transport } = await shown();
    transport.sendUpdate({ kind: "gone", text: "the kernel was restarted" });
    await eventually(() => expect(query(el, ".sgpu-banner").textContent).toContain("this was run 7f3a: %sgpu_attach 7f3a shows it"));
    expect(query(el, ".sgpu-state").textContent).toBe("was running");
    const copied = vi.spyOn(navigator.clipboard, "writeText").mockResolvedValue();
    button(el, "Copy command").click();
    expect(copied).toHaveBeenCalledWith("%sgpu_attach 7f3a");
    copied.mockRestore();
    transport.setLink({ busy: false, away: true, ended: "" });
    await new Promise(requestAnimationFrame);
    expect(query(el, ".sgpu-banner").textContent).toContain("the kernel was restarted");
  });

  it("is shown as temporary while it may recover", async () => {
    const { el, transport } = await shown();
    transport.setLink({ busy: false, away: true, ended: "" });
    await eventually(() => expect(query(el, ".sgpu-banner").textContent).toContain("the link to the kernel is down"));
    transport.setLink({ busy: true, away: false, ended: "" });
    await eventually(() => expect(query(el, ".sgpu-banner").textContent).toContain("the kernel is busy"));
    expect(transport.questions.filter(({ kind }) => kind === "hello")).toHaveLength(2);
  });
});

describe("a view in the background", () => {
  afterEach(() => setPageHidden(false));

  it("draws nothing while hidden, and requests the state when it is shown again", async () => {
    const { el, transport } = await shown();
    vi.useFakeTimers();
    setPageHidden(true);
    transport.sendSnapshot(snapshot({ seq: 2, name: "unseen" }));
    vi.advanceTimersByTime(6_000);
    expect(query(el, ".sgpu-name").textContent).toBe("train_digits");
    expect(vi.getTimerCount()).toBeLessThanOrEqual(1);
    setPageHidden(false);
    await vi.advanceTimersByTimeAsync(50);
    expect(query(el, ".sgpu-name").textContent).toBe("unseen");
    expect(transport.questions.filter(({ kind }) => kind === "hello")).toHaveLength(2);
  });

  it("updates the clock while the run is active", async () => {
    vi.useFakeTimers();
    const { el } = mounted(new TestTransport(respondingWith(0)));
    await vi.advanceTimersByTimeAsync(100);
    expect(query(el, ".sgpu-clock").textContent).toBe("2 min 14 s · start 3 s");
    await vi.advanceTimersByTimeAsync(3_000);
    expect(query(el, ".sgpu-clock").textContent).toBe("2 min 17 s · start 3 s");
  });

  it("updates the clock during a start", async () => {
    vi.useFakeTimers();
    const start = { state: "starting", elapsed_s: 0, starting_s: 0.4 };
    const { el, transport } = mounted(new TestTransport(respondingWith(0, start)));
    await vi.advanceTimersByTimeAsync(100);
    expect(query(el, ".sgpu-clock").textContent).toBe("start 0 s");
    await vi.advanceTimersByTimeAsync(25_000);
    expect(query(el, ".sgpu-clock").textContent).toBe("start 25 s");
    transport.sendSnapshot(snapshot({ seq: 2, elapsed_s: 0.1, starting_s: 25.4 }));
    await vi.advanceTimersByTimeAsync(1_200);
    expect(query(el, ".sgpu-clock").textContent).toBe("1 s · start 25 s");
    transport.sendSnapshot(snapshot({ seq: 3, final: true, ticking: false, elapsed_s: 0.31, starting_s: 0.2 }));
    await vi.advanceTimersByTimeAsync(100);
    expect(query(el, ".sgpu-clock").textContent).toBe("0.31 s");
  });

  it("leaves no element, timer or listener when it is closed", async () => {
    vi.useFakeTimers();
    const listening = new Set<string>();
    const observing = new Set<ResizeObserver>();
    vi.stubGlobal(
      "ResizeObserver",
      class {
        observe(this: ResizeObserver) {
          observing.add(this);
        }
        disconnect(this: ResizeObserver) {
          observing.delete(this);
        }
      },
    );
    const added = vi.spyOn(document, "addEventListener");
    const { el, end, transport } = mounted(new TestTransport(respondingWith(50_000)));
    await vi.advanceTimersByTimeAsync(300);
    for (const [name, , options] of added.mock.calls) {
      if (typeof options === "object" && options.signal === end.signal) listening.add(name);
      else throw new Error(`the listener of ${name} has no signal`);
    }
    expect([...listening]).toEqual(["visibilitychange"]);
    added.mockRestore();
    // one for the tabs, one for the log's lines, one for the view
    expect(observing.size).toBe(3);
    end.abort();
    expect(observing.size).toBe(0);
    vi.unstubAllGlobals();
    await vi.advanceTimersByTimeAsync(20);
    expect(el.childElementCount).toBe(0);
    expect(transport.disposed).toBe(true);
    expect(vi.getTimerCount()).toBe(0);
    transport.sendSnapshot(snapshot({ seq: 9 }));
    expect(vi.getTimerCount()).toBe(0);
  });
});
