import type { JupyterFrontEnd } from "@jupyterlab/application";
import { NotebookActions } from "@jupyterlab/notebook";

import type { NotebookLink, PanelHost, Translate } from "../panel/host";
import type { RunRow } from "../panel/messages";
import type { LabNotebooks } from "./lab_notebooks";
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

/** JupyterLab, or Notebook 7, as the panel's place. */
export class LabHost implements PanelHost {
  readonly pools: PanelPools;
  readonly translate: Translate;
  readonly memory: PanelMemory;
  readonly newNotebook: (() => void) | undefined;

  constructor(
    private readonly parts: HostParts,
    signal: AbortSignal,
  ) {
    const { app } = parts;
    this.pools = new PanelPools(parts.connection, signal);
    this.translate = parts.translate;
    this.memory = parts.memory;
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
    this.parts.runs.open({ run_id: run.run_id, name: run.name });
  };

  readonly attachRun = (run: RunRow): void => {
    const { frontPanel, front } = this.parts.notebooks;
    if (!frontPanel || !front) return;
    const { content, sessionContext } = frontPanel;
    NotebookActions.insertBelow(content);
    const lines = front.isKnown ? [] : ["%load_ext sgpu_magic"];
    content.activeCell?.model.sharedModel.setSource([...lines, `%sgpu_attach ${run.short_id}`].join("\n"));
    void NotebookActions.run(content, sessionContext);
  };
}
