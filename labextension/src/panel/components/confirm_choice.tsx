import { useTranslate } from "../context";
import type { NotebookModel } from "../notebook_model";

/** Asks the user to confirm another user's choice. */
export function ConfirmChoice({ notebook }: { notebook: NotebookModel }) {
  const t = useTranslate();
  const { kernel, plan, isPlanning, pendingAction, isInstalling, refusal } = notebook;
  if (!kernel) return null;
  const effects = plan ? plan.problem || plan.sentences.join(" ") : "";
  const isReady = plan?.problem === "" && !isPlanning;
  const isBusy = pendingAction !== "" || isInstalling;
  return (
    <section class="sgpu-part sgpu-state-card" aria-label={t("The notebook's choice")} aria-busy={isBusy}>
      <p class="sgpu-sentence">{t("This notebook asks for %1, which someone else chose.", kernel.choice_words)}</p>
      <p class="sgpu-soft sgpu-sentences">{effects || (isPlanning ? "…" : "")}</p>
      <div class="sgpu-row-buttons">
        <button
          type="button"
          class="sgpu-strong"
          disabled={isBusy || !isReady}
          onClick={() => void notebook.accept()}
        >
          {isInstalling ? t("Installing packages…") : t("Use it")}
        </button>
        <button type="button" disabled={isBusy} onClick={() => notebook.overrideChoice()}>
          {t("Choose my own")}
        </button>
      </div>
      {refusal && (
        <p class="sgpu-refusal" role="alert">
          {refusal}
        </p>
      )}
    </section>
  );
}
