/** Parses the messages that the environment panel receives. */

import { BadMessage } from "../shared/checks";
import { CHOICE_VERSION, keptChoice, kernelReply, panelUpdate, VERSION } from "./records";
import type { KeptChoice, KernelReply, PanelUpdate } from "./records";

export * from "./records";

/** A message from another version of sgpu-magic than this page's; the text is a sentence. */
export class OtherVersion extends BadMessage {}

/**
 * Parses an update.
 *
 * @throws OtherVersion: The server has another version.
 * @throws BadMessage: It is not a valid update.
 */
export function readUpdate(value: unknown): PanelUpdate {
  checkVersion(inner(value, "snapshot"), "the Jupyter server");
  return panelUpdate(value, "message", false);
}

/**
 * Parses a kernel's reply.
 *
 * @throws OtherVersion: The kernel has another version.
 * @throws BadMessage: It is not a valid reply.
 */
export function readReply(value: unknown): KernelReply {
  checkVersion(inner(value, "snapshot"), "the kernel");
  return kernelReply(value, "answer", false);
}

/** Parses the value of `CHOICE_KEY` in a notebook's metadata; null if it is missing or can't be read. */
export function readSavedChoice(value: unknown): KeptChoice | null {
  try {
    const kept = keptChoice(value, "choice", false);
    return kept.version === CHOICE_VERSION ? kept : null;
  } catch {
    return null;
  }
}

function inner(value: unknown, key: string): unknown {
  return typeof value === "object" && value !== null ? (value as Record<string, unknown>)[key] : undefined;
}

function checkVersion(snapshot: unknown, whose: string): void {
  const version = inner(snapshot, "version");
  if (typeof version !== "number" || version === VERSION) return;
  throw new OtherVersion(
    `This page has another version of sgpu-magic than ${whose}: after an upgrade, restart it and reload the page.`,
  );
}
