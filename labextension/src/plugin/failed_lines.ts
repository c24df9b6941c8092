/** A click on the line that failed goes to that line in its cell. */
import type { Cell } from "@jupyterlab/cells";
import type { INotebookTracker, NotebookPanel } from "@jupyterlab/notebook";

/** The class of the failed line, in a run's live view and in its saved output. */
export const FAILED = "sgpu-failure-culprit";

const CODE = "pre, .sgpu-code";
const HEADING = /Cell In\[(\d+)\]|File (?=\S+:\d+)/g;
const ARROW = /^-+> ?(\d+) ?(.*)$/;
const CUT = " ...";

/** A line of a notebook's cell; `line` counts from 0, `code` is as much of it as the traceback has. */
export interface FailedLine {
  readonly execution: number;
  readonly line: number;
  readonly code: string;
}

/** What is looked at of a code cell. */
export interface Source {
  readonly execution: number | null;
  readonly text: string;
}

/** The line of the cell which an element of a traceback shows; null for a line of a file. */
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
 * The index of the cell with this line, -1 if none has it: `own`, the cell with the output, if the line is still there,
 * else the one that was executed under the traceback's number.
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

/** Follows clicks on the failed lines of all notebooks for as long as the page is there. */
export function followFailedLines(notebooks: INotebookTracker): void {
  document.addEventListener("click", (event) => {
    const shown = event.target instanceof Element ? event.target.closest(`.${FAILED}`) : null;
    // who marks text to copy it stays where the text is
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
