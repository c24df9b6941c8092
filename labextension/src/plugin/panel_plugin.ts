/** The environment panel in JupyterLab's and Notebook 7's left area, with its commands and its toolbar buttons. */
import { ILabShell, ILayoutRestorer } from "@jupyterlab/application";
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from "@jupyterlab/application";
import { ICommandPalette, ISessionContextDialogs, IToolbarWidgetRegistry } from "@jupyterlab/apputils";
import { INotebookTracker } from "@jupyterlab/notebook";
import { ISettingRegistry } from "@jupyterlab/settingregistry";
import { IStateDB } from "@jupyterlab/statedb";
import { ITranslator, nullTranslator } from "@jupyterlab/translation";

import { runLabel } from "../panel/format";
import type { RunRow } from "../panel/messages";
import { OPEN_RUN, announceRunTabs } from "../shared/open_run";
import type { RunReference } from "../shared/open_run";
import { Chips } from "./chips";
import { EndNotifications } from "./end_notifications";
import { gpuIcon } from "./icon";
import { LabHost } from "./lab_host";
import { LabNotebooks } from "./lab_notebooks";
import { PanelStorage } from "./panel_storage";
import { PanelActions } from "./panel_actions";
import { PanelSettings, SCHEMA } from "./panel_settings";
import { PoolConnection } from "./pool_connection";
import { RunTabs } from "./run_tabs";
import { RunServer } from "./run_server";
import { createLocate, createRequest, openSocket } from "./server_requests";
import { Sidebar } from "./sidebar";
import { createTranslate } from "./translation";

const commands = {
  open: "sgpu-magic:open-panel",
  connect: "sgpu-magic:connect",
  disconnect: "sgpu-magic:disconnect",
  cancel: "sgpu-magic:cancel-runs",
  openRun: OPEN_RUN,
  compareRuns: "sgpu-magic:compare-runs",
} as const;

/** The toolbar item's name in `schema/panel.json`. */
const CHIP = "sgpu-session";

export const panelPlugin: JupyterFrontEndPlugin<void> = {
  id: SCHEMA,
  description: "The environment panel: GPUs, packages, session, devices and runs of the current notebook.",
  autoStart: true,
  optional: [
    ITranslator,
    INotebookTracker,
    ILabShell,
    ILayoutRestorer,
    ICommandPalette,
    IToolbarWidgetRegistry,
    ISettingRegistry,
    IStateDB,
    ISessionContextDialogs,
  ],
  activate: (
    app: JupyterFrontEnd,
    translator: ITranslator | null,
    tracker: INotebookTracker | null,
    labShell: ILabShell | null,
    restorer: ILayoutRestorer | null,
    palette: ICommandPalette | null,
    toolbars: IToolbarWidgetRegistry | null,
    registry: ISettingRegistry | null,
    state: IStateDB | null,
    dialogs: ISessionContextDialogs | null,
  ) => {
    const texts = (translator ?? nullTranslator).load("sgpu_magic");
    const t = createTranslate(texts);
    const { serverSettings } = app.serviceManager;
    const request = createRequest(serverSettings);
    const page = new AbortController();
    const server = { open: (path: string) => openSocket(serverSettings, path), request };
    const connection = new PoolConnection(server, page.signal);
    const settings = new PanelSettings();
    const storage = new PanelStorage(state);
    const notebooks = new LabNotebooks(tracker, dialogs);
    const runs = new RunTabs(app, new RunServer(request, createLocate(serverSettings)), labShell ? "main" : "down");

    settings.onChange(() => {
      connection.pollInterval_ms = 1_000 * settings.current.refresh_s;
      connection.defaultPool = settings.current.defaultPool;
    });
    const ready = Promise.all([settings.load(registry), storage.load()]);

    const endNotifications = {
      server,
      settings,
      translate: t,
      kernelIds: () => notebooks.kernelIds,
      openRun: (run: RunRow) => runs.open({ run_id: run.run_id, name: runLabel(run) }),
    };
    void ready.then(() => new EndNotifications(endNotifications, page.signal));

    const options = { app, connection, notebooks, settings, storage, runs, translate: t };
    const sidebar = new Sidebar(
      (signal) => new LabHost(options, signal),
      ready,
      (isVisible) => notebooks.setPanelVisible(isVisible),
      t("GPU environment"),
    );
    app.shell.add(sidebar, "left", { rank: 300 });
    restorer?.add(sidebar, sidebar.id);
    const openPanel = (): void => app.shell.activateById(sidebar.id);

    const actions = new PanelActions(notebooks, connection, t, openPanel);
    app.commands.addCommand(commands.open, {
      label: t("GPU Environment"),
      caption: t("Open the GPU environment"),
      icon: gpuIcon,
      execute: openPanel,
    });
    app.commands.addCommand(commands.connect, {
      label: t("Connect GPUs"),
      caption: t("Connect a session with what this notebook asks for"),
      isEnabled: () => actions.hasNotebook,
      execute: () => actions.connect(),
    });
    app.commands.addCommand(commands.disconnect, {
      label: t("End GPU Session"),
      caption: t("End this notebook's session"),
      isEnabled: () => actions.hasNotebook,
      execute: () => actions.disconnect(),
    });
    app.commands.addCommand(commands.cancel, {
      label: t("End This Notebook's Runs"),
      isEnabled: () => actions.hasNotebook,
      execute: () => actions.endRuns(),
    });
    announceRunTabs();
    app.commands.addCommand(commands.openRun, {
      label: (args) => (typeof args["name"] === "string" ? args["name"] : t("Open a run")),
      execute: (args) => {
        const run = readRun(args);
        if (run) runs.open(run);
      },
    });
    app.commands.addCommand(commands.compareRuns, {
      label: t("Compare two runs"),
      execute: ({ runs: compared }) => {
        const [first, second] = Array.isArray(compared) ? compared.map(readRun) : [];
        if (first && second) runs.compare(first, second);
      },
    });
    if (restorer) runs.restore(restorer, commands.openRun, commands.compareRuns);
    const category = t("GPU");
    for (const command of [commands.open, commands.connect, commands.disconnect, commands.cancel]) {
      palette?.addItem({ command, category });
    }

    if (toolbars) {
      const chips = new Chips({ connection, settings, translate: t, alwaysVisible: !labShell, openPanel });
      toolbars.addFactory("Notebook", CHIP, chips.create);
    }
  },
};

/** Returns the run that a command's arguments name, null if they name none. */
function readRun(value: unknown): RunReference | null {
  const { run_id, name } = (value ?? {}) as { readonly run_id?: unknown; readonly name?: unknown };
  return typeof run_id === "string" ? { run_id, name: typeof name === "string" ? name : run_id } : null;
}
