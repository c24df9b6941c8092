import { describe, expect, it } from "vitest";

import * as messages from "../src/panel/messages";
import { BadMessage } from "../src/shared/checks";
import { choice, kernelAnswer, kernelSnapshot, PLAN, poolSnapshot, run } from "./panel_samples";

const MESSAGES = { kind: "command-result", text: "It is done.", ok: true };

it("parses updates and replies by their kind", () => {
  for (const updates of [
    { kind: "pool", snapshot: poolSnapshot() },
    { kind: "runs", pool: "local", whole: true, changed: [run("a")], gone: [] },
    { kind: "pools", runs: [], pools: [] },
    MESSAGES,
  ]) expect(messages.readUpdate(updates)).toEqual(updates);
  for (const reply of [
    kernelAnswer(kernelSnapshot()),
    { kind: "plan-answer", n: 1, plan: PLAN },
    { kind: "panel-refusal", n: 1, text: "It can't be." },
  ]) expect(messages.readReply(reply)).toEqual(reply);
});

describe("a malformed message", () => {
  it("is rejected with the path of the invalid part", () => {
    expect(() => messages.readUpdate({ ...MESSAGES, ok: "yes" })).toThrow("message.ok is not true or false");
    expect(() => messages.readReply({ kind: "constructor" })).toThrow("answer.kind");
    expect(() => messages.readReply(null)).toThrow(BadMessage);
  });

  it("is rejected when it has another version, even if other parts are invalid", () => {
    expect(() => messages.readUpdate({ kind: "pool", snapshot: { version: 99 } })).toThrow("than the Jupyter server");
    expect(() => messages.readReply({ kind: "kernel-answer", snapshot: { version: 99 } })).toThrow(messages.OtherVersion);
  });

  it("is ignored in a notebook's metadata", () => {
    const kept = { choice: choice(), version: messages.CHOICE_VERSION };
    expect(messages.readSavedChoice({ ...kept, later: 1 })).toMatchObject(kept);
    for (const none of [undefined, null, "a10", { ...kept, choice: { gpus: "2" } }, { ...kept, version: 99 }]) {
      expect(messages.readSavedChoice(none)).toBeNull();
    }
  });
});
