import { useLayoutEffect, useRef, useState } from "preact/hooks";

import type { Tab } from "../log_model";

interface Props {
  readonly tab: Tab;
  readonly ranks: readonly number[];
  readonly onTab: (tab: Tab) => void;
  readonly id: string;
}

/** Share of the visible width that a button scrolls by. */
const SCROLL_SHARE = 0.8;
/** Width of the fade at the edges of the tab strip; must match the style sheet. */
const FADE_PX = 24;

/** The log's tabs: one for all ranks, then one for each rank. The arrow keys select a tab; buttons scroll to hidden tabs. */
export function Tabs({ tab, ranks, onTab, id }: Props) {
  const list = useRef<HTMLDivElement>(null);
  const [hidden, setHidden] = useState({ left: false, right: false });
  const tabs: readonly Tab[] = ["all", ...ranks];
  const updateHidden = () => {
    const box = list.current;
    if (!box) return;
    const left = box.scrollLeft > 1;
    const right = box.scrollLeft + box.clientWidth < box.scrollWidth - 1;
    setHidden((before) => (before.left === left && before.right === right ? before : { left, right }));
  };
  useLayoutEffect(updateHidden, [ranks.length]);
  useLayoutEffect(() => {
    if (!list.current || typeof ResizeObserver === "undefined") return;
    const observer = new ResizeObserver(updateHidden);
    observer.observe(list.current);
    return () => observer.disconnect();
  }, []);
  const scrollBy = (by: number) => {
    const box = list.current;
    if (box) box.scrollLeft += by * SCROLL_SHARE * box.clientWidth;
  };
  useLayoutEffect(() => {
    // not `scrollIntoView`, which may scroll the page too
    const box = list.current;
    const chosen = box?.querySelector<HTMLElement>('[aria-selected="true"]');
    if (!box || !chosen || box.clientWidth === 0) return;
    const [left, right] = [Math.max(chosen.offsetLeft - FADE_PX, 0), chosen.offsetLeft + chosen.offsetWidth + FADE_PX];
    if (left < box.scrollLeft) box.scrollLeft = left;
    else if (right > box.scrollLeft + box.clientWidth) box.scrollLeft = right - box.clientWidth;
  }, [tab]);
  const onWheel = (event: WheelEvent) => {
    const box = list.current;
    if (!box || event.deltaX !== 0 || box.scrollWidth <= box.clientWidth) return;
    event.preventDefault();
    box.scrollLeft += event.deltaY;
  };
  const onKey = (event: KeyboardEvent) => {
    const at = tabs.indexOf(tab);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const index = (to + tabs.length) % tabs.length;
    onTab(tabs[index] ?? "all");
    list.current?.querySelectorAll<HTMLElement>('[role="tab"]')[index]?.focus();
  };
  const classes = ["sgpu-tabs", hidden.left ? "sgpu-before" : "", hidden.right ? "sgpu-after" : ""].filter(Boolean);
  return (
    <div class="sgpu-tab-strip">
      {hidden.left && <ScrollButton label="tabs before" symbol="‹" onClick={() => scrollBy(-1)} />}
      <div
        ref={list}
        class={classes.join(" ")}
        role="tablist"
        aria-label="log by rank"
        onKeyDown={onKey}
        onWheel={onWheel}
        onScroll={updateHidden}
      >
        {tabs.map((each) => (
          <button
            key={each}
            type="button"
            role="tab"
            id={`${id}-tab-${each}`}
            aria-label={each === "all" ? "all ranks" : `rank ${each}`}
            aria-selected={each === tab}
            aria-controls={`${id}-panel`}
            tabIndex={each === tab ? 0 : -1}
            onClick={() => onTab(each)}
          >
            {each}
          </button>
        ))}
      </div>
      {hidden.right && <ScrollButton label="tabs after" symbol="›" onClick={() => scrollBy(1)} />}
    </div>
  );
}

/** Scrolls to hidden tabs. Only for pointers, because the arrow keys select tabs. */
function ScrollButton({ label, symbol, onClick }: { label: string; symbol: string; onClick: () => void }) {
  return (
    <button type="button" class="sgpu-turn" aria-label={label} title={label} tabIndex={-1} onClick={onClick}>
      {symbol}
    </button>
  );
}
