import { useMemo } from "preact/hooks";

import { formatValue } from "../../shared/units";
import type { Curve } from "../messages";
import { useCurveCursor } from "./curve_cursor";

const WIDTH = 100;
const HEIGHT = 26;
/** Space above and below the line, so that extreme values are not clipped. */
const MARGIN = 2;

/** Smaller values count as zero, because they are formatted as `0.0`. */
const NEAR_ZERO = 0.05;

/** Returns whether a curve would be a flat line at zero. */
export function isFlatZero(curve: Curve): boolean {
  return curve.values.every((value) => (value ?? 0) < NEAR_ZERO);
}

/** Returns SVG paths of a curve's line and of the area below it, with gaps where values are missing; empty for a flat line at zero. */
export function paths(curve: Curve): { line: string; area: string } {
  if (isFlatZero(curve)) return { line: "", area: "" };
  const { values } = curve;
  const largest = values.reduce<number>((top, value) => Math.max(top, value ?? 0), 0);
  const top = curve.top ?? (largest || 1);
  const x = (at: number) => round((at * WIDTH) / Math.max(values.length - 1, 1));
  const y = (value: number) =>
    round(HEIGHT - MARGIN - (Math.max(0, Math.min(value, top)) / (top || 1)) * (HEIGHT - 2 * MARGIN));
  let line = "";
  let area = "";
  for (let at = 0; at < values.length; at++) {
    const points: string[] = [];
    const first = at;
    for (let value = values[at]; value !== null && value !== undefined; value = values[++at]) {
      points.push(`${x(at)} ${y(value)}`);
    }
    if (points.length === 0) continue;
    // draw a single value as a line of zero length, which round caps turn into a dot
    line += `M${points.join("L")}${points.length === 1 ? "h0" : ""}`;
    area += `M${x(first)} ${HEIGHT}L${points.join("L")}L${x(at - 1)} ${HEIGHT}Z`;
  }
  return { line, area };
}

/** Returns one value of a curve and its age, as text. */
export function describe(curve: Curve, at: number): string {
  const value = curve.values[at];
  const ago_s = Math.round((curve.values.length - 1 - at) * curve.step_s);
  const what = value === null || value === undefined ? "not measured" : formatValue(value, curve.unit);
  return `${what} · ${ago_s === 0 ? "now" : `${ago_s} s ago`}`;
}

/** A curve without interaction. */
export function StaticSparkline({ curve }: { curve: Curve }) {
  return (
    <svg class="sgpu-spark" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
      <CurvePaths curve={curve} />
    </svg>
  );
}

function CurvePaths({ curve }: { curve: Curve }) {
  const { line, area } = useMemo(() => paths(curve), [curve]);
  return (
    <>
      <path class="sgpu-area" d={area} />
      <path class="sgpu-line" d={line} vector-effect="non-scaling-stroke" />
    </>
  );
}

interface Props {
  readonly curve: Curve;
  readonly label: string;
  readonly warn?: boolean;
  /** Whether the curve is a tab stop. */
  readonly isTabStop?: boolean;
  /** Called with a description of the value at the pointer or cursor, and with "" when it leaves the curve. */
  readonly onRead?: (text: string) => void;
}

/** A curve without axes; the pointer and the arrow keys read its values. */
export function Sparkline({ curve, label, warn = false, isTabStop = true, onRead }: Props) {
  const last = curve.values.length - 1;
  const { at, slider } = useCurveCursor({
    last,
    pointAt: (share) => Math.round(share * last),
    onRead: (index) => onRead?.(index === null || last < 0 ? "" : describe(curve, index)),
  });

  return (
    <svg
      {...slider}
      class={`sgpu-spark${warn ? " sgpu-warned" : ""}`}
      viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
      aria-label={label}
      aria-valuetext={`${curve.name} ${describe(curve, at ?? last)}`}
      // SVG attributes are case-sensitive: `tabIndex` would be ignored
      tabindex={isTabStop ? 0 : -1}
    >
      <CurvePaths curve={curve} />
      {at !== null && last > 0 && !isFlatZero(curve) && (
        <path class="sgpu-cursor" d={`M${round((at * WIDTH) / last)} 0V${HEIGHT}`} vector-effect="non-scaling-stroke" />
      )}
    </svg>
  );
}

function round(value: number): number {
  return Math.round(value * 10) / 10;
}
