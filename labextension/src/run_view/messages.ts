/** Parses the messages that a run's view receives. */

import { BadMessage } from "../shared/checks";
import { answer, feedUpdate, snapshot, VERSION } from "./records";
import type { Answer, LineRow, LineSkip, Snapshot, FeedUpdate } from "./records";

export * from "./records";

/**
 * Parses a snapshot.
 *
 * @throws BadMessage: It is not a valid snapshot, or has another version.
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

/** Parses an update. Throws `BadMessage`. */
export function readUpdate(value: unknown): FeedUpdate {
  return feedUpdate(value, "message", false);
}

/** Parses an answer. Throws `BadMessage`. */
export function readAnswer(value: unknown): Answer {
  return answer(value, "answer", false);
}

/** Whether a row stands for lines that are left out. */
export function isSkip(row: LineRow | LineSkip): row is LineSkip {
  return typeof row[2] === "number";
}
