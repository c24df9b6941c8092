/** Sample pools, kernels and hosts for tests of the panel. */
import type { KernelQuestionBody, KernelState, NotebookLink, PanelHost, PoolLink, PoolLinkState } from "../src/panel/host";
import { VERSION } from "../src/panel/messages";
import type {
  Choice,
  PanelDevice,
  KernelAnswer,
  PanelKernel,
  KernelReply,
  KeptChoice,
  PanelOrder,
  PanelPlan,
  PanelPool,
  RunRow,
  PanelUpdate,
  PanelType,
} from "../src/panel/messages";
import { interpolate } from "../src/panel/widget_host";

export const NOW = Math.floor(Date.now() / 1000);
export const KERNEL = "kernel-1";

export function type(change: Partial<PanelType> = {}): PanelType {
  return {
    type: "a10",
    label: "A10",
    total: 4,
    free: 3,
    memory_bytes: 24e9,
    price: 2.5,
    currency: "USD",
    simulated: false,
    reserved: false,
    waits_s: [0, 0, 0, 720],
    history: null,
    ...change,
  };
}

export const H100 = type({
  type: "h100",
  label: "H100",
  total: 8,
  free: 8,
  memory_bytes: 80e9,
  price: 7,
  reserved: true,
  waits_s: [0, 0, 0, 0, 0, 0, 0, 0],
});
export const B300 = type({ type: "b300", label: "B300", total: 2, free: 0, memory_bytes: 288e9, price: 11, waits_s: [720, null] });
export const CPUS = type({
  type: "cpu",
  label: "CPU",
  total: 16,
  free: 14,
  memory_bytes: 0,
  price: null,
  waits_s: Array.from({ length: 16 }, () => 0),
});

export function device(index: number, change: Partial<PanelDevice> = {}): PanelDevice {
  return {
    uuid: `gpu-${index}`,
    type: "a10",
    label: `A10 · ${index}`,
    simulated: false,
    utilization_pct: 0,
    used_bytes: 0,
    memory_bytes: 24e9,
    run_id: "",
    kernel: "",
    user: "free",
    free: true,
    history: null,
    ...change,
  };
}

export const DEVICES = [
  device(0, { utilization_pct: 94, used_bytes: 18.2e9, run_id: "s1", kernel: KERNEL, user: "train.ipynb · rank 0", free: false }),
  device(1, { utilization_pct: 91, used_bytes: 18.1e9, run_id: "s1", kernel: KERNEL, user: "train.ipynb · rank 1", free: false }),
  device(2, { utilization_pct: 34, used_bytes: 6.4e9, run_id: "x", kernel: "other", user: "eval.ipynb", free: false }),
  device(3),
];

export function poolSnapshot(change: Partial<PanelPool> = {}): PanelPool {
  return {
    version: VERSION,
    pool: "local",
    state: "up",
    sentence: "",
    remedy: "",
    remedy_words: "",
    now: NOW,
    about: "",
    types: [type(), H100, B300],
    devices: DEVICES,
    cpu_slots: 0,
    cpu_slots_free: 0,
    usage: "This month 41.2 GPU h · $118 of $300",
    notes: [],
    ...change,
  };
}

export function run(id: string, change: Partial<RunRow> = {}): RunRow {
  return {
    run_id: id,
    short_id: id.slice(0, 4),
    name: "train_digits",
    kind: "cell",
    session: "",
    state: "running",
    tone: "going",
    final: false,
    reason: "",
    ranks: 2,
    device_type: "a10",
    simulated: false,
    submitted_at: NOW - 134,
    started_at: NOW - 134,
    ended_at: null,
    metered_at: NOW - 134,
    hourly: 5,
    cost: null,
    currency: "USD",
    notebook: "train.ipynb",
    kernel: KERNEL,
    user: "ada",
    idle_ends_at: null,
    dead_ranks: [],
    tracked_url: "",
    here: true,
    parameters: [],
    ...change,
  };
}

