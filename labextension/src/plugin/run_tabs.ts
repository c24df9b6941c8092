import type { ILayoutRestorer, JupyterFrontEnd } from "@jupyterlab/application";
import { MainAreaWidget, WidgetTracker } from "@jupyterlab/apputils";
import { Widget } from "@lumino/widgets";

import { mountRunView } from "../run_view";
import { gpuIcon } from "./icon";
import { RunFeed } from "./run_feed";
import type { RunServer } from "./run_server";
import { ServerTransport } from "./server_transport";

const MIN_HEIGHT = "280px";

/** A run to open. */
export interface RunToOpen {
  readonly run_id: string;
  readonly name: string;
}

/** Tabs with runs' logs, stacks and devices, one for each run. */
export class RunTabs {
  private readonly tracker = new WidgetTracker<MainAreaWidget<RunTab>>({ namespace: "sgpu-runs" });

  /** @param area: The shell's area: `main`, or `down` in an application that shows a single document. */
  constructor(
    private readonly app: JupyterFrontEnd,
    private readonly server: RunServer,
    private readonly area: string,
  ) {}

  open(run: RunToOpen): void {
    const found = this.tracker.find((tab) => tab.content.run.run_id === run.run_id);
    const tab = found ?? this.create(run);
    // a tab rather than a split, so that the notebook keeps its height
    if (!tab.isAttached) this.app.shell.add(tab, this.area, { mode: "tab-after" });
    this.app.shell.activateById(tab.id);
  }

  /** Reopens the tabs that were open before a page reload. */
  restore(restorer: ILayoutRestorer, command: string): void {
    void restorer.restore(this.tracker, {
      command,
      args: ({ content: { run } }) => ({ run_id: run.run_id, name: run.name }),
      name: ({ content: { run } }) => run.run_id,
    });
  }

  private create(run: RunToOpen): MainAreaWidget<RunTab> {
    const tab = new MainAreaWidget({ content: new RunTab(run, this.server) });
    tab.id = `sgpu-run-${run.run_id}`;
    tab.title.label = run.name;
    tab.title.caption = `${run.name} · ${run.run_id}`;
    tab.title.icon = gpuIcon;
    tab.title.closable = true;
    tab.toolbar.hide();
    // widgets in the `down` area have no height of their own
    if (this.area !== "main") tab.content.node.style.minHeight = MIN_HEIGHT;
    void this.tracker.add(tab);
    return tab;
  }
}

/** A run's view in a tab; disposing it ends the feed. */
class RunTab extends Widget {
  private readonly controller = new AbortController();

  constructor(
    readonly run: RunToOpen,
    server: RunServer,
  ) {
    super();
    this.addClass("sgpu-run-tab");
    this.node.style.cssText = "overflow:auto;padding:8px;background:var(--jp-layout-color0)";
    this.node.tabIndex = -1;
    const feed = new RunFeed(server, run.run_id, this.controller.signal);
    mountRunView(this.node, new ServerTransport(server, feed), this.controller.signal);
    void feed.poll();
  }

  override dispose(): void {
    this.controller.abort();
    super.dispose();
  }
}
