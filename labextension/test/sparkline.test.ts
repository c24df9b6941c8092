import { h, render } from "preact";
import { describe, expect, it, vi } from "vitest";

import { Sparkline, describe as say, isFlatZero, paths } from "../src/run_view/components/sparkline";
import type { Curve } from "../src/run_view/messages";
import { eventually } from "./eventually";

function curve(values: Curve["values"], top: number | null = 100): Curve {
  return { name: "GPU", unit: "%", values, began_s: 0, step_s: 2, top };
}

describe("a curve", () => {
  it("has a gap for missing values", () => {
    const { line, area } = paths(curve([0, 100, null, null, 50, 50]));
    expect(line).toBe("M0 24L20 2M80 13L100 13");
    expect(area).toBe("M0 26L0 24L20 2L20 26ZM80 26L80 13L100 13L100 26Z");
  });

  it("shows a single value as a dot", () => {
    expect(paths(curve([null, 100, null])).line).toBe("M50 2h0");
  });

  it("may be empty, without values, or all zero", () => {
    for (const values of [[], [null], [0, 0]]) {
      expect(paths(curve(values, null)).line).not.toContain("NaN");
    }
    expect(paths(curve([null, null])).line).toBe("");
  });

  it("is not drawn if it would be a flat zero", () => {
    expect(paths(curve([0, 0.04, null, 0], 4))).toEqual({ line: "", area: "" });
    expect([isFlatZero(curve([])), isFlatZero(curve([0, 0.02])), isFlatZero(curve([0, 0.06]))]).toEqual([true, true, false]);
    expect(paths(curve([0, 0.06], 4)).line).not.toBe("");
  });

  it("is scaled to its top, or to its largest value without one", () => {
    expect(paths(curve([0, 30], null)).line).toBe("M0 24L100 2");
    expect(paths(curve([0, 130])).line).toBe("M0 24L100 2");
  });

  it("describes its values, including missing ones", () => {
    expect(say(curve([90, null, 94]), 2)).toBe("94 % · now");
    expect(say(curve([90, null, 94]), 1)).toBe("not measured · 2 s ago");
    expect(say(curve([]), -1)).toContain("not measured");
  });
});

describe("a curve's values", () => {
  it("are read with the arrow keys", async () => {
    const read = vi.fn();
    const el = document.createElement("div");
    document.body.append(el);
    render(h(Sparkline, { curve: curve([90, null, 94]), label: "GPU of rank 0", onRead: read }), el);
    const svg = el.querySelector("svg");
    expect(svg?.getAttribute("aria-label")).toBe("GPU of rank 0");
    expect(svg?.getAttribute("aria-valuetext")).toBe("GPU 94 % · now");
    const press = (key: string) => svg?.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    press("ArrowLeft");
    await eventually(() => expect(svg?.getAttribute("aria-valuetext")).toBe("GPU not measured · 2 s ago"));
    press("Home");
    await eventually(() => expect(svg?.getAttribute("aria-valuetext")).toBe("GPU 90 % · 4 s ago"));
    expect(read.mock.calls).toEqual([["not measured · 2 s ago"], ["90 % · 4 s ago"]]);
    svg?.dispatchEvent(new FocusEvent("blur"));
    expect(read).toHaveBeenLastCalledWith("");
    render(null, el);
  });
});
