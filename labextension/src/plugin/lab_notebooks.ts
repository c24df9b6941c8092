import type { ISessionContextDialogs } from "@jupyterlab/apputils";
import type { INotebookTracker, NotebookPanel } from "@jupyterlab/notebook";

import { ChoiceStore } from "./choice_store";
import { LabNotebook } from "./lab_notebook";
import { LoadedKernels, pageStore } from "./loaded_kernels";

/** The notebooks of the page, and which one is in front. */
export class LabNotebooks {
  private readonly links = new Map<NotebookPanel, LabNotebook>();
  private readonly choices = new ChoiceStore();
  private readonly loaded = new LoadedKernels(pageStore());
  private readonly callbacks = new Set<() => void>();
  private looked = false;

  constructor(
    private readonly tracker: INotebookTracker | null,
    private readonly dialogs: ISessionContextDialogs | null,
  ) {
    if (!tracker) return;
    tracker.forEach((panel) => this.add(panel));
    tracker.widgetAdded.connect((_, panel) => this.add(panel));
    tracker.currentChanged.connect(() => {
      void this.front?.tellKept();
      this.changed();
    });
  }

  /** The panel of the notebook in front. */
  get frontPanel(): NotebookPanel | null {
    const panel = this.tracker?.currentWidget ?? null;
    return panel?.isDisposed === false ? panel : null;
  }

  get front(): LabNotebook | null {
    const panel = this.frontPanel;
    return panel ? (this.links.get(panel) ?? null) : null;
  }

  /** Calls back when another notebook is in front. Returns a function that removes the callback. */
  onChange(callback: () => void): () => void {
    this.callbacks.add(callback);
    return () => this.callbacks.delete(callback);
  }

  /** Sets whether the panel is visible: while it is hidden, notebooks do not report changes to it. */
  setLooked(looked: boolean): void {
    if (looked === this.looked) return;
    this.looked = looked;
    if (looked) for (const link of this.links.values()) link.looked();
  }

  private add(panel: NotebookPanel): void {
    if (this.links.has(panel)) return;
    const end = new AbortController();
    const link: LabNotebook = new LabNotebook(
      {
        context: panel.context,
        session: panel.sessionContext,
        choices: this.choices,
        loaded: this.loaded,
        isLooked: () => this.looked,
        isFront: () => this.frontPanel === panel,
        showCell: (index) => {
          panel.content.activeCellIndex = index;
          // JupyterLab 4.4 can't focus a cell that is not rendered yet
          const take = () => panel.content.activate();
          panel.content.scrollToItem(index).then(take, take);
        },
        selectKernel: async () => this.dialogs?.selectKernel(panel.sessionContext),
      },
      end.signal,
    );
    this.links.set(panel, link);
    panel.disposed.connect(() => {
      end.abort();
      this.links.delete(panel);
      this.changed();
    });
    this.changed();
  }

  private changed(): void {
    for (const callback of [...this.callbacks]) callback();
  }
}
