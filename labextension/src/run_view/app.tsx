import { useLayoutEffect, useMemo, useState } from "preact/hooks";

import type { Activity } from "../shared/activity";
import { OPEN_RUN_LABEL, hasRunTabs, openRunAttributes } from "../shared/open_run";
import { Failure } from "./components/failure";
import { Header } from "./components/header";
import { LogPanel } from "./components/log_panel";
import { Metrics } from "./components/metrics";
import { Notices } from "./components/notices";
import { RankGrid } from "./components/rank_grid";
import type { Tab } from "./log_model";
import type { Snapshot } from "./messages";
import type { RunModel } from "./run_model";

interface Props {
  readonly model: RunModel;
  readonly activity: Activity;
  readonly signal: AbortSignal;
  /** Prefix of this view's element ids, unique in the page. */
  readonly id: string;
}

function Sentences({ lines, kind, label }: { lines: readonly string[]; kind: string; label: string }) {
  if (lines.length === 0) return null;
  return (
    <div class={`sgpu-lines sgpu-${kind}`} aria-label={label} role="group">
      {lines.map((text, index) => (
        <div key={index}>{text}</div>
      ))}
    </div>
  );
}

/** Only http and https URLs become links. */
function isPage(url: string): boolean {
  return /^https?:\/\//i.test(url);
}

/** Returns the ranks that have a tab in the log. */
function logRanks(run: Snapshot): readonly number[] {
  return run.only.length > 0 ? run.only : run.lines.map((_, rank) => rank);
}

/** The view of one run, from its preparation to its end. */
export function App({ model, activity, signal, id }: Props) {
  const [, redraw] = useState(0);
  const [tab, setTab] = useState<Tab>(model.position.tab);
  // a layout effect, because an effect subscribes after the first frame and could miss updates
  useLayoutEffect(() => model.subscribe(() => redraw((count) => count + 1)), [model]);
  model.position.tab = tab;
  const run = model.snapshot;
  const dense = run !== null && run.ranks.length > 8;
  const hasLines = model.log.lines("all").total > 0;
  // hide a session's empty log: its ranks rarely print between cells
  const hasLog = run !== null && (hasLines || (model.interrupts && run.ranks.length > 0));
  const ranks = run?.ranks;
  const charts = run?.metrics;
  // lines arrive much more often than `ranks` changes, so skip diffing an unchanged grid
  const grid = useMemo(() => ranks && ranks.length > 0 && <RankGrid ranks={ranks} onShow={setTab} />, [ranks]);
  const metrics = useMemo(
    () => run && charts && charts.length > 0 && <Metrics charts={charts} text={run.metrics_text} more={run.more_metrics} />,
    [charts],
  );
  const tabs = run ? logRanks(run) : [];
  const footer = run ? [...run.others, ...run.footer] : [];
  // an ended run keeps the height that its view had
  const held_px = run?.final || model.isContinued ? model.position.height_px : 0;
  const saysId = run !== null && footer.some((text) => text.includes(run.short_id));
  return (
    <article
      class={`sgpu-run${dense ? " sgpu-many" : ""}${held_px > 0 ? " sgpu-held" : ""}`}
      style={held_px > 0 ? { minHeight: `${held_px}px` } : undefined}
      aria-label={run ? `run ${run.short_id}, ${run.name}` : "run"}
      data-run={run?.run_id ?? ""}
      data-state={run?.state ?? ""}
      data-link={model.transport.kind}
      data-lm-suppress-shortcuts="true"
    >
      <Header model={model} activity={activity} signal={signal} />
      <Notices model={model} />
      {run && (
        <>
          {run.failure && <Failure failure={run.failure} />}
          <Sentences lines={run.preparing} kind="preparing" label="preparing" />
          {grid}
          <Sentences lines={run.idle} kind="idle-lines" label="idle devices" />
          <Sentences lines={run.stall} kind="stall" label="where the ranks wait" />
          <Sentences lines={run.warnings} kind="warnings" label="warnings" />
          <Sentences lines={run.notes} kind="notes" label="notes" />
          {metrics}
          {hasLog && <LogPanel model={model} tab={tab} onTab={setTab} ranks={tabs} dense={dense} id={id} signal={signal} />}
          <footer class="sgpu-foot">
            {(saysId ? footer : [...footer, `run ${run.short_id}`]).join(" · ")}
            {run.tracked && isPage(run.tracked.url) && (
              <>
                {" · "}
                <a href={run.tracked.url} target="_blank" rel="noopener noreferrer">
                  {run.tracked.text}
                </a>
              </>
            )}
            {hasRunTabs() && (
              <span class="sgpu-tab-link">
                {" · "}
                <button {...openRunAttributes(run)}>{OPEN_RUN_LABEL}</button>
              </span>
            )}
          </footer>
        </>
      )}
    </article>
  );
}
