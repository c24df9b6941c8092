import type { CellOutput, OwnedRun } from "./run_server";

/** The record that the kernel's own outputs carry: `sgpu_magic/views/bundle.py`. */
export const RUN_MIME = "application/vnd.sgpu.run.v1+json";
/** An output that shows a run as long as it goes on, drawn by this extension alone. */
export const LIVE_MIME = "application/vnd.sgpu.live.v1+json";

const FINAL = new Set(["succeeded", "failed", "cancelled", "timed out"]);

/** A run that a cell's outputs are of. */
export interface Mention {
  readonly run: string;
  /** They show its end. */
  readonly final: boolean;
}

/** Returns the run that outputs are of, null when they are of none. */
export function mentioned(outputs: readonly CellOutput[]): Mention | null {
  let found: Mention | null = null;
  for (const output of outputs) {
    const data = isRecord(output["data"]) ? output["data"] : {};
    const live = data[LIVE_MIME];
    const record = data[RUN_MIME];
    if (isRecord(live) && typeof live["run_id"] === "string") found = { run: live["run_id"], final: false };
    else if (isRecord(record) && typeof record["run_id"] === "string") {
      found = { run: record["run_id"], final: FINAL.has(String(record["state"])) };
    }
  }
  return found;
}

/** A run that a cell is to show and does not. */
export interface Missing {
  readonly run: string;
  /** It is known to go on. */
  readonly goesOn: boolean;
  /** Its cell is running as long as it goes on. */
  readonly blocks: boolean;
}

/**
 * Returns the run that a cell is to show and does not, null when it shows what it is to.
 *
 * @param shown: What its outputs are of.
 * @param submitted: The newest run that was submitted from this cell, null when there is none.
 * @param saved_s: When the notebook's file was saved last, seconds since the epoch.
 */
export function missing(shown: Mention | null, submitted: OwnedRun | null, saved_s: number): Missing | null {
  const goesOn = submitted !== null && !submitted.final;
  if (submitted && submitted.run_id !== shown?.run) {
    // what ended before the notebook was saved, and is not in it, was taken away by hand
    const isNews = goesOn || (submitted.ended !== null && submitted.ended > saved_s);
    if (isNews) return { run: submitted.run_id, goesOn, blocks: submitted.blocks };
  }
  if (!shown || shown.final) return null;
  const isTheSame = submitted?.run_id === shown.run;
  return { run: shown.run, goesOn: goesOn && isTheSame, blocks: !isTheSame || submitted.blocks };
}

/**
 * The output that shows a run as long as it goes on.
 *
 * @param view: Names this output on this page; others do not know it.
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

/** The view that a live output names, null when it is none. */
export function viewOf(data: unknown): number | null {
  return isRecord(data) && typeof data["view"] === "number" ? data["view"] : null;
}

/** What stands below a run whose kernel was restarted while it went on. */
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
