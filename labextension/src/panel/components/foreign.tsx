import { useTranslate } from "../context";
import type { NotebookModel } from "../notebook_model";

/** Asks the user to confirm a choice that someone else made. */
export function Foreign({ notebook }: { notebook: NotebookModel }) {
  const t = useTranslate();
  const { kernel, plan, isPlanning, doing, installing, refusal } = notebook;
  if (!kernel) return null;
  const words = plan ? plan.problem || plan.sentences.join(" ") : "";
  const can = plan?.problem === "" && !isPlanning;
  const isBusy = doing !== "" || installing;
  return (
    <section class="sgpu-part sgpu-state-card" aria-label={t("The notebook's choice")} aria-busy={isBusy}>
      <p class="sgpu-sentence">{t("This notebook asks for %1, which someone else chose.", kernel.choice_words)}</p>
      <p class="sgpu-soft sgpu-sentences">{words || (isPlanning ? "…" : "")}</p>
      <div class="sgpu-row-buttons">
        <button
          type="button"
          class="sgpu-strong"
          disabled={isBusy || !can}
          onClick={() => void notebook.accept()}
        >
          {installing ? t("Installing packages…") : t("Use it")}
        </button>
        <button type="button" disabled={isBusy} onClick={() => notebook.chooseMyself()}>
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
