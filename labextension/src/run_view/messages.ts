/**
 * The records between a run's view and what feeds it: twins of `messages.py` and `schema.py` in `sgpu_magic/views/live`, where they are described.
 *
 * Types and run-time checks come from one declaration each. A test checks samples of every record that Python writes.
 */

import { BadMessage, bool, either, kinds, list, nullable, num, oneOf, record, str, triple } from "../shared/checks";
import type { Of } from "../shared/checks";

export const VERSION = 3;
export const MAX_LINES = 500;
export const MAX_MATCHES = 1000;
export const MAX_LOG_BYTES = 48_000;

// ------------------------------------------------------------------ snapshot

export const tone = oneOf("plain", "busy", "good", "bad", "warn");
export type Tone = Of<typeof tone>;

export const lineRow = triple(num, num, str);
/** One line of the log: its rank, its number in the rank's log (from 0), its text with colour codes. */
export type LineRow = Of<typeof lineRow>;

export const lineSkip = triple(num, num, num);
/** Lines that are in the log and not in the message: their rank, the first one's number, how many. */
export type LineSkip = Of<typeof lineSkip>;

export const bar = record({ fraction: nullable(num), text: str });
export type Bar = Of<typeof bar>;

export const curve = record({
  name: str,
  unit: str,
  values: list(nullable(num)),
  began_s: num,
  step_s: num,
  top: nullable(num),
});
export type Curve = Of<typeof curve>;

export const rankCard = record({
  rank: num,
  state: str,
  tone,
  label: str,
  last: str,
  bar: nullable(bar),
  use: str,
  details: list(str),
  curves: list(curve),
  idle: str,
  host: str,
});
export type RankCard = Of<typeof rankCard>;

export const failureLine = record({ text: str, kind: oneOf("title", "code", "culprit", "error", "text") });
export type FailureLine = Of<typeof failureLine>;

export const memoryCard = record({ rank: num, cells: list(str), shares: list(num), culprit: bool });
export const memoryTensor = record({ name: str, cells: list(str) });
export const memoryBlock = record({
  title: str,
  heads: list(str),
  rows: list(memoryCard),
  more: str,
  largest: str,
  tensors: list(memoryTensor),
});
export type MemoryBlock = Of<typeof memoryBlock>;

export const failureBlock = record({
  rank: nullable(num),
  lines: list(failureLine),
  whole: list(failureLine),
  memory: nullable(memoryBlock),
});
export type FailureBlock = Of<typeof failureBlock>;

export const cost = record({ text: str, per_s: num, seconds: num, currency: str, mark: str });
export type Cost = Of<typeof cost>;

export const link = record({ text: str, url: str });
export type Link = Of<typeof link>;

export const snapshot = record({
  version: num,
  seq: num,
  run_id: str,
  short_id: str,
  name: str,
  mark: str,
  state: str,
  tone,
  final: bool,
  devices: str,
  pool: str,
  host: str,
  attempt: str,
  elapsed_s: num,
  ticking: bool,
  cost: nullable(cost),
  meta: list(str),
  preparing: list(str),
  bar: nullable(bar),
  ranks: list(rankCard),
  only: list(num),
  idle: list(str),
  notes: list(str),
  stall: list(str),
  failure: nullable(failureBlock),
  others: list(str),
  footer: list(str),
  tracked: nullable(link),
  lines: list(num),
  can_cancel: bool,
  stop: str,
  attach: str,
});
export type Snapshot = Of<typeof snapshot>;

// ------------------------------------------------------------------ told without being asked

export const newLines = record({
  kind: oneOf("lines"),
  seq: num,
  first: num,
  rows: list(either<LineRow, LineSkip>(lineRow, lineSkip)),
  ranks: list(num),
});
export type NewLines = Of<typeof newLines>;

export const gone = record({ kind: oneOf("gone"), text: str });
export type Gone = Of<typeof gone>;

export const told = kinds({ lines: newLines, gone });
export type Told = NewLines | Gone;

// ------------------------------------------------------------------ questions and answers

export const askHello = record({ kind: oneOf("hello"), n: num, over: str });
export const askLines = record({ kind: oneOf("lines"), n: num, first: num, count: num, rank: nullable(num) });
export const askFind = record({ kind: oneOf("find"), n: num, text: str, rank: nullable(num) });
export const askLog = record({ kind: oneOf("log"), n: num, offset: num, rank: nullable(num) });
export const askCancel = record({ kind: oneOf("cancel"), n: num });
export const askStacks = record({ kind: oneOf("stacks"), n: num });

export type Question =
  | Of<typeof askHello>
  | Of<typeof askLines>
  | Of<typeof askFind>
  | Of<typeof askLog>
  | Of<typeof askCancel>
  | Of<typeof askStacks>;

export const helloAnswer = record({ kind: oneOf("hello"), n: num, snapshot, seq: num });
export const linesAnswer = record({
  kind: oneOf("lines-answer"),
  n: num,
  first: num,
  rows: list(lineRow),
  total: num,
});
export const findAnswer = record({ kind: oneOf("find-answer"), n: num, matches: list(num), total: num });
export const logAnswer = record({ kind: oneOf("log-answer"), n: num, text: str, next_offset: nullable(num) });
export const textAnswer = record({ kind: oneOf("text"), n: num, lines: list(str) });
export const refusal = record({ kind: oneOf("refusal"), n: num, text: str });

export type HelloAnswer = Of<typeof helloAnswer>;
export type LinesAnswer = Of<typeof linesAnswer>;
export type FindAnswer = Of<typeof findAnswer>;
export type LogAnswer = Of<typeof logAnswer>;
export type TextAnswer = Of<typeof textAnswer>;
export type Refusal = Of<typeof refusal>;

export const answer = kinds({
  hello: helloAnswer,
  "lines-answer": linesAnswer,
  "find-answer": findAnswer,
  "log-answer": logAnswer,
  text: textAnswer,
  refusal,
});
export type Answer = HelloAnswer | LinesAnswer | FindAnswer | LogAnswer | TextAnswer | Refusal;

// ------------------------------------------------------------------ reading

/**
 * Returns a snapshot that has come from outside.
 *
 * @throws BadMessage: It is none, or of another version.
 */
export function readSnapshot(value: unknown): Snapshot {
  const version = typeof value === "object" && value !== null ? (value as { version?: unknown }).version : undefined;
  if (typeof version === "number" && version !== VERSION) {
    throw new BadMessage(
      `this view reads version ${VERSION} of a run's picture and got version ${version}: ` +
        "restart the kernel and reload the page after an upgrade",
    );
  }
  return snapshot(value, "snapshot", false);
}

/** Returns what was told. Throws `BadMessage`. */
export function readTold(value: unknown): Told {
  return told(value, "message", false);
}

/** Returns an answer. Throws `BadMessage`. */
export function readAnswer(value: unknown): Answer {
  return answer(value, "answer", false);
}

/** Whether lines are named and not given. */
export function isSkip(row: LineRow | LineSkip): row is LineSkip {
  return typeof row[2] === "number";
}
