/** Finds the blockers of a queued run. Pure functions, without rendering or messages. */
import type { RunRow } from "./messages";

const HOLDING_KINDS: ReadonlySet<string> = new Set(["cell", "call", "session"]);
const ANY_TYPE = "any";

/** A run that holds devices of the type that another one waits for. */
export interface Holder {
  readonly run: RunRow;
  /** When a session became idle, seconds since the epoch; null while a cell runs, and for other runs. */
  readonly idleSince_s: number | null;
}

/** Returns the runs that hold devices of the type that a waiting run asks for, longest idle first. */
export function holdersOf(waiting: RunRow, runs: readonly RunRow[]): readonly Holder[] {
  // a cell waits for its session, whose devices it uses
  if (waiting.final || waiting.tone !== "waiting" || waiting.session !== "") return [];
  const found = runs.filter((run) => holdsDevices(run) && isOfType(run, waiting.device_type));
  const holders = found.map((run) => ({ run, idleSince_s: idleSince(run, runs) }));
  return holders.sort((a, b) => (a.idleSince_s ?? Infinity) - (b.idleSince_s ?? Infinity));
}

function holdsDevices(run: RunRow): boolean {
  return !run.final && run.tone !== "waiting" && run.session === "" && HOLDING_KINDS.has(run.kind);
}

function isOfType(run: RunRow, type: string): boolean {
  return type === ANY_TYPE || run.device_type === type;
}

/** When a session's last cell ended, or the session began; null while a cell runs. */
function idleSince(session: RunRow, runs: readonly RunRow[]): number | null {
  if (session.kind !== "session" || session.idle_ends_at === null || session.started_at === null) return null;
  const ends = runs.filter((run) => run.session === session.run_id).map((run) => run.ended_at ?? 0);
  return Math.max(session.started_at, ...ends);
}
