import { useState } from "preact/hooks";

import { usePanel, useTranslate } from "../context";
import type { RunRow } from "../messages";
import { runLabel } from "../format";

/** A button that ends a run or a session after a confirmation. */
export function EndRun({ run, label }: { run: RunRow; label: string }) {
  const model = usePanel();
  const t = useTranslate();
  const [isConfirming, setConfirming] = useState(false);
  const isEnding = run.state === "cancelling" || model.cancelling.has(run.run_id);
  if (run.final) return null;
  if (!isConfirming || isEnding) {
    return (
      <button type="button" class="sgpu-end" disabled={isEnding} onClick={() => setConfirming(true)}>
        {isEnding ? t("Ending…") : label}
      </button>
    );
  }
  const answer = (element: Element, isConfirmed: boolean): void => {
    focusContainer(element);
    setConfirming(false);
    if (isConfirmed) model.cancel(run);
  };
  return (
    <span class="sgpu-question" role="group" aria-label={t("End it?")}>
      <span>{t("End %1?", runLabel(run))}</span>
      <button type="button" class="sgpu-risky" ref={focusButton} onClick={(event) => answer(event.currentTarget, true)}>
        {t("End")}
      </button>
      <button type="button" onClick={(event) => answer(event.currentTarget, false)}>
        {t("Don't end")}
      </button>
    </span>
  );
}

/** Moves the focus to the row or section, because the focused button disappears. */
function focusContainer(element: Element): void {
  const row = element.closest(".sgpu-run-row")?.querySelector<HTMLElement>(".sgpu-run-head");
  (row ?? element.closest<HTMLElement>("section"))?.focus();
}

/** Moves the focus to the confirmation, which replaces the pressed button. */
function focusButton(button: HTMLButtonElement | null): void {
  button?.focus();
}
