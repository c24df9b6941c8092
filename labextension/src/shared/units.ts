/** Numbers with their units, as `sgpu_magic/views/units.py` writes them. */

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

const SIGNS: Readonly<Record<string, string>> = { USD: "$", EUR: "€", GBP: "£", JPY: "¥", INR: "₹", KRW: "₩" };

/** Returns `$0.37`, `3.10 CHF`; of few cents two digits: `$0.015`, as `sgpu_magic/wire/costs.py` writes it. */
export function formatMoney(amount: number, currency: string): string {
  if (amount > 0 && amount < 1e-6) return `under ${withSign("0.000001", currency)}`;
  if (amount === 0 || amount >= 0.0995) {
    return withSign(amount.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 }), currency);
  }
  return withSign(Number(amount.toExponential(1)).toFixed(6).replace(/0+$/, "").padEnd(4, "0"), currency);
}

function withSign(digits: string, currency: string): string {
  const sign = SIGNS[currency] ?? (/^.$/u.test(currency) ? currency : "");
  return sign ? `${sign}${digits}` : `${digits} ${currency}`.trimEnd();
}

/** Returns what `seconds` on the meter cost: each that has begun counts whole, as in `wire/costs.py`. */
export function costOf(per_s: number, seconds: number): number {
  return per_s * Math.max(1, Math.ceil(seconds - 1e-6));
}
