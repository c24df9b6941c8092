/** Position of a long list in the panel, its scroll container. */
import type { RefObject } from "preact";
import { useLayoutEffect, useState } from "preact/hooks";

/** Assumed height of the view until it is measured. */
const DEFAULT_HEIGHT_PX = 440;

/** The visible part of a list. */
export interface VisibleRange {
  /** Offset of the view's top from the list's top; negative if the list begins below it. */
  readonly from_px: number;
  readonly view_px: number;
  /** Scrolls a part of the list into view; its bounds are in pixels from the list's top. */
  readonly scrollTo: (from_px: number, to_px: number) => void;
}

/** Tracks the visible part of an element in the panel. */
export function useVisibleRange(box: RefObject<HTMLElement | null>): VisibleRange {
  const [{ from_px, view_px }, setRange] = useState({ from_px: 0, view_px: DEFAULT_HEIGHT_PX });

  const measure = (): void => {
    const scroller = scrollContainer(box);
    if (!scroller || !box.current) return;
    const next = { from_px: scroller.scrollTop - box.current.offsetTop, view_px: scroller.clientHeight || DEFAULT_HEIGHT_PX };
    setRange((range) => (range.from_px === next.from_px && range.view_px === next.view_px ? range : next));
  };

  // the height of the content above the list may have changed
  useLayoutEffect(measure);
  useLayoutEffect(() => {
    const scroller = scrollContainer(box);
    if (!scroller) return undefined;
    const end = new AbortController();
    scroller.addEventListener("scroll", measure, { signal: end.signal, passive: true });
    if (typeof ResizeObserver !== "undefined") {
      const observer = new ResizeObserver(measure);
      observer.observe(scroller);
      if (scroller.firstElementChild) observer.observe(scroller.firstElementChild);
      end.signal.addEventListener("abort", () => observer.disconnect(), { once: true });
    }
    return () => end.abort();
  }, []);

  return {
    from_px,
    view_px,
    scrollTo: (top_px, bottom_px) => {
      const scroller = scrollContainer(box);
      if (!scroller) return;
      if (top_px < from_px) scroller.scrollTop += top_px - from_px;
      else if (bottom_px > from_px + view_px) scroller.scrollTop += bottom_px - from_px - view_px;
      measure();
    },
  };
}

function scrollContainer(box: RefObject<HTMLElement | null>): HTMLElement | null {
  return box.current?.closest<HTMLElement>(".sgpu-panel") ?? null;
}
