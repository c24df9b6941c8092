import type { ILayoutRestorer, JupyterFrontEnd } from "@jupyterlab/application";
import { MainAreaWidget, WidgetTracker } from "@jupyterlab/apputils";
import { Widget } from "@lumino/widgets";

import { mountComparison, mountRunPage } from "../run_page";
import { RunPageModel } from "../run_page/page_model";
import { mountRunView } from "../run_view";
import type { RunReference } from "../shared/open_run";
import { gpuIcon } from "./icon";
import { RunFeed } from "./run_feed";
import type { RunServer } from "./run_server";
import { ServerTransport } from "./server_transport";

const MIN_HEIGHT = "280px";

/** Tabs that show a run's live view and page, and tabs that compare two runs. */
export class RunTabs {
  private readonly runs = new WidgetTracker<MainAreaWidget<RunTab>>({ namespace: "sgpu-runs" });
  private readonly comparisons = new WidgetTracker<MainAreaWidget<ComparisonTab>>({ namespace: "sgpu-comparisons" });

  /** @param area: The shell's area: `main`, or `down` in an application that shows a single document. */
  constructor(
    private readonly app: JupyterFrontEnd,
    private readonly server: RunServer,
    private readonly area: string,
  ) {}

  open(run: RunReference): void {
    const found = this.runs.find((tab) => tab.content.run.run_id === run.run_id);
    this.show(found ?? this.create(run));
  }

  /** Opens a tab that compares two runs. */
  compare(first: RunReference, second: RunReference): void {
    const id = comparisonId(first, second);
    this.show(this.comparisons.find((tab) => tab.id === id) ?? this.createComparison(first, second));
  }

  /** Reopens the tabs that were open before a page reload. */
  restore(restorer: ILayoutRestorer, openCommand: string, compareCommand: string): void {
    void restorer.restore(this.runs, {
      command: openCommand,
      args: ({ content: { run } }) => ({ run_id: run.run_id, name: run.name }),
      name: ({ content: { run } }) => run.run_id,
    });
    void restorer.restore(this.comparisons, {
      command: compareCommand,
      args: ({ content: { runs } }) => ({ runs: runs.map(({ run_id, name }) => ({ run_id, name })) }),
      name: ({ id }) => id,
    });
  }

  private show(tab: MainAreaWidget): void {
    // not a split, so that the notebook keeps its height
    if (!tab.isAttached) this.app.shell.add(tab, this.area, { mode: "tab-after" });
    this.app.shell.activateById(tab.id);
  }

  private create(run: RunReference): MainAreaWidget<RunTab> {
    const tab = this.wrap(new RunTab(run, this.server), `sgpu-run-${run.run_id}`, run.name);
    tab.title.caption = `${run.name} · ${run.run_id}`;
    void this.runs.add(tab);
    return tab;
  }

  private createComparison(first: RunReference, second: RunReference): MainAreaWidget<ComparisonTab> {
    const content = new ComparisonTab([first, second], this.server);
    const tab = this.wrap(content, comparisonId(first, second), comparisonLabel(first, second));
    void this.comparisons.add(tab);
    return tab;
  }

  private wrap<T extends Widget>(content: T, id: string, label: string): MainAreaWidget<T> {
    const tab = new MainAreaWidget({ content });
    tab.id = id;
    tab.title.label = label;
    tab.title.caption = label;
    tab.title.icon = gpuIcon;
    tab.title.closable = true;
    tab.toolbar.hide();
    // the `down` area does not give its widgets a height
    if (this.area !== "main") content.node.style.minHeight = MIN_HEIGHT;
    return tab;
  }
}

function comparisonId(first: RunReference, second: RunReference): string {
  return `sgpu-compare-${first.run_id}-${second.run_id}`;
}

/** Returns `fit ↔ train`, or `fit 7f3a ↔ fit 80b1` if both runs have the same name. */
function comparisonLabel(first: RunReference, second: RunReference): string {
  if (first.name !== second.name) return `${first.name} ↔ ${second.name}`;
  return `${first.name} ${first.run_id.slice(0, 4)} ↔ ${second.run_id.slice(0, 4)}`;
}

/** A widget that scrolls; disposing it aborts its signal. */
class ScrollingTab extends Widget {
  protected readonly controller = new AbortController();

  constructor() {
    super();
    this.node.style.cssText = "overflow:auto;padding:8px;background:var(--jp-layout-color0)";
    this.node.tabIndex = -1;
  }

  override dispose(): void {
    this.controller.abort();
    super.dispose();
  }
}

/** The live view and the page of a run. */
class RunTab extends ScrollingTab {
  constructor(
    readonly run: RunReference,
    server: RunServer,
  ) {
    super();
    this.addClass("sgpu-run-tab");
    const { signal } = this.controller;
    const [viewElement, pageElement] = [document.createElement("div"), document.createElement("div")];
    this.node.append(viewElement, pageElement);
    const feed = new RunFeed(server, run.run_id, signal);
    mountRunView(viewElement, new ServerTransport(server, feed), signal);
    const page = new RunPageModel(run.run_id, server, signal);
    feed.addListener(page);
    mountRunPage(pageElement, page, signal);
    void page.refresh();
    void feed.poll();
  }
}

/** The comparison of two runs. */
class ComparisonTab extends ScrollingTab {
  constructor(
    readonly runs: readonly [RunReference, RunReference],
    server: RunServer,
  ) {
    super();
    this.addClass("sgpu-comparison-tab");
    mountComparison(this.node, [runs[0].run_id, runs[1].run_id], server, this.controller.signal);
  }
}
