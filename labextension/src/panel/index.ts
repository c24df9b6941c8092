/** The environment panel: `mountPanel` for JupyterLab's sidebar and for the widget. */
import { h } from "preact";

import { Activity } from "../shared/activity";
import { mountView } from "../shared/mount_view";
import { App } from "./app";
import type { PanelHost } from "./host";
import { PanelModel } from "./model";
import css from "./panel.css";

/**
 * Draws the panel into an element until `signal` aborts.
 *
 * @param el: An empty element; it is emptied again when `signal` aborts.
 */
export function mountPanel(el: HTMLElement, host: PanelHost, signal: AbortSignal): void {
  if (signal.aborted) return;
  mountView(el, signal, { css, className: "sgpu-root sgpu-panel-root" }, (root) => {
    const model = new PanelModel(host, new Activity(root, signal), signal);
    return h(App, { model });
  });
}
