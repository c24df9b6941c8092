/** The button that opens a run's tab: in a run's live view, and in the saved form of an ended run. */

/** The command that opens a run's tab; its arguments are a run's `run_id` and `name`. */
export const OPEN_RUN = "sgpu-magic:open-run";
export const OPEN_RUN_LABEL = "Open in a tab";

/** The id and the name of a run. */
export interface RunReference {
  readonly run_id: string;
  readonly name: string;
}

/** To be called when the command is added: buttons that are drawn from then on are shown. */
export function announceRunTabs(): void {
  document.body.dataset["sgpuRunTabs"] = "";
}

export function hasRunTabs(): boolean {
  return document.body.dataset["sgpuRunTabs"] !== undefined;
}

/** Returns the attributes of the button. JupyterLab and Notebook 7 execute their command when it is clicked. */
export function openRunAttributes({ run_id, name }: RunReference): Readonly<Record<string, string>> {
  return {
    type: "button",
    class: "sgpu-open-run",
    title: "Its code, options, environment, files and MLflow run",
    "data-commandlinker-command": OPEN_RUN,
    "data-commandlinker-args": JSON.stringify({ run_id, name }),
  };
}
