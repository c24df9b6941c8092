import { Dialog, Notification, showDialog } from "@jupyterlab/apputils";

import { EMPTY_CHOICE } from "../panel/form";
import type { Translate } from "../panel/host";
import type { KernelReply, RunRow } from "../panel/messages";
import type { LabNotebook } from "./lab_notebook";
import type { LabNotebooks } from "./lab_notebooks";
import type { PoolConnection } from "./pool_connection";

/** Actions of menus and the command palette on the active notebook; the panel need not be open. */
export class PanelActions {
  constructor(
    private readonly notebooks: LabNotebooks,
    private readonly connection: PoolConnection,
    private readonly translate: Translate,
    private readonly openPanel: () => void,
  ) {}

  get hasNotebook(): boolean {
    return this.notebooks.activeNotebook !== null;
  }

  /** The active notebook's session, as far as the page knows. */
  get session(): RunRow | null {
    const { activeNotebook } = this.notebooks;
    return activeNotebook ? this.connection.model.sessionOf(activeNotebook.kernel, "") : null;
  }

  /** The active notebook's active runs, without sessions. */
  get runs(): readonly RunRow[] {
    const kernel = this.notebooks.activeNotebook?.kernel ?? "";
    if (kernel === "") return [];
    return this.connection.model.runs.filter((run) => run.kernel === kernel && !run.final && run.kind !== "session");
  }

  /** Opens the panel, and connects a session with the notebook's choice unless that needs a decision there. */
  async connect(): Promise<void> {
    this.openPanel();
    await this.withKernel(async (notebook) => {
      const state = await notebook.ask({ kind: "kernel", kept: notebook.savedChoice });
      if (state.kind !== "kernel-answer") return state;
      const { choice, confirmed } = state.snapshot;
      if (choice && !confirmed) return null;
      const asked = choice ?? EMPTY_CHOICE;
      const plan = await notebook.ask({ kind: "plan", choice: asked, connect: true });
      if (plan.kind !== "plan-answer") return plan;
      if (plan.plan.loses || plan.plan.problem) return null;
      return notebook.ask({ kind: "apply", choice: asked, connect: true, confirmed: false });
    });
  }

  /** Ends the active notebook's session through its kernel, or through the pool if the kernel fails. */
  async disconnect(): Promise<void> {
    const { session } = this;
    await this.withKernel(
      (notebook) => notebook.ask({ kind: "disconnect", name: "" }),
      session ? () => this.cancel(session) : undefined,
    );
  }

  /** Ends the active notebook's runs after a confirmation. */
  async endRuns(): Promise<void> {
    const t = this.translate;
    const { runs } = this;
    if (runs.length === 0) {
      Notification.info(t("This notebook has no active runs."), { autoClose: 5_000 });
      return;
    }
    const names = runs.map((run) => `${run.name} (${run.short_id})`).join(", ");
    const { button } = await showDialog({
      title: t("End this notebook's runs?"),
      body: names,
      buttons: [Dialog.cancelButton({ label: t("Don't end") }), Dialog.warnButton({ label: t("End them") })],
    });
    if (button.accept) for (const run of runs) this.cancel(run);
  }

  private cancel(run: RunRow): void {
    const pool = this.connection.model.snapshot?.pool ?? "";
    this.connection.order({ kind: "cancel-run", run_id: run.run_id, pool });
  }

  private async withKernel(
    act: (notebook: LabNotebook) => Promise<KernelReply | null>,
    onFailure?: () => void,
  ): Promise<void> {
    const { activeNotebook } = this.notebooks;
    if (!activeNotebook) return;
    try {
      const reply = await act(activeNotebook);
      if (reply?.kind === "panel-refusal") showError(reply.text);
      if (reply?.kind === "kernel-answer" && reply.kept) activeNotebook.saveChoice(reply.kept);
    } catch (error) {
      if (onFailure) onFailure();
      else showError(error instanceof Error ? error.message : String(error));
    }
  }
}

function showError(text: string): void {
  Notification.error(text, { autoClose: 10_000 });
}
