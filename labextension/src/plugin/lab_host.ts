import type { JupyterFrontEnd } from "@jupyterlab/application";
import { NotebookActions } from "@jupyterlab/notebook";

import type { NotebookLink, PanelHost, Translate } from "../panel/host";
import type { RunRow } from "../panel/messages";
import { runLabel } from "../panel/format";
import type { LabNotebooks } from "./lab_notebooks";
import { connectLine } from "./magic_lines";
import type { PanelMemory } from "./memory";
import type { PanelSettings } from "./panel_settings";
import { PanelPools } from "./pool_connection";
import type { PoolConnection } from "./pool_connection";
import type { RunTabs } from "./run_tabs";

const NEW_NOTEBOOK = "notebook:create-new";

/** What the panel's host is made of. */
export interface HostParts {
  readonly app: JupyterFrontEnd;
  readonly connection: PoolConnection;
  readonly notebooks: LabNotebooks;
  readonly settings: PanelSettings;
  readonly memory: PanelMemory;
  readonly runs: RunTabs;
  readonly translate: Translate;
}

/** The panel's host in JupyterLab and Notebook 7. */
export class LabHost implements PanelHost {
  readonly pools: PanelPools;
  readonly translate: Translate;
  readonly storage: PanelMemory;
  readonly newNotebook: (() => void) | undefined;

  constructor(
    private readonly parts: HostParts,
    signal: AbortSignal,
  ) {
    const { app } = parts;
    this.pools = new PanelPools(parts.connection, signal);
    this.translate = parts.translate;
    this.storage = parts.memory;
    this.newNotebook = app.commands.hasCommand(NEW_NOTEBOOK)
      ? () => void app.commands.execute(NEW_NOTEBOOK, { activate: true })
      : undefined;
  }

  get settings(): { readonly showPrices: boolean } {
    return this.parts.settings.current;
  }

  get firstPool(): string {
    return this.parts.settings.current.defaultPool;
  }

  get notebook(): NotebookLink | null {
    return this.parts.notebooks.front;
  }

  onChange(callback: () => void): () => void {
    const unlisten = [this.parts.notebooks.onChange(callback), this.parts.settings.onChange(callback)];
    return () => unlisten.forEach((each) => each());
  }

  readonly openRun = (run: RunRow): void => {
    this.parts.runs.open({ run_id: run.run_id, name: runLabel(run) });
  };

  readonly attachRun = (run: RunRow): void => {
    this.runInNewCell(`%sgpu_attach ${run.short_id}`);
  };

  readonly replayRun = (run: RunRow): void => {
    this.runInNewCell(`%sgpu_replay ${run.short_id}`);
  };

  readonly connectRun = (session: RunRow): void => {
    const { picture, pools } = this.parts.connection.model;
    const usual = pools.find((pool) => pool.default)?.name ?? "";
    this.runInNewCell(connectLine(session, picture && picture.pool !== usual ? picture.pool : ""));
  };

  /** Runs a line in a new cell below the active one; the cell loads the extension first if necessary. */
  private runInNewCell(line: string): void {
    const { frontPanel, front } = this.parts.notebooks;
    if (!frontPanel || !front) return;
    const { content, sessionContext } = frontPanel;
    NotebookActions.insertBelow(content);
    const lines = front.isKnown ? [] : ["%load_ext sgpu_magic"];
    content.activeCell?.model.sharedModel.setSource([...lines, line].join("\n"));
    void NotebookActions.run(content, sessionContext);
  }
}
