import { formatMegabytes } from "../shared/units";
import { plain } from "./ansi";
import { copyText } from "./clipboard";
import type { Tab } from "./log_model";
import type { RunModel } from "./run_model";

/** Longer logs can only be downloaded: they would slow down the clipboard and the application that pastes them. */
const MAX_COPY_CHARS = 5_000_000;
/** Text is moved into Blobs of this size, which browsers keep outside the page's memory. */
const PART_CHARS = 4_000_000;

/** Callback for progress messages, and a signal that aborts the export. */
export interface Progress {
  readonly signal: AbortSignal;
  readonly report: (text: string) => void;
}

async function* readLog(model: RunModel, tab: Tab, signal: AbortSignal): AsyncGenerator<string> {
  for (let offset: number | null = 0; offset !== null; ) {
    const answer = await model.readLog(offset, tab);
    if (signal.aborted) return;
    yield answer.text;
    // stop if the offset does not advance, rather than request the same part forever
    offset = answer.next_offset !== null && answer.next_offset > offset ? answer.next_offset : null;
  }
}

/** Copies the whole log of a tab, without colours; returns a message for the user. */
export async function copyLog(model: RunModel, tab: Tab, { signal, report }: Progress): Promise<string> {
  const parts: string[] = [];
  let size = 0;
  for await (const text of readLog(model, tab, signal)) {
    parts.push(text);
    size += text.length;
    if (size > MAX_COPY_CHARS) return `the log is larger than ${formatMegabytes(MAX_COPY_CHARS)}: download it instead`;
    report(`copying ${formatMegabytes(size)}`);
  }
  if (signal.aborted) return "";
  const copied = await copyText(plainLines(parts.join("")));
  return copied ? `copied ${formatMegabytes(size)}` : "the browser does not allow copying here: download the log instead";
}

/** Saves the whole log of a tab as a file; returns a message for the user. */
export async function downloadLog(model: RunModel, tab: Tab, { signal, report }: Progress): Promise<string> {
  const blobs: Blob[] = [];
  let parts: string[] = [];
  let pending = 0;
  let size = 0;
  for await (const text of readLog(model, tab, signal)) {
    parts.push(text);
    pending += text.length;
    size += text.length;
    if (pending > PART_CHARS) {
      blobs.push(new Blob(parts));
      parts = [];
      pending = 0;
    }
    report(`downloading ${formatMegabytes(size)}`);
  }
  if (signal.aborted) return "";
  saveFile(new Blob([...blobs, ...parts], { type: "text/plain;charset=utf-8" }), fileName(model, tab));
  return `downloaded ${formatMegabytes(size)}`;
}

/** Returns a text without colours. Works line by line, because an escape sequence ends with its line. */
function plainLines(text: string): string {
  return text.includes("\x1b") ? text.split("\n").map(plain).join("\n") : text;
}

function fileName(model: RunModel, tab: Tab): string {
  const run = model.snapshot;
  const name = (run?.name ?? "run").replace(/[^\w.-]+/g, "-").slice(0, 60);
  return `${name}-${run?.short_id ?? "log"}${tab === "all" ? "" : `-rank-${tab}`}.log`;
}

function saveFile(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  // the download holds its own reference to the blob once the click has been handled
  setTimeout(() => URL.revokeObjectURL(link.href), 1_000);
}
