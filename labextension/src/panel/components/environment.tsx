import { useState } from "preact/hooks";

import { usePanelId, useTranslate } from "../context";
import { packageLines, requirementProblem, undoLine, withPackage, withoutLine } from "../form";
import type { FormLine } from "../form";
import type { NotebookModel } from "../notebook_model";
import { Section } from "./section";

/** The ranks' packages: a base environment and the differences from it. */
export function Environment({ notebook }: { notebook: NotebookModel }) {
  const t = useTranslate();
  const id = usePanelId();
  const { kernel, form, choiceInEffect } = notebook;
  if (!kernel) return null;
  const isSameBase = form.env_version === choiceInEffect.env_version;
  const base = kernel.bases.find(({ name }) => name === form.env_version);
  const lines = packageLines(kernel.differences, choiceInEffect, form);
  const count = kernel.packages === 1 ? t("1 package") : t("%1 packages", kernel.packages.toLocaleString("en-US"));
  return (
    <Section title={t("Environment")}>
      <div class="sgpu-pair">
        <label class="sgpu-soft" for={id}>
          {t("Base")}
        </label>
        <select
          id={id}
          value={form.env_version}
          title={base?.label}
          onChange={(event) => notebook.choose({ ...notebook.form, env_version: event.currentTarget.value })}
        >
          {!base && <option value={form.env_version}>{form.env_version || t("this notebook's packages")}</option>}
          {kernel.bases.map(({ name, label }) => (
            <option key={name} value={name}>
              {label}
            </option>
          ))}
        </select>
      </div>
      <div class="sgpu-pair sgpu-soft sgpu-about">
        <span>{isSameBase ? kernel.python : (base?.about ?? "")}</span>
        {isSameBase && kernel.packages > 0 && <span>{count}</span>}
      </div>
      {lines.length > 0 && (
        <ul class="sgpu-packages" aria-label={t("Differences from the base")}>
          {lines.map((line) => (
            <PackageRow key={`${line.sign}${line.name}`} line={line} notebook={notebook} />
          ))}
        </ul>
      )}
      {isSameBase && kernel.more_differences > 0 && <div class="sgpu-soft sgpu-small">{t("and %1 more", kernel.more_differences)}</div>}
      <AddPackage notebook={notebook} />
      {kernel.notes.map((note) => (
        <p key={note} class="sgpu-note">
          {note}
        </p>
      ))}
    </Section>
  );
}

const SIGN_LABELS: Readonly<Record<FormLine["sign"], string>> = { "+": "added", "-": "left out", "~": "another version" };

function PackageRow({ line, notebook }: { line: FormLine; notebook: NotebookModel }) {
  const t = useTranslate();
  const kind = { "+": "plus", "-": "minus", "~": "other" }[line.sign];
  const isUndo = line.pending !== "" || line.sign === "-";
  const word = isUndo ? t("undo") : t("remove");
  const undoOrRemove = () =>
    notebook.choose(line.pending === "" ? withoutLine(notebook.form, line) : undoLine(notebook.form, notebook.choiceInEffect, line));
  return (
    <li class={`sgpu-package sgpu-${kind}${line.pending ? ` sgpu-${line.pending}` : ""}`}>
      <span title={line.words}>
        <span aria-hidden="true">{line.sign} </span>
        {/* what the colour and the strikethrough mean, for screen readers */}
        <span class="sgpu-hidden">{`${t(line.pending === "dropped" ? "will be undone" : SIGN_LABELS[line.sign])}: `}</span>
        {line.words}
      </span>
      {(line.removable || line.pending !== "") && (
        <button type="button" class="sgpu-text" aria-label={`${word} ${line.name}`} onClick={undoOrRemove}>
          {word}
        </button>
      )}
    </li>
  );
}

function AddPackage({ notebook }: { notebook: NotebookModel }) {
  const t = useTranslate();
  const id = usePanelId();
  const [typed, setTyped] = useState("");
  const [problem, setProblem] = useState("");
  const add = (requirement: string) => {
    const found = requirementProblem(requirement);
    setProblem(found && t(found, requirement));
    if (found || requirement === "") return;
    notebook.choose(withPackage(notebook.form, requirement));
    setTyped("");
  };
  return (
    <>
      <input
        class="sgpu-add"
        type="text"
        value={typed}
        placeholder={t("add a package…")}
        aria-label={t("Add a package")}
        aria-invalid={problem !== ""}
        aria-describedby={`${id}-problem`}
        autocomplete="off"
        spellcheck={false}
        onInput={(event) => {
          setTyped(event.currentTarget.value);
          setProblem("");
        }}
        onKeyDown={(event) => {
          if (event.key === "Enter" && !event.isComposing) {
            event.preventDefault();
            add(event.currentTarget.value.trim());
          } else if (event.key === "Escape" && typed !== "") {
            event.stopPropagation();
            setTyped("");
            setProblem("");
          }
        }}
      />
      <p id={`${id}-problem`} class="sgpu-problem sgpu-bad" role="alert">
        {problem}
      </p>
    </>
  );
}
