import { describe, expect, it } from "vitest";

import { LIVE_MIME, RUN_MIME, liveOutput, mentioned, missing, restartedOutput, viewOf } from "../src/plugin/outputs";
import type { CellOutput, OwnedRun } from "../src/plugin/run_server";

const SAVED_S = 1000;

function output(data: Record<string, unknown>): CellOutput {
  return { output_type: "display_data", data, metadata: {} };
}

function recorded(run: string, state: string): CellOutput {
  return output({ "text/plain": "x", [RUN_MIME]: { run_id: run, state } });
}

function owned(run: string, ended: number | null): OwnedRun {
  return { run_id: run, cell: "c", final: ended !== null, ended, execution_count: 3, blocks: true };
}

describe("what a cell's outputs are of", () => {
  it("is the run of the last record, and whether it shows the end", () => {
    expect(mentioned([])).toBeNull();
    expect(mentioned([{ output_type: "stream", name: "stdout", text: "x" }, output({ "text/plain": "x" })])).toBeNull();
    expect(mentioned([recorded("aaaaaaaa", "running")])).toEqual({ run: "aaaaaaaa", final: false });
    expect(mentioned([recorded("aaaaaaaa", "timed out")])).toEqual({ run: "aaaaaaaa", final: true });
    expect(mentioned([recorded("aaaaaaaa", "failed"), liveOutput("bbbbbbbb", 1)])).toEqual({ run: "bbbbbbbb", final: false });
  });

  it("is nothing when a record makes no sense", () => {
    expect(mentioned([output({ [RUN_MIME]: "aaaaaaaa", [LIVE_MIME]: null })])).toBeNull();
    expect(mentioned([output({ [RUN_MIME]: { run_id: 7 } })])).toBeNull();
  });
});

describe("the run that a cell lacks", () => {
  it("is one that goes on and is not shown", () => {
    expect(missing(null, owned("aaaaaaaa", null), SAVED_S)).toEqual({ run: "aaaaaaaa", isActive: true, blocks: true });
    expect(missing({ run: "bbbbbbbb", final: true }, owned("aaaaaaaa", null), SAVED_S)).toMatchObject({ run: "aaaaaaaa" });
    expect(missing({ run: "aaaaaaaa", final: false }, owned("aaaaaaaa", null), SAVED_S)).toEqual({ run: "aaaaaaaa", isActive: true, blocks: true });
  });

  it("is a session that goes on, whose cell ended long ago", () => {
    const session = { ...owned("aaaaaaaa", null), blocks: false };
    expect(missing(null, session, SAVED_S)).toEqual({ run: "aaaaaaaa", isActive: true, blocks: false });
    expect(missing({ run: "aaaaaaaa", final: false }, session, SAVED_S)).toMatchObject({ blocks: false });
  });

  it("is one whose end the notebook's file has not seen", () => {
    expect(missing(null, owned("aaaaaaaa", SAVED_S + 1), SAVED_S)).toEqual({ run: "aaaaaaaa", isActive: false, blocks: true });
    expect(missing({ run: "aaaaaaaa", final: false }, owned("aaaaaaaa", SAVED_S - 1), SAVED_S)).toMatchObject({ isActive: false });
  });

  it("is one that another kernel had, when the cell still shows it going on", () => {
    expect(missing({ run: "aaaaaaaa", final: false }, null, SAVED_S)).toEqual({ run: "aaaaaaaa", isActive: false, blocks: true });
  });

  it("is none when the cell shows the end, or its outputs were taken away by hand", () => {
    expect(missing({ run: "aaaaaaaa", final: true }, owned("aaaaaaaa", SAVED_S + 1), SAVED_S)).toBeNull();
    expect(missing(null, owned("aaaaaaaa", SAVED_S - 1), SAVED_S)).toBeNull();
    expect(missing(null, null, SAVED_S)).toBeNull();
  });
});

describe("outputs that are written", () => {
  it("name the view on this page, and read well without it", () => {
    const live = liveOutput("0123abcd", 7);
    const data = live["data"] as Record<string, unknown>;
    expect(viewOf(data[LIVE_MIME])).toBe(7);
    expect(viewOf({ run_id: "0123abcd" })).toBeNull();
    expect(data["text/plain"]).toBe("run 0123 was still running when this was saved · %sgpu_attach 0123 shows it");
    expect(JSON.stringify(restartedOutput("0123abcd"))).toContain("%sgpu_attach 0123");
  });
});
