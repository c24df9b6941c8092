/**
 * Types and checks of the records in these modules, which document them:
 *
 * - `sgpu_magic.runs.choice.schema`
 * - `sgpu_magic.panel.schema`
 * - `sgpu_magic.panel.kernel_state`
 * - `sgpu_magic.panel.orders`
 *
 * Written by `scripts/front_end_records.py`.
 */

import { bool, kinds, list, nullable, num, oneOf, record, str } from "../shared/checks";
import type { Of } from "../shared/checks";

export const CHOICE_VERSION = 1;

export const CHOICE_KEY = "sgpu";

export const choice = record({
  gpus: num,
  type: str,
  pool: str,
  env_version: str,
  dependencies: list(str),
  removed: list(str),
});
export type Choice = Of<typeof choice>;

export const keptChoice = record({ choice, version: num });
export type KeptChoice = Of<typeof keptChoice>;

export const VERSION = 2;

export const poolState = oneOf("up", "none", "lost", "other-version", "problem");
export type PoolState = Of<typeof poolState>;

export const remedy = oneOf("", "start", "retry");
export type Remedy = Of<typeof remedy>;

export const MAX_RUNS = 1000;

export const poolChoice = record({
  name: str,
  about: str,
  reserved: bool,
  default: bool,
  reachable: bool,
});
export type PoolChoice = Of<typeof poolChoice>;

export const panelHistory = record({
  utilization_pct: list(nullable(num)),
  memory_pct: list(nullable(num)),
  runs: list(str),
});
export type PanelHistory = Of<typeof panelHistory>;

export const panelType = record({
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
  history: nullable(panelHistory),
});
export type PanelType = Of<typeof panelType>;

export const panelDevice = record({
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
  history: nullable(panelHistory),
});
export type PanelDevice = Of<typeof panelDevice>;

export const runParameter = record({ name: str, value: str });
export type RunParameter = Of<typeof runParameter>;

export const runRow = record({
  run_id: str,
  short_id: str,
  name: str,
  kind: str,
  session: str,
  state: str,
  tone: str,
  final: bool,
  reason: str,
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
  dead_ranks: list(num),
  tracked_url: str,
  here: bool,
  parameters: list(runParameter),
});
export type RunRow = Of<typeof runRow>;

export const panelPool = record({
  version: num,
  pool: str,
  state: poolState,
  sentence: str,
  remedy,
  remedy_words: str,
  now: num,
  about: str,
  types: list(panelType),
  devices: list(panelDevice),
  cpu_slots: num,
  cpu_slots_free: num,
  usage: str,
  notes: list(str),
});
export type PanelPool = Of<typeof panelPool>;

export const poolUpdate = record({ kind: oneOf("pool"), snapshot: panelPool });
export type PoolUpdate = Of<typeof poolUpdate>;

export const runsUpdate = record({
  kind: oneOf("runs"),
  pool: str,
  whole: bool,
  changed: list(runRow),
  gone: list(str),
});
export type RunsUpdate = Of<typeof runsUpdate>;

export const poolRuns = record({ pool: str, runs: list(runRow) });
export type PoolRuns = Of<typeof poolRuns>;

export const poolsUpdate = record({ kind: oneOf("pools"), pools: list(poolChoice), runs: list(poolRuns) });
export type PoolsUpdate = Of<typeof poolsUpdate>;

export const stateUpdate = kinds({
  pools: poolsUpdate,
  pool: poolUpdate,
  runs: runsUpdate,
});
export type StateUpdate = Of<typeof stateUpdate>;

export const baseChoice = record({ name: str, label: str, about: str });
export type BaseChoice = Of<typeof baseChoice>;

export const packageLine = record({ sign: oneOf("+", "-", "~"), name: str, words: str, removable: bool });
export type PackageLine = Of<typeof packageLine>;

export const panelSession = record({ run_id: str, name: str, current: bool, state: str, words: str });
export type PanelSession = Of<typeof panelSession>;

