"""Maps frames of a stack to the notebook's lines."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from sgpu_magic.wire.rank_events import StackFrame
from sgpu_magic.wire.run import CellSource

_CELL_FILE = re.compile(r"<ipython-input-(\d+)-")
NO_FUNCTION = ("<module>", "<cell line: 0>", "")
"""Names of code outside functions: a module or a cell."""

# on a rank, it calls the function of a call
_CALLER = "sgpu_magic/payload/call.py"
# width of a line number with its arrow
_NUMBER_CHARS = 7
_MAX_SOURCE = 80


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

    def place(self, frame: StackFrame) -> str:
        """Return `Cell In[7], line 15`, or the file's name and the line."""
        return f"{self._file(frame, os.path.basename(frame.file))}, line {frame.line}"

    def source(self, frame: StackFrame) -> str:
        """Return the notebook's line without its indent, "" for other files."""
        lines = self._lines(frame)
        text = lines[frame.line - 1].strip() if 0 < frame.line <= len(lines) else ""
        return text if len(text) <= _MAX_SOURCE else f"{text[:_MAX_SOURCE]} ..."

    def context(self, frame: StackFrame, around: int = 2) -> list[str]:
        """Return a frame in the notebook as IPython's tracebacks have it: its place, its line and those around it.

        Args:
            frame: The frame.
            around: The number of lines before and after it.

        Returns:
            The lines; empty for other files.
        """
        lines = self._lines(frame)
        if not 0 < frame.line <= len(lines):
            return []
        drawn = self.entry(frame)[:1]
        for number in range(max(frame.line - around, 1), min(frame.line + around, len(lines)) + 1):
            digits = f"{number}"
            mark = f"{'-' * (_NUMBER_CHARS - 2 - len(digits))}> {digits}" if number == frame.line else digits
            drawn.append(f"{mark:>{_NUMBER_CHARS}} {lines[number - 1]}".rstrip())
        return drawn

    def entry(self, frame: StackFrame) -> list[str]:
        """Return a frame as in a traceback: its place, and its source line if it is in the notebook."""
        where = "" if frame.function in NO_FUNCTION else f", in {frame.function}"
        source = self.source(frame)
        head = f"{self._file(frame, f'File {frame.file}')}, line {frame.line}{where}"
        return [head, f"  {source}"] if source else [head]

    def own_frames(self, frames: Sequence[StackFrame]) -> Sequence[StackFrame]:
        """Return the frames without those that started the cell or called the function; innermost first."""
        caller = caller_at(frames)
        if caller:
            return frames[:caller]
        outermost = max((at for at, frame in enumerate(frames) if self.is_notebook(frame)), default=len(frames) - 1)
        return frames[: outermost + 1]

    def _lines(self, frame: StackFrame) -> Sequence[str]:
        own = self._cell if self._is_own(frame) else []
        return self._others.get(frame.file, (own, None))[0]

    def _file(self, frame: StackFrame, otherwise: str) -> str:
        if frame.file in self._others:
            number = self._others[frame.file][1]
            unnumbered = otherwise if os.path.isabs(frame.file) else "the notebook"
            return unnumbered if number is None else f"Cell In[{number}]"
        if _CELL_FILE.match(frame.file):
            return f"Cell In[{self._number}]" if self._number is not None else "the cell"
        return otherwise


def caller_at(frames: Sequence[StackFrame]) -> int:
    """Return the index of the frame that calls the function of a call, 0 in a cell."""
    return next((at for at, frame in enumerate(frames) if frame.file.endswith(_CALLER)), 0)
