/** A run's page below its live view, and the comparison of two runs' pages. */
import type { ComponentChild } from "preact";
import { h, render as draw } from "preact";

import { Activity } from "../shared/activity";
import theme from "../shared/theme.css";
import { Ticker } from "../shared/ticker";
import { RunPageApp } from "./app";
import { ComparisonApp } from "./comparison";
import type { PageServer, RunPageModel } from "./page_model";
import css from "./run_page.css";

/** Draws a run's page into an element until `signal` aborts. */
export function mountRunPage(el: HTMLElement, model: RunPageModel, signal: AbortSignal): void {
  mount(el, signal, (ticker) => h(RunPageApp, { model, ticker }));
}

/** Draws the comparison of two runs into an element until `signal` aborts. */
export function mountComparison(el: HTMLElement, runs: readonly [string, string], server: PageServer, signal: AbortSignal): void {
  mount(el, signal, () => h(ComparisonApp, { runs, server, signal }));
}

function mount(el: HTMLElement, signal: AbortSignal, make: (ticker: Ticker) => ComponentChild): void {
  const style = document.createElement("style");
  style.textContent = theme + css;
  // in the head, before the styles of run views in the page: the theme must not override theirs
  document.head.append(style);
  const root = document.createElement("div");
  root.className = "sgpu-root";
  root.dataset["lmSuppressShortcuts"] = "true";
  el.append(root);
  const ticker = new Ticker(() => Date.now() / 1000, new Activity(root, signal), signal);
  draw(make(ticker), root);
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
