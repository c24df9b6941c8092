import { describe, expect, it } from "vitest";

import * as messages from "../src/run_view/messages";
import { BadMessage } from "../src/shared/checks";
import { snapshot, newLines } from "./samples";

it("parses answers and updates by their kind", () => {
  expect(messages.readUpdate(newLines(1, 0, [[0, 0, "a", true], [1, 4, 7]], [1, 5]))).toMatchObject({ kind: "lines" });
  expect(messages.readUpdate({ kind: "gone", text: "over" })).toMatchObject({ text: "over" });
  expect(messages.readAnswer({ kind: "log-answer", n: 1, text: "a", next_offset: null })).toMatchObject({ n: 1 });
  expect(messages.readAnswer({ kind: "hello", n: 2, snapshot: snapshot(), seq: 1 })).toMatchObject({ n: 2 });
});

describe("a malformed message", () => {
  const good = snapshot();

  it("is rejected with the path of the invalid part", () => {
    expect(() => messages.readSnapshot({ ...good, elapsed_s: "1" })).toThrow("snapshot.elapsed_s is not a number");
    expect(() => messages.readSnapshot({ ...good, ranks: [{ rank: 0 }] })).toThrow("snapshot.ranks[0].state");
    expect(() => messages.readUpdate({ kind: "constructor" })).toThrow("message.kind");
    expect(() => messages.readAnswer(null)).toThrow(BadMessage);
  });

  it("is rejected when it has another version", () => {
    expect(() => messages.readSnapshot({ ...good, version: 1 })).toThrow(`reads version ${messages.VERSION} of a run's data and got version 1`);
  });

  it("may have unknown keys unless the check is strict", () => {
    expect(messages.readSnapshot({ ...good, later: 1 })).toBeTruthy();
    expect(() => messages.snapshot({ ...good, later: 1 }, "snapshot", true)).toThrow("snapshot.later is not a known key");
  });
});
