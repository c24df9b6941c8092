import { useEffect } from "preact/hooks";

import { usePanel, useTranslate } from "../context";
import type { PanelVariable, VariableForm } from "../messages";
import { formatCount } from "../../shared/units";
import { Section } from "./section";

/** The variables on the ranks of the notebook's live session; folded until it is opened. */
export function Variables() {
  const { session } = usePanel();
  const t = useTranslate();
  const isStarted = (session?.started_at ?? null) !== null;
  if (!session || !isStarted) return null;
  return (
    <Section title={t("Variables")} name="variables" open={false}>
      <VariableList key={session.run_id} />
    </Section>
  );
}

/** Requests the variables while it is shown. */
function VariableList() {
  const { notebook } = usePanel();
  const t = useTranslate();
  const isKnown = (notebook?.kernel ?? null) !== null;
  useEffect(() => {
    if (!isKnown) return;
    notebook?.showVariables(true);
    return () => notebook?.showVariables(false);
  }, [notebook, isKnown]);
  const found = notebook?.variables;
  return (
    <>
      {notebook && notebook.variablesError !== "" && <p class="sgpu-bad">{notebook.variablesError}</p>}
      {found?.busy && <p class="sgpu-soft">{t("A cell runs in the session. Its variables are listed when the cell has ended.")}</p>}
      {found?.notes.map((note) => (
        <p key={note} class="sgpu-soft">
          {note}
        </p>
      ))}
      {found && !found.busy && found.variables.length === 0 && found.notes.length === 0 && (
        <p class="sgpu-soft">{t("No variables yet")}</p>
      )}
      {found && found.variables.length > 0 && <VariableTable variables={found.variables} />}
      {found && found.more > 0 && <p class="sgpu-soft">{t("and %1 more: %sgpu_who with names or patterns lists those", formatCount(found.more))}</p>}
    </>
  );
}

function VariableTable({ variables }: { variables: readonly PanelVariable[] }) {
  const t = useTranslate();
  return (
    <div class="sgpu-variables-box" role="group" aria-label={t("Variables on the ranks")} tabIndex={0}>
      <table class="sgpu-variables">
        <caption class="sgpu-hidden">{t("Variables on the ranks")}</caption>
        <thead>
          <tr>
            <th scope="col">{t("name")}</th>
            <th scope="col">{t("type")}</th>
            <th scope="col">{t("size")}</th>
          </tr>
        </thead>
        {variables.map((variable) => (
          <VariableRows key={variable.name} variable={variable} />
        ))}
      </table>
    </div>
  );
}

/** A row for each group of ranks that have the same. */
function VariableRows({ variable: { name, forms } }: { variable: PanelVariable }) {
  const t = useTranslate();
  return (
    <tbody>
      {forms.map((form, at) => (
        <tr key={form.ranks}>
          {at === 0 && (
            <th scope="rowgroup" rowSpan={forms.length}>
              {name}
              {forms.length > 1 && (
                <small class="sgpu-warn" title={t("differs between ranks")}>
                  {t("differs")}
                </small>
              )}
            </th>
          )}
          <td>
            {form.type}
            <small class="sgpu-soft">{details(form, t)}</small>
          </td>
          <td>{form.size}</td>
        </tr>
      ))}
    </tbody>
  );
}

/** Returns `(10, 4) · float32 · cuda:0-3 · ranks 0, 2`. */
function details({ shape, dtype, device, ranks }: VariableForm, t: ReturnType<typeof useTranslate>): string {
  return [shape, dtype, device, ranksText(ranks, t)].filter(Boolean).join(" · ");
}

function ranksText(ranks: string, t: ReturnType<typeof useTranslate>): string {
  if (ranks === "") return "";
  return /^\d+$/.test(ranks) ? t("rank %1", ranks) : t("ranks %1", ranks);
}
