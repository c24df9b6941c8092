import type { JupyterFrontEnd } from "@jupyterlab/application";
import { NotebookActions } from "@jupyterlab/notebook";

import type { NotebookLink, PanelHost, Translate } from "../panel/host";
import type { RunRow } from "../panel/messages";
import { runLabel } from "../panel/format";
import type { LabNotebooks } from "./lab_notebooks";
import { connectLine } from "./magic_lines";
import type { PanelStorage } from "./panel_storage";
import type { PanelSettings } from "./panel_settings";
import { PanelPools } from "./pool_connection";
import type { PoolConnection } from "./pool_connection";
import type { RunTabs } from "./run_tabs";

const NEW_NOTEBOOK = "notebook:create-new";

/** The services of the page that the panel's host uses. */
export interface HostOptions {
  readonly app: JupyterFrontEnd;
  readonly connection: PoolConnection;
  readonly notebooks: LabNotebooks;
  readonly settings: PanelSettings;
  readonly storage: PanelStorage;
  readonly runs: RunTabs;
  readonly translate: Translate;
}

/** The panel's host in JupyterLab and Notebook 7. */
export class LabHost implements PanelHost {
  readonly pools: PanelPools;
  readonly translate: Translate;
  readonly storage: PanelStorage;
  readonly newNotebook: (() => void) | undefined;

  constructor(
    private readonly options: HostOptions,
    signal: AbortSignal,
  ) {
    const { app } = options;
    this.pools = new PanelPools(options.connection, signal);
    this.translate = options.translate;
    this.storage = options.storage;
    this.newNotebook = app.commands.hasCommand(NEW_NOTEBOOK)
      ? () => void app.commands.execute(NEW_NOTEBOOK, { activate: true })
      : undefined;
  }

  get settings(): { readonly showPrices: boolean } {
    return this.options.settings.current;
  }

  get firstPool(): string {
    return this.options.settings.current.defaultPool;
  }

  get notebook(): NotebookLink | null {
    return this.options.notebooks.activeNotebook;
  }

  onChange(callback: () => void): () => void {
    const unsubscribe = [this.options.notebooks.onChange(callback), this.options.settings.onChange(callback)];
    return () => unsubscribe.forEach((each) => each());
  }

  readonly openRun = (run: RunRow): void => {
    this.options.runs.open({ run_id: run.run_id, name: runLabel(run) });
  };

  readonly compareRuns = (first: RunRow, second: RunRow): void => {
    const [one, other] = [first, second].map((run) => ({ run_id: run.run_id, name: run.name || run.short_id }));
    if (one && other) this.options.runs.compare(one, other);
  };

  readonly attachRun = (run: RunRow): void => {
    this.runInNewCell(`%sgpu_attach ${run.short_id}`);
  };

  readonly replayRun = (run: RunRow): void => {
    this.runInNewCell(`%sgpu_replay ${run.short_id}`);
  };

  readonly connectRun = (session: RunRow): void => {
    const { snapshot, pools } = this.options.connection.model;
    const defaultPool = pools.find((pool) => pool.default)?.name ?? "";
    this.runInNewCell(connectLine(session, snapshot && snapshot.pool !== defaultPool ? snapshot.pool : ""));
  };

  /** Runs a line in a new cell below the active one; the cell loads the extension first if necessary. */
  private runInNewCell(line: string): void {
    const { activePanel, activeNotebook } = this.options.notebooks;
    if (!activePanel || !activeNotebook) return;
    const { content, sessionContext } = activePanel;
    // a run's tab may be in front of the notebook
    this.options.app.shell.activateById(activePanel.id);
    NotebookActions.insertBelow(content);
    void content.scrollToItem(content.activeCellIndex);
    const lines = activeNotebook.isKnown ? [] : ["%load_ext sgpu_magic"];
    content.activeCell?.model.sharedModel.setSource([...lines, line].join("\n"));
    void NotebookActions.run(content, sessionContext);
  }
}
