/** Position of a long list in the panel, its scroll container. */
import type { RefObject } from "preact";
import { useLayoutEffect, useState } from "preact/hooks";

/** Assumed height of the view until it is measured. */
const USUAL_PX = 440;

/** The visible part of a list. */
export interface View {
  /** Offset of the view's top from the list's top; negative if the list begins below it. */
  readonly from_px: number;
  readonly view_px: number;
  /** Scrolls a part of the list into view; its bounds are in pixels from the list's top. */
  readonly scrollTo: (from_px: number, to_px: number) => void;
}

/** Tracks the visible part of an element in the panel. */
export function useView(box: RefObject<HTMLElement | null>): View {
  const [{ from_px, view_px }, setSeen] = useState({ from_px: 0, view_px: USUAL_PX });

  const measure = (): void => {
    const scroller = scrollerOf(box);
    if (!scroller || !box.current) return;
    const next = { from_px: scroller.scrollTop - box.current.offsetTop, view_px: scroller.clientHeight || USUAL_PX };
    setSeen((seen) => (seen.from_px === next.from_px && seen.view_px === next.view_px ? seen : next));
  };

  // the height of the content above the list may have changed
  useLayoutEffect(measure);
  useLayoutEffect(() => {
    const scroller = scrollerOf(box);
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
      const scroller = scrollerOf(box);
      if (!scroller) return;
      if (top_px < from_px) scroller.scrollTop += top_px - from_px;
      else if (bottom_px > from_px + view_px) scroller.scrollTop += bottom_px - from_px - view_px;
      measure();
    },
  };
}

function scrollerOf(box: RefObject<HTMLElement | null>): HTMLElement | null {
  return box.current?.closest<HTMLElement>(".sgpu-panel") ?? null;
}
