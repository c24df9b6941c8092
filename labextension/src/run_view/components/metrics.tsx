import { useId, useMemo, useState } from "preact/hooks";

import { formatCount } from "../../shared/units";
import type { MetricChart, MetricCurve } from "../messages";
import { useCurveCursor } from "./curve_cursor";

const WIDTH = 240;
const HEIGHT = 48;
const MARGIN = 2;
/** Length of the line that shows a single value, because a line of zero length is invisible. */
const DOT = 4;
/** Number of colours; further curves are dashed. */
const COLOURS = 4;

interface Props {
  readonly charts: readonly MetricChart[];
  readonly text: string;
  readonly more: string;
}

/** The metrics that the run's code has logged, collapsed by default. */
export function Metrics({ charts, text, more }: Props) {
  const [isOpen, setOpen] = useState(false);
  const id = useId();
  return (
    <section class="sgpu-metrics" aria-label="metrics">
      <button type="button" class="sgpu-fold" aria-expanded={isOpen} aria-controls={id} onClick={() => setOpen(!isOpen)}>
        <b>Metrics</b> <span>{text}</span>
      </button>
      <div id={id} class="sgpu-charts" hidden={!isOpen}>
        {isOpen && charts.map((chart) => <Chart key={chart.name} chart={chart} />)}
        {isOpen && more && <div class="sgpu-hint">{more}</div>}
      </div>
    </section>
  );
}

function Chart({ chart }: { chart: MetricChart }) {
  const { curves } = chart;
  const lines = useMemo(() => curves.map((curve) => path(chart, curve)), [chart]);
  const steps = useMemo(() => [...new Set(curves.flatMap((curve) => curve.steps))].sort((a, b) => a - b), [chart]);
  const last = steps.length - 1;
  const { at, slider } = useCurveCursor({ last, pointAt: (share) => nearest(steps, share) });
  const step = at === null ? undefined : steps[at];
  const isSingle = curves.length === 1;
  return (
    <div class="sgpu-chart">
      <div class="sgpu-chart-head">
        <b>{chart.name}</b> {chart.last} <span>{chart.range}</span>
      </div>
      <svg
        {...slider}
        viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
        aria-label={chart.name}
        aria-valuetext={describe(chart, step ?? steps[last] ?? 0)}
        // SVG attributes are case-sensitive: `tabIndex` would be ignored
        tabindex={0}
      >
        {/* draw the first rank's curve last, above the others */}
        {lines.map((d, index) => <path key={index} class={colour(index)} d={d} vector-effect="non-scaling-stroke" />).reverse()}
        {step !== undefined && last > 0 && (
          <path class="sgpu-cursor" d={`M${scale(chart)(step)} 0V${HEIGHT}`} vector-effect="non-scaling-stroke" />
        )}
      </svg>
      <div class="sgpu-axis">
        {step !== undefined ? (
          <span>{isSingle ? describe(chart, step) : positionText(chart, step)}</span>
        ) : (
          <>
            <span>{chart.begins}</span>
            <span>{chart.ends}</span>
          </>
        )}
      </div>
      {(!isSingle || chart.others) && (
        <div class="sgpu-legend">
          {curves.map((curve, index) => (
            <span key={curve.rank}>
              <svg viewBox="0 0 16 2" aria-hidden="true">
                <path class={colour(index)} d="M0 1H16" />
              </svg>
              rank {curve.rank} {step === undefined ? curve.last : valueText(curve, step) || "–"}
            </span>
          ))}
          {chart.others && <span class="sgpu-plain">{chart.others}</span>}
        </div>
      )}
    </div>
  );
}

function colour(index: number): string {
  return `sgpu-curve sgpu-curve-${index % COLOURS}${index >= COLOURS ? " sgpu-dashed" : ""}`;
}

/** Returns a function from a position on a chart's axis to a coordinate. */
function scale({ curves }: MetricChart): (step: number) => number {
  const first = Math.min(...curves.map(({ steps }) => steps[0] ?? 0));
  const last = Math.max(...curves.map(({ steps }) => steps[steps.length - 1] ?? 0));
  return (step) => (last > first ? round((WIDTH * (step - first)) / (last - first)) : WIDTH / 2);
}

/** Returns the SVG path of a curve, interrupted where values are not finite. */
export function path(chart: MetricChart, curve: MetricCurve): string {
  // halved, because the difference of two large values may be infinite
  const [low, high] = [chart.low / 2, chart.high / 2];
  const x = scale(chart);
  let line = "";
  let stretch: (readonly [number, number])[] = [];
  const finish = () => {
    const [first] = stretch;
    if (first && stretch.length === 1) {
      line += `M${Math.max(0, Math.min(first[0] - DOT / 2, WIDTH - DOT))} ${first[1]}h${DOT}`;
    } else if (first) {
      line += `M${stretch.map((point) => point.join(" ")).join("L")}`;
    }
    stretch = [];
  };
  curve.steps.forEach((step, at) => {
    const value = curve.values[at];
    if (value === null || value === undefined) {
      finish();
      return;
    }
    const share = Math.max(0, Math.min((value / 2 - low) / (high - low), 1));
    stretch.push([x(step), round(HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN))]);
  });
  finish();
  return line;
}

/** Returns the index of the step at a share of a chart's width. */
function nearest(steps: readonly number[], share: number): number {
  const [first, last] = [steps[0] ?? 0, steps[steps.length - 1] ?? 0];
  const wanted = first + share * (last - first);
  let best = 0;
  steps.forEach((step, at) => {
    if (Math.abs(step - wanted) < Math.abs((steps[best] ?? 0) - wanted)) best = at;
  });
  return best;
}

/** Returns the values of all curves at a position, as text: `step 12: rank 0 0.31 · rank 1 0.32`. */
export function describe(chart: MetricChart, step: number): string {
  const parts = chart.curves.flatMap((curve) => {
    const text = valueText(curve, step);
    if (!text) return [];
    return [chart.curves.length > 1 ? `rank ${curve.rank} ${text}` : text];
  });
  return `${positionText(chart, step)}: ${parts.join(" · ")}`;
}

/** Returns a curve's last value at a position, "" where it has none. */
function valueText(curve: MetricCurve, step: number): string {
  const at = curve.steps.lastIndexOf(step);
  if (at < 0) return "";
  const value = curve.values[at];
  return value === null || value === undefined ? "not finite" : String(Number(value.toPrecision(4)));
}

function positionText(chart: MetricChart, step: number): string {
  return chart.axis === "step" ? `step ${formatCount(step)}` : `${step} s`;
}

function round(value: number): number {
  return Math.round(value * 10) / 10;
}
