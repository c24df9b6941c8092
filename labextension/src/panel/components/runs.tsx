import { useLayoutEffect, useRef, useState } from "preact/hooks";

import { useStored, useNow, usePanel, useTranslate } from "../context";
import type { Translate } from "../host";
import type { RunRow as Run } from "../messages";
import { holdersOf } from "../queue";
import { EVERY_RUN, STATES, TIMES, filterRuns, hasFilter, isOwn, notebooksOf, parseFilter } from "../run_filter";
import type { RunFilter, StateFilter, TimeFilter } from "../run_filter";
import { useVisibleRange } from "../scrolling";
import { holderLabel } from "../format";
import { Comparison } from "./comparison";
import { RunRow } from "./run_row";
import { Section } from "./section";

const ROW_PX = 44;
/** Height of the additional line that names the holders of a run's devices. */
const HELD_LINE_PX = 16;
/** Rows that are rendered above and below those in view. */
const OVERSCAN_ROWS = 6;
/** Height of a row's actions until it is measured. */
const ACTIONS_PX = 60;
/** Maximum number of runs in a comparison. */
const MAX_COMPARED = 2;
/** Show the search field only above this many runs. */
const SEARCH_ABOVE = 5;

/** The queued, running and recent runs of all pools, newest first. */
export function Runs() {
  const { pool, notebook } = usePanel();
  const t = useTranslate();
  const [stored, setStored] = useStored("filter", "");
  const filter = parseFilter(stored);
  if (!pool.snapshot && !pool.hasRuns) return null;
  const [name, kernel] = [notebook?.link.name ?? "", notebook?.link.kernel ?? ""];
  const runs = filterRuns(pool.allRuns, filter, name, kernel, pool.now_s, (run) => pool.poolOf(run));
  return (
    <Section title={t("Runs")} name="runs">
      {pool.away.length > 0 && <p class="sgpu-note">{t("%1 can't be reached now: the list has none of its newer runs.", pool.away.join(", "))}</p>}
      {(pool.allRuns.length > SEARCH_ABOVE || hasFilter(filter)) && (
        <Filter
          filter={filter}
          onChange={(next) => setStored(JSON.stringify(next))}
          hasNotebook={notebook !== null}
          notebooks={notebooksOf(pool.allRuns)}
        />
      )}
      {runs.length > 0 ? (
        <RunList runs={runs} notebook={name} kernel={kernel} />
      ) : (
        <p class="sgpu-soft">
          {hasFilter(filter) ? t("No matching runs.") : t("No runs yet. Cells that begin with %%distributed appear here.")}{" "}
          {hasFilter(filter) && (
            <button type="button" class="sgpu-text" onClick={() => setStored(JSON.stringify(EVERY_RUN))}>
              {t("Show all")}
            </button>
          )}
        </p>
      )}
    </Section>
  );
}

const STATE_LABELS: Readonly<Record<StateFilter, string>> = {
  all: "all states",
  going: "running",
  waiting: "waiting",
  ended: "ended",
  failed: "failed",
};

const TIME_LABELS: Readonly<Record<TimeFilter, string>> = {
  any: "any time",
  hour: "last hour",
  day: "last 24 hours",
  week: "last 7 days",
};

/** Values of the notebook selection besides the notebooks' file names, which contain no slash and are not empty. */
const [EVERY_NOTEBOOK, THIS_NOTEBOOK] = ["", "/"] as const;

interface FilterProps {
  readonly filter: RunFilter;
  readonly onChange: (filter: RunFilter) => void;
  readonly hasNotebook: boolean;
  /** File names of the notebooks that submitted runs. */
  readonly notebooks: readonly string[];
}

