import { useState } from "preact/hooks";

import { Shape } from "../../shared/shape";
import { usePanel, useTranslate } from "../context";
import type { RunRow as Run } from "../messages";
import { costWords, rankWords, runWords, signOf } from "../words";

interface Props {
  readonly run: Run;
  readonly now: number;
  readonly isOpen: boolean;
  readonly isOwn: boolean;
  /** Tab comes here. */
  readonly isStop: boolean;
  readonly at: number;
  readonly count: number;
  readonly onOpen: () => void;
  readonly onFocus: () => void;
}

/** One run of the list; a click shows what can be done with it. */
export function RunRow({ run, now, isOpen, isOwn, isStop, at, count, onOpen, onFocus }: Props) {
  const { host } = usePanel();
  const t = useTranslate();
  return (
    <div class={`sgpu-run-row${isOpen ? " sgpu-open-row" : ""}`} role="listitem" aria-setsize={count} aria-posinset={at + 1}>
      <button
        type="button"
        class="sgpu-run-head"
        data-run={run.run_id}
        aria-expanded={isOpen}
        tabIndex={isStop ? 0 : -1}
        onClick={onOpen}
        onFocus={onFocus}
      >
        <span class={`sgpu-dot sgpu-tone-${run.tone}`}>
          <Shape sign={signOf(run)} />
          <span class="sgpu-hidden">{t(run.state)}</span>
        </span>
        <span class="sgpu-run-name">
          {run.name || run.short_id}
          {isOwn && <span class="sgpu-hidden"> ({t("this notebook's")})</span>}
        </span>
        <small class="sgpu-soft sgpu-run-words" title={run.words}>
          {runWords(run, now, t)}
        </small>
        <small class="sgpu-soft sgpu-run-cost">{host.settings.showPrices ? costWords(run, now) : ""}</small>
      </button>
      {isOpen && <Actions run={run} />}
    </div>
  );
}

function Actions({ run }: { run: Run }) {
  const model = usePanel();
  const t = useTranslate();
  const [asks, setAsks] = useState(false);
  const { host, pool } = model;
  const away = run.here ? "" : t("Its files are on another machine.");
  const isEnding = run.state === "cancelling" || model.cancelling.has(run.run_id);
  const stop = run.kind === "session" ? t("End session") : t("Cancel");
  const about = [run.short_id, rankWords(run, pool.picture, t), run.notebook, run.user].filter(Boolean);
  return (
    <div class="sgpu-actions">
      <small class="sgpu-soft">{about.join(" · ")}</small>
      <div class="sgpu-row-buttons">
        {host.openRun && (
          <>
            <button type="button" disabled={!run.here} title={away} onClick={() => host.openRun?.(run)}>
              {t("Open log")}
            </button>
            {!run.final && (
              <button type="button" disabled={!run.here} title={away} onClick={() => host.openRun?.(run)}>
                {t("Stacks")}
              </button>
            )}
          </>
        )}
        {host.attachRun && model.notebook && run.kind !== "session" && (
          <button type="button" title={t("Show it in a new cell")} onClick={() => host.attachRun?.(run)}>
            {t("Attach")}
          </button>
        )}
        {!run.final && !asks && (
          <button type="button" disabled={isEnding} onClick={() => setAsks(true)}>
            {isEnding ? t("Ending…") : stop}
          </button>
        )}
        {/^https?:\/\//i.test(run.tracked_url) && (
          <a href={run.tracked_url} target="_blank" rel="noopener noreferrer">
            {t("Open in MLflow")}
          </a>
        )}
      </div>
      {!run.final && asks && !isEnding && (
        <div class="sgpu-row-buttons" role="group" aria-label={t("Stop it?")}>
          <span>{t("Stop %1?", run.name || run.short_id)}</span>
          <button
            type="button"
            class="sgpu-risky"
            ref={focused}
            onClick={(event) => {
              toHead(event.currentTarget);
              setAsks(false);
              model.cancel(run);
            }}
          >
            {t("Stop")}
          </button>
          <button
            type="button"
            onClick={(event) => {
              toHead(event.currentTarget);
              setAsks(false);
            }}
          >
            {t("Keep")}
          </button>
        </div>
      )}
    </div>
  );
}

/** What had the focus goes away: its row has it next. */
function toHead(element: Element): void {
  element.closest(".sgpu-run-row")?.querySelector<HTMLElement>(".sgpu-run-head")?.focus();
}

/** The question takes the focus from the button that it stands for. */
function focused(button: HTMLButtonElement | null): void {
  button?.focus();
}
