import type { Cell, CodeCell } from "@jupyterlab/cells";
import type { NotebookPanel } from "@jupyterlab/notebook";

import { endedRunFactory } from "./ended_runs";
import { LiveViews } from "./live_views";
import { findShownRun, findMissingRun } from "./outputs";
import { isFollowed, RestoredRun } from "./restored_run";
import type { RestoreReason } from "./restored_run";
import type { SubmittedRun, RunServer } from "./run_server";

const RESTARTING = new Set(["restarting", "autorestarting"]);

/**
 * Restores the runs in a notebook's cells after a page reload, after the notebook is reopened, or after a kernel
 * restart. Ends when the notebook's panel is disposed.
 */
export class NotebookRuns {
  private readonly controller = new AbortController();
  private readonly views: LiveViews;
  private readonly restoredRuns = new Map<CodeCell, RestoredRun>();
  private isRestarting = false;

  constructor(
    private readonly panel: NotebookPanel,
    private readonly server: RunServer,
  ) {
    this.views = new LiveViews(server);
    const { rendermime } = panel.content;
    rendermime.addFactory(this.views.factory);
    rendermime.addFactory(endedRunFactory(server, (mimeType) => rendermime.createRenderer(mimeType)));
    const context = panel.sessionContext;
    const onKernelChange = (): void => void this.restore("loaded");
    const onStatus = (_: unknown, status: string): void => this.onStatus(status);
    context.kernelChanged.connect(onKernelChange);
    context.statusChanged.connect(onStatus);
    panel.disposed.connect(() => this.controller.abort());
    this.controller.signal.addEventListener("abort", () => {
      context.kernelChanged.disconnect(onKernelChange);
      context.statusChanged.disconnect(onStatus);
      this.restoredRuns.clear();
    });
    void Promise.all([panel.context.ready, context.ready]).then(() => this.restore("loaded"));
  }

  private onStatus(status: string): void {
    if (RESTARTING.has(status)) this.isRestarting = true;
    else if (this.isRestarting) {
      this.isRestarting = false;
      void this.restore("restarted");
    }
  }

  private async restore(reason: RestoreReason): Promise<void> {
    const kernel = this.panel.sessionContext.session?.kernel?.id;
    let runs: readonly SubmittedRun[] = [];
    try {
      runs = kernel === undefined ? [] : await this.server.runs(kernel, this.controller.signal);
    } catch {
      // the server has no extension or can't be reached, so the notebook stays as it is
      return;
    }
    if (this.controller.signal.aborted) return;
    // the runs are sorted oldest first, so this keeps the newest of each cell
    const submitted = new Map(runs.map((run) => [run.cell, run]));
    const saved_s = Date.parse(this.panel.context.contentsModel?.last_modified ?? "") / 1000 || 0;
    for (const cell of this.panel.content.widgets) {
      if (isCode(cell)) this.restoreCell(cell, submitted.get(cell.model.id) ?? null, saved_s, reason);
    }
  }

  private restoreCell(cell: CodeCell, submitted: SubmittedRun | null, saved_s: number, reason: RestoreReason): void {
    if (isFollowed(cell)) return;
    const previous = this.restoredRuns.get(cell);
    if (previous && !previous.isOver) return;
    const shown = findShownRun(cell.model.outputs.toJSON());
    const found = findMissingRun(shown, submitted, saved_s);
    if (!found) return;
    const { model } = this.panel.context;
    const restored = new RestoredRun(cell, model, found, reason, this.server, this.views, this.controller.signal);
    this.restoredRuns.set(cell, restored);
    void restored.show();
  }
}

function isCode(cell: Cell): cell is CodeCell {
  return cell.model.type === "code";
}