function Filter({ filter, onChange, hasNotebook, notebooks }: FilterProps) {
  const t = useTranslate();
  // the stored notebook may no longer have runs
  const names = filter.notebook === "" || notebooks.includes(filter.notebook) ? notebooks : [filter.notebook, ...notebooks];
  const own = hasNotebook || filter.own ? [[THIS_NOTEBOOK, t("this notebook")] as const] : [];
  return (
    <div class="sgpu-filter" role="search" aria-label={t("Runs")}>
      <input
        type="search"
        value={filter.text}
        placeholder={t("search")}
        aria-label={t("Search runs")}
        onInput={(event) => onChange({ ...filter, text: event.currentTarget.value })}
      />
      <Select
        label={t("State")}
        value={filter.state}
        options={STATES.map((state) => [state, t(STATE_LABELS[state])])}
        onChange={(state) => onChange({ ...filter, state })}
      />
      <Select
        label={t("Notebook")}
        value={filter.own ? THIS_NOTEBOOK : filter.notebook}
        options={[[EVERY_NOTEBOOK, t("all notebooks")], ...own, ...names.map((name) => [name, name] as const)]}
        onChange={(value) => {
          const isOwn = value === THIS_NOTEBOOK;
          onChange({ ...filter, own: isOwn, notebook: isOwn ? "" : value });
        }}
      />
      <Select
        label={t("Time")}
        value={filter.time}
        options={TIMES.map((time) => [time, t(TIME_LABELS[time])])}
        onChange={(time) => onChange({ ...filter, time })}
      />
    </div>
  );
}

interface SelectProps<T extends string> {
  readonly label: string;
  readonly value: T;
  readonly options: readonly (readonly [value: T, label: string])[];
  readonly onChange: (value: T) => void;
}

function Select<T extends string>({ label, value, options, onChange }: SelectProps<T>) {
  return (
    <select
      aria-label={label}
      value={value}
      onChange={({ currentTarget: { selectedIndex } }) => {
        const chosen = options[selectedIndex];
        if (chosen) onChange(chosen[0]);
      }}
    >
      {options.map(([each, text]) => (
        <option key={each} value={each}>
          {text}
        </option>
      ))}
    </select>
  );
}