export const SESSION = run("session-1", {
  name: "main",
  kind: "session",
  submitted_at: NOW - 720,
  started_at: NOW - 720,
  metered_at: NOW - 720,
  idle_ends_at: NOW + 48 * 60,
});

export const RUNS: readonly RunRow[] = [
  run("run-4"),
  run("run-3", {
    name: "sweep[3]",
    state: "queued",
    tone: "waiting",
    reason: "waits for 1 A10, position 1",
    ranks: 4,
    submitted_at: NOW - 200,
    started_at: null,
    metered_at: null,
    kernel: "other",
    notebook: "sweep.ipynb",
  }),
  run("run-2", {
    state: "failed",
    tone: "bad",
    final: true,
    reason: "rank 1: ValueError",
    submitted_at: NOW - 900,
    started_at: NOW - 890,
    ended_at: NOW - 870,
    cost: 0.02,
    parameters: [
      { name: "lr", value: "0.1" },
      { name: "batch", value: "64" },
    ],
  }),
  run("run-1", {
    name: "preprocess",
    state: "succeeded",
    tone: "good",
    final: true,
    submitted_at: NOW - 2000,
    started_at: NOW - 1990,
    ended_at: NOW - 1990 + 216,
    cost: 0.3,
    tracked_url: "https://mlflow.example/run/1",
    parameters: [
      { name: "lr", value: "0.01" },
      { name: "epochs", value: "3" },
    ],
  }),
];

export function manyRuns(count: number): readonly RunRow[] {
  return Array.from({ length: count }, (_, index) =>
    run(`many-${String(index).padStart(4, "0")}`, {
      name: `step_${index}`,
      state: index % 10 === 3 ? "failed" : "succeeded",
      tone: index % 10 === 3 ? "bad" : "good",
      final: true,
      submitted_at: NOW - 1000 - index * 60,
      started_at: NOW - 1000 - index * 60,
      ended_at: NOW - 980 - index * 60,
      cost: 0.02,
      kernel: index % 2 ? KERNEL : "other",
      notebook: index % 2 ? "train.ipynb" : "eval.ipynb",
    }),
  );
}

export function choice(change: Partial<Choice> = {}): Choice {
  return { gpus: 2, type: "a10", pool: "", env_version: "", dependencies: [], removed: [], ...change };
}

export function kernelSnapshot(change: Partial<PanelKernel> = {}): PanelKernel {
  return {
    version: VERSION,
    package_version: "0.1.0",
    pool: "local",
    choice: null,
    choice_words: "",
    confirmed: true,
    bases: [
      { name: "", label: "this notebook's packages", about: "Python 3.12.3 · torch 2.7.1" },
      { name: "4", label: "4: Databricks serverless GPU, Python 3.12", about: "Python 3.12 · 168 packages" },
    ],
    python: "Python 3.12.3 · torch 2.7.1",
    packages: 166,
    differences: [],
    more_differences: 0,
    sessions: [],
    notes: [],
    ...change,
  };
}

export const PLAN: PanelPlan = {
  sentences: ["2 packages will be installed, about 20 s.", "Nothing is running."],
  loses: false,
  problem: "",
  button: "Apply and connect",
};

export type Responder = (question: KernelQuestionBody) => KernelReply | Promise<KernelReply>;

export function kernelAnswer(snapshot: PanelKernel, change: Partial<KernelAnswer> = {}): KernelAnswer {
  return { kind: "kernel-answer", n: 0, snapshot, kept: null, notice: "", installing: false, ...change };
}

/** Answers every question with a fixed kernel state or a fixed plan. */
export function respondingWith(snapshot: PanelKernel, plan: PanelPlan = PLAN): Responder {
  return (question) => (question.kind === "plan" ? { kind: "plan-answer", n: 0, plan } : kernelAnswer(snapshot));
}

export class TestNotebook implements NotebookLink {
  name = "train.ipynb";
  kernel = KERNEL;
  kernelState: KernelState = "idle";
  savedChoice: KeptChoice | null = null;
  readonly questions: KernelQuestionBody[] = [];
  readonly savedChoices: KeptChoice[] = [];
  loadCount = 0;
  startCount = 0;
  loadExtension: (() => void) | undefined = () => {
    this.loadCount += 1;
  };
  startKernel: (() => Promise<void>) | undefined = () => {
    this.startCount += 1;
    return Promise.resolve();
  };
  private readonly callbacks = new Set<() => void>();

