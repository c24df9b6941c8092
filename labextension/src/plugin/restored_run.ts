import type { CodeCell } from "@jupyterlab/cells";
import type { IOutput } from "@jupyterlab/nbformat";

import type { LiveViews } from "./live_views";
import { liveOutput, restartedOutput, viewOf, LIVE_MIME } from "./outputs";
import type { Missing } from "./outputs";
import { paused, RunFeed } from "./run_feed";
import { Refused } from "./run_server";
import type { CellOutput, CellOutputs, RunServer } from "./run_server";

const RETRY_MS = 2_000;
const GOES_ON = 409;

/** Why a run is shown through the server. */
export type Reason = "loaded" | "restarted";

/**
 * Shows a run in a cell whose execution this page does not follow: first its live view, then the cell's final outputs.
 *
 * Only the final outputs mark the notebook as changed. Ends when they are shown, when other code clears or writes the
 * cell's outputs, or with the signal.
 */
export class RestoredRun {
  private readonly end = new AbortController();
  private readonly view: number;
  private writing = false;

  constructor(
    private readonly cell: CodeCell,
    private readonly document: { dirty: boolean },
    private readonly missing: Missing,
    private readonly reason: Reason,
    private readonly server: RunServer,
    private readonly views: LiveViews,
    signal: AbortSignal,
  ) {
    this.view = views.newView();
    const { signal: ended } = this.end;
    const stop = (): void => this.end.abort();
    if (signal.aborted) stop();
    signal.addEventListener("abort", stop, { signal: ended });
    cell.disposed.connect(stop);
    cell.model.outputs.changed.connect(this.outputsChanged);
    ended.addEventListener("abort", () => {
      cell.disposed.disconnect(stop);
      if (!cell.isDisposed) cell.model.outputs.changed.disconnect(this.outputsChanged);
    });
  }

  private get run(): string {
    return this.missing.run;
  }

  get isOver(): boolean {
    return this.end.signal.aborted;
  }

  /** Shows the run until `isOver`. */
  async show(): Promise<void> {
    try {
      const outputs = this.missing.isActive ? null : await this.final();
      if (outputs) this.finish(outputs);
      else await this.live();
    } catch (error) {
      // the server refuses, or no longer has the run: the cell stays as it was saved
      if (!this.isOver && !(error instanceof Refused)) throw error;
    } finally {
      this.end.abort();
    }
  }

  /** Returns the cell's final outputs, null while the run is active. Retries when the server can't be reached. */
  private async final(): Promise<CellOutputs | null> {
    for (;;) {
      try {
        return await this.server.outputs(this.run, this.end.signal);
      } catch (error) {
        if (this.isOver) throw error;
        if (error instanceof Refused && error.status === GOES_ON) return null;
        if (error instanceof Refused && error.status < 500) throw error;
        await paused(RETRY_MS, this.end.signal);
      }
    }
  }

  private async live(): Promise<void> {
    const feed = new RunFeed(this.server, this.run, this.end.signal);
    this.views.open(this.view, feed);
    feed.listen({ displayed: () => void this.showDisplays() });
    this.unsaved(() => {
      this.write([liveOutput(this.run, this.view)]);
      if (this.missing.blocks) this.cell.model.executionState = "running";
    });
    await feed.follow();
    if (this.isOver) return;
    if (feed.isFinal) {
      const outputs = await this.final();
      if (outputs) this.finish(outputs);
    }
    // otherwise the view stays, and shows why the feed has ended
    else await new Promise((resolve) => this.end.signal.addEventListener("abort", resolve, { once: true }));
  }

  private finish(final: CellOutputs): void {
    if (this.isOver) return;
    const outputs = this.reason === "restarted" ? [...final.outputs, restartedOutput(this.run)] : final.outputs;
    this.write(outputs);
    this.cell.model.executionCount = final.execution_count;
    // set explicitly: the execution count may be the same as before
    this.cell.model.executionState = "idle";
  }

  private async showDisplays(): Promise<void> {
    let found: CellOutputs;
    try {
      found = await this.server.displays(this.run, this.end.signal);
    } catch {
      // retried with the next display, or at the run's end
      return;
    }
    if (!this.isOver) this.unsaved(() => this.writeDisplays(found.outputs));
  }

  private writeDisplays(displays: readonly CellOutput[]): void {
    const { outputs } = this.cell.model;
    if (displays.length < outputs.length - 1) {
      this.write([liveOutput(this.run, this.view), ...displays]);
      return;
    }
    // one by one, so that the live view is not rendered again
    displays.forEach((output, index) => {
      const at = index + 1;
      if (at >= outputs.length) outputs.add(output as IOutput);
      else if (JSON.stringify(outputs.get(at).toJSON()) !== JSON.stringify(output)) outputs.set(at, output as IOutput);
    });
  }

  /** Writes without marking the notebook as changed: these outputs are temporary, and other pages may have it open. */
  private unsaved(write: () => void): void {
    const { dirty } = this.document;
    write();
    this.document.dirty = dirty;
  }

  private write(outputs: readonly CellOutput[]): void {
    const { model } = this.cell;
    this.writing = true;
    // the outputs come from the user's own execution, like those from the kernel
    model.trusted = true;
    model.outputs.fromJSON(outputs as unknown as IOutput[]);
    this.writing = false;
  }

  /** Ends when the outputs were cleared, or replaced by another execution. */
  private readonly outputsChanged = (): void => {
    if (this.writing) return;
    const { outputs } = this.cell.model;
    for (let at = 0; at < outputs.length; at++) {
      if (viewOf(outputs.get(at).data[LIVE_MIME]) === this.view) return;
    }
    if (this.cell.model.executionState === "running" && !this.isFollowed) this.cell.model.executionState = "idle";
    this.end.abort();
  };

  private get isFollowed(): boolean {
    return isFollowed(this.cell);
  }
}

/** Whether this page follows the cell's execution, that is, receives the kernel's messages about it. */
export function isFollowed(cell: CodeCell): boolean {
  const future = cell.outputArea.future as { isDisposed: boolean } | null | undefined;
  return future ? !future.isDisposed : false;
}
