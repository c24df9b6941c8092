import { afterEach, describe, expect, it } from "vitest";

import { findCell, FAILED_LINE_CLASS, parseFailedLine } from "../src/plugin/failed_lines";
import type { FailedLine } from "../src/plugin/failed_lines";

const CULPRIT = `----&gt; 5 if rank == 1: raise ValueError("NaN")`;

afterEach(() => document.body.replaceChildren());

function failedElement(html: string): Element {
  document.body.innerHTML = html;
  const found = [...document.querySelectorAll(`.${FAILED_LINE_CLASS}`)].at(-1);
  if (!found) throw new Error("nothing is marked");
  return found;
}

describe("parseFailedLine", () => {
  it("reads the marked line of a saved output and its execution count", () => {
    const line = failedElement(
      `<pre><b>ValueError</b> on rank 1\nCell In[4], line 5\n      4 step()\n<span class="${FAILED_LINE_CLASS}">${CULPRIT}</span>\n</pre>`,
    );
    expect(parseFailedLine(line)).toEqual({ execution: 4, line: 4, code: 'if rank == 1: raise ValueError("NaN")' });
  });

  it("reads the marked line of the live view and its frame", () => {
    const frame = (number: number) => `<div>Cell In[${number}], line 5</div><div class="${FAILED_LINE_CLASS}">${CULPRIT}</div>`;
    const line = failedElement(`<div class="sgpu-code">${frame(2)}${frame(3)}</div>`);
    expect(parseFailedLine(line)?.execution).toBe(3);
  });

  it("returns null for a file's frame, or without a traceback", () => {
    const marked = `<div class="${FAILED_LINE_CLASS}">${CULPRIT}</div>`;
    expect(parseFailedLine(failedElement(`<div class="sgpu-code"><div>Cell In[2], line 5</div>${marked}<div>File ~/a.py:5, in f</div>${marked}</div>`))).toBeNull();
    expect(parseFailedLine(failedElement(`<div class="${FAILED_LINE_CLASS}">a sentence</div>`))).toBeNull();
  });
});

describe("findCell", () => {
  const failed: FailedLine = { execution: 4, line: 1, code: "fail()" };
  const cell = (execution: number | null, text: string) => ({ execution, text });

  it("prefers the cell with the output if it has the line", () => {
    expect(findCell(failed, [cell(4, "x = 1"), cell(null, "%%distributed\nfail()")], 1)).toBe(1);
  });

  it("finds the cell by execution count for another cell's function", () => {
    expect(findCell(failed, [null, cell(4, "def f():\n    fail()"), cell(5, "%%distributed\nf()")], 2)).toBe(1);
  });

  it("matches a shortened line, and the line number after an edit", () => {
    const long = { ...failed, code: "call(aaaa ..." };
    expect(findCell(long, [cell(1, "\ncall(aaaabbbb)"), cell(4, "\nother()")], 0)).toBe(0);
    expect(findCell(failed, [cell(4, "\nmended()"), cell(7, "a")], 1)).toBe(0);
  });

  it("returns -1 if no cell has enough lines", () => {
    expect(findCell(failed, [cell(4, "x"), null], 1)).toBe(-1);
  });
});
