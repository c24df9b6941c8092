/** anywidget's entry point of the panel: `%sgpu_env --panel` in VS Code, Colab and wherever there is no sidebar. */
import type { WidgetModel } from "../shared/widget_requests";
import { mountPanel } from "./index";
import { WidgetPanelHost } from "./widget_host";

interface RenderProps {
  readonly model: WidgetModel;
  readonly el: HTMLElement;
  readonly signal?: AbortSignal;
}

/** Draws the widget; the returned function ends the view, for hosts that give no signal. */
function render({ model, el, signal }: RenderProps): () => void {
  const end = new AbortController();
  signal?.addEventListener("abort", () => end.abort(), { signal: end.signal });
  el.classList.add("sgpu-panel-below");
  mountPanel(el, new WidgetPanelHost(model, end.signal), end.signal);
  return () => end.abort();
}

export default { render };
