/** The JupyterLab and Notebook 7 plugin: a run is shown again after a reload of its page, whatever its kernel does. */
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from "@jupyterlab/application";
import { URLExt } from "@jupyterlab/coreutils";
import { INotebookTracker } from "@jupyterlab/notebook";
import { ServerConnection } from "@jupyterlab/services";

import { NotebookRuns } from "./notebook_runs";
import { RunServer } from "./run_server";

const plugin: JupyterFrontEndPlugin<void> = {
  id: "@sgpu-magic/labextension:runs",
  description: "Shows the runs of a notebook again after its page was reloaded.",
  autoStart: true,
  // an application without notebooks has no tracker
  optional: [INotebookTracker],
  activate: (app: JupyterFrontEnd, notebooks: INotebookTracker | null) => {
    if (!notebooks) return;
    const { serverSettings } = app.serviceManager;
    const server = new RunServer((path, init) =>
      ServerConnection.makeRequest(URLExt.join(serverSettings.baseUrl, path), init, serverSettings),
    );
    notebooks.forEach((panel) => new NotebookRuns(panel, server));
    notebooks.widgetAdded.connect((_, panel) => {
      new NotebookRuns(panel, server);
    });
  },
};

export default plugin;
