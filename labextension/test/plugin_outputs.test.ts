import { describe, expect, it } from "vitest";

import { LIVE_MIME, RUN_MIME, liveOutput, findShownRun, findMissingRun, restartedOutput, viewNumber } from "../src/plugin/outputs";
import type { CellOutput, SubmittedRun } from "../src/plugin/run_server";

const SAVED_S = 1000;

function output(data: Record<string, unknown>): CellOutput {
  return { output_type: "display_data", data, metadata: {} };
}

function recorded(run: string, state: string): CellOutput {
  return output({ "text/plain": "x", [RUN_MIME]: { run_id: run, state } });
}

function submittedRun(run: string, ended: number | null): SubmittedRun {
  return { run_id: run, cell: "c", final: ended !== null, ended, execution_count: 3, blocks: true };
}

describe("findShownRun", () => {
  it("returns the last record's run, and whether it is final", () => {
    expect(findShownRun([])).toBeNull();
    expect(findShownRun([{ output_type: "stream", name: "stdout", text: "x" }, output({ "text/plain": "x" })])).toBeNull();
    expect(findShownRun([recorded("aaaaaaaa", "running")])).toEqual({ run: "aaaaaaaa", final: false });
    expect(findShownRun([recorded("aaaaaaaa", "timed out")])).toEqual({ run: "aaaaaaaa", final: true });
    expect(findShownRun([recorded("aaaaaaaa", "failed"), liveOutput("bbbbbbbb", 1)])).toEqual({ run: "bbbbbbbb", final: false });
  });

  it("returns null for an invalid record", () => {
    expect(findShownRun([output({ [RUN_MIME]: "aaaaaaaa", [LIVE_MIME]: null })])).toBeNull();
    expect(findShownRun([output({ [RUN_MIME]: { run_id: 7 } })])).toBeNull();
  });
});

describe("findMissingRun", () => {
  it("returns an active run that is not shown", () => {
    expect(findMissingRun(null, submittedRun("aaaaaaaa", null), SAVED_S)).toEqual({ run: "aaaaaaaa", isActive: true, blocks: true });
    expect(findMissingRun({ run: "bbbbbbbb", final: true }, submittedRun("aaaaaaaa", null), SAVED_S)).toMatchObject({ run: "aaaaaaaa" });
    expect(findMissingRun({ run: "aaaaaaaa", final: false }, submittedRun("aaaaaaaa", null), SAVED_S)).toEqual({ run: "aaaaaaaa", isActive: true, blocks: true });
  });

  it("returns an active session whose cell has ended", () => {
    const session = { ...submittedRun("aaaaaaaa", null), blocks: false };
    expect(findMissingRun(null, session, SAVED_S)).toEqual({ run: "aaaaaaaa", isActive: true, blocks: false });
    expect(findMissingRun({ run: "aaaaaaaa", final: false }, session, SAVED_S)).toMatchObject({ blocks: false });
  });

  it("returns a run that ended after the notebook was saved", () => {
    expect(findMissingRun(null, submittedRun("aaaaaaaa", SAVED_S + 1), SAVED_S)).toEqual({ run: "aaaaaaaa", isActive: false, blocks: true });
    expect(findMissingRun({ run: "aaaaaaaa", final: false }, submittedRun("aaaaaaaa", SAVED_S - 1), SAVED_S)).toMatchObject({ isActive: false });
  });

  it("returns another kernel's run that is shown as active", () => {
    expect(findMissingRun({ run: "aaaaaaaa", final: false }, null, SAVED_S)).toEqual({ run: "aaaaaaaa", isActive: false, blocks: true });
  });

  it("returns null for a final output, or one that the user removed", () => {
    expect(findMissingRun({ run: "aaaaaaaa", final: true }, submittedRun("aaaaaaaa", SAVED_S + 1), SAVED_S)).toBeNull();
    expect(findMissingRun(null, submittedRun("aaaaaaaa", SAVED_S - 1), SAVED_S)).toBeNull();
    expect(findMissingRun(null, null, SAVED_S)).toBeNull();
  });
});

describe("outputs that are written", () => {
  it("have the view's number, and a text for other pages", () => {
    const live = liveOutput("0123abcd", 7);
    const data = live["data"] as Record<string, unknown>;
    expect(viewNumber(data[LIVE_MIME])).toBe(7);
    expect(viewNumber({ run_id: "0123abcd" })).toBeNull();
    expect(data["text/plain"]).toBe("run 0123 was still running when this was saved · %sgpu_attach 0123 shows it");
    expect(JSON.stringify(restartedOutput("0123abcd"))).toContain("%sgpu_attach 0123");
  });
});
