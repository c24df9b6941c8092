import { useEffect, useRef, useState } from "preact/hooks";

import { countOf } from "../../shared/units";
import { copyLog, downloadLog } from "../log_export";
import type { Progress } from "../log_export";
import type { Tab } from "../log_model";
import { errorText } from "../run_model";
import type { RunModel } from "../run_model";
import { FindBar } from "./find_bar";
import { LogView, grownRows } from "./log_view";
import { Tabs } from "./tabs";

interface Props {
  readonly model: RunModel;
  readonly tab: Tab;
  readonly onTab: (tab: Tab) => void;
  readonly ranks: readonly number[];
  /** Whether the cards of many ranks leave less space for the log. */
  readonly dense: boolean;
  readonly id: string;
  readonly signal: AbortSignal;
}

/** The log: its tabs, tools and lines. */
export function LogPanel({ model, tab, onTab, ranks, dense, id, signal }: Props) {
  const { position } = model;
  const [following, setFollowing] = useState(position.line === null);
  const [isFindOpen, setFindOpen] = useState(position.find !== null);
  const [query, setQuery] = useState(position.find ?? "");
  const [target, setTarget] = useState<{ line: number } | null>(null);
  const [status, setStatus] = useState("");
  const [isExporting, setExporting] = useState(false);
  const seenLines = useRef(model.log.lines(tab).total);
  const top = useRef(0);
  const panel = useRef<HTMLDivElement>(null);
  const rows = useRef(0);
  const draggedHeight = useRef("");
  const lastTab = useRef(tab);
  const wasFindOpen = useRef(isFindOpen);
  const total = model.log.lines(tab).total;
  // sized for the longest tab so far, so that changing tabs does not move the content below
  rows.current = grownRows(rows.current, total, dense);

  position.find = isFindOpen ? query : null;

  useEffect(() => {
    if (lastTab.current === tab) return;
    lastTab.current = tab;
    setFollowing(true);
    setTarget(null);
  }, [tab]);

  const follow = (on: boolean) => {
    if (!on && following) seenLines.current = total;
    if (on && !following) setTarget(null);
    setFollowing(on);
  };
  const closeFind = () => {
    setFindOpen(false);
    wasFindOpen.current = false;
    setQuery("");
    setTarget(null);
    panel.current?.querySelector<HTMLElement>(".sgpu-log")?.focus();
  };
  const runExport = async (exportLog: (progress: Progress) => Promise<string>) => {
    setExporting(true);
    try {
      setStatus(await exportLog({ signal, report: setStatus }));
    } catch (error) {
      setStatus(errorText(error));
    }
    setExporting(false);
  };
  const onKey = (event: KeyboardEvent) => {
    // the browser's own search finds only the lines in view
    if ((event.ctrlKey || event.metaKey) && event.key === "f") {
      event.preventDefault();
      event.stopPropagation();
      setFindOpen(true);
    }
  };
  const unseen = total - seenLines.current;
  return (
    <section class="sgpu-log-panel" aria-label="log" onKeyDown={onKey}>
      <nav class="sgpu-nav">
        <Tabs tab={tab} ranks={ranks} onTab={onTab} id={id} />
        <span class="sgpu-tools">
          <span class="sgpu-count">{status || countOf(total, "line")}</span>
          <button
            type="button"
            class="sgpu-follow"
            aria-pressed={following}
            title="Keep the newest lines in view (End)"
            onClick={() => follow(!following)}
          >
            {following ? "following" : "follow"}
          </button>
          <button type="button" aria-expanded={isFindOpen} title="Find in the whole log (Ctrl+F)" onClick={() => (isFindOpen ? closeFind() : setFindOpen(true))}>
            find
          </button>
          <button type="button" disabled={isExporting} title="Copy the whole log" onClick={() => void runExport((progress) => copyLog(model, tab, progress))}>
            copy
          </button>
          <button type="button" disabled={isExporting} title="Download the whole log" onClick={() => void runExport((progress) => downloadLog(model, tab, progress))}>
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
          minRows={rows.current}
          isFull={rows.current >= grownRows(0, Infinity, dense)}
          draggedHeight={draggedHeight}
        />
        {isFindOpen && (
          <FindBar
            model={model}
            tab={tab}
            top={top}
            initialQuery={query}
            takesFocus={!wasFindOpen.current}
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
