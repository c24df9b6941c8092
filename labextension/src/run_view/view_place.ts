/** What a person sees of a run in its live view, so that the view of the ended run shows the same place. */
import type { Tab } from "./log_model";
import type { LineRow, Snapshot } from "./messages";

/** The place in a run's view. The view's components read it when they are made, and keep it up to date. */
export interface ViewPlace {
  tab: Tab;
  /** The first line in view; null while the log follows its end. */
  line: number | null;
  /** The text in the find bar; null while it is closed. */
  find: string | null;
  /** Height of the view of the active run; 0 if it was not seen. */
  height_px: number;
}

/** The place in a view and what it showed there, for another view of the same run. */
export interface SeenRun {
  readonly place: ViewPlace;
  readonly snapshot: Snapshot;
  /** The lines in view and their numbers in the place's tab. */
  readonly rows: readonly (readonly [number, LineRow])[];
}

/** The page keeps what was seen of this many runs. */
const MAX_SEEN = 64;
// the widget and the extension are separate bundles, which share this map
const KEY = Symbol.for("@sgpu-magic/seen-runs/1");

type SeenRuns = Map<string, () => SeenRun | null>;

function seenRuns(): SeenRuns {
  const page = globalThis as { [KEY]?: SeenRuns | undefined };
  page[KEY] ??= new Map<string, () => SeenRun | null>();
  return page[KEY];
}

/** Returns a new place: the end of the log of all ranks. */
export function endOfLog(): ViewPlace {
  return { tab: "all", line: null, find: null, height_px: 0 };
}

/** Remembers how to describe what this page shows of a run. The oldest are forgotten. */
export function rememberSeen(run: string, describe: () => SeenRun | null): void {
  const runs = seenRuns();
  runs.delete(run);
  runs.set(run, describe);
  const [oldest] = runs.keys();
  if (runs.size > MAX_SEEN && oldest !== undefined) runs.delete(oldest);
}

/** Returns what this page has shown of an active run, null if it has not shown it. */
export function findSeen(run: string): SeenRun | null {
  return seenRuns().get(run)?.() ?? null;
}
