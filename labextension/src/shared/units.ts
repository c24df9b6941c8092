/** Numbers with their units, as `sgpu_magic/views/units.py` writes them. */

/** Shorter times are treated as zero, such as that of a refused run. */
const MIN_SHOWN_S = 0.0005;

/** Returns an elapsed time: `38 ms`, `0.31 s`, `12 s`, `2 min 14 s`, `1 h 05 min`; from 1 s on it is rounded down. */
export function formatElapsed(seconds: number): string {
  if (seconds < 0.0995) return `${Math.round(Math.max(seconds, 0) * 1000)} ms`;
  if (seconds < 0.995) return `${seconds.toFixed(2)} s`;
  const whole = Math.max(Math.floor(seconds), 1);
  if (whole < 100) return `${whole} s`;
  const twoDigits = (value: number) => String(value).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${twoDigits(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${twoDigits(Math.floor((whole % 3600) / 60))} min`;
}

/**
 * Returns `12 s · start 25 s`: how long a run's ranks ran, and how long they took to start.
 *
 * @param running_s: Seconds since the ranks started; 0 if they never did.
 * @param starting_s: Seconds from the lease until then. Less than a second is left out unless there is no running time.
 * @param isTicking: Whether the time is still counting: then less than a second is shown as `0 s`.
 */
export function formatDuration(running_s: number, starting_s: number, isTicking = false): string {
  const format = (seconds: number) => (isTicking && seconds < 1 ? "0 s" : formatElapsed(seconds));
  const parts = running_s >= MIN_SHOWN_S ? [format(running_s)] : [];
  if (starting_s >= 1 || (starting_s >= MIN_SHOWN_S && parts.length === 0)) parts.push(`start ${format(starting_s)}`);
  return parts.join(" · ");
}

/** Returns `204,816`. */
export function formatCount(count: number): string {
  return count.toLocaleString("en-US");
}

/** Returns `1 line`, `204,816 lines`. */
export function countOf(count: number, noun: string): string {
  return `${formatCount(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** Returns a size like `312 B`, `1.2 kB` or `45.1 MB`. */
export function formatBytes(bytes: number): string {
  if (bytes < 999.5) return `${Math.round(bytes)} B`;
  let count = bytes / 1000;
  for (const unit of ["kB", "MB", "GB"]) {
    if (count < 999.95) return `${count.toFixed(1)} ${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(1)} TB`;
}

/** Returns `1.2 MB`. */
export function formatMegabytes(bytes: number): string {
  return `${(bytes / 1e6).toFixed(1)} MB`;
}

/** Returns a measured value; fractions have one decimal below 10 and in GB, else none. */
export function formatValue(value: number, unit: string): string {
  const hasDecimal = !Number.isInteger(value) && (Math.abs(value) < 10 || unit === "GB");
  const digits = hasDecimal ? 1 : 0;
  return `${value.toFixed(digits)} ${unit}`;
}

const CURRENCY_SYMBOLS: Readonly<Record<string, string>> = { USD: "$", EUR: "€", GBP: "£", JPY: "¥", INR: "₹", KRW: "₩" };

/** Returns `$0.37`, `3.10 CHF`; a few cents have two significant digits: `$0.015`, as in `sgpu_magic/wire/costs.py`. */
export function formatMoney(amount: number, currency: string): string {
  if (amount > 0 && amount < 1e-6) return `under ${withCurrency("0.000001", currency)}`;
  if (amount === 0 || amount >= 0.0995) {
    return withCurrency(amount.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 }), currency);
  }
  return withCurrency(Number(amount.toExponential(1)).toFixed(6).replace(/0+$/, "").padEnd(4, "0"), currency);
}

function withCurrency(digits: string, currency: string): string {
  const symbol = CURRENCY_SYMBOLS[currency] ?? (/^.$/u.test(currency) ? currency : "");
  return symbol ? `${symbol}${digits}` : `${digits} ${currency}`.trimEnd();
}

/** Returns the cost of `seconds`: a started second is charged in full, and at least one, as in `wire/costs.py`. */
export function costOf(per_s: number, seconds: number): number {
  return per_s * Math.max(1, Math.ceil(seconds - 1e-6));
}
