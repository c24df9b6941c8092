import { useLayoutEffect, useRef, useState } from "preact/hooks";

import { useMemory, useNow, usePanel, useTranslate } from "../context";
import type { RunRow as Run } from "../messages";
import { EVERY_RUN, STATES, filtered, isFiltered, isOwn, readFilter } from "../run_filter";
import type { RunFilter, StateFilter } from "../run_filter";
import { RunRow } from "./run_row";
import { Section } from "./section";

const ROW_PX = 44;
/** The list scrolls when it is higher. */
const MOST_PX = 10 * ROW_PX;
/** Rows that are drawn above and below those in view. */
const BEYOND = 6;
/** What an opened row takes more, before it has been measured. */
const ACTIONS_PX = 60;
/** Fewer runs are looked through with the eyes. */
const FEW = 5;

/** The pool's queue, and its running and recent runs, newest first. */
export function Runs() {
  const { pool, notebook } = usePanel();
  const t = useTranslate();
  const [kept, keep] = useMemory("filter", "");
  const filter = readFilter(kept);
  if (!pool.picture && !pool.hasRuns) return null;
  const [name, kernel] = [notebook?.link.name ?? "", notebook?.link.kernel ?? ""];
  const runs = filtered(pool.runs, filter, name, kernel);
  return (
    <Section title={t("Runs")} name="runs">
      {(pool.runs.length > FEW || isFiltered(filter)) && (
        <Filter filter={filter} onChange={(next) => keep(JSON.stringify(next))} hasNotebook={notebook !== null} />
      )}
      {runs.length > 0 ? (
        <RunList runs={runs} notebook={name} kernel={kernel} />
      ) : (
        <p class="sgpu-soft">
          {isFiltered(filter) ? t("No matching runs.") : t("No runs yet. Cells that begin with %%distributed appear here.")}{" "}
          {isFiltered(filter) && (
            <button type="button" class="sgpu-word" onClick={() => keep(JSON.stringify(EVERY_RUN))}>
              {t("Show all")}
            </button>
          )}
        </p>
      )}
    </Section>
  );
}

const STATE_WORDS: Readonly<Record<StateFilter, string>> = {
  all: "all states",
  going: "running",
  waiting: "waiting",
  ended: "ended",
  failed: "failed",
};

interface FilterProps {
  readonly filter: RunFilter;
  readonly onChange: (filter: RunFilter) => void;
  readonly hasNotebook: boolean;
}

function Filter({ filter, onChange, hasNotebook }: FilterProps) {
  const t = useTranslate();
  return (
    <div class="sgpu-filter" role="search" aria-label={t("Runs")}>
      <input
        type="search"
        value={filter.text}
        placeholder={t("search")}
        aria-label={t("Search runs")}
        onInput={(event) => onChange({ ...filter, text: event.currentTarget.value })}
      />
      <select
        aria-label={t("State")}
        value={filter.state}
        onChange={(event) =>
          onChange({ ...filter, state: STATES.find((each) => each === event.currentTarget.value) ?? "all" })
        }
      >
        {STATES.map((state) => (
          <option key={state} value={state}>
            {t(STATE_WORDS[state])}
          </option>
        ))}
      </select>
      {hasNotebook && (
        <button type="button" aria-pressed={filter.own} onClick={() => onChange({ ...filter, own: !filter.own })}>
          {t("this notebook")}
        </button>
      )}
    </div>
  );
}

/** Only the rows in view are in the page, whatever their number. */
function RunList({ runs, notebook, kernel }: { runs: readonly Run[]; notebook: string; kernel: string }) {
  const t = useTranslate();
  const [opened, setOpened] = useState("");
  const [stop, setStop] = useState("");
  const [scroll_px, setScroll] = useState(0);
  const [actions_px, setActions] = useState(ACTIONS_PX);
  const box = useRef<HTMLDivElement>(null);
  const wanted = useRef("");
  const now = useNow(runs.some(({ final }) => !final));

  const openAt = runs.findIndex(({ run_id }) => run_id === opened);
  const extra_px = openAt < 0 ? 0 : actions_px;
  const top = (at: number) => at * ROW_PX + (openAt >= 0 && at > openAt ? extra_px : 0);
  const all_px = runs.length * ROW_PX + extra_px;
  const view_px = Math.min(all_px, MOST_PX);
  const from_px = Math.max(0, Math.min(scroll_px, all_px - view_px));
  const below = openAt >= 0 && from_px > top(openAt) ? Math.max(openAt, Math.floor((from_px - extra_px) / ROW_PX)) : Math.floor(from_px / ROW_PX);
  const first = Math.max(0, below - BEYOND);
  const last = Math.min(runs.length, below + Math.ceil(view_px / ROW_PX) + 1 + BEYOND);
  const stopAt = Math.max(0, runs.findIndex(({ run_id }) => run_id === stop));

  useLayoutEffect(() => {
    const height = box.current?.querySelector<HTMLElement>(".sgpu-actions")?.offsetHeight ?? 0;
    if (height > 0 && height !== actions_px) setActions(height);
  });
  useLayoutEffect(() => {
    if (wanted.current === "") return;
    const row = [...(box.current?.querySelectorAll<HTMLElement>(".sgpu-run-head") ?? [])];
    row.find((each) => each.dataset["run"] === wanted.current)?.focus({ preventScroll: true });
    wanted.current = "";
  });

  const onKey = (event: KeyboardEvent) => {
    if (!(event.target instanceof HTMLElement) || !event.target.classList.contains("sgpu-run-head")) return;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = runs.findIndex(({ run_id }) => run_id === (event.target as HTMLElement).dataset["run"]);
    const page = Math.floor(view_px / ROW_PX);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: runs.length - 1 }[
      event.key
    ];
    if (to === undefined || at < 0) return;
    event.preventDefault();
    const next = Math.min(runs.length - 1, Math.max(0, to));
    const id = runs[next]?.run_id ?? "";
    wanted.current = id;
    setStop(id);
    const scroller = box.current;
    if (!scroller) return;
    if (top(next) < from_px) scroller.scrollTop = top(next);
    else if (top(next) + ROW_PX > from_px + view_px) scroller.scrollTop = top(next) + ROW_PX - view_px;
    setScroll(scroller.scrollTop);
  };

  return (
    <div
      ref={box}
      class="sgpu-runs"
      style={{ height: `${view_px}px` }}
      onScroll={(event) => setScroll(event.currentTarget.scrollTop)}
      onKeyDown={onKey}
    >
      <div role="list" aria-label={t("Runs")} style={{ height: `${all_px - top(first)}px`, marginTop: `${top(first)}px` }}>
        {runs.slice(first, last).map((run, index) => (
          <RunRow
            key={run.run_id}
            run={run}
            now={now}
            isOpen={run.run_id === opened}
            isOwn={isOwn(run, notebook, kernel)}
            isStop={first + index === stopAt || (index === 0 && (stopAt < first || stopAt >= last))}
            at={first + index}
            count={runs.length}
            onOpen={() => setOpened(run.run_id === opened ? "" : run.run_id)}
            onFocus={() => setStop(run.run_id)}
          />
        ))}
      </div>
    </div>
  );
}
