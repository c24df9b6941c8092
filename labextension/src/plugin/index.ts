/** Plugins for JupyterLab and Notebook 7: runs restored after a page reload, outputs of runs, and the panel. */
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from "@jupyterlab/application";
import { INotebookTracker } from "@jupyterlab/notebook";

import { handleFailedLineClicks } from "./failed_lines";
import { NotebookRuns } from "./notebook_runs";
import outputs from "./outputs.css";
import { panelPlugin } from "./panel_plugin";
import { RunServer } from "./run_server";
import { createRequest } from "./server_requests";

const runsPlugin: JupyterFrontEndPlugin<void> = {
  id: "@sgpu-magic/labextension:runs",
  description: "Shows the runs of a notebook again after its page was reloaded.",
  autoStart: true,
  // an application without notebooks has no tracker
  optional: [INotebookTracker],
  activate: (app: JupyterFrontEnd, notebooks: INotebookTracker | null) => {
    if (!notebooks) return;
    const server = new RunServer(createRequest(app.serviceManager.serverSettings));
    notebooks.forEach((panel) => new NotebookRuns(panel, server));
    notebooks.widgetAdded.connect((_, panel) => {
      new NotebookRuns(panel, server);
    });
  },
};

const outputsPlugin: JupyterFrontEndPlugin<void> = {
  id: "@sgpu-magic/labextension:outputs",
  description: "Shows the displays of a run's ranks side by side, and goes to the line that failed.",
  autoStart: true,
  optional: [INotebookTracker],
  activate: (_: JupyterFrontEnd, notebooks: INotebookTracker | null) => {
    if (notebooks) handleFailedLineClicks(notebooks);
    const style = document.createElement("style");
    style.textContent = outputs;
    document.head.append(style);
  },
};

export default [runsPlugin, outputsPlugin, panelPlugin];
