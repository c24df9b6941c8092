import { describe, expect, it } from "vitest";

import { costOf, formatBytes, formatDuration, formatElapsed, formatMoney } from "../src/shared/units";

// the same as in tests/unit/views/test_render.py
describe("a duration", () => {
  it.each([
    [0.038, "38 ms"],
    [0.314, "0.31 s"],
    [0.997, "1 s"],
    [12.9, "12 s"],
    [99.9, "99 s"],
    [134, "2 min 14 s"],
    [3599.9, "59 min 59 s"],
    [3900, "1 h 05 min"],
  ])("of %f s is %s", (seconds, text) => {
    expect(formatElapsed(seconds)).toBe(text);
  });

  it("shows the start if it took a second, or if there is no running time", () => {
    expect(formatDuration(12.4, 25.2)).toBe("12 s · start 25 s");
    expect(formatDuration(12.4, 0.9)).toBe("12 s");
    expect([formatDuration(0, 0.9), formatDuration(0, 0.9, true), formatDuration(0.4, 3, true)]).toEqual([
      "start 0.90 s",
      "start 0 s",
      "0 s · start 3 s",
    ]);
    expect(formatDuration(0, 0)).toBe("");
  });
});

// the same as in tests/unit/pool/test_meter.py
describe("money", () => {
  it.each([
    [0.37, "USD", "$0.37"],
    [1240, "USD", "$1,240.00"],
    [0.0042, "USD", "$0.0042"],
    [0.00995, "EUR", "€0.01"],
    [0.015, "USD", "$0.015"],
    [0.02, "USD", "$0.02"],
    [0.0996, "USD", "$0.10"],
    [0.000333, "USD", "$0.00033"],
    [1e-9, "USD", "under $0.000001"],
    [0, "USD", "$0.00"],
    [3.1, "CHF", "3.10 CHF"],
    [3.1, "₿", "₿3.10"],
  ])("%f %s is %s", (amount, currency, text) => {
    expect(formatMoney(amount, currency)).toBe(text);
  });

  it("charges each started second", () => {
    expect([0, 0.02, 1, 1.001, 59.5].map((seconds) => costOf(1, seconds))).toEqual([1, 1, 1, 2, 60]);
  });
});

describe("formatBytes", () => {
  it("uses decimal units, with one digit after the point", () => {
    expect([0, 312, 999, 1_000, 45_100_000, 999_960, 2.5e9, 3e12].map(formatBytes)).toEqual([
      "0 B",
      "312 B",
      "999 B",
      "1.0 kB",
      "45.1 MB",
      "1.0 MB",
      "2.5 GB",
      "3.0 TB",
    ]);
  });
});
