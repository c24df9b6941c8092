import type { IRenderMime } from "@jupyterlab/rendermime-interfaces";
import { Panel, Widget } from "@lumino/widgets";

import { mountRunView } from "../run_view";
import { findViewState } from "../run_view/view_state";
import type { ViewState } from "../run_view/view_state";
import { OPEN_RUN_LABEL, hasRunTabs, openRunAttributes } from "../shared/open_run";
import { RUN_MIME, findEndedRun } from "./outputs";
import { RunFeed } from "./run_feed";
import type { RunServer } from "./run_server";
import { ServerTransport } from "./server_transport";

/** After this time without the run's end from the server, the saved form is shown. */
const FINAL_TIMEOUT_MS = 5_000;
// before text/html, after widgets
const RANK = 30;

/** Creates the notebook's renderer for a MIME type. */
export type CreateRenderer = (mimeType: string) => IRenderMime.IRenderer;

/**
 * Returns the renderer of ended runs: a run whose live view this page has shown keeps that view, with its height, the
 * place in its log and its tools; any other run is drawn in its saved form, which is HTML.
 */
export function endedRunFactory(server: RunServer, createRenderer: CreateRenderer): IRenderMime.IRendererFactory {
  return {
    // the view escapes text, and the notebook's own renderer draws the saved form
    safe: true,
    mimeTypes: [RUN_MIME],
    defaultRank: RANK,
    createRenderer: () => new EndedRunOutput(server, createRenderer),
  };
}

class EndedRunOutput extends Panel implements IRenderMime.IRenderer {
  private controller = new AbortController();

  constructor(
    private readonly server: RunServer,
    private readonly createRenderer: CreateRenderer,
  ) {
    super();
    this.addClass("sgpu-ended-output");
  }

  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    this.clear();
    const run = findEndedRun(model.data[RUN_MIME])?.run_id ?? null;
    const previous = run === null ? null : findViewState(run);
    if (run === null || previous === null) await this.showSaved(model);
    else this.showView(run, previous, model);
  }

  override dispose(): void {
    this.controller.abort();
    super.dispose();
  }

  private clear(): void {
    this.controller.abort();
    this.controller = new AbortController();
    for (const widget of [...this.widgets]) widget.dispose();
  }

  private showView(run: string, previous: ViewState, model: IRenderMime.IMimeModel): void {
    const { signal } = this.controller;
    const view = new Widget();
    this.addWidget(view);
    const feed = new RunFeed(this.server, run, signal);
    const giveUp = (): void => {
      if (signal.aborted || feed.isFinal) return;
      this.clear();
      void this.showSaved(model);
    };
    feed.addListener({
      onLinkChange: ({ away, ended }) => {
        if (away || ended) giveUp();
      },
    });
    const timer = setTimeout(giveUp, FINAL_TIMEOUT_MS);
    signal.addEventListener("abort", () => clearTimeout(timer), { once: true });
    mountRunView(view.node, new ServerTransport(this.server, feed), signal, previous);
    void feed.poll();
  }

  private async showSaved(model: IRenderMime.IMimeModel): Promise<void> {
    const saved = this.createRenderer("text/html" in model.data ? "text/html" : "text/plain");
    this.addWidget(saved);
    await saved.renderModel(model);
    addOpenButton(saved.node, model.data[RUN_MIME]);
  }
}

/** Adds a button that opens the run's tab to the last line of a saved form, in pages that have such tabs. */
function addOpenButton(saved: HTMLElement, record: unknown): void {
  const run = findEndedRun(record);
  const end = saved.querySelector(".sgpu-end > span");
  if (run === null || !end || !hasRunTabs()) return;
  const button = document.createElement("button");
  for (const [name, value] of Object.entries(openRunAttributes(run))) button.setAttribute(name, value);
  button.textContent = OPEN_RUN_LABEL;
  end.append(" · ", button);
}
