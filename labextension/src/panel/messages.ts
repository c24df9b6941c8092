/**
 * The records of the environment panel: twins of `schema.py` and `messages.py` in `sgpu_magic/panel`, where they are
 * described.
 *
 * A test checks samples of every record that Python writes.
 */

import { BadMessage, bool, kinds, list, nullable, num, oneOf, record, str } from "../shared/checks";
import type { Of } from "../shared/checks";

export const VERSION = 1;
export const MAX_RUNS = 1000;
/** The model id of questions that belong to no run's view. */
export const PANEL = "panel";
/** Where a notebook's metadata has its choice. */
export const CHOICE_KEY = "sgpu";

// ------------------------------------------------------------------ a pool

export const poolState = oneOf("up", "none", "lost", "other-version", "problem");
export type PoolState = Of<typeof poolState>;

export const poolChoice = record({ name: str, about: str, reserved: bool, default: bool });
export type PoolChoice = Of<typeof poolChoice>;

export const typePicture = record({
  type: str,
  label: str,
  total: num,
  free: num,
  memory_bytes: num,
  price: nullable(num),
  currency: str,
  simulated: bool,
  reserved: bool,
  waits_s: list(nullable(num)),
});
export type TypePicture = Of<typeof typePicture>;

export const devicePicture = record({
  uuid: str,
  type: str,
  label: str,
  simulated: bool,
  utilization_pct: nullable(num),
  used_bytes: nullable(num),
  memory_bytes: num,
  run_id: str,
  kernel: str,
  user: str,
  free: bool,
});
export type DevicePicture = Of<typeof devicePicture>;

export const runRow = record({
  run_id: str,
  short_id: str,
  name: str,
  kind: str,
  session: str,
  state: str,
  tone: str,
  final: bool,
  words: str,
  ranks: num,
  device_type: str,
  simulated: bool,
  submitted_at: num,
  started_at: nullable(num),
  ended_at: nullable(num),
  metered_at: nullable(num),
  hourly: nullable(num),
  cost: nullable(num),
  currency: str,
  notebook: str,
  kernel: str,
  user: str,
  idle_ends_at: nullable(num),
  tracked_url: str,
  here: bool,
});
export type RunRow = Of<typeof runRow>;

export const poolPicture = record({
  version: num,
  pool: str,
  state: poolState,
  sentence: str,
  remedy: oneOf("", "start", "retry"),
  remedy_words: str,
  now: num,
  about: str,
  types: list(typePicture),
  devices: list(devicePicture),
  cpu_slots: num,
  cpu_slots_free: num,
  usage: str,
  notes: list(str),
});
export type PoolPicture = Of<typeof poolPicture>;

// ------------------------------------------------------------------ told

export const poolTold = record({ kind: oneOf("pool"), picture: poolPicture });
export const runsTold = record({ kind: oneOf("runs"), pool: str, whole: bool, changed: list(runRow), gone: list(str) });
export const poolsTold = record({ kind: oneOf("pools"), pools: list(poolChoice) });
export const said = record({ kind: oneOf("said"), text: str, ok: bool });

export type PoolTold = Of<typeof poolTold>;
export type RunsTold = Of<typeof runsTold>;
export type PoolsTold = Of<typeof poolsTold>;
export type Said = Of<typeof said>;

export const told = kinds({ pool: poolTold, runs: runsTold, pools: poolsTold, said });
export type Told = PoolTold | RunsTold | PoolsTold | Said;

// ------------------------------------------------------------------ orders

export const watch = record({ kind: oneOf("watch"), pool: str });
export const rest = record({ kind: oneOf("rest") });
export const startPool = record({ kind: oneOf("start-pool"), pool: str });
export const cancelRun = record({ kind: oneOf("cancel-run"), run_id: str, pool: str });

export type PanelOrder = Of<typeof watch> | Of<typeof rest> | Of<typeof startPool> | Of<typeof cancelRun>;

// ------------------------------------------------------------------ a notebook

export const choice = record({
  gpus: num,
  type: str,
  pool: str,
  env_version: str,
  dependencies: list(str),
  removed: list(str),
});
export type Choice = Of<typeof choice>;

