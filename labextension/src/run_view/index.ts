/** The run's view: anywidget's entry point, and `mountRunView` for other hosts. */
import { h } from "preact";

import { Activity } from "../shared/activity";
import { mountView } from "../shared/mount_view";
import type { WidgetModel } from "../shared/widget_requests";
import { App } from "./app";
import { RunModel } from "./run_model";
import css from "./run_view.css";
import type { Transport } from "./transport";
import { rememberSeen } from "./view_place";
import type { SeenRun } from "./view_place";
import { WidgetTransport } from "./widget_transport";

let views = 0;

/**
 * Draws a run into an element until `signal` aborts, which also disposes the transport.
 *
 * @param el: An empty element; it is emptied again when `signal` aborts.
 * @param transport: The source of the run's updates; not shared with another view.
 * @param seen: What another view showed of the run, which is shown until the first update; null without one.
 */
export function mountRunView(el: HTMLElement, transport: Transport, signal: AbortSignal, seen: SeenRun | null = null): void {
  if (signal.aborted) {
    transport.dispose();
    return;
  }
  mountView(el, signal, { css }, (root) => {
    const activity = new Activity(root, signal);
    const model = new RunModel(transport, activity, signal, seen);
    keepSeen(root, model, signal);
    return h(App, { model, activity, signal, id: `sgpu-${++views}` });
  });
}

/** Keeps what is in view of an active run, also after `signal` aborts. */
function keepSeen(root: HTMLElement, model: RunModel, signal: AbortSignal): void {
  if (typeof ResizeObserver !== "undefined") {
    const observer = new ResizeObserver(([entry]) => {
      // no height: the view was detached from the page
      const height_px = root.querySelector("article")?.offsetHeight ?? 0;
      if (entry && height_px > 0 && !model.isContinued && !model.snapshot?.final) model.place.height_px = height_px;
    });
    observer.observe(root);
    signal.addEventListener("abort", () => observer.disconnect(), { once: true });
  }
  let run = "";
  const remember = (): void => {
    if (run === "" && model.snapshot && !model.snapshot.final) {
      run = model.snapshot.run_id;
      rememberSeen(run, () => model.seen);
    }
  };
  model.subscribe(remember);
  signal.addEventListener(
    "abort",
    () => {
      // without the model, which holds pages of the log
      const { seen } = model;
      if (run !== "") rememberSeen(run, () => seen);
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
