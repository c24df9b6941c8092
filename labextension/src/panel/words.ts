/** A panel's numbers and states in words. */
import type { Sign } from "../shared/shape";
import { formatDuration, formatMoney } from "../shared/units";
import { CPU, typeOf } from "./form";
import type { Translate } from "./host";
import type { PoolPicture, RunRow } from "./messages";

const HOUR_S = 3600;

/** Returns `40 s`, `12 min`, `1 h 05 min`: how long something lasts, which nobody reads to the second. */
export function formatSpan(seconds: number): string {
  const whole = Math.max(0, Math.round(seconds));
  return whole < 100 ? `${whole} s` : inMinutes(whole);
}

/** Returns `20 s`, `1 min`, `12 min`: an estimate, which pretends to no more than it is. */
export function formatEstimate(seconds: number): string {
  return seconds < 45 ? `${Math.max(10, 10 * Math.ceil(seconds / 10))} s` : inMinutes(seconds);
}

function inMinutes(seconds: number): string {
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

/** Returns `24 GB`, `0.5 GB`. */
export function formatMemory(bytes: number): string {
  const gigabytes = bytes / 1e9;
  return `${gigabytes < 10 ? gigabytes.toFixed(1).replace(/\.0$/, "") : gigabytes.toFixed(0)} GB`;
}

/** Returns `18.2 GB`: always with a digit after the point, for numbers that change while they are read. */
export function formatUsed(bytes: number): string {
  return `${(bytes / 1e9).toFixed(1)} GB`;
}

/** Returns `10:41`, on another day than today `21 Nov`. */
export function formatMoment(at_s: number, now_s: number): string {
  const at = new Date(at_s * 1000);
  const isToday = at.toDateString() === new Date(now_s * 1000).toDateString();
  if (isToday) return `${String(at.getHours()).padStart(2, "0")}:${String(at.getMinutes()).padStart(2, "0")}`;
  return at.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
}

/** What a run has cost until now, "" without a price. Each second that has begun counts whole. */
export function costWords(run: RunRow, now_s: number): string {
  if (run.cost !== null) return formatMoney(run.cost, run.currency);
  if (run.hourly === null || run.metered_at === null || run.final) return "";
  const seconds = Math.max(1, Math.ceil(now_s - run.metered_at - 1e-6));
  return formatMoney((run.hourly * seconds) / HOUR_S, run.currency);
}

/** Returns `A10`, with the word that its devices are simulated where they are. */
export function typeWords(pool: PoolPicture | null, type: string, simulated: boolean, t: Translate): string {
  const label = typeOf(pool, type)?.label ?? (type === "" ? "" : type.toUpperCase());
  return simulated && type !== CPU ? `${label} ${t("(simulated)")}` : label;
}

/** Returns `2 × A10`, `2 ranks on CPU`. */
export function rankWords(run: RunRow, pool: PoolPicture | null, t: Translate): string {
  const type = typeWords(pool, run.device_type, run.simulated, t);
  if (run.device_type === CPU) return run.ranks === 1 ? t("1 rank on CPU") : t("%1 ranks on CPU", run.ranks);
  return type === "" ? t("%1 ranks", run.ranks) : `${run.ranks}\u00a0×\u00a0${type}`;
}

export type SessionStage = "waiting" | "connecting" | "connected" | "ending";

export function stageOf(run: RunRow): SessionStage {
  if (run.state === "cancelling") return "ending";
  if (run.state === "running") return "connected";
  return run.state === "queued" ? "waiting" : "connecting";
}

/** The state of a session in a word. */
export function stageWord(run: RunRow, t: Translate): string {
  const words = { waiting: "Waiting", connecting: "Connecting", connected: "Connected", ending: "Disconnecting" };
  return t(words[stageOf(run)]);
}

/** What stands below a run's name: its words, how long it goes on or went on, and when it ended. */
export function runWords(run: RunRow, now_s: number, t: Translate): string {
  const pieces = run.words === "" ? [] : [run.words];
  if (!run.final) {
    const state = run.kind === "session" && run.state === "running" ? "connected" : run.state;
    if (run.started_at !== null) pieces.push(`${t(state)} ${formatDuration(now_s - run.started_at, startOf(run), true)}`);
    else if (run.tone !== "waiting") pieces.push(t(state));
  } else {
    if (run.started_at !== null && run.ended_at !== null && run.tone !== "bad") {
      pieces.push(formatDuration(run.ended_at - run.started_at, startOf(run)));
    }
    if (run.ended_at !== null) pieces.push(formatMoment(run.ended_at, now_s));
  }
  return pieces.join(" · ");
}

/** How long a run's ranks took to start, 0 where that is unknown. */
function startOf(run: RunRow): number {
  return run.started_at !== null && run.metered_at !== null ? run.started_at - run.metered_at : 0;
}

const SIGNS: Readonly<Record<string, Sign>> = { waiting: "ring", going: "dot", good: "check", bad: "cross" };

/** The shape of a run's dot. */
export function signOf(run: RunRow): Sign {
  return SIGNS[run.tone] ?? "square";
}
