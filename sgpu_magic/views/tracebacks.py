"""Tracebacks by the notebook's lines: where a frame is, and the part of a traceback that every view shows."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from msgspec.structs import replace

from sgpu_magic.formatting import clipped, ends
from sgpu_magic.views.run_notes import error_text, last_part
from sgpu_magic.views.units import ROW_CHARS
from sgpu_magic.wire.base import FailureKind, RunKind
from sgpu_magic.wire.rank_events import Failure, StackFrame
from sgpu_magic.wire.run import CellSource, RunSpec

_CELL_FILE = re.compile(r"<ipython-input-(\d+)-")
NO_FUNCTION = ("<module>", "<cell line: 0>", "")
"""Names of code outside functions: a module or a cell."""

# the file that runs a call's function on a rank
_CALLER = "sgpu_magic/payload/call.py"
# width of a line number with its arrow
_NUMBER_CHARS = 7
_MAX_SOURCE = 80
_RULE = re.compile(r"-{5,}")
_HEADING = re.compile(r"[\w.]+ +Traceback \(most recent call last\):?")
_FRAME = re.compile(r"(Cell In\[|File |<)")
_CELL_FRAME = re.compile(r"Cell In\[")
# IPython abbreviates the home directory of files
_FILE_FRAME = re.compile(r"File ~?(.+):\d+")
_IN_FRAME = re.compile(r"[ \t]|-+>|Cell In\[|File ")

# the outermost and the innermost ones of the cell's frames
_MAX_FRAMES = 4
_MAX_CHAIN_LINES = 20
_MAX_MESSAGE_ROWS = 6


class Sources:
    """Maps frames of a stack to the notebook's lines.

    Args:
        cell: The run's cell, with the sources of other cells whose functions were shipped.
    """

    def __init__(self, cell: CellSource) -> None:
        self._number = cell.execution_count
        # line numbers as in a rank: the magic's line comes first, unless the body starts with another magic
        inner = cell.body.lstrip().startswith("%%")
        above = [] if inner or not cell.magic_line else [cell.magic_line]
        self._cell = [*above, *cell.body.splitlines()]
        self._others = {name: (source.splitlines(), number) for name, source, number in cell.linecache}
        self._script = cell.file or None

    def is_notebook(self, frame: StackFrame) -> bool:
        return frame.file in self._others or self._is_own(frame)

    def _is_own(self, frame: StackFrame) -> bool:
        return frame.file == self._script or _CELL_FILE.match(frame.file) is not None

    def location(self, frame: StackFrame) -> str:
        """Return `Cell In[7], line 15`, or the file's name and the line."""
        return f"{self._file(frame, os.path.basename(frame.file))}, line {frame.line}"

    def source(self, frame: StackFrame) -> str:
        """Return the notebook's line without its indent, "" for other files."""
        lines = self._lines(frame)
        return clipped(lines[frame.line - 1].strip(), _MAX_SOURCE) if 0 < frame.line <= len(lines) else ""

    def context(self, frame: StackFrame, around: int = 2) -> list[str]:
        """Return a frame in the notebook as in IPython's tracebacks: its location, its line and the lines around it.

        Args:
            frame: The frame.
            around: The number of lines before and after it.

        Returns:
            The lines; empty for other files.
        """
        lines = self._lines(frame)
        if not 0 < frame.line <= len(lines):
            return []
        context = self.entry(frame)[:1]
        for number in range(max(frame.line - around, 1), min(frame.line + around, len(lines)) + 1):
            digits = f"{number}"
            mark = f"{'-' * (_NUMBER_CHARS - 2 - len(digits))}> {digits}" if number == frame.line else digits
            context.append(f"{mark:>{_NUMBER_CHARS}} {lines[number - 1]}".rstrip())
        return context

    def entry(self, frame: StackFrame) -> list[str]:
        """Return a frame as in a traceback: its location, and its source line if it is in the notebook."""
        where = "" if frame.function in NO_FUNCTION else f", in {frame.function}"
        source = self.source(frame)
        head = f"{self._file(frame, f'File {frame.file}')}, line {frame.line}{where}"
        return [head, f"  {source}"] if source else [head]

    def own_frames(self, frames: Sequence[StackFrame]) -> Sequence[StackFrame]:
        """Return the frames without those that started the cell or called the function; innermost first."""
        own = [at for at, frame in enumerate(frames, 1) if self.is_notebook(frame)]
        return frames[: caller_at(frames) or max(own, default=len(frames))]

    def _lines(self, frame: StackFrame) -> Sequence[str]:
        return self._others.get(frame.file, (self._cell if self._is_own(frame) else [], None))[0]

    def _file(self, frame: StackFrame, otherwise: str) -> str:
        if frame.file in self._others:
            number = self._others[frame.file][1]
            otherwise = otherwise if os.path.isabs(frame.file) else "the notebook"
        elif _CELL_FILE.match(frame.file):
            number, otherwise = self._number, "the cell"
        else:
            return otherwise
        return otherwise if number is None else f"Cell In[{number}]"


