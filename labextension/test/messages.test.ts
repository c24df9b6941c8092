import { readFileSync } from "node:fs";
import { resolve } from "node:path";

import { describe, expect, it } from "vitest";

import * as messages from "../src/run_view/messages";
import { BadMessage } from "../src/shared/checks";
import type { Check } from "../src/shared/checks";

interface Golden {
  readonly constants: Readonly<Record<string, number>>;
  readonly records: Readonly<Record<string, readonly unknown[]>>;
}

// written by tests/test_front_end.py from sgpu_magic/views/live/messages.py
const golden = JSON.parse(readFileSync(resolve(import.meta.dirname, "../../tests/golden/live_messages.json"), "utf8")) as Golden;

const TWINS: Readonly<Record<string, Check<unknown>>> = {
  Bar: messages.bar,
  Cost: messages.cost,
  Curve: messages.curve,
  RankCard: messages.rankCard,
  FailureLine: messages.failureLine,
  Link: messages.link,
  MemoryCard: messages.memoryCard,
  MemoryTensor: messages.memoryTensor,
  MemoryBlock: messages.memoryBlock,
  FailureBlock: messages.failureBlock,
  Snapshot: messages.snapshot,
  NewLines: messages.newLines,
  Gone: messages.gone,
  AskHello: messages.askHello,
  AskLines: messages.askLines,
  AskFind: messages.askFind,
  AskLog: messages.askLog,
  AskCancel: messages.askCancel,
  AskStacks: messages.askStacks,
  HelloAnswer: messages.helloAnswer,
  LinesAnswer: messages.linesAnswer,
  FindAnswer: messages.findAnswer,
  LogAnswer: messages.logAnswer,
  TextAnswer: messages.textAnswer,
  Refusal: messages.refusal,
};

describe("the records and their Python twins", () => {
  it("are the same ones", () => {
    expect(Object.keys(TWINS).sort()).toEqual(Object.keys(golden.records).sort());
  });

  it.each(Object.entries(golden.records))("%s reads what Python writes, key for key", (name, samples) => {
    expect(samples.length).toBeGreaterThan(0);
    for (const sample of samples) expect(TWINS[name]?.(sample, name, true)).toEqual(sample);
  });

  it("have the same bounds", () => {
    const { VERSION, MAX_LINES, MAX_MATCHES, MAX_LOG_BYTES } = messages;
    expect({ VERSION, MAX_LINES, MAX_MATCHES, MAX_LOG_BYTES }).toEqual(golden.constants);
  });

  it("tell answers and what is told apart by their kind", () => {
    for (const name of ["NewLines", "Gone"]) messages.readTold(golden.records[name]?.[0]);
    for (const name of Object.keys(TWINS).filter((each) => each.endsWith("Answer") || each === "Refusal")) {
      messages.readAnswer(golden.records[name]?.[0]);
    }
  });
});

describe("a message that is not what it should be", () => {
  const good = { ...(golden.records["Snapshot"]?.[0] as Record<string, unknown>), version: messages.VERSION };

  it("is refused with the place that is wrong", () => {
    expect(() => messages.readSnapshot({ ...good, elapsed_s: "1" })).toThrow("snapshot.elapsed_s is not a number");
    expect(() => messages.readSnapshot({ ...good, ranks: [{ rank: 0 }] })).toThrow("snapshot.ranks[0].state");
    expect(() => messages.readTold({ kind: "constructor" })).toThrow("message.kind");
    expect(() => messages.readAnswer(null)).toThrow(BadMessage);
  });

  it("says so when it is of another version", () => {
    expect(() => messages.readSnapshot({ ...good, version: 1 })).toThrow("reads version 3 of a run's picture and got version 1");
  });

  it("may have keys that are new, which the strict reading of this test refuses", () => {
    expect(messages.readSnapshot({ ...good, later: 1 })).toBeTruthy();
    expect(() => messages.snapshot({ ...good, later: 1 }, "snapshot", true)).toThrow("snapshot.later is not a known key");
  });
});
