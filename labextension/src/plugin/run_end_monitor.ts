import type { PanelUpdate, PoolChoice, RunRow } from "../panel/messages";
import { PoolConnection } from "./pool_connection";
import type { PanelServer } from "./pool_connection";

/** Polling interval where a proxy blocks websockets. */
const POLL_INTERVAL_MS = 5_000;

/**
 * Reports each run that ends while the page is open, once, in any pool and independently of the panel.
 *
 * Runs that ended earlier are not reported. Stops when the signal aborts.
 */
export class RunEndMonitor {
  private readonly monitoredPools = new Set<string>();
  private readonly activeRuns = new Set<string>();

  /**
   * @param onEnd: Called with the run, and the time of its end in seconds since the epoch.
   * @param onChange: Called when runs have changed, before ended runs are reported.
   */
  constructor(
    private readonly server: PanelServer,
    private readonly onEnd: (run: RunRow, ended_s: number) => void,
    private readonly onChange: () => void,
    private readonly signal: AbortSignal,
  ) {
    // the pool in sgpu-magic's settings; its connection also receives the list of pools
    this.monitor("");
  }

  private monitor(pool: string): void {
    if (this.monitoredPools.has(pool)) return;
    this.monitoredPools.add(pool);
    const connection = new PoolConnection(this.server, this.signal);
    connection.pollInterval_ms = POLL_INTERVAL_MS;
    connection.addListener({ onUpdate: (update) => this.apply(update, connection.model.now_s) });
    connection.watch(this, pool);
  }

  private apply(update: PanelUpdate, now_s: number): void {
    if (update.kind === "pools") this.monitorOthers(update.pools);
    if (update.kind !== "runs") return;
    this.onChange();
    for (const run of update.gone) this.activeRuns.delete(run);
    for (const run of update.changed) {
      if (!run.final) this.activeRuns.add(run.run_id);
      else if (this.activeRuns.delete(run.run_id)) this.onEnd(run, run.ended_at ?? now_s);
    }
  }

  private monitorOthers(pools: readonly PoolChoice[]): void {
    for (const pool of pools) {
      if (pool.reachable && !pool.default) this.monitor(pool.name);
    }
  }
}
