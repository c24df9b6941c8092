import type { RunRow } from "./messages";

/** Filters of the run list by state. */
export const STATES = ["all", "going", "waiting", "ended", "failed"] as const;
export type StateFilter = (typeof STATES)[number];

export interface RunFilter {
  readonly text: string;
  readonly state: StateFilter;
  /** Only runs of the active notebook. */
  readonly own: boolean;
}

export const EVERY_RUN: RunFilter = { text: "", state: "all", own: false };

export function hasFilter(filter: RunFilter): boolean {
  return filter.text.trim() !== "" || filter.state !== "all" || filter.own;
}

/** Returns the runs that match a filter, in their order. */
export function filterRuns(runs: readonly RunRow[], filter: RunFilter, notebook: string, kernel: string): readonly RunRow[] {
  if (!hasFilter(filter)) return runs;
  const words = filter.text.toLowerCase().split(/\s+/).filter(Boolean);
  return runs.filter((run) => {
    if (filter.own && !isOwn(run, notebook, kernel)) return false;
    if (!matchesState(run, filter.state)) return false;
    if (words.length === 0) return true;
    const text = [run.name, run.short_id, run.run_id, run.words, run.state, run.notebook, run.user, run.device_type]
      .join(" ")
      .toLowerCase();
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
    return { text: typeof stored.text === "string" ? stored.text : "", state, own: stored.own === true };
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