def caller_at(frames: Sequence[StackFrame]) -> int:
    """Return the index of the frame that calls the function of a call, 0 in a cell."""
    return next((at for at, frame in enumerate(frames) if frame.file.endswith(_CALLER)), 0)


# ---------------------------------------------------------------- what is always shown of a traceback


class Excerpt(NamedTuple):
    """The part of a traceback that is always shown.

    Args:
        code: The cell's frames, each with its failed line and the lines around it.
        message: The exception's type and the beginning of its message.
        is_whole: Nothing of the traceback is left out.
    """

    code: list[str]
    message: list[str]
    is_whole: bool


def source_of(spec: RunSpec) -> CellSource:
    """Return a run's cell; for a call of a function only the cells with the function's code."""
    return spec.cell if spec.kind is RunKind.CELL else replace(spec.cell, body="")


def excerpt_of(failure: Failure, cell: CellSource) -> Excerpt:
    """Return the cell's own frames of a failure's traceback and the message.

    Chained exceptions are included if they are short. Without a frame of the cell, its line is taken from its source.
    """
    body = traceback_body(failure)
    frames, message = _split(body, failure)
    blocks = [block for block in frames or [] if _is_own(block[0], cell)]
    if frames is None and len(body) <= _MAX_CHAIN_LINES:
        code = body[: len(body) - len(message)]
    elif blocks:
        code = [line for block in ends(blocks, _MAX_FRAMES, ["..."]) for line in _bounded(block)]
    else:
        code = line_of_cell(failure, cell) or (_bounded(frames[-1]) if frames else [])
        message = message or _error_lines(failure)
    code = [clipped(line) for line in code if line.strip()]
    begun, is_all = beginning([line for line in message if line.strip()])
    visible = [line for line in body if line.strip()]
    return Excerpt(code, begun, is_all and (not visible or visible == [*code, *begun]))


def _is_own(heading: str, cell: CellSource) -> bool:
    """Whether a frame of a traceback is in a cell, or in the run's script."""
    if _CELL_FRAME.match(heading):
        return True
    return bool(cell.file and (found := _FILE_FRAME.match(heading)) and cell.file.endswith(found[1]))


def traceback_body(failure: Failure) -> list[str]:
    """Return the lines of the plain traceback without IPython's separator line and heading."""
    lines = failure.traceback_text.strip("\n").split("\n") if failure.traceback_text.strip() else []
    while lines and (_RULE.fullmatch(lines[0].strip()) or _HEADING.fullmatch(lines[0].strip())):
        lines.pop(0)
    return lines


def split_traceback(failure: Failure) -> tuple[list[str], list[str]]:
    """Return the lines of a traceback before the message, and those of the message; both empty without a traceback."""
    body = traceback_body(failure)
    first = _split(body, failure)[1][:1] if body else []
    begun = max((at for at, line in enumerate(body) if [line] == first), default=len(body))
    frames = body[:begun]
    while frames and not frames[-1].strip():
        frames.pop()
    return frames, body[begun:]


