import type { RunReference } from "../shared/open_run";
import type { CellOutput, SubmittedRun } from "./run_server";

/** MIME type of the record in the kernel's own outputs: `sgpu_magic/views/bundle.py`. */
export const RUN_MIME = "application/vnd.sgpu.run.v1+json";
/** MIME type of an output that shows an active run; only this extension renders it. */
export const LIVE_MIME = "application/vnd.sgpu.live.v1+json";

const FINAL_STATES = new Set(["succeeded", "failed", "cancelled", "timed out"]);

/** The run that a cell's outputs belong to. */
export interface ShownRun {
  readonly run: string;
  /** Whether the outputs show the run's final state. */
  readonly final: boolean;
}

/** Returns the run that the outputs belong to, null if there is none. */
export function findShownRun(outputs: readonly CellOutput[]): ShownRun | null {
  let found: ShownRun | null = null;
  for (const output of outputs) {
    const data = isRecord(output["data"]) ? output["data"] : {};
    const live = data[LIVE_MIME];
    const record = data[RUN_MIME];
    if (isRecord(live) && typeof live["run_id"] === "string") found = { run: live["run_id"], final: false };
    else if (isRecord(record) && typeof record["run_id"] === "string") {
      found = { run: record["run_id"], final: FINAL_STATES.has(String(record["state"])) };
    }
  }
  return found;
}

/** Returns the run whose final state an output shows as a whole, null for a part of a run and for an active run. */
export function findEndedRun(record: unknown): RunReference | null {
  if (!isRecord(record) || typeof record["run_id"] !== "string" || record["whole"] !== true) return null;
  if (!FINAL_STATES.has(String(record["state"]))) return null;
  return { run_id: record["run_id"], name: typeof record["name"] === "string" ? record["name"] : record["run_id"] };
}

/** A run that a cell should show, but does not. */
export interface MissingRun {
  readonly run: string;
  /** Whether the run is known to be active. */
  readonly isActive: boolean;
  /** Whether the cell runs until the run ends. */
  readonly blocks: boolean;
}

/**
 * Returns the run that a cell should show, but does not; null if there is none.
 *
 * @param shown: The run that its outputs belong to.
 * @param submitted: The newest run that was submitted from this cell, null when there is none.
 * @param saved_s: When the notebook's file was saved last, seconds since the epoch.
 */
export function findMissingRun(shown: ShownRun | null, submitted: SubmittedRun | null, saved_s: number): MissingRun | null {
  const isActive = submitted !== null && !submitted.final;
  if (submitted && submitted.run_id !== shown?.run) {
    // if a run ended before the last save and is not in the file, the user has removed its outputs
    const isNewer = isActive || (submitted.ended !== null && submitted.ended > saved_s);
    if (isNewer) return { run: submitted.run_id, isActive, blocks: submitted.blocks };
  }
  if (!shown || shown.final) return null;
  const isSameRun = submitted?.run_id === shown.run;
  return { run: shown.run, isActive: isActive && isSameRun, blocks: !isSameRun || submitted.blocks };
}

/**
 * Returns the output that shows a run while it is active.
 *
 * @param view: The number of the output, valid on this page only.
 */
export function liveOutput(run: string, view: number): CellOutput {
  const short = run.slice(0, 4);
  return {
    output_type: "display_data",
    data: {
      [LIVE_MIME]: { run_id: run, view },
      "text/plain": `run ${short} was still running when this was saved · %sgpu_attach ${short} shows it`,
    },
    metadata: {},
  };
}

/** Returns the number of a live output, null for any other data. */
export function viewNumber(data: unknown): number | null {
  return isRecord(data) && typeof data["view"] === "number" ? data["view"] : null;
}

/** Returns the note below a run whose kernel was restarted while the run was active. */
export function restartedOutput(run: string): CellOutput {
  const short = run.slice(0, 4);
  const text = `the kernel of run ${short} was restarted · %sgpu_attach ${short} shows it again`;
  const style = "font-family:var(--jp-ui-font-family,sans-serif);font-size:12px;opacity:.75";
  return {
    output_type: "display_data",
    data: { "text/plain": text, "text/html": `<div style="${style}">${text}</div>` },
    metadata: {},
  };
}

function isRecord(value: unknown): value is Readonly<Record<string, unknown>> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
