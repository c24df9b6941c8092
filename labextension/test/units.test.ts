import { describe, expect, it } from "vitest";

import { costOf, formatMoney } from "../src/shared/units";

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

  it("counts each second that has begun", () => {
    expect([0, 0.02, 1, 1.001, 59.5].map((seconds) => costOf(1, seconds))).toEqual([1, 1, 1, 2, 60]);
  });
});
