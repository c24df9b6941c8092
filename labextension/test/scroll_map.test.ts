import { describe, expect, it } from "vitest";

import { MAX_HEIGHT_PX, ScrollMap } from "../src/run_view/scroll_map";

const ROW = 18;
const VIEW = 252;

function mapOf(lines: number): ScrollMap {
  const map = new ScrollMap(ROW);
  map.resize(lines, VIEW);
  return map;
}

describe("ScrollMap", () => {
  it("maps scroll positions to lines directly up to the maximum height", () => {
    const map = mapOf(1000);
    map.onScroll(500 * ROW);
    expect(map.range(0)).toEqual({ first: 500, count: 14 });
    expect(map.lineTop_px(500)).toBe(500 * ROW);
    expect(map.atEnd).toBe(false);
    map.scrollToEnd();
    expect(map.range(3)).toEqual({ first: 983, count: 17 });
  });

  it.each([1_000_000, 20_000_000])("reaches every line of %d", (lines) => {
    const map = mapOf(lines);
    expect(map.height_px).toBe(MAX_HEIGHT_PX);
    map.onScroll(MAX_HEIGHT_PX - VIEW);
    expect(map.range(0)).toEqual({ first: lines - 14, count: 14 });
    map.onScroll(MAX_HEIGHT_PX / 2);
    expect(Math.abs(map.range(0).first - lines / 2)).toBeLessThan(lines / 1000);
    map.onScroll(0);
    expect(map.range(0).first).toBe(0);
    for (const line of [0, 1, 777_777, lines - 1]) {
      map.scrollToLine(line);
      const { first, count } = map.range(0);
      expect(first <= line && line < first + count).toBe(true);
      const y = map.lineTop_px(line) - map.scroll_px;
      expect(y >= 0 && y + ROW <= VIEW).toBe(true);
    }
  });

  it("moves by the wheel's pixels, and aligns the scroll bar afterwards", () => {
    const map = mapOf(20_000_000);
    map.onScroll(5_000_000);
    const before = map.range(0).first;
    for (let step = 1; step <= 10; step++) map.onScroll(5_000_000 + step * 90);
    expect(map.range(0).first - before).toBe((10 * 90) / ROW);
    expect(map.alignScrollBar()).toBe(true);
    expect(map.range(0).first - before).toBe((10 * 90) / ROW);
    expect(map.alignScrollBar()).toBe(false);
  });

  it("keeps the lines in view while the log grows", () => {
    const map = mapOf(2_000_000);
    map.onScroll(4_000_000);
    const { first } = map.range(0);
    map.resize(3_000_000, VIEW);
    expect(map.range(0).first).toBe(first);
  });

  it("moves by lines and pages", () => {
    const map = mapOf(5_000_000);
    map.scrollBy(0, 1);
    expect(map.range(0).first).toBe(13);
    map.scrollBy(-1, 0);
    expect(map.range(0).first).toBe(12);
    map.scrollBy(5_000_000, 0);
    expect(map.atEnd).toBe(true);
    map.scrollBy(-5_000_000, 0);
    expect(map.range(0).first).toBe(0);
  });

  it("is at the end while all lines are in view", () => {
    expect(mapOf(3).atEnd).toBe(true);
    expect(mapOf(0).range(5)).toEqual({ first: 0, count: 0 });
  });
});
