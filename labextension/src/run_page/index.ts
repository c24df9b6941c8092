/** A run's page below its live view, and the comparison of two runs' pages. */
import { h } from "preact";

import { Activity } from "../shared/activity";
import { mountView } from "../shared/mount_view";
import { Ticker } from "../shared/ticker";
import { RunPageApp } from "./app";
import { ComparisonApp } from "./comparison";
import type { PageServer, RunPageModel } from "./page_model";
import css from "./run_page.css";

/** Draws a run's page into an element until `signal` aborts. */
export function mountRunPage(el: HTMLElement, model: RunPageModel, signal: AbortSignal): void {
  mountView(el, signal, { css, stylesInHead: true }, (root) => {
    const ticker = new Ticker(() => Date.now() / 1000, new Activity(root, signal), signal);
    return h(RunPageApp, { model, ticker });
  });
}

/** Draws the comparison of two runs into an element until `signal` aborts. */
export function mountComparison(el: HTMLElement, runs: readonly [string, string], server: PageServer, signal: AbortSignal): void {
  mountView(el, signal, { css, stylesInHead: true }, () => h(ComparisonApp, { runs, server, signal }));
}
