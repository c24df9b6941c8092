import { useEffect, useRef, useState } from "preact/hooks";

import { countOf } from "../../shared/units";
import { copyLog, downloadLog } from "../log_export";
import type { Progress } from "../log_export";
import type { Tab } from "../log_model";
import { textOf } from "../run_model";
import type { RunModel } from "../run_model";
import { FindBar } from "./find_bar";
import { LogView, grownRows } from "./log_view";
import { Tabs } from "./tabs";

interface Props {
  readonly model: RunModel;
  readonly tab: Tab;
  readonly onTab: (tab: Tab) => void;
  readonly ranks: readonly number[];
  /** There are many ranks, whose cards need the room. */
  readonly dense: boolean;
  readonly id: string;
  readonly signal: AbortSignal;
}

/** The log: its tabs, tools and lines. */
export function LogPanel({ model, tab, onTab, ranks, dense, id, signal }: Props) {
  const [following, setFollowing] = useState(true);
  const [finding, setFinding] = useState(false);
  const [query, setQuery] = useState("");
  const [target, setTarget] = useState<{ line: number } | null>(null);
  const [says, setSays] = useState("");
  const [busy, setBusy] = useState(false);
  const leftAt = useRef(0);
  const top = useRef(0);
  const panel = useRef<HTMLDivElement>(null);
  const rows = useRef(0);
  const dragged = useRef("");
  const total = model.log.lines(tab).total;
  // sized for the longest tab so far, so that changing tabs does not move the content below
  rows.current = grownRows(rows.current, total, dense);

  useEffect(() => {
    setFollowing(true);
    setTarget(null);
  }, [tab]);

  const follow = (on: boolean) => {
    if (!on && following) leftAt.current = total;
    if (on && !following) setTarget(null);
    setFollowing(on);
  };
  const closeFind = () => {
    setFinding(false);
    setQuery("");
    setTarget(null);
    panel.current?.querySelector<HTMLElement>(".sgpu-log")?.focus();
  };
  const run = async (work: (progress: Progress) => Promise<string>) => {
    setBusy(true);
    try {
      setSays(await work({ signal, tell: setSays }));
    } catch (error) {
      setSays(textOf(error));
    }
    setBusy(false);
  };
  const onKey = (event: KeyboardEvent) => {
    // the browser's own search finds only the lines in view
    if ((event.ctrlKey || event.metaKey) && event.key === "f") {
      event.preventDefault();
      event.stopPropagation();
      setFinding(true);
    }
  };
  const unseen = total - leftAt.current;
  return (
    <section class="sgpu-log-panel" aria-label="log" onKeyDown={onKey}>
      <nav class="sgpu-nav">
        <Tabs tab={tab} ranks={ranks} onTab={onTab} id={id} />
        <span class="sgpu-tools">
          <span class="sgpu-count">{says || countOf(total, "line")}</span>
          <button
            type="button"
            class="sgpu-follow"
            aria-pressed={following}
            title="Keep the newest lines in view (End)"
            onClick={() => follow(!following)}
          >
            {following ? "following" : "follow"}
          </button>
          <button type="button" aria-expanded={finding} title="Find in the whole log (Ctrl+F)" onClick={() => (finding ? closeFind() : setFinding(true))}>
            find
          </button>
          <button type="button" disabled={busy} title="Copy the whole log" onClick={() => void run((to) => copyLog(model, tab, to))}>
            copy
          </button>
          <button type="button" disabled={busy} title="Download the whole log" onClick={() => void run((to) => downloadLog(model, tab, to))}>
            download
          </button>
        </span>
      </nav>
      <div ref={panel} class="sgpu-log-box" role="tabpanel" id={`${id}-panel`} aria-labelledby={`${id}-tab-${tab}`}>
        <LogView
          key={tab}
          model={model}
          tab={tab}
          following={following}
          onFollow={follow}
          query={query}
          target={target}
          top={top}
          rows={rows.current}
          isFull={rows.current >= grownRows(0, Infinity, dense)}
          dragged={dragged}
        />
        {finding && (
          <FindBar
            model={model}
            tab={tab}
            top={top}
            onQuery={setQuery}
            onLine={(line) => {
              setTarget(line === null ? null : { line });
              if (line !== null) follow(false);
            }}
            onClose={closeFind}
          />
        )}
        {!following && unseen > 0 && (
          <button type="button" class="sgpu-newer" onClick={() => follow(true)}>
            ↓ {countOf(unseen, "new line")}
          </button>
        )}
      </div>
    </section>
  );
}
