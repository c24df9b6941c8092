import type { ISessionContextDialogs } from "@jupyterlab/apputils";
import { NotebookActions } from "@jupyterlab/notebook";
import type { INotebookTracker, NotebookPanel } from "@jupyterlab/notebook";

import { ChoiceStore } from "./choice_store";
import { LabNotebook } from "./lab_notebook";
import { LoadedKernels, browserStorage } from "./loaded_kernels";

/** The notebooks of the page, and the active one. */
export class LabNotebooks {
  private readonly notebooks = new Map<NotebookPanel, LabNotebook>();
  private readonly choices = new ChoiceStore();
  private readonly loaded = new LoadedKernels(browserStorage());
  private readonly callbacks = new Set<() => void>();
  private isPanelVisible = false;

  constructor(
    private readonly tracker: INotebookTracker | null,
    private readonly dialogs: ISessionContextDialogs | null,
  ) {
    if (!tracker) return;
    tracker.forEach((panel) => this.add(panel));
    tracker.widgetAdded.connect((_, panel) => this.add(panel));
    tracker.currentChanged.connect(() => {
      void this.activeNotebook?.sendChoice();
      this.notify();
    });
  }

  /** The panel of the active notebook. */
  get activePanel(): NotebookPanel | null {
    const panel = this.tracker?.currentWidget ?? null;
    return panel?.isDisposed === false ? panel : null;
  }

  get activeNotebook(): LabNotebook | null {
    const panel = this.activePanel;
    return panel ? (this.notebooks.get(panel) ?? null) : null;
  }

  /** The ids of the open notebooks' kernels. */
  get kernelIds(): readonly string[] {
    return [...this.notebooks.keys()].flatMap((panel) => panel.sessionContext.session?.kernel?.id ?? []);
  }

  /** Calls back when another notebook becomes active. Returns a function that removes the callback. */
  onChange(callback: () => void): () => void {
    this.callbacks.add(callback);
    return () => this.callbacks.delete(callback);
  }

  /** Sets whether the panel is visible. Notebooks report no changes to a hidden panel. */
  setPanelVisible(isVisible: boolean): void {
    if (isVisible === this.isPanelVisible) return;
    this.isPanelVisible = isVisible;
    if (isVisible) for (const notebook of this.notebooks.values()) notebook.onPanelShown();
  }

  private add(panel: NotebookPanel): void {
    if (this.notebooks.has(panel)) return;
    const controller = new AbortController();
    const notebook: LabNotebook = new LabNotebook(
      {
        document: panel.context,
        session: panel.sessionContext,
        choices: this.choices,
        loaded: this.loaded,
        isPanelVisible: () => this.isPanelVisible,
        isActive: () => this.activePanel === panel,
        showCell: (index) => {
          panel.content.activeCellIndex = index;
          // JupyterLab 4.4 can't focus a cell that is not rendered yet
          const activate = () => panel.content.activate();
          panel.content.scrollToItem(index).then(activate, activate);
        },
        runActiveCell: () => void NotebookActions.run(panel.content, panel.sessionContext),
        selectKernel: async () => this.dialogs?.selectKernel(panel.sessionContext),
      },
      controller.signal,
    );
    this.notebooks.set(panel, notebook);
    panel.disposed.connect(() => {
      controller.abort();
      this.notebooks.delete(panel);
      this.notify();
    });
    this.notify();
  }

  private notify(): void {
    for (const callback of [...this.callbacks]) callback();
  }
}