export const keptChoice = record({ choice, signed: str, version: num });
export type KeptChoice = Of<typeof keptChoice>;

export const baseChoice = record({ name: str, label: str, about: str });
export type BaseChoice = Of<typeof baseChoice>;

export const packageLine = record({ sign: oneOf("+", "-", "~"), name: str, words: str, removable: bool });
export type PackageLine = Of<typeof packageLine>;

export const sessionPicture = record({ run_id: str, name: str, current: bool, state: str, words: str });
export type SessionPicture = Of<typeof sessionPicture>;

export const kernelPicture = record({
  version: num,
  package_version: str,
  pool: str,
  choice: nullable(choice),
  choice_words: str,
  confirmed: bool,
  bases: list(baseChoice),
  python: str,
  packages: num,
  differences: list(packageLine),
  more_differences: num,
  sessions: list(sessionPicture),
  notes: list(str),
});
export type KernelPicture = Of<typeof kernelPicture>;

export const planPicture = record({ sentences: list(str), loses: bool, problem: str, button: str });
export type PlanPicture = Of<typeof planPicture>;

// ------------------------------------------------------------------ questions to the kernel, and its answers

export const askKernel = record({ kind: oneOf("kernel"), n: num, kept: nullable(keptChoice) });
export const askPlan = record({ kind: oneOf("plan"), n: num, choice, connect: bool });
export const askApply = record({ kind: oneOf("apply"), n: num, choice, connect: bool, confirmed: bool });
export const askDisconnect = record({ kind: oneOf("disconnect"), n: num, name: str });

export type KernelQuestion =
  | Of<typeof askKernel>
  | Of<typeof askPlan>
  | Of<typeof askApply>
  | Of<typeof askDisconnect>;

export const kernelAnswer = record({
  kind: oneOf("kernel-answer"),
  n: num,
  picture: kernelPicture,
  kept: nullable(keptChoice),
  said: str,
  installing: bool,
});
export const planAnswer = record({ kind: oneOf("plan-answer"), n: num, plan: planPicture });
export const panelRefusal = record({ kind: oneOf("panel-refusal"), n: num, text: str });

export type KernelAnswer = Of<typeof kernelAnswer>;
export type PlanAnswer = Of<typeof planAnswer>;
export type PanelRefusal = Of<typeof panelRefusal>;

export const kernelReply = kinds({
  "kernel-answer": kernelAnswer,
  "plan-answer": planAnswer,
  "panel-refusal": panelRefusal,
});
export type KernelReply = KernelAnswer | PlanAnswer | PanelRefusal;

// ------------------------------------------------------------------ reading

/** A message of another version of sgpu-magic than this page's; the text is a sentence. */
export class OtherVersion extends BadMessage {}

/**
 * Returns what was told.
 *
 * @throws OtherVersion: The server has another version.
 * @throws BadMessage: It is nothing that is told.
 */
export function readTold(value: unknown): Told {
  checkVersion(inner(value, "picture"), "the Jupyter server");
  return told(value, "message", false);
}

/**
 * Returns a kernel's answer.
 *
 * @throws OtherVersion: The kernel has another version.
 * @throws BadMessage: It is no answer.
 */
export function readReply(value: unknown): KernelReply {
  checkVersion(inner(value, "picture"), "the kernel");
  return kernelReply(value, "answer", false);
}

/** Returns what a notebook's metadata says under `CHOICE_KEY`; null for nothing, or for what can't be read. */
export function readKept(value: unknown): KeptChoice | null {
  try {
    const kept = keptChoice(value, "choice", false);
    return kept.version === VERSION ? kept : null;
  } catch {
    return null;
  }
}

function inner(value: unknown, key: string): unknown {
  return typeof value === "object" && value !== null ? (value as Record<string, unknown>)[key] : undefined;
}

function checkVersion(picture: unknown, whose: string): void {
  const version = inner(picture, "version");
  if (typeof version !== "number" || version === VERSION) return;
  throw new OtherVersion(
    `This page has another version of sgpu-magic than ${whose}: after an upgrade, restart it and reload the page.`,
  );
}
