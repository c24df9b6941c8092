import { useState } from "preact/hooks";

import type { FailureBlock, FailureLine } from "../messages";
import { Memory } from "./memory";

/** Match the exception's type at the start of a line, which is highlighted; a title without one is highlighted whole. */
const TYPE_PATTERNS = { title: /^[\w.]+(?= on rank \d| ·|$)/, error: /^[A-Za-z_][\w.]*(?=:)/ };

function Line({ line }: { line: FailureLine }) {
  const { kind, text } = line;
  const type = kind === "title" || kind === "error" ? TYPE_PATTERNS[kind].exec(text)?.[0] : undefined;
  const highlighted = type ?? (kind === "title" ? text : "");
  return (
    <div class={`sgpu-failure-${kind}`}>
      {highlighted && <b>{highlighted}</b>}
      {text.slice(highlighted.length) || (highlighted ? "" : "\u200b")}
    </div>
  );
}

/** The first failure: the cell's lines, or the whole traceback on request. */
export function Failure({ failure }: { failure: FailureBlock }) {
  const [open, setOpen] = useState(false);
  const lines = open && failure.whole.length ? failure.whole : failure.lines;
  return (
    <section class="sgpu-failure" aria-label="the first failure">
      <div class="sgpu-code" tabIndex={0}>
        {lines.map((line, index) => (
          <Line key={index} line={line} />
        ))}
      </div>
      {failure.memory && <Memory memory={failure.memory} />}
      {failure.whole.length > 0 && (
        <button type="button" class="sgpu-link" aria-expanded={open} onClick={() => setOpen(!open)}>
          {open ? "the cell's lines only" : "the whole traceback"}
        </button>
      )}
    </section>
  );
}
