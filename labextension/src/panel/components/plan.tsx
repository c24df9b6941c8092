import { usePanel, useTranslate } from "../context";
import type { NotebookModel } from "../notebook_model";

/** The effects of applying the form, and the button that applies it. */
export function Plan({ notebook }: { notebook: NotebookModel }) {
  const { session } = usePanel();
  const t = useTranslate();
  const { plan, isPlanning, pendingAction, isInstalling, refusal, notice, isChanged } = notebook;
  const isBusy = pendingAction === "apply" || isInstalling;
  const nothingToDo = session !== null && !isChanged && !isBusy;
  if (nothingToDo && !refusal && !notice) return null;
  const buttonLabel = (): string => {
    if (isInstalling) return t("Installing packages…");
    if (pendingAction === "apply") return t("Applying…");
    if (plan?.loses) return t("Confirm");
    return plan && plan.button !== "" ? plan.button : t("Connect");
  };
  const isReady = plan !== null && plan.problem === "" && !isPlanning && pendingAction === "" && !isInstalling;
  return (
    <section class="sgpu-part" aria-label={t("Apply")} aria-busy={isBusy}>
      {!nothingToDo && (
        <>
          <div class={`sgpu-sentences${isPlanning ? " sgpu-stale" : ""}`}>
            {plan?.problem ? <p role="alert">{plan.problem}</p> : (plan?.sentences ?? []).join(" ") || (isPlanning ? "…" : "")}
          </div>
          <button
            type="button"
            class={`sgpu-primary${plan?.loses ? " sgpu-risky" : ""}`}
            disabled={!isReady}
            onClick={() => void notebook.apply(true)}
          >
            {buttonLabel()}
          </button>
          {isChanged && (
            <div class="sgpu-row-buttons">
              {session === null && (
                <button
                  type="button"
                  class="sgpu-quiet"
                  title={t("Bare %%distributed cells use it; nothing is connected.")}
                  disabled={!isReady}
                  onClick={() => void notebook.apply(false)}
                >
                  {t("Apply only")}
                </button>
              )}
              <button type="button" class="sgpu-quiet" disabled={isBusy} onClick={() => notebook.reset()}>
                {t("Undo changes")}
              </button>
            </div>
          )}
        </>
      )}
      {refusal && (
        <p class="sgpu-refusal" role="alert">
          {refusal}
        </p>
      )}
      {notice && (
        <div class="sgpu-pair sgpu-top sgpu-info">
          <p class="sgpu-soft" role="status">
            {notice}
          </p>
          <button type="button" class="sgpu-text" aria-label={t("close")} onClick={() => notebook.dismissNotice()}>
            ×
          </button>
        </div>
      )}
    </section>
  );
}
