import { readFileSync } from "node:fs";
import { resolve } from "node:path";

import { describe, expect, it } from "vitest";

import * as messages from "../src/panel/messages";
import { BadMessage } from "../src/shared/checks";
import type { Check } from "../src/shared/checks";

interface Golden {
  readonly constants: Readonly<Record<string, number | string>>;
  readonly records: Readonly<Record<string, readonly unknown[]>>;
}

// written by tests/test_front_end.py from sgpu_magic/panel
const golden = JSON.parse(readFileSync(resolve(import.meta.dirname, "../../tests/golden/panel_messages.json"), "utf8")) as Golden;

const TWINS: Readonly<Record<string, Check<unknown>>> = {
  PoolChoice: messages.poolChoice,
  TypePicture: messages.typePicture,
  DevicePicture: messages.devicePicture,
  RunRow: messages.runRow,
  PoolPicture: messages.poolPicture,
  PoolTold: messages.poolTold,
  RunsTold: messages.runsTold,
  PoolsTold: messages.poolsTold,
  Choice: messages.choice,
  KeptChoice: messages.keptChoice,
  BaseChoice: messages.baseChoice,
  PackageLine: messages.packageLine,
  SessionPicture: messages.sessionPicture,
  KernelPicture: messages.kernelPicture,
  PlanPicture: messages.planPicture,
  AskKernel: messages.askKernel,
  AskPlan: messages.askPlan,
  AskApply: messages.askApply,
  AskDisconnect: messages.askDisconnect,
  KernelAnswer: messages.kernelAnswer,
  PlanAnswer: messages.planAnswer,
  PanelRefusal: messages.panelRefusal,
  Watch: messages.watch,
  Rest: messages.rest,
  StartPool: messages.startPool,
  CancelRun: messages.cancelRun,
  Said: messages.said,
};

const first = (name: string) => golden.records[name]?.[0] as Record<string, unknown>;

describe("the panel's records and their Python twins", () => {
  it("are the same ones", () => {
    expect(Object.keys(TWINS).sort()).toEqual(Object.keys(golden.records).sort());
  });

  it.each(Object.entries(golden.records))("%s reads what Python writes, key for key", (name, samples) => {
    expect(samples.length).toBeGreaterThan(0);
    for (const sample of samples) expect(TWINS[name]?.(sample, name, true)).toEqual(sample);
  });

  it("have the same constants", () => {
    const { VERSION, MAX_RUNS, PANEL, CHOICE_KEY } = messages;
    expect({ VERSION, MAX_RUNS, PANEL, CHOICE_KEY }).toEqual(golden.constants);
  });

  it("are told apart by their kind", () => {
    const now = { version: messages.VERSION };
    for (const name of ["RunsTold", "PoolsTold", "Said"]) messages.readTold(first(name));
    messages.readTold({ ...first("PoolTold"), picture: { ...first("PoolPicture"), ...now } });
    for (const name of ["PlanAnswer", "PanelRefusal"]) messages.readReply(first(name));
    messages.readReply({ ...first("KernelAnswer"), picture: { ...first("KernelPicture"), ...now } });
  });
});

describe("a message that is not what it should be", () => {
  it("is refused with the place that is wrong", () => {
    expect(() => messages.readTold({ ...first("Said"), ok: "yes" })).toThrow("message.ok is not true or false");
    expect(() => messages.readReply({ kind: "constructor" })).toThrow("answer.kind");
    expect(() => messages.readReply(null)).toThrow(BadMessage);
  });

  it("says so when it is of another version, whatever else is in it", () => {
    expect(() => messages.readTold({ kind: "pool", picture: { version: 99 } })).toThrow("than the Jupyter server");
    expect(() => messages.readReply({ kind: "kernel-answer", picture: { version: 99 } })).toThrow(messages.OtherVersion);
  });

  it("is no choice when a notebook's metadata has it", () => {
    const kept = { ...first("KeptChoice"), version: messages.VERSION };
    expect(messages.readKept({ ...kept, later: 1 })).toMatchObject(kept);
    for (const none of [undefined, null, "a10", { ...kept, choice: { gpus: "2" } }, { ...kept, version: 99 }]) {
      expect(messages.readKept(none)).toBeNull();
    }
  });
});
