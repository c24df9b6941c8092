import type { Cell, CodeCell } from "@jupyterlab/cells";
import type { NotebookPanel } from "@jupyterlab/notebook";

import { LiveViews } from "./live_views";
import { mentioned, missing } from "./outputs";
import { isFollowed, RestoredRun } from "./restored_run";
import type { Reason } from "./restored_run";
import type { OwnedRun, RunServer } from "./run_server";

const RESTARTING = new Set(["restarting", "autorestarting"]);

/**
 * Restores the runs in a notebook's cells after a page reload, after the notebook is reopened, or after a kernel
 * restart. Ends when the notebook's panel is disposed.
 */
export class NotebookRuns {
  private readonly end = new AbortController();
  private readonly views: LiveViews;
  private readonly restored = new Map<CodeCell, RestoredRun>();
  private isRestarting = false;

  constructor(
    private readonly panel: NotebookPanel,
    private readonly server: RunServer,
  ) {
    this.views = new LiveViews(server);
    panel.content.rendermime.addFactory(this.views.factory);
    const context = panel.sessionContext;
    const kernelChanged = (): void => void this.restore("loaded");
    const statusChanged = (_: unknown, status: string): void => this.statusChanged(status);
    context.kernelChanged.connect(kernelChanged);
    context.statusChanged.connect(statusChanged);
    panel.disposed.connect(() => this.end.abort());
    this.end.signal.addEventListener("abort", () => {
      context.kernelChanged.disconnect(kernelChanged);
      context.statusChanged.disconnect(statusChanged);
      this.restored.clear();
    });
    void Promise.all([panel.context.ready, context.ready]).then(() => this.restore("loaded"));
  }

  private statusChanged(status: string): void {
    if (RESTARTING.has(status)) this.isRestarting = true;
    else if (this.isRestarting) {
      this.isRestarting = false;
      void this.restore("restarted");
    }
  }

  private async restore(reason: Reason): Promise<void> {
    const kernel = this.panel.sessionContext.session?.kernel?.id;
    let runs: readonly OwnedRun[] = [];
    try {
      runs = kernel === undefined ? [] : await this.server.runs(kernel, this.end.signal);
    } catch {
      // the server has no extension or can't be reached: the notebook stays as it is
      return;
    }
    if (this.end.signal.aborted) return;
    // the runs are sorted, oldest first: this keeps the newest of each cell
    const submitted = new Map(runs.map((run) => [run.cell, run]));
    const saved_s = Date.parse(this.panel.context.contentsModel?.last_modified ?? "") / 1000 || 0;
    for (const cell of this.panel.content.widgets) {
      if (isCode(cell)) this.restoreCell(cell, submitted.get(cell.model.id) ?? null, saved_s, reason);
    }
  }

  private restoreCell(cell: CodeCell, submitted: OwnedRun | null, saved_s: number, reason: Reason): void {
    if (isFollowed(cell)) return;
    const before = this.restored.get(cell);
    if (before && !before.isOver) return;
    const shown = mentioned(cell.model.outputs.toJSON());
    const found = missing(shown, submitted, saved_s);
    if (!found) return;
    const { model } = this.panel.context;
    const restored = new RestoredRun(cell, model, found, reason, this.server, this.views, this.end.signal);
    this.restored.set(cell, restored);
    void restored.show();
  }
}

function isCode(cell: Cell): cell is CodeCell {
  return cell.model.type === "code";
}
