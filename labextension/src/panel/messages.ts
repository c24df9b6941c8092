/** Reads what comes from outside to the environment panel. */

import { BadMessage } from "../shared/checks";
import { keptChoice, kernelReply, told, VERSION } from "./records";
import type { KeptChoice, KernelReply, Told } from "./records";

export * from "./records";

/** A message of another version of sgpu-magic than this page's; the text is a sentence. */
export class OtherVersion extends BadMessage {}

/**
 * Returns what was told.
 *
 * @throws OtherVersion: The server has another version.
 * @throws BadMessage: It is nothing that is told.
 */
export function readTold(value: unknown): Told {
  checkVersion(inner(value, "picture"), "the Jupyter server");
  return told(value, "message", false);
}

/**
 * Returns a kernel's answer.
 *
 * @throws OtherVersion: The kernel has another version.
 * @throws BadMessage: It is no answer.
 */
export function readReply(value: unknown): KernelReply {
  checkVersion(inner(value, "picture"), "the kernel");
  return kernelReply(value, "answer", false);
}

/** Returns what a notebook's metadata says under `CHOICE_KEY`; null for nothing, or for what can't be read. */
export function readKept(value: unknown): KeptChoice | null {
  try {
    const kept = keptChoice(value, "choice", false);
    return kept.version === VERSION ? kept : null;
  } catch {
    return null;
  }
}

function inner(value: unknown, key: string): unknown {
  return typeof value === "object" && value !== null ? (value as Record<string, unknown>)[key] : undefined;
}

function checkVersion(picture: unknown, whose: string): void {
  const version = inner(picture, "version");
  if (typeof version !== "number" || version === VERSION) return;
  throw new OtherVersion(
    `This page has another version of sgpu-magic than ${whose}: after an upgrade, restart it and reload the page.`,
  );
}
