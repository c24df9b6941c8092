import type { JSX } from "preact";

import type { Tone } from "../messages";

type Sign = "dot" | "ring" | "check" | "cross" | "square" | "triangle" | "dash";

const SIGNS: Readonly<Record<string, Sign>> = {
  running: "dot",
  connected: "dot",
  alive: "dot",
  starting: "dot",
  preparing: "ring",
  queued: "ring",
  waiting: "ring",
  done: "check",
  succeeded: "check",
  failed: "cross",
  dead: "cross",
  "timed out": "cross",
  cancelled: "square",
  cancelling: "square",
  disconnecting: "square",
  ended: "square",
  released: "dash",
  idle: "triangle",
};
const TONES: Readonly<Record<Tone, Sign>> = {
  plain: "ring",
  busy: "dot",
  good: "check",
  bad: "cross",
  warn: "triangle",
};
const SHAPES: Readonly<Record<Sign, JSX.Element>> = {
  dot: <circle cx="5" cy="5" r="4" fill="currentColor" />,
  ring: <circle cx="5" cy="5" r="3.4" fill="none" stroke="currentColor" stroke-width="1.4" />,
  check: <path d="M1.2 5.4 4 8.2 8.9 2.2" fill="none" stroke="currentColor" stroke-width="1.9" />,
  cross: <path d="M1.8 1.8 8.2 8.2M8.2 1.8 1.8 8.2" fill="none" stroke="currentColor" stroke-width="1.9" />,
  square: <rect x="1.5" y="1.5" width="7" height="7" fill="currentColor" />,
  triangle: <path d="M5 .8 9.6 9.2H.4Z" fill="currentColor" />,
  dash: <path d="M1 5H9" fill="none" stroke="currentColor" stroke-width="2" />,
};

/** A state's shape; its word always stands beside it. */
export function Icon({ state, tone }: { state: string; tone: Tone }) {
  return (
    <svg class="sgpu-icon" viewBox="0 0 10 10" aria-hidden="true">
      {SHAPES[SIGNS[state] ?? TONES[tone]]}
    </svg>
  );
}
