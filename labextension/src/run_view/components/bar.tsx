import type { Bar } from "../messages";

/** A thin progress bar; indeterminate without a known total. */
export function ProgressBar({ bar, label }: { bar: Bar | null; label: string }) {
  if (!bar) return <div class="sgpu-bar" />;
  const percent = bar.fraction === null ? undefined : Math.round(Math.max(0, Math.min(bar.fraction, 1)) * 1000) / 10;
  return (
    <div
      class={`sgpu-bar${percent === undefined ? " sgpu-open" : ""}`}
      role="progressbar"
      aria-label={label}
      aria-valuemin={0}
      aria-valuemax={100}
      {...(percent === undefined ? {} : { "aria-valuenow": percent })}
      aria-valuetext={bar.text}
      title={bar.text}
    >
      <i style={{ width: `${percent ?? 100}%` }} />
    </div>
  );
}
