/** Reads what comes from outside to a run's view. */

import { BadMessage } from "../shared/checks";
import { answer, snapshot, told, VERSION } from "./records";
import type { Answer, LineRow, LineSkip, Snapshot, Told } from "./records";

export * from "./records";

/**
 * Returns a snapshot that has come from outside.
 *
 * @throws BadMessage: It is none, or of another version.
 */
export function readSnapshot(value: unknown): Snapshot {
  const version = typeof value === "object" && value !== null ? (value as { version?: unknown }).version : undefined;
  if (typeof version === "number" && version !== VERSION) {
    throw new BadMessage(
      `this view reads version ${VERSION} of a run's data and got version ${version}: ` +
        "restart the kernel and reload the page after an upgrade",
    );
  }
  return snapshot(value, "snapshot", false);
}

/** Returns what was told. Throws `BadMessage`. */
export function readTold(value: unknown): Told {
  return told(value, "message", false);
}

/** Returns an answer. Throws `BadMessage`. */
export function readAnswer(value: unknown): Answer {
  return answer(value, "answer", false);
}

/** Whether lines are named and not given. */
export function isSkip(row: LineRow | LineSkip): row is LineSkip {
  return typeof row[2] === "number";
}
