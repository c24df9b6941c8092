import { Shape } from "../../shared/shape";
import { usePanel, useTranslate } from "../context";
import type { RunRow as Run } from "../messages";
import { formatCost, ranksLabel, runLabel, runNames, runSummary, shapeOf } from "../format";
import { EndRun } from "./end_run";
import { Holders } from "./holders";

interface Props {
  readonly run: Run;
  readonly now: number;
  readonly isOpen: boolean;
  readonly isOwn: boolean;
  /** Whether the run is selected for a comparison. */
  readonly isCompared: boolean;
  /** Text that names the runs whose devices the run waits for, "" for none. */
  readonly heldBy: string;
  /** Name of the run's pool, "" if there is only one. */
  readonly pool: string;
  /** Whether the row is the list's tab stop. */
  readonly isTabStop: boolean;
  readonly index: number;
  readonly count: number;
  /** Called to show or hide the run's actions. */
  readonly onOpen: () => void;
  readonly onCompare: () => void;
  readonly onFocus: () => void;
}

/** A run in the list. A click opens the run's view if the host can show it; the button beside it shows the actions. */
export function RunRow({ run, now, isOpen, isOwn, isCompared, heldBy, pool, isTabStop, index, count, onOpen, onCompare, onFocus }: Props) {
  const { host } = usePanel();
  const t = useTranslate();
  const [notebook, name] = runNames(run);
  const opensView = host.openRun !== undefined && run.here;
  const summary = [pool, runSummary(run, now, t)].filter(Boolean).join(" · ");
  return (
    <div class={`sgpu-run-row${isOpen ? " sgpu-open-row" : ""}`} role="listitem" aria-setsize={count} aria-posinset={index + 1}>
      <div class="sgpu-run-line">
        <button
          type="button"
          class="sgpu-run-head"
          data-run={run.run_id}
          aria-expanded={opensView ? undefined : isOpen}
          tabIndex={isTabStop ? 0 : -1}
          title={[runLabel(run), summary, heldBy].filter(Boolean).join("\n")}
          onClick={() => (opensView ? host.openRun?.(run) : onOpen())}
          onFocus={onFocus}
        >
          <span class={`sgpu-dot sgpu-tone-${run.tone}`}>
            <Shape name={shapeOf(run)} />
            <span class="sgpu-hidden">{t(run.state)}</span>
          </span>
          <span class="sgpu-run-name">
            {notebook !== "" && <span class="sgpu-run-notebook">{notebook}</span>}
            <span class="sgpu-clip">
              {notebook !== "" && "\u00a0· "}
              {name}
            </span>
            {isOwn && <span class="sgpu-hidden"> ({t("this notebook's")})</span>}
          </span>
          <small class="sgpu-soft sgpu-run-words">{summary}</small>
          {heldBy !== "" && <small class="sgpu-soft sgpu-run-words sgpu-run-held">{heldBy}</small>}
          <small class="sgpu-soft sgpu-run-cost">{host.settings.showPrices ? formatCost(run, now) : ""}</small>
        </button>
        <button
          type="button"
          class="sgpu-menu"
          aria-label={t("Actions of %1", runLabel(run))}
          aria-expanded={isOpen}
          tabIndex={isTabStop ? 0 : -1}
          onClick={onOpen}
        >
          <svg class="sgpu-dots" viewBox="0 0 14 4" aria-hidden="true">
            <circle cx="2" cy="2" r="1.4" />
            <circle cx="7" cy="2" r="1.4" />
            <circle cx="12" cy="2" r="1.4" />
          </svg>
        </button>
      </div>
      {isOpen && <Actions run={run} now={now} isCompared={isCompared} onCompare={onCompare} />}
    </div>
  );
}

interface ActionsProps {
  readonly run: Run;
  readonly now: number;
  readonly isCompared: boolean;
  readonly onCompare: () => void;
}

function Actions({ run, now, isCompared, onCompare }: ActionsProps) {
  const model = usePanel();
  const t = useTranslate();
  const { host, pool } = model;
  const canRerun = run.kind === "cell" || run.kind === "call";
  const away = host.openRun && !run.here ? t("its files are on another machine") : "";
  const about = [run.short_id, ranksLabel(run, pool.snapshot, t), run.user, away].filter(Boolean);
  return (
    <div class="sgpu-actions">
      <small class="sgpu-soft">{about.join(" · ")}</small>
      <Holders run={run} now={now} />
      <div class="sgpu-row-buttons">
        {host.attachRun && model.notebook && run.kind !== "session" && (
          <button type="button" title={t("Show it in a new cell")} onClick={() => host.attachRun?.(run)}>
            {t("Attach")}
          </button>
        )}
        {host.replayRun && model.notebook && canRerun && run.final && run.here && (
          <button type="button" title={t("Run it again in a new cell, with its code and variables")} onClick={() => host.replayRun?.(run)}>
            {t("Rerun")}
          </button>
        )}
        {run.kind !== "session" && (
          <button type="button" aria-pressed={isCompared} onClick={onCompare}>
            {t("Compare")}
          </button>
        )}
        <EndRun run={run} label={run.kind === "session" ? t("End session") : t("End run")} />
        {/^https?:\/\//i.test(run.tracked_url) && (
          <a href={run.tracked_url} target="_blank" rel="noopener noreferrer">
            {t("Open in MLflow")}
          </a>
        )}
      </div>
    </div>
  );
}
