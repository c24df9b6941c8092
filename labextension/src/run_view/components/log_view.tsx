import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

import type { Tab } from "../log_model";
import type { RunModel } from "../run_model";
import { ScrollMap } from "../scroll_map";
import { LogRow, widthOf } from "./log_row";

export const ROW_PX = 18;
/** Rows that are rendered above and below those in view. */
const OVERSCAN_ROWS = 12;
/** Height, in rows, of an empty log, of a full one, and of a full one below the cards of many ranks. */
const ROWS = { empty: 3, full: 14, dense: 10 };
const ALIGN_DELAY_MS = 160;

/** Returns the log's height in rows: it grows with the lines until the log is full, and never shrinks. */
export function grownRows(before: number, lines: number, dense: boolean): number {
  return Math.max(before, Math.min(Math.max(lines, ROWS.empty), dense ? ROWS.dense : ROWS.full));
}

interface Props {
  readonly model: RunModel;
  readonly tab: Tab;
  readonly following: boolean;
  readonly onFollow: (following: boolean) => void;
  readonly query: string;
  /** The line to mark and scroll to, null for none; a new object with the same line scrolls again. */
  readonly target: { readonly line: number } | null;
  /** Receives the first line in view. */
  readonly top: { current: number };
  /** Minimum height in rows. */
  readonly minRows: number;
  /** Whether the log has its full height, so that more lines make it scroll, and the user can resize it. */
  readonly isFull: boolean;
  /** CSS height to which the user has resized the log, "" if not resized; shared by all tabs. */
  readonly draggedHeight: { current: string };
}

/** The lines of one tab as a virtual list: only those in view are in the DOM. */
export function LogView({ model, tab, following, onFollow, query, target, top, minRows, isFull, draggedHeight }: Props) {
  const minHeight_px = minRows * ROW_PX;
  const [height_px, setHeight] = useState(minHeight_px);
  const [, redraw] = useState(0);
  const [map] = useState(() => new ScrollMap(ROW_PX));
  const scroller = useRef<HTMLDivElement>(null);
  const widest = useRef(0);
  const lastTarget = useRef<{ readonly line: number } | null>(null);
  const lines = model.log.lines(tab);
  const firstLine = useRef(model.position.line);

  // the ResizeObserver reports a grown height only after it was drawn
  map.resize(lines.total, isFull ? height_px : Math.max(height_px, minHeight_px));
  if (target && target !== lastTarget.current) map.scrollToLine(target.line);
  else if (following) map.scrollToEnd();
  else if (firstLine.current !== null) map.scrollBy(firstLine.current, 0);
  if (lines.total > 0) firstLine.current = null;
  lastTarget.current = target;
  const { first, count } = map.range(OVERSCAN_ROWS);
  top.current = map.topLine;
  model.position.line = following ? null : map.topLine;

  const applyScroll = () => {
    const element = scroller.current;
    if (element && Math.abs(element.scrollTop - map.scroll_px) >= 1) element.scrollTop = map.scroll_px;
  };
  useLayoutEffect(applyScroll);
  useEffect(() => model.log.requestMissing(tab, first, count));

  const alignTimer = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  // the cleanup of a layout effect runs when the view is removed, that of an effect only after the next frame
  useLayoutEffect(() => {
    const element = scroller.current;
    if (!element) return;
    element.style.height = draggedHeight.current;
    const observer =
      typeof ResizeObserver === "undefined"
        ? null
        : new ResizeObserver(() => {
            // an element without a height was detached from the page, and has lost its scroll position
            if (element.clientHeight > 0) setHeight(element.clientHeight);
            applyScroll();
          });
    observer?.observe(element);
    return () => {
      draggedHeight.current = element.style.height;
      observer?.disconnect();
      clearTimeout(alignTimer.current);
    };
  }, []);

  const onMove = () => {
    onFollow(map.atEnd);
    redraw((number) => number + 1);
  };
  const onScroll = () => {
    const element = scroller.current;
    if (!element || element.clientHeight === 0 || Math.abs(element.scrollTop - map.scroll_px) < 1) return;
    // the browser scrolls after a resize, which the observer is about to report
    if (element.clientHeight !== height_px && typeof ResizeObserver !== "undefined") return;
    map.onScroll(element.scrollTop);
    onMove();
    clearTimeout(alignTimer.current);
    alignTimer.current = setTimeout(() => {
      if (map.alignScrollBar()) redraw((number) => number + 1);
    }, ALIGN_DELAY_MS);
  };
  const onKey = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const steps: Readonly<Record<string, readonly [number, number]>> = {
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      PageUp: [0, -1],
      PageDown: [0, 1],
      Home: [-lines.total, 0],
      End: [lines.total, 0],
    };
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    map.scrollBy(...step);
    onMove();
  };

  const rows = [];
  for (let line = first; line < first + count; line++) {
    const row = lines.get(line);
    if (row) widest.current = Math.max(widest.current, widthOf(row));
    rows.push(
      <LogRow
        key={line}
        row={row}
        label={tab === "all" ? labelWidth(model) : 0}
        query={query}
        isCurrent={target?.line === line}
      />,
    );
  }
  return (
    <div
      ref={scroller}
      class={`sgpu-log${isFull ? " sgpu-full" : ""}`}
      style={isFull ? { "--full": `${minHeight_px}px` } : { minHeight: `${minHeight_px}px` }}
      role="log"
      aria-live="off"
      aria-label={tab === "all" ? "lines of all ranks" : `lines of rank ${tab}`}
      tabIndex={0}
      onScroll={onScroll}
      onKeyDown={onKey}
    >
      {lines.total === 0 && <div class="sgpu-row sgpu-hole">{model.snapshot?.final ? "no output" : "no output yet"}</div>}
      <div class="sgpu-tall" style={{ height: `${map.height_px}px`, minWidth: `${widest.current + 8}ch` }}>
        <div class="sgpu-rows" style={{ transform: `translateY(${map.lineTop_px(first)}px)` }}>
          {rows}
        </div>
      </div>
    </div>
  );
}

function labelWidth(model: RunModel): number {
  return String(Math.max((model.snapshot?.lines.length ?? 1) - 1, 0)).length + 2;
}
