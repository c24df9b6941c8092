import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

import type { Tab } from "../log_model";
import type { RunModel } from "../run_model";
import { ScrollMap } from "../scroll_map";
import { LogRow, widthOf } from "./log_row";

export const ROW_PX = 18;
/** Rows that are drawn above and below those in view. */
const BEYOND = 12;
/** Rows of a log without lines, of a full one, and of a full one below the cards of many ranks. */
const ROWS = { empty: 3, full: 14, dense: 10 };
const SETTLE_MS = 160;

/** The number of rows that the log takes: it grows with its lines until it is full, and never shrinks. */
export function grownRows(before: number, lines: number, dense: boolean): number {
  return Math.max(before, Math.min(Math.max(lines, ROWS.empty), dense ? ROWS.dense : ROWS.full));
}

interface Props {
  readonly model: RunModel;
  readonly tab: Tab;
  readonly following: boolean;
  readonly onFollow: (following: boolean) => void;
  readonly query: string;
  /** The line to mark and scroll to, null for none; a new object scrolls to it again. */
  readonly target: { readonly line: number } | null;
  /** Kept up to date with the first line in view. */
  readonly top: { current: number };
  /** The rows to show at least. */
  readonly rows: number;
  /** The log has its full height: further lines scroll, and its corner can be dragged. */
  readonly isFull: boolean;
  /** The height that its corner was dragged to, "" for none; all tabs share it. */
  readonly dragged: { current: string };
}

/** The lines of one tab as a virtual list: only those in view are in the DOM. */
export function LogView({ model, tab, following, onFollow, query, target, top, rows: shownRows, isFull, dragged }: Props) {
  const least_px = shownRows * ROW_PX;
  const [height_px, setHeight] = useState(least_px);
  const [, redraw] = useState(0);
  const [map] = useState(() => new ScrollMap(ROW_PX));
  const scroller = useRef<HTMLDivElement>(null);
  const widest = useRef(0);
  const shown = useRef<{ readonly line: number } | null>(null);
  const lines = model.log.lines(tab);

  // a grown height is reported by the ResizeObserver only after it was drawn
  map.resize(lines.total, isFull ? height_px : Math.max(height_px, least_px));
  if (target && target !== shown.current) map.show(target.line);
  else if (following) map.toEnd();
  shown.current = target;
  const { first, count } = map.range(BEYOND);
  top.current = map.topLine;

  const place = () => {
    const element = scroller.current;
    if (element && Math.abs(element.scrollTop - map.scroll_px) >= 1) element.scrollTop = map.scroll_px;
  };
  useLayoutEffect(place);
  useEffect(() => model.log.ensure(tab, first, count));

  const settling = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  // a layout effect: its cleanup runs when the view is removed, not after the next frame
  useLayoutEffect(() => {
    const element = scroller.current;
    if (!element) return;
    element.style.height = dragged.current;
    const observer =
      typeof ResizeObserver === "undefined"
        ? null
        : new ResizeObserver(() => {
            // no height: the cell was detached from the page and lost its scroll position
            if (element.clientHeight > 0) setHeight(element.clientHeight);
            place();
          });
    observer?.observe(element);
    return () => {
      dragged.current = element.style.height;
      observer?.disconnect();
      clearTimeout(settling.current);
    };
  }, []);

  const moved = () => {
    onFollow(map.atEnd);
    redraw((number) => number + 1);
  };
  const onScroll = () => {
    const element = scroller.current;
    if (!element || element.clientHeight === 0 || Math.abs(element.scrollTop - map.scroll_px) < 1) return;
    // the browser scrolled after a resize that the observer is about to report
    if (element.clientHeight !== height_px && typeof ResizeObserver !== "undefined") return;
    map.scrolled(element.scrollTop);
    moved();
    clearTimeout(settling.current);
    settling.current = setTimeout(() => {
      if (map.settle()) redraw((number) => number + 1);
    }, SETTLE_MS);
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
    map.move(...step);
    moved();
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
      style={isFull ? { "--full": `${least_px}px` } : { minHeight: `${least_px}px` }}
      role="log"
      aria-live="off"
      aria-label={tab === "all" ? "lines of all ranks" : `lines of rank ${tab}`}
      tabIndex={0}
      onScroll={onScroll}
      onKeyDown={onKey}
    >
      {lines.total === 0 && <div class="sgpu-row sgpu-hole">{model.snapshot?.final ? "no output" : "no output yet"}</div>}
      <div class="sgpu-tall" style={{ height: `${map.height_px}px`, minWidth: `${widest.current + 8}ch` }}>
        <div class="sgpu-rows" style={{ transform: `translateY(${map.place_px(first)}px)` }}>
          {rows}
        </div>
      </div>
    </div>
  );
}

function labelWidth(model: RunModel): number {
  return String(Math.max((model.snapshot?.lines.length ?? 1) - 1, 0)).length + 2;
}
