/** The run's view: anywidget's entry point, and `mountRunView` for other hosts. */
import { h } from "preact";

import { Activity } from "../shared/activity";
import { mountView } from "../shared/mount_view";
import type { WidgetModel } from "../shared/widget_requests";
import { App } from "./app";
import { RunModel } from "./run_model";
import css from "./run_view.css";
import type { Transport } from "./transport";
import { registerViewState } from "./view_state";
import type { ViewState } from "./view_state";
import { WidgetTransport } from "./widget_transport";

let views = 0;

/**
 * Draws a run into an element until `signal` aborts, which also disposes the transport.
 *
 * @param el: An empty element; it is emptied again when `signal` aborts.
 * @param transport: The source of the run's updates; not shared with another view.
 * @param previous: The state of an earlier view of the run, which is shown until the first update; null without one.
 */
export function mountRunView(el: HTMLElement, transport: Transport, signal: AbortSignal, previous: ViewState | null = null): void {
  if (signal.aborted) {
    transport.dispose();
    return;
  }
  mountView(el, signal, { css }, (root) => {
    const activity = new Activity(root, signal);
    const model = new RunModel(transport, activity, signal, previous);
    keepViewState(root, model, signal);
    return h(App, { model, activity, signal, id: `sgpu-${++views}` });
  });
}

/** Keeps the view state of an active run, also after `signal` aborts. */
function keepViewState(root: HTMLElement, model: RunModel, signal: AbortSignal): void {
  if (typeof ResizeObserver !== "undefined") {
    const observer = new ResizeObserver(([entry]) => {
      // a view without a height was detached from the page
      const height_px = root.querySelector("article")?.offsetHeight ?? 0;
      if (entry && height_px > 0 && !model.isContinued && !model.snapshot?.final) model.position.height_px = height_px;
    });
    observer.observe(root);
    signal.addEventListener("abort", () => observer.disconnect(), { once: true });
  }
  let run = "";
  const register = (): void => {
    if (run === "" && model.snapshot && !model.snapshot.final) {
      run = model.snapshot.run_id;
      registerViewState(run, () => model.viewState);
    }
  };
  model.subscribe(register);
  signal.addEventListener(
    "abort",
    () => {
      // release the model, which holds pages of the log
      const { viewState } = model;
      if (run !== "") registerViewState(run, () => viewState);
    },
    { once: true },
  );
}

interface RenderProps {
  readonly model: WidgetModel;
  readonly el: HTMLElement;
  readonly signal?: AbortSignal;
}

/** Draws a widget. Returns a function that ends the view, for hosts without an abort signal. */
function render({ model, el, signal }: RenderProps): () => void {
  const controller = new AbortController();
  signal?.addEventListener("abort", () => controller.abort(), { signal: controller.signal });
  mountRunView(el, new WidgetTransport(model), controller.signal);
  return () => controller.abort();
}

/**
 * Sends a hello for a view that is not drawn yet, such as one in a cell that is scrolled out of view. Without a hello,
 * the kernel assumes that the front end can't draw the view.
 */
function initialize({ model }: { readonly model: WidgetModel }): void {
  const transport = new WidgetTransport(model);
  const end = (): void => transport.dispose();
  transport.ask({ kind: "hello", over: transport.kind }).then(end, end);
}

export default { initialize, render };
