/** Clicking the failed line of a traceback moves the cursor to that line in its cell. */
import type { Cell } from "@jupyterlab/cells";
import type { INotebookTracker, NotebookPanel } from "@jupyterlab/notebook";

/** CSS class of the failed line, in a run's live view and in its saved output. */
export const FAILED_LINE_CLASS = "sgpu-failure-culprit";

const CODE_SELECTOR = "pre, .sgpu-code";
const HEADING = /Cell In\[(\d+)\]|File (?=\S+:\d+)/g;
const ARROW = /^-+> ?(\d+) ?(.*)$/;
const ELLIPSIS = " ...";

/** A line of a notebook's cell: `line` counts from 0, and `code` is the part of the line that the traceback shows. */
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

/** Returns the line of a cell that an element of a traceback shows, null for a line of a file. */
export function parseFailedLine(element: Element): FailedLine | null {
  const code = element.closest(CODE_SELECTOR);
  const [, number, text] = ARROW.exec(element.textContent.trimEnd()) ?? [];
  if (!code || number === undefined || text === undefined) return null;
  const before = element.ownerDocument.createRange();
  before.setStart(code, 0);
  before.setEndBefore(element);
  const execution = [...before.toString().matchAll(HEADING)].at(-1)?.[1];
  return execution === undefined ? null : { execution: Number(execution), line: Number(number) - 1, code: text };
}

/**
 * Returns the index of the cell with this line, -1 if there is none.
 *
 * Cells whose line is unchanged are preferred; among them `own`, the cell with the output, to the cell with the
 * traceback's execution count.
 */
export function findCell(failed: FailedLine, cells: readonly (Source | null)[], own: number): number {
  const numbered = cells.findIndex((cell) => cell?.execution === failed.execution);
  const candidates = [own, numbered];
  return candidates.find((at) => matches(cells[at], failed)) ?? candidates.find((at) => lineOf(cells[at], failed) !== undefined) ?? -1;
}

function lineOf(cell: Source | null | undefined, { line }: FailedLine): string | undefined {
  return cell?.text.split("\n")[line];
}

function matches(cell: Source | null | undefined, failed: FailedLine): boolean {
  const { code } = failed;
  const line = lineOf(cell, failed)?.trim();
  const prefix = code.endsWith(ELLIPSIS) ? code.slice(0, -ELLIPSIS.length).trim() : null;
  return line !== undefined && (prefix === null ? line === code.trim() : line.startsWith(prefix));
}

/** Handles clicks on failed lines in all notebooks, until the page is closed. */
export function handleFailedLineClicks(notebooks: INotebookTracker): void {
  document.addEventListener("click", (event) => {
    const shown = event.target instanceof Element ? event.target.closest(`.${FAILED_LINE_CLASS}`) : null;
    // a click that ends a text selection must not move the cursor
    if (!shown || event.defaultPrevented || document.getSelection()?.toString()) return;
    const panel = notebooks.find(({ node }) => node.contains(shown));
    const failed = parseFailedLine(shown);
    if (panel && failed) void revealLine(panel, failed, shown);
  });
}

async function revealLine(panel: NotebookPanel, failed: FailedLine, shown: Element): Promise<void> {
  const { content: notebook } = panel;
  const cells = notebook.widgets;
  const own = cells.findIndex(({ node }) => node.contains(shown));
  const at = findCell(failed, cells.map(sourceOf), own);
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

function sourceOf({ model }: Cell): Source | null {
  if (model.type !== "code") return null;
  const execution = (model as unknown as { executionCount: number | null }).executionCount;
  return { execution, text: model.sharedModel.getSource() };
}