export const variableForm = record({
  type: str,
  shape: str,
  dtype: str,
  device: str,
  size: str,
  ranks: str,
});
export type VariableForm = Of<typeof variableForm>;

export const panelVariable = record({ name: str, forms: list(variableForm) });
export type PanelVariable = Of<typeof panelVariable>;

export const panelVariables = record({
  session: str,
  busy: bool,
  variables: list(panelVariable),
  more: num,
  notes: list(str),
});
export type PanelVariables = Of<typeof panelVariables>;

export const panelKernel = record({
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
  sessions: list(panelSession),
  notes: list(str),
});
export type PanelKernel = Of<typeof panelKernel>;

export const panelPlan = record({ sentences: list(str), loses: bool, problem: str, button: str });
export type PanelPlan = Of<typeof panelPlan>;

export const PANEL = "panel";

export const askKernel = record({ kind: oneOf("kernel"), n: num, kept: nullable(keptChoice) });
export type AskKernel = Of<typeof askKernel>;

export const askPlan = record({ kind: oneOf("plan"), n: num, choice, connect: bool });
export type AskPlan = Of<typeof askPlan>;

export const askApply = record({
  kind: oneOf("apply"),
  n: num,
  choice,
  connect: bool,
  confirmed: bool,
});
export type AskApply = Of<typeof askApply>;

export const askDisconnect = record({ kind: oneOf("disconnect"), n: num, name: str });
export type AskDisconnect = Of<typeof askDisconnect>;

export const askVariables = record({ kind: oneOf("variables"), n: num });
export type AskVariables = Of<typeof askVariables>;

export const kernelQuestion = kinds({
  kernel: askKernel,
  plan: askPlan,
  apply: askApply,
  disconnect: askDisconnect,
  variables: askVariables,
});
export type KernelQuestion = Of<typeof kernelQuestion>;

export const kernelAnswer = record({
  kind: oneOf("kernel-answer"),
  n: num,
  snapshot: panelKernel,
  kept: nullable(keptChoice),
  notice: str,
  installing: bool,
});
export type KernelAnswer = Of<typeof kernelAnswer>;

export const planAnswer = record({ kind: oneOf("plan-answer"), n: num, plan: panelPlan });
export type PlanAnswer = Of<typeof planAnswer>;

export const variablesAnswer = record({ kind: oneOf("variables-answer"), n: num, variables: panelVariables });
export type VariablesAnswer = Of<typeof variablesAnswer>;

export const panelRefusal = record({ kind: oneOf("panel-refusal"), n: num, text: str });
export type PanelRefusal = Of<typeof panelRefusal>;

export const kernelReply = kinds({
  "kernel-answer": kernelAnswer,
  "plan-answer": planAnswer,
  "variables-answer": variablesAnswer,
  "panel-refusal": panelRefusal,
});
export type KernelReply = Of<typeof kernelReply>;

export const watch = record({ kind: oneOf("watch"), pool: str });
export type Watch = Of<typeof watch>;

export const rest = record({ kind: oneOf("rest") });
export type Rest = Of<typeof rest>;

export const startPool = record({ kind: oneOf("start-pool"), pool: str });
export type StartPool = Of<typeof startPool>;

export const cancelRun = record({ kind: oneOf("cancel-run"), run_id: str, pool: str });
export type CancelRun = Of<typeof cancelRun>;

export const panelOrder = kinds({
  watch,
  rest,
  "start-pool": startPool,
  "cancel-run": cancelRun,
});
export type PanelOrder = Of<typeof panelOrder>;

export const commandResult = record({ kind: oneOf("command-result"), text: str, ok: bool });
export type CommandResult = Of<typeof commandResult>;

export const panelUpdate = kinds({
  pools: poolsUpdate,
  pool: poolUpdate,
  runs: runsUpdate,
  "command-result": commandResult,
});
export type PanelUpdate = Of<typeof panelUpdate>;
