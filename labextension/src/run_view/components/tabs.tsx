import { useLayoutEffect, useRef } from "preact/hooks";

import type { Tab } from "../log_model";

interface Props {
  readonly tab: Tab;
  readonly ranks: readonly number[];
  readonly onTab: (tab: Tab) => void;
  readonly id: string;
}

/** The log's tabs: all ranks, then each; arrow keys go from one to the next. */
export function Tabs({ tab, ranks, onTab, id }: Props) {
  const list = useRef<HTMLDivElement>(null);
  const tabs: readonly Tab[] = ["all", ...ranks];
  useLayoutEffect(() => {
    // only sideways: the page stays where it is
    const box = list.current;
    const chosen = box?.querySelector<HTMLElement>('[aria-selected="true"]');
    if (!box || !chosen) return;
    const [left, right] = [chosen.offsetLeft, chosen.offsetLeft + chosen.offsetWidth];
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
  return (
    <div ref={list} class="sgpu-tabs" role="tablist" aria-label="log by rank" onKeyDown={onKey} onWheel={onWheel}>
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
  );
}
