import { useTranslate } from "../context";
import { formatMemory, formatUsed } from "../format";
import type { PanelHistory } from "../messages";

/** Number of points in ten minutes. */
const POINTS = 60;
const HEIGHT = 18;
/** Space above and below the line, so that extreme values are not clipped. */
const MARGIN = 1;
/** Half the length of the line for a single value. */
const HALF_DASH = 0.5;
/** Number of newest points that may have the current value: the last one may not have been measured yet. */
const CURRENT_POINTS = 2;

/** Returns the points of SVG polylines, one for each range without gaps. The last value is at the right edge. */
function polylines(values: readonly (number | null)[]): readonly string[] {
  const lines: string[] = [];
  const offset = POINTS - values.length;
  const y = (value: number) => HEIGHT - MARGIN - (Math.max(0, Math.min(value, 100)) / 100) * (HEIGHT - 2 * MARGIN);
  const point = (x: number, value: number) => `${round(x)},${round(y(value))}`;
  for (let at = 0; at < values.length; at++) {
    const first = at;
    const range: number[] = [];
    for (let value = values[at]; value !== null && value !== undefined; value = values[++at]) range.push(value);
    const [only] = range;
    if (only === undefined) continue;
    const x = offset + first;
    lines.push(
      range.length === 1
        ? `${point(x - HALF_DASH, only)} ${point(x + HALF_DASH, only)}`
        : range.map((value, index) => point(x + index, value)).join(" "),
    );
  }
  return lines;
}

/** A device's memory now. */
interface Memory {
  readonly used_bytes: number | null;
  readonly memory_bytes: number;
}

interface Props {
  readonly history: PanelHistory;
  /** Null for the mean of a type. */
  readonly memory: Memory | null;
}

/** Use and memory in the last ten minutes, with a tooltip that describes them and names the runs that held the device. */
export function DeviceCurve({ history, memory }: Props) {
  const description = useDescription(history, memory);
  return (
    <span class="sgpu-history" title={description}>
      <svg viewBox={`-${HALF_DASH} 0 ${POINTS} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
        {polylines(history.memory_pct).map((points) => (
          <polyline key={points} class="sgpu-history-memory" points={points} vector-effect="non-scaling-stroke" />
        ))}
        {polylines(history.utilization_pct).map((points) => (
          <polyline key={points} class="sgpu-history-use" points={points} vector-effect="non-scaling-stroke" />
        ))}
      </svg>
      <span class="sgpu-hidden">{description}</span>
    </span>
  );
}

/** Returns `10 minutes: use 80 % on average, memory 12.0 GB of 24 GB now; held by 7f3a train.ipynb`. */
function useDescription({ utilization_pct, memory_pct, runs }: PanelHistory, now: Memory | null): string {
  const t = useTranslate();
  const use = utilization_pct.filter((value) => value !== null);
  const memory = memory_pct.slice(-CURRENT_POINTS).filter((value) => value !== null);
  const percent = memory[memory.length - 1];
  const parts: string[] = [];
  if (use.length > 0) {
    parts.push(t("use %1 % on average", Math.round(use.reduce((sum, value) => sum + value, 0) / use.length)));
  }
  if (now !== null && now.used_bytes !== null && now.memory_bytes > 0) {
    parts.push(t("memory %1 of %2 now", formatUsed(now.used_bytes), formatMemory(now.memory_bytes)));
  } else if (percent !== undefined) {
    parts.push(t("memory %1 % now", percent));
  }
  const held = runs.length > 0 ? `; ${t("held by %1", runs.join(", "))}` : "";
  return t("10 minutes: %1", parts.join(", ")) + held;
}

function round(value: number): number {
  return Math.round(value * 10) / 10;
}
