import { useRef, useState } from "preact/hooks";

interface Options {
  /** Index of the curve's last point; -1 for an empty curve. */
  readonly last: number;
  /** Returns the index of the point at a share of the curve's width. */
  readonly pointAt: (share: number) => number;
  /** Called with the index of the point at the pointer or cursor, and with null when it leaves the curve. */
  readonly onRead?: (index: number | null) => void;
}

/**
 * A position on a curve, set by the pointer and the arrow keys.
 *
 * Returns the index of the point, or null without a cursor, and the attributes of the curve's `<svg>`.
 */
export function useCurveCursor({ last, pointAt, onRead }: Options) {
  const [cursor, setCursor] = useState<number | null>(null);
  const box = useRef<SVGSVGElement>(null);
  // the curve may have become shorter
  const at = cursor === null ? null : Math.max(0, Math.min(cursor, last));

  const read = (index: number | null) => {
    const bounded = index === null ? null : Math.max(0, Math.min(index, last));
    setCursor(bounded);
    onRead?.(bounded);
  };
  const onPointerMove = (event: PointerEvent) => {
    const { left, width } = box.current?.getBoundingClientRect() ?? { left: 0, width: 0 };
    if (width > 0) read(pointAt((event.clientX - left) / width));
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const from = at ?? last;
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    read(to);
  };
  const slider = {
    ref: box,
    preserveAspectRatio: "none",
    role: "slider",
    "aria-valuemin": 0,
    "aria-valuemax": Math.max(last, 0),
    "aria-valuenow": at ?? Math.max(last, 0),
    "aria-readonly": true,
    onPointerMove,
    onPointerLeave: () => read(null),
    onFocus: () => read(last),
    onBlur: () => read(null),
    onKeyDown,
  } as const;
  return { at, slider };
}