  constructor(public respond: Responder = respondingWith(kernelSnapshot())) {}

  onChange(callback: () => void): () => void {
    this.callbacks.add(callback);
    return () => this.callbacks.delete(callback);
  }

  get listenerCount(): number {
    return this.callbacks.size;
  }

  change(change: Partial<Pick<TestNotebook, "kernel" | "kernelState" | "savedChoice" | "name">> = {}): void {
    Object.assign(this, change);
    for (const callback of [...this.callbacks]) callback();
  }

  async ask(question: KernelQuestionBody): Promise<KernelReply> {
    this.questions.push(question);
    await Promise.resolve();
    return this.respond(question);
  }

  saveChoice(kept: KeptChoice): void {
    this.savedChoices.push(kept);
    this.change({ savedChoice: kept });
  }

  questionKinds(): string[] {
    return this.questions.map(({ kind }) => kind);
  }
}

export class TestPools implements PoolLink {
  readonly orders: PanelOrder[] = [];
  retryCount = 0;
  private updateCallbacks: ((updates: PanelUpdate) => void)[] = [];
  private linkCallbacks: ((state: PoolLinkState) => void)[] = [];

  order(order: PanelOrder): void {
    this.orders.push(order);
  }

  onUpdate(callback: (updates: PanelUpdate) => void): void {
    this.updateCallbacks.push(callback);
  }

  onLink(callback: (state: PoolLinkState) => void): void {
    this.linkCallbacks.push(callback);
  }

  retry(): void {
    this.retryCount += 1;
  }

  sendUpdates(...messages: PanelUpdate[]): void {
    for (const message of messages) for (const callback of this.updateCallbacks) callback(message);
  }

  setLink(state: PoolLinkState): void {
    for (const callback of this.linkCallbacks) callback(state);
  }
}

export class TestHost implements PanelHost {
  readonly pools = new TestPools();
  readonly translate = interpolate;
  settings = { showPrices: true };
  readonly opened: RunRow[] = [];
  readonly attached: RunRow[] = [];
  readonly replayed: RunRow[] = [];
  readonly connected: RunRow[] = [];
  newNotebook: (() => void) | undefined = () => undefined;
  compareRuns: PanelHost["compareRuns"];
  readonly stored = new Map<string, string>();
  readonly storage = {
    get: (key: string) => this.stored.get(key) ?? null,
    set: (key: string, value: string) => void this.stored.set(key, value),
  };
  private readonly callbacks = new Set<() => void>();

  constructor(public notebook: TestNotebook | null = new TestNotebook()) {}

  get listenerCount(): number {
    return this.callbacks.size;
  }

  openRun(row: RunRow): void {
    this.opened.push(row);
  }

  attachRun(row: RunRow): void {
    this.attached.push(row);
  }

  replayRun(row: RunRow): void {
    this.replayed.push(row);
  }

  connectRun: ((row: RunRow) => void) | undefined = (row) => void this.connected.push(row);

  onChange(callback: () => void): () => void {
    this.callbacks.add(callback);
    return () => this.callbacks.delete(callback);
  }

  setNotebook(notebook: TestNotebook | null): void {
    this.notebook = notebook;
    for (const callback of [...this.callbacks]) callback();
  }

  /** Sends the updates that a server sends first. */
  sendPoolState(snapshot: PanelPool = poolSnapshot(), runs: readonly RunRow[] = RUNS): void {
    this.pools.setLink({ kind: "open", text: "" });
    this.pools.sendUpdates(
      { kind: "pools", runs: [], pools: [{ name: "local", about: "this machine", reserved: false, default: true, reachable: true }] },
      { kind: "pool", snapshot },
      { kind: "runs", pool: snapshot.pool, whole: true, changed: runs, gone: [] },
    );
  }
}
