import { Shape } from "../../shared/shape";
import type { ShapeName } from "../../shared/shape";
import type { Tone } from "../messages";

const STATE_SHAPES: Readonly<Record<string, ShapeName>> = {
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
const TONE_SHAPES: Readonly<Record<Tone, ShapeName>> = {
  plain: "ring",
  busy: "dot",
  good: "check",
  bad: "cross",
  warn: "triangle",
};

/** A state's shape, always shown next to the state's name. */
export function Icon({ state, tone }: { state: string; tone: Tone }) {
  return <Shape name={STATE_SHAPES[state] ?? TONE_SHAPES[tone]} />;
}
