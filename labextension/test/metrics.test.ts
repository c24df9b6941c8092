import { afterEach, beforeEach, describe, expect, it } from "vitest";

import { describe as say, path } from "../src/run_view/components/metrics";
import { mountRunView } from "../src/run_view/index";
import type { MetricChart, Snapshot } from "../src/run_view/messages";
import { addElement, query } from "./dom";
import { eventually } from "./eventually";
import { TestTransport, respondingWith, snapshot } from "./samples";

const LOSS: MetricChart = {
  name: "train/<b>loss</b>",
  last: "0.4",
  range: "0.4 to 2.1",
  low: 0.4,
  high: 2.1,
  axis: "step",
  begins: "step 0",
  ends: "step 4",
  curves: [
    { rank: 0, last: "0.4", steps: [0, 1, 2, 4], values: [2, 1, null, 0.4] },
    { rank: 1, last: "0.5", steps: [0, 2, 4], values: [2.1, 0.7, 0.5] },
  ],
  others: "56 more ranks, last 0.3 to 0.4",
};
const RATE: MetricChart = {
  name: "rows/s",
  last: "1225",
  range: "",
  low: 612.5,
  high: 1837.5,
  axis: "seconds",
  begins: "0 s",
  ends: "",
  curves: [{ rank: 0, last: "1225", steps: [0], values: [1225] }],
  others: "",
};

let end = new AbortController();
beforeEach(() => {
  end = new AbortController();
});
afterEach(() => {
  end.abort();
  document.body.replaceChildren();
});

async function shown(change: Partial<Snapshot>) {
  const el = addElement();
  const transport = new TestTransport(respondingWith(0, change));
  mountRunView(el, transport, end.signal);
  await eventually(() => expect(el.querySelector(".sgpu-state")).not.toBeNull());
  return { el, transport };
}

const LOGGED = { metrics: [LOSS, RATE], metrics_text: "train/<b>loss</b> 0.4 · rows/s 1225 · and 3 more", more_metrics: "and 3 more" };

describe("the metrics of a run", () => {
  it("are not there before something was logged", async () => {
    const { el, transport } = await shown({});
    expect(el.querySelector(".sgpu-metrics")).toBeNull();
    transport.sendSnapshot(snapshot({ ...LOGGED, seq: 2 }));
    await eventually(() => expect(query(el, ".sgpu-metrics button").textContent).toContain("rows/s 1225"));
  });

  it("are folded until a click, with their last values beside it", async () => {
    const { el } = await shown(LOGGED);
    const button = query(el, ".sgpu-metrics button");
    expect(button.textContent).toBe("Metrics train/<b>loss</b> 0.4 · rows/s 1225 · and 3 more");
    expect(button.getAttribute("aria-expanded")).toBe("false");
    expect(el.querySelector(".sgpu-chart")).toBeNull();
    button.click();
    await eventually(() => expect(el.querySelectorAll(".sgpu-chart")).toHaveLength(2));
    expect(button.getAttribute("aria-expanded")).toBe("true");
    expect(query(el, `[id="${button.getAttribute("aria-controls")}"]`).hidden).toBe(false);
    expect(query(el, ".sgpu-chart-head").textContent).toBe("train/<b>loss</b> 0.4 0.4 to 2.1");
    expect(query(el, ".sgpu-charts").textContent).toContain("and 3 more");
    // nothing in it interrupts a screen reader
    expect(query(el, ".sgpu-metrics").querySelector("[aria-live], [role=status], [role=alert]")).toBeNull();
    button.click();
    await eventually(() => expect(el.querySelector(".sgpu-chart")).toBeNull());
  });

  it("have a curve for each rank, and a legend where there are several", async () => {
    const { el } = await shown(LOGGED);
    query(el, ".sgpu-metrics button").click();
    await eventually(() => expect(el.querySelectorAll(".sgpu-legend")).toHaveLength(1));
    const [loss, rate] = [...el.querySelectorAll(".sgpu-chart > svg")];
    // the first rank's curve is drawn last, above the others
    expect([...(loss?.querySelectorAll("path") ?? [])].map((each) => each.getAttribute("class"))).toEqual([
      "sgpu-curve sgpu-curve-1",
      "sgpu-curve sgpu-curve-0",
    ]);
    expect(rate?.querySelectorAll("path")).toHaveLength(1);
    const legend = [...query(el, ".sgpu-legend").children].map((child) => child.textContent);
    expect(legend).toEqual(["rank 0 0.4", "rank 1 0.5", "56 more ranks, last 0.3 to 0.4"]);
  });

  it("stay open when new values arrive", async () => {
    const { el, transport } = await shown(LOGGED);
    query(el, ".sgpu-metrics button").click();
    await eventually(() => expect(el.querySelector(".sgpu-chart")).not.toBeNull());
    transport.sendSnapshot(snapshot({ ...LOGGED, metrics: [{ ...LOSS, last: "0.3" }], seq: 3 }));
    await eventually(() => expect(query(el, ".sgpu-chart-head").textContent).toContain("0.3 "));
    expect(query(el, ".sgpu-metrics button").getAttribute("aria-expanded")).toBe("true");
  });

  it("are read with the arrow keys", async () => {
    const { el } = await shown(LOGGED);
    query(el, ".sgpu-metrics button").click();
    const svg = await eventually(() => query(el, ".sgpu-chart > svg"));
    expect(svg.getAttribute("aria-valuetext")).toBe("step 4: rank 0 0.4 · rank 1 0.5");
    const press = (key: string) => svg.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    press("ArrowLeft");
    await eventually(() => expect(svg.getAttribute("aria-valuetext")).toBe("step 2: rank 0 not finite · rank 1 0.7"));
    press("Home");
    await eventually(() => expect(query(el, ".sgpu-axis").textContent).toBe("step 0"));
    press("ArrowRight");
    await eventually(() => expect(query(el, ".sgpu-axis").textContent).toBe("step 1"));
    expect(query(el, ".sgpu-legend").textContent).toContain("rank 0 1rank 1 –");
    svg.dispatchEvent(new FocusEvent("blur"));
    await eventually(() => expect(query(el, ".sgpu-axis").textContent).toBe("step 0step 4"));
  });
});

describe("a curve", () => {
  it("has gaps where values are not finite, and a short line where one is alone", () => {
    const [first] = LOSS.curves;
    if (!first) throw new Error("no curve");
    expect(path(LOSS, first)).toBe("M0 4.6L60 30.5M236 46h4");
    expect(path(LOSS, { ...first, values: [null, null, null, null] })).toBe("");
  });

  it("can be drawn for the largest numbers", () => {
    const most = Number.MAX_VALUE;
    const curve = { rank: 0, last: "", steps: [0, 1], values: [-most, most] };
    expect(path({ ...LOSS, low: -most, high: most, curves: [curve] }, curve)).toBe("M0 46L240 2");
  });

  it("names seconds where points have no steps", () => {
    expect(say(RATE, 0)).toBe("0 s: 1225");
  });
});
