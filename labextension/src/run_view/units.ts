/** Numbers with their units, as `sgpu_magic/render/units.py` writes them. */

/** Returns `02:14`, above an hour `1:02:14`. */
export function formatClock(seconds: number): string {
  const whole = Math.floor(Math.max(seconds, 0));
  const hours = Math.floor(whole / 3600);
  const pair = (value: number) => String(value).padStart(2, "0");
  const rest = `${pair(Math.floor((whole % 3600) / 60))}:${pair(whole % 60)}`;
  return hours ? `${hours}:${rest}` : rest;
}

/** Returns `204,816`. */
export function formatCount(count: number): string {
  return count.toLocaleString("en-US");
}

/** Returns `1 line`, `204,816 lines`. */
export function countOf(count: number, noun: string): string {
  return `${formatCount(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** Returns `1.2 MB`. */
export function formatMegabytes(bytes: number): string {
  return `${(bytes / 1e6).toFixed(1)} MB`;
}

/** Returns a measured value: three digits at most, a decimal only where it says something. */
export function formatValue(value: number, unit: string): string {
  const digits = Math.abs(value) < 10 && !Number.isInteger(value) ? 1 : unit === "GB" && !Number.isInteger(value) ? 1 : 0;
  return `${value.toFixed(digits)} ${unit}`;
}
