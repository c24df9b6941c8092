/** Formats the panel's numbers and states. */
import type { ShapeName } from "../shared/shape";
import { formatDuration, formatMoney } from "../shared/units";
import { CPU, typeOf } from "./form";
import type { Translate } from "./host";
import type { PanelPool, RunRow } from "./messages";

const HOUR_S = 3600;
/** Of more ranks only the number is named. */
const MOST_RANKS_NAMED = 3;

/** Returns `40 s`, `12 min`, `1 h 05 min`: a duration, in minutes from 100 s on. */
export function formatSpan(seconds: number): string {
  const whole = Math.max(0, Math.round(seconds));
  return whole < 100 ? `${whole} s` : inMinutes(whole);
}

/** Returns `20 s`, `1 min`, `12 min`: an estimate, rounded so as not to look exact. */
export function formatEstimate(seconds: number): string {
  return seconds < 45 ? `${Math.max(10, 10 * Math.ceil(seconds / 10))} s` : inMinutes(seconds);
}

function inMinutes(seconds: number): string {
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

/** Memory sizes of devices on the market, in GB. */
const MARKETED_SIZES_GB = [
  1, 2, 3, 4, 5, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 94, 96, 120, 141, 144, 180, 186, 192, 288,
] as const;
/** Drivers report GiB, without the memory that they and ECC reserve, but at least this share of the nominal size. */
const MIN_REPORTED_SHARE = 0.92;

/** A device's memory in GB as its vendor states it: 80 for the 85.5 GB that an H100's driver reports. */
function vendorGigabytes(bytes: number): number {
  // already the vendor's number
  if (bytes % 1e9 === 0 || bytes < 2 ** 29) return bytes / 1e9;
  const gib = bytes / 2 ** 30;
  const size = MARKETED_SIZES_GB.find((one) => one >= gib * 0.999) ?? 0;
  return size > 0 && gib >= MIN_REPORTED_SHARE * size ? size : Math.round(gib);
}

/** Returns a device's memory as its vendor states it: `24 GB`, `0.5 GB`. */
export function formatMemory(bytes: number): string {
  const gigabytes = vendorGigabytes(bytes);
  return `${gigabytes < 10 ? gigabytes.toFixed(1).replace(/\.0$/, "") : gigabytes.toFixed(0)} GB`;
}

/** Returns `18.2 GB`: always with one decimal, so that a changing value keeps its format. */
export function formatUsed(bytes: number): string {
  return `${(bytes / 1e9).toFixed(1)} GB`;
}

/** Returns `10:41`, or `21 Nov` on another day. */
export function formatMoment(at_s: number, now_s: number): string {
  const at = new Date(at_s * 1000);
  const isToday = at.toDateString() === new Date(now_s * 1000).toDateString();
  if (isToday) return `${String(at.getHours()).padStart(2, "0")}:${String(at.getMinutes()).padStart(2, "0")}`;
  return at.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
}

/** Returns a run's cost so far, "" without a price. A started second is charged in full. */
export function formatCost(run: RunRow, now_s: number): string {
  if (run.cost !== null) return formatMoney(run.cost, run.currency);
  if (run.hourly === null || run.metered_at === null || run.final) return "";
  const seconds = Math.max(1, Math.ceil(now_s - run.metered_at - 1e-6));
  return formatMoney((run.hourly * seconds) / HOUR_S, run.currency);
}

/** Returns `A10`, or `A10 (simulated)` for simulated devices. */
function typeLabel(pool: PanelPool | null, type: string, simulated: boolean, t: Translate): string {
  const label = typeOf(pool, type)?.label ?? (type === "" ? "" : type.toUpperCase());
  return simulated && type !== CPU ? `${label} ${t("(simulated)")}` : label;
}

/** Returns `2 × A10`, `2 ranks on CPU`. */
export function ranksLabel(run: RunRow, pool: PanelPool | null, t: Translate): string {
  const type = typeLabel(pool, run.device_type, run.simulated, t);
  if (run.device_type === CPU) return run.ranks === 1 ? t("1 rank on CPU") : t("%1 ranks on CPU", run.ranks);
  return type === "" ? t("%1 ranks", run.ranks) : `${run.ranks}\u00a0×\u00a0${type}`;
}

/** Returns `train.ipynb`, or `bob's train.ipynb` for another user's run. */
function ownerLabel(run: RunRow, user: string): string {
  return user !== "" && run.user !== "" && run.user !== user ? `${run.user}'s ${run.notebook}` : run.notebook;
}

/** Returns a run's notebook, "" if unknown, and its cell or function, the short id if unknown. */
export function runNames(run: RunRow): readonly [notebook: string, name: string] {
  return [run.notebook, run.name || run.short_id];
}

/** Returns `train.ipynb · cell 7`. */
export function runLabel(run: RunRow): string {
  return runNames(run).filter(Boolean).join(" · ");
}

/**
 * Names a run that holds devices: `story5.ipynb, idle 2 min`, `train.ipynb · cell 7`, `session work` of the same
 * notebook.
 *
 * @param idle_s: For how long a session has been idle; null for others.
 * @param waiting: The run that waits for the devices.
 */
export function holderLabel(run: RunRow, idle_s: number | null, waiting: RunRow, t: Translate): string {
  const isSameKernel = run.kernel !== "" && run.kernel === waiting.kernel;
  const owner = isSameKernel ? "" : ownerLabel(run, waiting.user);
  const isNamedByNotebook = run.kind === "session" && owner !== "";
  const name = isNamedByNotebook ? owner : [owner, run.name || run.short_id].filter(Boolean).join(" · ");
  return idle_s === null ? name : t("%1, idle %2", name, formatSpan(idle_s));
}

export type SessionStage = "waiting" | "connecting" | "connected" | "ending";

export function stageOf(run: RunRow): SessionStage {
  if (run.state === "cancelling") return "ending";
  if (run.state === "running") return "connected";
  return run.state === "queued" ? "waiting" : "connecting";
}

/** Returns `Connected: 2 × A10 · local`. */
export function sessionLine(session: RunRow, pool: PanelPool | null, poolName: string, t: Translate): string {
  // the line below says that devices are simulated, because this one is short
  const devices = ranksLabel({ ...session, simulated: false }, pool, t);
  return `${t("%1: %2", stageLabel(session, t), devices)}${poolName === "" ? "" : ` · ${poolName}`}`;
}

/** Returns which ranks of a session are dead: `rank 1 dead`, `ranks 1, 2 dead`, `5 ranks dead`; "" for none. */
export function deadRanksLabel({ dead_ranks: ranks }: RunRow, t: Translate): string {
  if (ranks.length === 0) return "";
  if (ranks.length === 1) return t("rank %1 dead", ranks.join());
  return ranks.length > MOST_RANKS_NAMED ? t("%1 ranks dead", ranks.length) : t("ranks %1 dead", ranks.join(", "));
}

/** Returns a session's state in one word. */
function stageLabel(run: RunRow, t: Translate): string {
  const words = { waiting: "Waiting", connecting: "Connecting", connected: "Connected", ending: "Ending" };
  return t(words[stageOf(run)]);
}

/** Returns a run's duration so far: `2 min 14 s · start 3 s`; "" before it has started. */
export function runDuration(run: RunRow, now_s: number): string {
  if (run.started_at === null) return "";
  if (run.final && run.ended_at === null) return "";
  return formatDuration((run.ended_at ?? now_s) - run.started_at, startDuration_s(run), !run.final);
}

/** Returns the text below a run's name: its ranks or why it failed, how long it has run, and when it ended. */
export function runSummary(run: RunRow, now_s: number, t: Translate): string {
  const ranks = run.ranks === 1 ? t("1 rank") : t("%1 ranks", run.ranks);
  const pieces = [run.tone === "bad" && run.reason !== "" ? "" : ranks, run.reason].filter(Boolean);
  if (!run.final) {
    const state = run.kind === "session" && run.state === "running" ? "connected" : run.state;
    if (run.started_at !== null) pieces.push(`${t(state)} ${formatDuration(now_s - run.started_at, startDuration_s(run), true)}`);
    else if (run.tone !== "waiting") pieces.push(t(state));
  } else {
    if (run.started_at !== null && run.ended_at !== null && run.tone !== "bad") {
      pieces.push(formatDuration(run.ended_at - run.started_at, startDuration_s(run)));
    }
    if (run.ended_at !== null) pieces.push(formatMoment(run.ended_at, now_s));
  }
  return pieces.join(" · ");
}

/** Returns how many seconds a run's ranks took to start, 0 if unknown. */
function startDuration_s(run: RunRow): number {
  return run.started_at !== null && run.metered_at !== null ? run.started_at - run.metered_at : 0;
}

const TONE_SHAPES: Readonly<Record<string, ShapeName>> = { waiting: "ring", going: "dot", good: "check", bad: "cross" };

/** Returns the shape that stands for a run's state. */
export function shapeOf(run: RunRow): ShapeName {
  return TONE_SHAPES[run.tone] ?? "square";
}