def line_of_cell(failure: Failure, cell: CellSource) -> list[str]:
    """Return the line of the cell that a rank was executing and the lines around it; empty if it is unknown."""
    sources = Sources(cell)
    stack = stack_of(failure, cell, failure.where if failure.kind is FailureKind.WORKER_DIED else "")
    frame = next((frame for frame in stack if sources.is_notebook(frame)), None)
    return sources.context(frame) if frame is not None else []


def stack_of(failure: Failure, cell: CellSource, function: str) -> Sequence[StackFrame]:
    """Return a rank's stack; without one, a frame of the cell's `function` for its last known line, if any."""
    if failure.stack or failure.line is None:
        return failure.stack
    return (StackFrame(cell.file or f"<ipython-input-{cell.execution_count or 0}->", failure.line, function),)


def beginning(lines: Sequence[str]) -> tuple[list[str], bool]:
    """Return as much of a message as fits into six rows, and whether that is all of it."""
    whole_lines: list[str] = []
    rows = _MAX_MESSAGE_ROWS
    for line in lines:
        needed = max(-(-len(line) // ROW_CHARS), 1)
        if rows == 0:
            return [*whole_lines[:-1], f"{whole_lines[-1]} ..."], False
        if needed > rows:
            return [*whole_lines, f"{line[: rows * ROW_CHARS]} ..."], False
        whole_lines.append(line)
        rows -= needed
    return whole_lines, True


def cut_lines(lines: Sequence[str], most: int) -> list[str]:
    """Return the beginning and the end of `lines`, about `most` characters in total."""
    if sum(map(len, lines)) + len(lines) <= most:
        return list(lines)
    joined = "\n".join(lines)
    return [*joined[: most // 2].split("\n"), "...", *joined[-most // 2 :].split("\n")]


def _split(body: list[str], failure: Failure) -> tuple[list[list[str]] | None, list[str]]:
    """Return the frames of a traceback, None for chained exceptions, and the lines of the message."""
    if not body:
        return [], _error_lines(failure)
    blocks = [list(lines) for has_text, lines in groupby(body, lambda line: bool(line.strip())) if has_text]
    frames = [block for block in blocks if _FRAME.match(block[0])]
    at = _message_at(body, failure)
    # frames come first, then the message: another order, or another heading, is a chain of exceptions
    if blocks[: len(frames)] != frames or any(_HEADING.fullmatch(line.strip()) for line in body):
        return None, body[at:] if at is not None else []
    message = [line for block in blocks[len(frames) :] for line in block]
    if not frames or (not message and at is not None):
        # text added by the exception itself, or a SyntaxError, whose message directly follows its line
        message = body[at:] if at is not None else _error_lines(failure)
        frames = [*frames[:-1], frames[-1][: max(len(frames[-1]) - len(message), 1)]] if frames else []
    return frames, message or _error_lines(failure)


def _message_at(body: list[str], failure: Failure) -> int | None:
    """Return the index of the line at which the message of the last exception begins."""
    name = last_part(failure.type_name)
    after = max((at for at, line in enumerate(body) if _IN_FRAME.match(line)), default=-1)
    found = [at for at, line in enumerate(body) if name and (line == name or line.startswith(f"{name}:"))]
    return next((at for at in found if at > after), found[-1] if found else None)


def _error_lines(failure: Failure) -> list[str]:
    return error_text(failure, failure.message.strip("\n")).split("\n")


def _bounded(block: list[str]) -> list[str]:
    """Return a frame with its failed line and two lines before and after it."""
    at = next((at for at, line in enumerate(block) if line.startswith("--")), None)
    return block[:6] if at is None else [block[0], *block[max(at - 2, 1) : at + 3]]