/** A virtual list, with only the rows in view in the DOM. The panel is the scroll container. */
function RunList({ runs, notebook, kernel }: { runs: readonly Run[]; notebook: string; kernel: string }) {
  const { pool, host } = usePanel();
  const t = useTranslate();
  const [opened, setOpened] = useState("");
  const [tabStop, setTabStop] = useState("");
  const [compared, setCompared] = useState<readonly string[]>([]);
  const [actions_px, setActionsHeight] = useState(ACTIONS_PX);
  const box = useRef<HTMLDivElement>(null);
  const nextFocus = useRef("");
  const { from_px, view_px, scrollTo } = useVisibleRange(box);
  const now = useNow(runs.some(({ final }) => !final));

  const holders = holderLabels(pool.runs, now, t);
  // of other pools too few runs are known
  const heldBy = (run: Run) => (pool.poolOf(run.run_id) === pool.name ? holders(run) : "");
  const tops = [0];
  for (const run of runs) {
    const more_px = (heldBy(run) === "" ? 0 : HELD_LINE_PX) + (run.run_id === opened ? actions_px : 0);
    tops.push((tops.at(-1) ?? 0) + ROW_PX + more_px);
  }
  const all_px = tops.at(-1) ?? 0;
  const top = (at: number) => tops[at] ?? all_px;
  const shown_px = Math.min(Math.max(0, from_px), Math.max(0, all_px - view_px));
  const first = Math.max(0, rowAt(tops, shown_px) - OVERSCAN_ROWS);
  const last = Math.min(runs.length, rowAt(tops, shown_px + view_px) + 1 + OVERSCAN_ROWS);
  const tabStopIndex = Math.max(0, runs.findIndex(({ run_id }) => run_id === tabStop));

  useLayoutEffect(() => {
    const height = box.current?.querySelector<HTMLElement>(".sgpu-actions")?.offsetHeight ?? 0;
    if (height > 0 && height !== actions_px) setActionsHeight(height);
  });
  useLayoutEffect(() => {
    const at = runs.findIndex(({ run_id }) => run_id === opened);
    if (at >= 0) scrollTo(top(at), top(at + 1));
  }, [opened, actions_px]);
  useLayoutEffect(() => {
    if (nextFocus.current === "") return;
    const row = [...(box.current?.querySelectorAll<HTMLElement>(".sgpu-run-head") ?? [])];
    row.find((each) => each.dataset["run"] === nextFocus.current)?.focus({ preventScroll: true });
    nextFocus.current = "";
  });

  const onKey = (event: KeyboardEvent) => {
    if (!(event.target instanceof HTMLElement) || !event.target.classList.contains("sgpu-run-head")) return;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const id = event.target.dataset["run"] ?? "";
    const from = runs.findIndex(({ run_id }) => run_id === id);
    if (from < 0) return;
    if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
      event.preventDefault();
      setOpened(event.key === "ArrowRight" ? id : "");
      return;
    }
    const page = Math.max(1, Math.floor(view_px / ROW_PX));
    const to = { ArrowDown: from + 1, ArrowUp: from - 1, PageDown: from + page, PageUp: from - page, Home: 0, End: runs.length - 1 }[
      event.key
    ];
    if (to === undefined) return;
    event.preventDefault();
    const next = Math.min(runs.length - 1, Math.max(0, to));
    nextFocus.current = runs[next]?.run_id ?? "";
    setTabStop(nextFocus.current);
    scrollTo(top(next), top(next + 1));
  };

  const compare = (id: string) => {
    const chosen = compared.includes(id) ? compared.filter((each) => each !== id) : [...compared, id].slice(-MAX_COMPARED);
    const [first, second] = chosen.map((each) => pool.run(each));
    if (host.compareRuns && first?.here && second?.here) {
      host.compareRuns(first, second);
      setCompared([]);
    } else {
      setCompared(chosen);
    }
  };
  return (
    <>
      <Comparison
        runs={compared.map((id) => pool.run(id)).filter((run) => run !== null)}
        now={now}
        onClose={() => setCompared([])}
      />
      <div ref={box} class="sgpu-runs" style={{ height: `${all_px}px` }} onKeyDown={onKey}>
        <div role="list" aria-label={t("Runs")} style={{ transform: `translateY(${top(first)}px)` }}>
          {runs.slice(first, last).map((run, index) => (
            <RunRow
              key={run.run_id}
              run={run}
              now={now}
              isOpen={run.run_id === opened}
              isOwn={isOwn(run, notebook, kernel)}
              isCompared={compared.includes(run.run_id)}
              heldBy={heldBy(run)}
              pool={pool.pools.length > 1 ? pool.poolOf(run.run_id) : ""}
              isTabStop={first + index === tabStopIndex || (index === 0 && (tabStopIndex < first || tabStopIndex >= last))}
              index={first + index}
              count={runs.length}
              onOpen={() => setOpened(run.run_id === opened ? "" : run.run_id)}
              onCompare={() => compare(run.run_id)}
              onFocus={() => setTabStop(run.run_id)}
            />
          ))}
        </div>
      </div>
    </>
  );
}

/** Returns a function that names the holders of a run's devices, "" for none; cached by type, user and kernel. */
function holderLabels(runs: readonly Run[], now: number, t: Translate): (run: Run) => string {
  const cache = new Map<string, string>();
  return (run) => {
    if (run.final || run.tone !== "waiting" || run.session !== "") return "";
    const key = `${run.device_type} ${run.user} ${run.kernel}`;
    const cached = cache.get(key);
    if (cached !== undefined) return cached;
    const [holder, ...others] = holdersOf(run, runs);
    const since_s = holder?.idleSince_s ?? null;
    const idle_s = since_s === null ? null : now - since_s;
    const first = holder ? t("held by %1", holderLabel(holder.run, idle_s, run, t)) : "";
    const label = others.length > 0 ? `${first} ${t("and %1 more", others.length)}` : first;
    cache.set(key, label);
    return label;
  };
}

/** Returns the index of the row at an offset; `tops` has the offset of each row. */
function rowAt(tops: readonly number[], px: number): number {
  let [low, high] = [0, Math.max(0, tops.length - 2)];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if ((tops[middle] ?? 0) <= px) low = middle;
    else high = middle - 1;
  }
  return low;
}
