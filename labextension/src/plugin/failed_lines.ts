/** Clicking the failed line of a traceback moves the cursor to that line in its cell. */
import type { Cell } from "@jupyterlab/cells";
import type { INotebookTracker, NotebookPanel } from "@jupyterlab/notebook";

/** The class of the failed line, in a run's live view and in its saved output. */
export const FAILED = "sgpu-failure-culprit";

const CODE = "pre, .sgpu-code";
const HEADING = /Cell In\[(\d+)\]|File (?=\S+:\d+)/g;
const ARROW = /^-+> ?(\d+) ?(.*)$/;
const CUT = " ...";

/** A line of a notebook's cell; `line` counts from 0, `code` is the part of it that the traceback shows. */
export interface FailedLine {
  readonly execution: number;
  readonly line: number;
  readonly code: string;
}

/** The text of a code cell, and the number of its last execution. */
export interface Source {
  readonly execution: number | null;
  readonly text: string;
}

/** Returns the cell's line that an element of a traceback shows, null for a line of a file. */
export function failedLine(shown: Element): FailedLine | null {
  const code = shown.closest(CODE);
  const [, number, text] = ARROW.exec(shown.textContent.trimEnd()) ?? [];
  if (!code || number === undefined || text === undefined) return null;
  const before = shown.ownerDocument.createRange();
  before.setStart(code, 0);
  before.setEndBefore(shown);
  const execution = [...before.toString().matchAll(HEADING)].at(-1)?.[1];
  return execution === undefined ? null : { execution: Number(execution), line: Number(number) - 1, code: text };
}

/**
 * Returns the index of the cell with this line, -1 if there is none. An unchanged line comes first; then `own`, the
 * cell with the output, comes before the cell with the traceback's execution count.
 */
export function cellOf(failed: FailedLine, cells: readonly (Source | null)[], own: number): number {
  const numbered = cells.findIndex((cell) => cell?.execution === failed.execution);
  const places = [own, numbered];
  return places.find((at) => has(cells[at], failed)) ?? places.find((at) => lineOf(cells[at], failed) !== undefined) ?? -1;
}

function lineOf(cell: Source | null | undefined, { line }: FailedLine): string | undefined {
  return cell?.text.split("\n")[line];
}

function has(cell: Source | null | undefined, failed: FailedLine): boolean {
  const { code } = failed;
  const line = lineOf(cell, failed)?.trim();
  const begun = code.endsWith(CUT) ? code.slice(0, -CUT.length).trim() : null;
  return line !== undefined && (begun === null ? line === code.trim() : line.startsWith(begun));
}

/** Handles clicks on failed lines in all notebooks, until the page is closed. */
export function followFailedLines(notebooks: INotebookTracker): void {
  document.addEventListener("click", (event) => {
    const shown = event.target instanceof Element ? event.target.closest(`.${FAILED}`) : null;
    // a click that ends a text selection must not move the cursor
    if (!shown || event.defaultPrevented || document.getSelection()?.toString()) return;
    const panel = notebooks.find(({ node }) => node.contains(shown));
    const failed = failedLine(shown);
    if (panel && failed) void show(panel, failed, shown);
  });
}

async function show(panel: NotebookPanel, failed: FailedLine, shown: Element): Promise<void> {
  const { content: notebook } = panel;
  const cells = notebook.widgets;
  const own = cells.findIndex(({ node }) => node.contains(shown));
  const at = cellOf(failed, cells.map(source), own);
  const cell = cells[at];
  if (!cell) return;
  notebook.activeCellIndex = at;
  await notebook.scrollToItem(at);
  await cell.ready;
  const { editor } = cell;
  if (!editor) return;
  const position = { line: failed.line, column: 0 };
  notebook.mode = "edit";
  editor.focus();
  editor.setCursorPosition(position);
  editor.revealPosition(position);
}

function source({ model }: Cell): Source | null {
  if (model.type !== "code") return null;
  const execution = (model as unknown as { executionCount: number | null }).executionCount;
  return { execution, text: model.sharedModel.getSource() };
}
