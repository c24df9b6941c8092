/** anywidget's entry point for the panel: `%sgpu_env --panel` in front ends without a sidebar, such as VS Code and Colab. */
import type { WidgetModel } from "../shared/widget_requests";
import { mountPanel } from "./index";
import { WidgetPanelHost } from "./widget_host";

interface RenderProps {
  readonly model: WidgetModel;
  readonly el: HTMLElement;
  readonly signal?: AbortSignal;
}

/** Draws the widget. Returns a function that ends the view, for hosts without an abort signal. */
function render({ model, el, signal }: RenderProps): () => void {
  const controller = new AbortController();
  signal?.addEventListener("abort", () => controller.abort(), { signal: controller.signal });
  el.classList.add("sgpu-panel-below");
  mountPanel(el, new WidgetPanelHost(model, controller.signal), controller.signal);
  return () => controller.abort();
}

export default { render };
