import type { PanelUpdate, PoolChoice, RunRow } from "../panel/messages";
import { PoolConnection } from "./pool_connection";
import type { PanelServer } from "./pool_connection";

/** Polling interval where a proxy blocks websockets. */
const POLL_INTERVAL_MS = 5_000;

/**
 * Reports each run that ends while the page is open, once, whichever pool it runs in and whatever the panel shows.
 *
 * Runs that had ended before are not reported. Ends with the signal.
 */
export class RunEnds {
  private readonly followedPools = new Set<string>();
  private readonly activeRuns = new Set<string>();

  /**
   * @param onEnd: Called with the run, and the time of its end in seconds since the epoch.
   * @param onChange: Called when runs have changed, before those that have ended are reported.
   */
  constructor(
    private readonly server: PanelServer,
    private readonly onEnd: (run: RunRow, ended_s: number) => void,
    private readonly onChange: () => void,
    private readonly signal: AbortSignal,
  ) {
    // the pool in sgpu-magic's settings, whose connection also brings the list of pools
    this.follow("");
  }

  private follow(pool: string): void {
    if (this.followedPools.has(pool)) return;
    this.followedPools.add(pool);
    const connection = new PoolConnection(this.server, this.signal);
    connection.pollInterval_ms = POLL_INTERVAL_MS;
    connection.addListener({ onUpdate: (update) => this.apply(update, connection.model.now_s) });
    connection.watch(this, pool);
  }

  private apply(update: PanelUpdate, now_s: number): void {
    if (update.kind === "pools") this.followOthers(update.pools);
    if (update.kind !== "runs") return;
    this.onChange();
    for (const run of update.gone) this.activeRuns.delete(run);
    for (const run of update.changed) {
      if (!run.final) this.activeRuns.add(run.run_id);
      else if (this.activeRuns.delete(run.run_id)) this.onEnd(run, run.ended_at ?? now_s);
    }
  }

  private followOthers(pools: readonly PoolChoice[]): void {
    for (const pool of pools) {
      if (pool.reachable && !pool.default) this.follow(pool.name);
    }
  }
}
