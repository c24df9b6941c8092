import type { JSX } from "preact";

export type ShapeName = "dot" | "ring" | "check" | "cross" | "square" | "triangle" | "dash";

const SHAPES: Readonly<Record<ShapeName, JSX.Element>> = {
  dot: <circle cx="5" cy="5" r="4" fill="currentColor" />,
  ring: <circle cx="5" cy="5" r="3.4" fill="none" stroke="currentColor" stroke-width="1.4" />,
  check: <path d="M1.2 5.4 4 8.2 8.9 2.2" fill="none" stroke="currentColor" stroke-width="1.9" />,
  cross: <path d="M1.8 1.8 8.2 8.2M8.2 1.8 1.8 8.2" fill="none" stroke="currentColor" stroke-width="1.9" />,
  square: <rect x="1.5" y="1.5" width="7" height="7" fill="currentColor" />,
  triangle: <path d="M5 .8 9.6 9.2H.4Z" fill="currentColor" />,
  dash: <path d="M1 5H9" fill="none" stroke="currentColor" stroke-width="2" />,
};

/** A small shape in the current text colour; always placed next to text. */
export function Shape({ name }: { name: ShapeName }) {
  return (
    <svg class="sgpu-icon" viewBox="0 0 10 10" aria-hidden="true">
      {SHAPES[name]}
    </svg>
  );
}
