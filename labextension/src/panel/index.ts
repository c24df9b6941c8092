/** The environment panel: `mountPanel` for JupyterLab's sidebar and for the widget. */
import { h, render as draw } from "preact";

import { Activity } from "../shared/activity";
import theme from "../shared/theme.css";
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
  const style = document.createElement("style");
  style.textContent = theme + css;
  const root = document.createElement("div");
  root.className = "sgpu-root sgpu-panel-root";
  root.dataset["lmSuppressShortcuts"] = "true";
  el.append(style, root);
  const model = new PanelModel(host, new Activity(root, signal), signal);
  draw(h(App, { model }), root);
  signal.addEventListener(
    "abort",
    () => {
      draw(null, root);
      root.remove();
      style.remove();
    },
    { once: true },
  );
}
