/**
 * Types and checks of the records in these modules, which document them:
 *
 * - `sgpu_magic.views.live.schema`
 * - `sgpu_magic.views.live.messages`
 *
 * Written by `scripts/front_end_records.py`.
 */

import { bool, either, kinds, list, nullable, num, oneOf, quadruple, record, str, triple } from "../shared/checks";
import type { Of } from "../shared/checks";

export const VERSION = 5;

export const tone = oneOf("plain", "busy", "good", "bad", "warn");
export type Tone = Of<typeof tone>;

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

export const metricCurve = record({ rank: num, last: str, steps: list(num), values: list(nullable(num)) });
export type MetricCurve = Of<typeof metricCurve>;

export const metricChart = record({
  name: str,
  last: str,
  range: str,
  low: num,
  high: num,
  axis: oneOf("step", "seconds"),
  begins: str,
  ends: str,
  curves: list(metricCurve),
  others: str,
});
export type MetricChart = Of<typeof metricChart>;

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
export type MemoryCard = Of<typeof memoryCard>;

export const memoryTensor = record({ name: str, cells: list(str) });
export type MemoryTensor = Of<typeof memoryTensor>;

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

export const holdingSession = record({ run_id: str, name: str });
export type HoldingSession = Of<typeof holdingSession>;

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
  starting_s: num,
  ticking: bool,
  cost: nullable(cost),
  meta: list(str),
  preparing: list(str),
  bar: nullable(bar),
  ranks: list(rankCard),
  metrics: list(metricChart),
  metrics_text: str,
  more_metrics: str,
  only: list(num),
  idle: list(str),
  warnings: list(str),
  notes: list(str),
  stall: list(str),
  failure: nullable(failureBlock),
  others: list(str),
  footer: list(str),
  tracked: nullable(link),
  lines: list(num),
  can_cancel: bool,
  own_sessions: list(holdingSession),
  stop: str,
  attach: str,
});
export type Snapshot = Of<typeof snapshot>;

export const lineRow = quadruple(num, num, str, bool);
export type LineRow = Of<typeof lineRow>;

export const lineSkip = triple(num, num, num);
export type LineSkip = Of<typeof lineSkip>;

export const MAX_LINES = 500;

export const MAX_MATCHES = 1000;

export const MAX_LOG_BYTES = 48000;

export const newLines = record({
  kind: oneOf("lines"),
  seq: num,
  first: num,
  rows: list(either(lineRow, lineSkip)),
  ranks: list(num),
});
export type NewLines = Of<typeof newLines>;

export const noMoreUpdates = record({ kind: oneOf("gone"), text: str });
export type NoMoreUpdates = Of<typeof noMoreUpdates>;

export const askHello = record({ kind: oneOf("hello"), n: num, over: str });
export type AskHello = Of<typeof askHello>;

export const askLines = record({
  kind: oneOf("lines"),
  n: num,
  first: num,
  count: num,
  rank: nullable(num),
});
export type AskLines = Of<typeof askLines>;

export const askFind = record({ kind: oneOf("find"), n: num, text: str, rank: nullable(num) });
export type AskFind = Of<typeof askFind>;

export const askLog = record({ kind: oneOf("log"), n: num, offset: num, rank: nullable(num) });
export type AskLog = Of<typeof askLog>;

export const askCancel = record({ kind: oneOf("cancel"), n: num });
export type AskCancel = Of<typeof askCancel>;

export const askEndSession = record({ kind: oneOf("end-session"), n: num, session: str });
export type AskEndSession = Of<typeof askEndSession>;

export const askStacks = record({ kind: oneOf("stacks"), n: num });
export type AskStacks = Of<typeof askStacks>;

export const question = kinds({
  hello: askHello,
  lines: askLines,
  find: askFind,
  log: askLog,
  cancel: askCancel,
  "end-session": askEndSession,
  stacks: askStacks,
});
export type Question = Of<typeof question>;

export const helloAnswer = record({ kind: oneOf("hello"), n: num, snapshot, seq: num });
export type HelloAnswer = Of<typeof helloAnswer>;

export const linesAnswer = record({
  kind: oneOf("lines-answer"),
  n: num,
  first: num,
  rows: list(lineRow),
  total: num,
});
export type LinesAnswer = Of<typeof linesAnswer>;

export const findAnswer = record({ kind: oneOf("find-answer"), n: num, matches: list(num), total: num });
export type FindAnswer = Of<typeof findAnswer>;

export const logAnswer = record({
  kind: oneOf("log-answer"),
  n: num,
  text: str,
  next_offset: nullable(num),
});
export type LogAnswer = Of<typeof logAnswer>;

export const textAnswer = record({ kind: oneOf("text"), n: num, lines: list(str) });
export type TextAnswer = Of<typeof textAnswer>;

export const refusal = record({ kind: oneOf("refusal"), n: num, text: str });
export type Refusal = Of<typeof refusal>;

export const answer = kinds({
  hello: helloAnswer,
  "lines-answer": linesAnswer,
  "find-answer": findAnswer,
  "log-answer": logAnswer,
  text: textAnswer,
  refusal,
});
export type Answer = Of<typeof answer>;

export const feedUpdate = kinds({
  lines: newLines,
  gone: noMoreUpdates,
});
export type FeedUpdate = Of<typeof feedUpdate>;
