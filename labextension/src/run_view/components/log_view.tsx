import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

import type { Tab } from "../log_model";
import type { RunModel } from "../run_model";
import { ScrollMap } from "../scroll_map";
import { LogRow, widthOf } from "./log_row";

export const ROW_PX = 18;
/** Rows that are drawn above and below those in view. */
const BEYOND = 12;
/** The view's height before the browser has told it. */
const FIRST_HEIGHT_PX = 14 * ROW_PX;
const SETTLE_MS = 160;

interface Props {
  readonly model: RunModel;
  readonly tab: Tab;
  readonly following: boolean;
  readonly onFollow: (following: boolean) => void;
  readonly query: string;
  /** The line that is to be in view and is marked, null without one; a new object brings it into view again. */
  readonly target: { readonly line: number } | null;
  /** Kept up to date with the first line in view. */
  readonly top: { current: number };
}

/** The lines of one tab: only those in view are in the page, whatever their number. */
export function LogView({ model, tab, following, onFollow, query, target, top }: Props) {
  const [height_px, setHeight] = useState(FIRST_HEIGHT_PX);
  const [, redraw] = useState(0);
  const [map] = useState(() => new ScrollMap(ROW_PX));
  const scroller = useRef<HTMLDivElement>(null);
  const widest = useRef(0);
  const shown = useRef<{ readonly line: number } | null>(null);
  const lines = model.log.lines(tab);

  map.resize(lines.total, height_px);
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
  // a layout effect: its end comes with the view's, not after the next frame
  useLayoutEffect(() => {
    const element = scroller.current;
    if (!element) return;
    const observer =
      typeof ResizeObserver === "undefined"
        ? null
        : new ResizeObserver(() => {
            // no height: the cell was taken off the page, and its scroll position with it
            if (element.clientHeight > 0) setHeight(element.clientHeight);
            place();
          });
    observer?.observe(element);
    return () => {
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
      class="sgpu-log"
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
