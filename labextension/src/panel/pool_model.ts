import { MAX_RUNS } from "./messages";
import type { PoolChoice, PoolRuns, PanelPool, RunRow, CommandResult, PanelUpdate } from "./messages";

/** The runs of all pools, and the pools of those that are not in the pool that is shown. */
interface RunsOfPools {
  readonly runs: readonly RunRow[];
  readonly pools: ReadonlyMap<string, string>;
}

/** A pool's state, built from its updates: its snapshot, its runs by id, the server's clock. */
export class PoolModel {
  /** Pools that may be chosen. */
  pools: readonly PoolChoice[] = [];
  /** The runs of the other pools, as polled every ten seconds, by pool. */
  private listed: readonly PoolRuns[] = [];
  snapshot: PanelPool | null = null;
  /** The result of the last order, until it is dismissed. */
  result: CommandResult | null = null;
  private readonly byId = new Map<string, RunRow>();
  private sorted: readonly RunRow[] | null = null;
  private everywhere: RunsOfPools | null = null;
  private clock = { server_s: Date.now() / 1000, here_ms: performance.now() };

  /** @param watched: The pool's name, "" the default one. */
  constructor(public watched = "") {}

  /** Newest first. */
  get runs(): readonly RunRow[] {
    this.sorted ??= [...this.byId.values()].sort(newestFirst).slice(0, MAX_RUNS);
    return this.sorted;
  }

  /** The runs of all pools, newest first; of the other pools the active and the newest ones. */
  get allRuns(): readonly RunRow[] {
    return this.collected().runs;
  }

  /** The name of the pool that is shown. */
  get name(): string {
    return this.snapshot?.pool ?? (this.watched || (this.pools.find((each) => each.default)?.name ?? ""));
  }

  /** The other pools that can't be reached, whose runs are those that were known last. */
  get away(): readonly string[] {
    return this.pools.filter(({ name, reachable }) => !reachable && name !== this.name).map(({ name }) => name);
  }

  /** Returns the pool of one of `allRuns`. */
  poolOf(id: string): string {
    return this.collected().pools.get(id) ?? this.name;
  }

  /** Whether any runs are known. */
  get hasRuns(): boolean {
    return this.allRuns.length > 0;
  }

  /** The server's time now, seconds since the epoch. */
  get now_s(): number {
    return this.clock.server_s + (performance.now() - this.clock.here_ms) / 1000;
  }

  /** Switches to another pool and drops the previous one's state. */
  switchTo(pool: string): void {
    this.watched = pool;
    this.snapshot = null;
    this.clearRuns();
  }

  apply(update: PanelUpdate): void {
    switch (update.kind) {
      case "pools":
        this.pools = update.pools;
        this.listed = update.runs;
        this.everywhere = null;
        break;
      case "pool":
        if (!this.isWatched(update.snapshot.pool)) return;
        this.snapshot = update.snapshot;
        this.everywhere = null;
        this.clock = { server_s: update.snapshot.now, here_ms: performance.now() };
        break;
      case "runs":
        if (!this.isWatched(update.pool)) return;
        if (update.whole) this.byId.clear();
        for (const run of update.changed) this.byId.set(run.run_id, run);
        for (const id of update.gone) this.byId.delete(id);
        this.sorted = null;
        this.everywhere = null;
        break;
      case "command-result":
        this.result = update;
        break;
    }
  }

  /** Returns one of `allRuns`, null if there is no such run. */
  run(id: string): RunRow | null {
    return this.byId.get(id) ?? this.allRuns.find(({ run_id }) => run_id === id) ?? null;
  }

  /** Returns the pool that is used in place of one that can't be reached, if no pool is named; "" if it can be. */
  insteadOf(pool: string): string {
    if (this.pools.find(({ name }) => name === pool)?.reachable !== false) return "";
    const fallback = this.pools.find((each) => each.default)?.name ?? "";
    return fallback === pool ? "" : fallback;
  }

  /** Returns a kernel's session: the one that its cells run in if that is known, else the newest. */
  sessionOf(kernel: string, current: string): RunRow | null {
    if (kernel === "") return null;
    let found: RunRow | null = null;
    for (const run of this.byId.values()) {
      if (run.kind !== "session" || run.kernel !== kernel || run.final) continue;
      if (run.run_id === current) return run;
      if (!found || newestFirst(run, found) < 0) found = run;
    }
    return found;
  }

  /** Returns a kernel's newest session if it has ended; a kernel keeps its id when it is restarted. */
  endedSessionOf(kernel: string): RunRow | null {
    if (kernel === "") return null;
    let newest: RunRow | null = null;
    for (const run of this.byId.values()) {
      if (run.kind === "session" && run.kernel === kernel && (!newest || newestFirst(run, newest) < 0)) newest = run;
    }
    return newest?.final === true ? newest : null;
  }

  private clearRuns(): void {
    this.byId.clear();
    this.sorted = null;
    this.everywhere = null;
  }

  private collected(): RunsOfPools {
    if (this.everywhere) return this.everywhere;
    const others = this.listed.filter(({ pool }) => pool !== this.name);
    const pools = new Map(others.flatMap(({ pool, runs }) => runs.map(({ run_id }) => [run_id, pool] as const)));
    const runs = [...this.runs, ...others.flatMap((each) => each.runs)].sort(newestFirst).slice(0, MAX_RUNS);
    this.everywhere = { runs, pools };
    return this.everywhere;
  }

  /** Filters out late updates of the previous pool. */
  private isWatched(pool: string): boolean {
    if (this.watched !== "") return pool === this.watched;
    const fallback = this.pools.find((each) => each.default);
    return fallback === undefined || pool === fallback.name;
  }
}

function newestFirst(a: RunRow, b: RunRow): number {
  return b.submitted_at - a.submitted_at || (a.run_id < b.run_id ? 1 : -1);
}
