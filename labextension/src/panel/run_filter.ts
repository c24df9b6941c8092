import type { RunRow } from "./messages";

/** Filters of the run list by state. */
export const STATES = ["all", "going", "waiting", "ended", "failed"] as const;
export type StateFilter = (typeof STATES)[number];

/** Filters by time: runs that are active, or ended within this time. */
export const TIMES = ["any", "hour", "day", "week"] as const;
export type TimeFilter = (typeof TIMES)[number];

const HOUR_S = 3600;
const SPANS_S: Readonly<Record<TimeFilter, number>> = { any: Infinity, hour: HOUR_S, day: 24 * HOUR_S, week: 168 * HOUR_S };

export interface RunFilter {
  readonly text: string;
  readonly state: StateFilter;
  readonly time: TimeFilter;
  /** Only runs of the active notebook. */
  readonly own: boolean;
  /** Only runs of the notebook with this file name; "" for every notebook. */
  readonly notebook: string;
}

export const EVERY_RUN: RunFilter = { text: "", state: "all", time: "any", own: false, notebook: "" };

export function hasFilter(filter: RunFilter): boolean {
  const { text, state, time, own, notebook } = filter;
  return text.trim() !== "" || state !== "all" || time !== "any" || own || notebook !== "";
}

/** Returns the file names of the notebooks that submitted these runs, in alphabetical order. */
export function notebooksOf(runs: readonly RunRow[]): readonly string[] {
  return [...new Set(runs.map(({ notebook }) => notebook))].filter((name) => name !== "").sort();
}

/**
 * Returns the runs that match a filter, in their order.
 *
 * @param notebook: The active notebook's file name, "" without one.
 * @param kernel: The active notebook's kernel, "" without one.
 * @param now_s: The server's time, in seconds since the epoch.
 * @param poolOf: Returns the name of a run's pool.
 */
export function filterRuns(
  runs: readonly RunRow[],
  filter: RunFilter,
  notebook: string,
  kernel: string,
  now_s: number,
  poolOf: (run: string) => string,
): readonly RunRow[] {
  if (!hasFilter(filter)) return runs;
  const since_s = now_s - SPANS_S[filter.time];
  const words = filter.text.toLowerCase().split(/\s+/).filter(Boolean);
  return runs.filter((run) => {
    if (filter.own && !isOwn(run, notebook, kernel)) return false;
    if (filter.notebook !== "" && run.notebook !== filter.notebook) return false;
    if (!matchesState(run, filter.state)) return false;
    if (run.final && (run.ended_at ?? run.submitted_at) < since_s) return false;
    if (words.length === 0) return true;
    const { name, short_id, run_id, reason, state, notebook: file, user, device_type } = run;
    const text = [name, short_id, run_id, reason, state, file, user, device_type, poolOf(run_id)].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

/** Whether a run was submitted by a notebook or its kernel. */
export function isOwn(run: RunRow, notebook: string, kernel: string): boolean {
  return (kernel !== "" && run.kernel === kernel) || (notebook !== "" && run.notebook === notebook);
}

/** Parses a stored filter; one that can't be read matches every run. */
export function parseFilter(text: string | null): RunFilter {
  try {
    const stored = JSON.parse(text ?? "") as Partial<Record<keyof RunFilter, unknown>>;
    const state = STATES.find((each) => each === stored.state) ?? "all";
    const time = TIMES.find((each) => each === stored.time) ?? "any";
    const [words, notebook] = [stored.text, stored.notebook].map((each) => (typeof each === "string" ? each : ""));
    return { text: words ?? "", state, time, own: stored.own === true, notebook: notebook ?? "" };
  } catch {
    return EVERY_RUN;
  }
}

function matchesState(run: RunRow, state: StateFilter): boolean {
  switch (state) {
    case "all":
      return true;
    case "going":
      return !run.final && run.tone !== "waiting";
    case "waiting":
      return !run.final && run.tone === "waiting";
    case "ended":
      return run.final;
    case "failed":
      return run.tone === "bad";
  }
}
