/** Where a long list lies in the panel, which scrolls it. */
import type { RefObject } from "preact";
import { useLayoutEffect, useState } from "preact/hooks";

/** Before anything has been measured. */
const USUAL_PX = 440;

/** The part of a list that can be seen. */
export interface View {
  /** How far the list's beginning is above that of what is seen; negative where it is below. */
  readonly from_px: number;
  readonly view_px: number;
  /** Brings a part of the list into view, both in pixels from its beginning. */
  readonly scrollTo: (from_px: number, to_px: number) => void;
}

/** Follows what can be seen of an element in the panel around it. */
export function useView(box: RefObject<HTMLElement | null>): View {
  const [{ from_px, view_px }, setSeen] = useState({ from_px: 0, view_px: USUAL_PX });

  const measure = (): void => {
    const scroller = scrollerOf(box);
    if (!scroller || !box.current) return;
    const next = { from_px: scroller.scrollTop - box.current.offsetTop, view_px: scroller.clientHeight || USUAL_PX };
    setSeen((seen) => (seen.from_px === next.from_px && seen.view_px === next.view_px ? seen : next));
  };

  // what lies above it may have become longer or shorter
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
