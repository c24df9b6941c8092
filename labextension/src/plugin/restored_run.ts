import type { CodeCell } from "@jupyterlab/cells";
import type { IOutput } from "@jupyterlab/nbformat";

import type { LiveViews } from "./live_views";
import { liveOutput, restartedOutput, viewNumber, LIVE_MIME } from "./outputs";
import type { MissingRun } from "./outputs";
import { sleep, RunFeed } from "./run_feed";
import { ServerError } from "./run_server";
import type { CellOutput, CellOutputs, RunServer } from "./run_server";

const RETRY_MS = 2_000;
const STILL_ACTIVE_STATUS = 409;

/** Why a run is restored: the page was loaded, or the kernel restarted. */
export type RestoreReason = "loaded" | "restarted";

/**
 * Shows a run in a cell whose execution this page does not follow: first its live view, then the cell's final outputs.
 *
 * Only the final outputs mark the notebook as changed. The restoration ends when they are shown, when other code clears
 * or writes the cell's outputs, or when the signal aborts.
 */
export class RestoredRun {
  private readonly controller = new AbortController();
  private readonly view: number;
  private isWriting = false;

  constructor(
    private readonly cell: CodeCell,
    private readonly document: { dirty: boolean },
    private readonly missing: MissingRun,
    private readonly reason: RestoreReason,
    private readonly server: RunServer,
    private readonly views: LiveViews,
    signal: AbortSignal,
  ) {
    this.view = views.allocateView();
    const { signal: ended } = this.controller;
    const stop = (): void => this.controller.abort();
    if (signal.aborted) stop();
    signal.addEventListener("abort", stop, { signal: ended });
    cell.disposed.connect(stop);
    cell.model.outputs.changed.connect(this.onOutputsChange);
    ended.addEventListener("abort", () => {
      cell.disposed.disconnect(stop);
      if (!cell.isDisposed) cell.model.outputs.changed.disconnect(this.onOutputsChange);
    });
  }

  private get run(): string {
    return this.missing.run;
  }

  get isOver(): boolean {
    return this.controller.signal.aborted;
  }

  /** Shows the run until the restoration ends. */
  async show(): Promise<void> {
    try {
      const outputs = this.missing.isActive ? null : await this.requestFinal();
      if (outputs) this.showFinal(outputs);
      else await this.showLive();
    } catch (error) {
      // keep the saved cell if the server refuses or no longer has the run
      if (!this.isOver && !(error instanceof ServerError)) throw error;
    } finally {
      this.controller.abort();
    }
  }

  /** Returns the cell's final outputs, null while the run is active. Retries when the server can't be reached. */
  private async requestFinal(): Promise<CellOutputs | null> {
    for (;;) {
      try {
        return await this.server.outputs(this.run, this.controller.signal);
      } catch (error) {
        if (this.isOver) throw error;
        if (error instanceof ServerError && error.status === STILL_ACTIVE_STATUS) return null;
        if (error instanceof ServerError && error.status < 500) throw error;
        await sleep(RETRY_MS, this.controller.signal);
      }
    }
  }

  private async showLive(): Promise<void> {
    const feed = new RunFeed(this.server, this.run, this.controller.signal);
    this.views.open(this.view, feed);
    feed.addListener({ onDisplay: () => void this.showDisplays() });
    this.withoutMarkingDirty(() => {
      this.write([liveOutput(this.run, this.view)]);
      if (this.missing.blocks) this.cell.model.executionState = "running";
    });
    await feed.poll();
    if (this.isOver) return;
    if (feed.isFinal) {
      const outputs = await this.requestFinal();
      if (outputs) this.showFinal(outputs);
    }
    // keep the view, which shows why the feed has ended
    else await new Promise((resolve) => this.controller.signal.addEventListener("abort", resolve, { once: true }));
  }

  private showFinal(final: CellOutputs): void {
    if (this.isOver) return;
    const outputs = this.reason === "restarted" ? [...final.outputs, restartedOutput(this.run)] : final.outputs;
    this.write(outputs);
    this.cell.model.executionCount = final.execution_count;
    // needed, because the execution count may not have changed
    this.cell.model.executionState = "idle";
  }

  private async showDisplays(): Promise<void> {
    let displays: CellOutputs;
    try {
      displays = await this.server.displays(this.run, this.controller.signal);
    } catch {
      // requested again at the next display and at the run's end
      return;
    }
    if (!this.isOver) this.withoutMarkingDirty(() => this.writeDisplays(displays.outputs));
  }

  private writeDisplays(displays: readonly CellOutput[]): void {
    const { outputs } = this.cell.model;
    if (displays.length < outputs.length - 1) {
      this.write([liveOutput(this.run, this.view), ...displays]);
      return;
    }
    // replace changed outputs only, so that the live view is not rendered again
    displays.forEach((output, index) => {
      // the live view is the first output
      const position = index + 1;
      if (position >= outputs.length) outputs.add(output as IOutput);
      else if (JSON.stringify(outputs.get(position).toJSON()) !== JSON.stringify(output)) outputs.set(position, output as IOutput);
    });
  }

  /** Writes temporary outputs without marking the notebook as changed, because other pages may have it open too. */
  private withoutMarkingDirty(write: () => void): void {
    const { dirty } = this.document;
    write();
    this.document.dirty = dirty;
  }

  private write(outputs: readonly CellOutput[]): void {
    const { model } = this.cell;
    this.isWriting = true;
    // the outputs come from the user's own execution, like those that the kernel sends
    model.trusted = true;
    model.outputs.fromJSON(outputs as unknown as IOutput[]);
    this.isWriting = false;
  }

  /** Ends the restoration if the outputs were cleared, or replaced by another execution. */
  private readonly onOutputsChange = (): void => {
    if (this.isWriting) return;
    const { outputs } = this.cell.model;
    for (let at = 0; at < outputs.length; at++) {
      if (viewNumber(outputs.get(at).data[LIVE_MIME]) === this.view) return;
    }
    if (this.cell.model.executionState === "running" && !isFollowed(this.cell)) this.cell.model.executionState = "idle";
    this.controller.abort();
  };

}

/** Returns whether this page receives the kernel's messages about the cell's execution. */
export function isFollowed(cell: CodeCell): boolean {
  const future = cell.outputArea.future as { isDisposed: boolean } | null | undefined;
  return future ? !future.isDisposed : false;
}
