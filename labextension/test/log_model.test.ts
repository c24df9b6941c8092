import { describe, expect, it, vi } from "vitest";

import { ALL_PAGES, LogModel, MAX_CHARS, PAGE_LINES, PagedLines, RANK_PAGES, RETRY_MS } from "../src/run_view/log_model";
import type { FetchLines } from "../src/run_view/log_model";
import { eventually } from "./eventually";
import { line, newLines } from "./samples";

function modelWith(fetch: FetchLines, now = () => 0) {
  const changed = vi.fn();
  return { log: new LogModel(fetch, changed, now), changed };
}

const unanswered: FetchLines = () => new Promise(() => undefined);

describe("PagedLines", () => {
  it("evicts the least recently used pages above the page limit", () => {
    const lines = new PagedLines(3);
    for (let at = 0; at < 10 * PAGE_LINES; at++) {
      lines.touch(0, 1);
      lines.put(at, line(at));
    }
    expect(lines.pageCount).toBe(3);
    expect(lines.get(0)).toEqual(line(0));
    expect(lines.get(5 * PAGE_LINES)).toBeUndefined();
    expect(lines.get(10 * PAGE_LINES - 1)).toEqual(line(10 * PAGE_LINES - 1));
  });

  it("evicts pages of long lines above the character limit", () => {
    const lines = new PagedLines(50);
    const long = "x".repeat(16_000);
    for (let at = 0; at < 20 * PAGE_LINES; at++) lines.put(at, [0, at, long, false]);
    expect(lines.pageCount * PAGE_LINES * long.length).toBeLessThan(MAX_CHARS + PAGE_LINES * long.length * 2);
    expect(lines.get(20 * PAGE_LINES - 1)).toBeDefined();
  });
});

describe("the log", () => {
  it("stores new lines for all ranks and for their rank", () => {
    const { log } = modelWith(unanswered);
    expect(log.add(newLines(1, 0, [line(0), line(1), line(5)], [1, 2, 0, 0]))).toBe(true);
    expect(log.lines("all").total).toBe(3);
    expect(log.lines("all").get(2)).toEqual(line(5));
    expect(log.lines(1).get(1)).toEqual(line(5));
    expect(log.lines(1).total).toBe(2);
    expect(log.lines(3).total).toBe(0);
  });

  it("ignores a message that it has already applied", () => {
    const { log } = modelWith(unanswered);
    log.onHello(7, [4, 4]);
    expect(log.add(newLines(7, 0, [[0, 0, "old", false]], [1]))).toBe(true);
    expect(log.lines("all").get(0)).toBeUndefined();
    expect(log.lines("all").total).toBe(8);
  });

  it("reports a missing message and stores lines by number", () => {
    const { log } = modelWith(unanswered);
    expect(log.add(newLines(1, 0, [line(0)], [1, 0, 0, 0]))).toBe(true);
    expect(log.add(newLines(4, 100, [line(100)], [26, 25, 25, 25]))).toBe(false);
    expect(log.lines("all").total).toBe(101);
    expect(log.lines("all").get(100)).toEqual(line(100));
    expect(log.lines("all").get(50)).toBeUndefined();
  });

  it("requests skipped lines when they are in view", async () => {
    const asked: unknown[] = [];
    const { log } = modelWith((first, count, rank) => {
      asked.push([first, count, rank]);
      const rows = Array.from({ length: count }, (_, index) => line(first + index));
      return Promise.resolve({ kind: "lines-answer", n: 1, first, rows, total: 302 });
    });
    log.add(newLines(1, 0, [line(0), [1, 0, 300], line(301)], [76, 76, 75, 75]));
    expect(log.lines("all").total).toBe(302);
    expect(log.lines("all").get(301)).toEqual(line(301));
    log.requestMissing("all", 290, 12);
    expect(asked).toEqual([[200, 102, null]]);
    log.requestMissing("all", 290, 12);
    expect(asked).toHaveLength(1);
    await eventually(() => expect(log.lines("all").get(295)).toEqual(line(295)));
    log.requestMissing("all", 0, 5);
    expect(asked[1]).toEqual([1, 199, null]);
  });

  it("requests the rest of a short answer, and retries a failed request later", async () => {
    let now_ms = 0;
    let lost = true;
    const asked: number[] = [];
    const { log } = modelWith(
      (first) => {
        asked.push(first);
        if (lost) return Promise.resolve(null);
        return Promise.resolve({ kind: "lines-answer", n: 1, first, rows: [line(first)], total: 20 });
      },
      () => now_ms,
    );
    log.onHello(0, [5, 5, 5, 5]);
    log.requestMissing("all", 0, 20);
    await Promise.resolve();
    await Promise.resolve();
    log.requestMissing("all", 0, 20);
    expect(asked).toEqual([0]);
    now_ms = RETRY_MS + 1;
    lost = false;
    log.requestMissing("all", 0, 20);
    await eventually(() => expect(log.lines("all").get(0)).toBeDefined());
    log.requestMissing("all", 0, 20);
    expect(asked).toEqual([0, 0, 1]);
  });

  it("requests a rank's lines by the rank's own numbers", () => {
    const fetch = vi.fn<FetchLines>(unanswered);
    const { log } = modelWith(fetch);
    log.onHello(0, [0, 0, 1000, 0]);
    log.requestMissing(2, 950, 50);
    expect(fetch.mock.calls).toEqual([[800, 200, 2]]);
  });

  it("stays within its limits over a million lines", () => {
    const { log } = modelWith(unanswered);
    const ranks = [0, 0, 0, 0];
    for (let seq = 1; seq <= 5_000; seq++) {
      const first = (seq - 1) * 200;
      const rows = Array.from({ length: 200 }, (_, index) => line(first + index));
      for (const rank of [0, 1, 2, 3]) ranks[rank] = (first + 200) / 4;
      log.add(newLines(seq, first, rows, ranks));
    }
    expect(log.lines("all").total).toBe(1_000_000);
    expect(log.lines("all").pageCount).toBe(ALL_PAGES);
    for (const rank of [0, 1, 2, 3]) expect(log.lines(rank).pageCount).toBe(RANK_PAGES);
    expect(log.lines("all").get(999_999)).toEqual(line(999_999));
  });
});
