import type { IRenderMime } from "@jupyterlab/rendermime-interfaces";
import { Widget } from "@lumino/widgets";

import { mountRunView } from "../run_view";
import { LIVE_MIME, viewNumber } from "./outputs";
import type { RunFeed } from "./run_feed";
import type { RunServer } from "./run_server";
import { ServerTransport } from "./server_transport";

/** The feeds of a notebook's live outputs, and the renderer that draws them. */
export class LiveViews {
  private readonly feeds = new Map<number, RunFeed>();
  private count = 0;

  constructor(private readonly server: RunServer) {}

  /** Returns the number of a new live output. */
  allocateView(): number {
    this.count += 1;
    return this.count;
  }

  /** Shows a feed in the live output with this number, until the feed's signal aborts. */
  open(view: number, feed: RunFeed): void {
    this.feeds.set(view, feed);
    feed.signal.addEventListener("abort", () => this.feeds.delete(view), { once: true });
  }

  get factory(): IRenderMime.IRendererFactory {
    return {
      // the view escapes text, and does not render the ranks' displays
      safe: true,
      mimeTypes: [LIVE_MIME],
      defaultRank: 0,
      createRenderer: () => new LiveOutput((view) => this.feeds.get(view), this.server),
    };
  }
}

class LiveOutput extends Widget implements IRenderMime.IRenderer {
  private controller = new AbortController();

  constructor(
    private readonly findFeed: (view: number) => RunFeed | undefined,
    private readonly server: RunServer,
  ) {
    super();
    this.addClass("sgpu-live-output");
  }

  renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    this.controller.abort();
    this.controller = new AbortController();
    this.node.replaceChildren();
    const view = viewNumber(model.data[LIVE_MIME]);
    const feed = view === null ? undefined : this.findFeed(view);
    if (feed) {
      mountRunView(this.node, new ServerTransport(this.server, feed), this.controller.signal);
    } else {
      // written by another page; a restored run replaces it, unless the server no longer has the run
      const saved = model.data["text/plain"];
      const text = document.createElement("pre");
      text.textContent = typeof saved === "string" ? saved : "";
      this.node.append(text);
    }
    return Promise.resolve();
  }

  override dispose(): void {
    this.controller.abort();
    super.dispose();
  }
}
