"""How much of what goes along is at a pool of another machine: one line below the cell while that takes long."""

from __future__ import annotations

import sys
import time

from sgpu_magic.runs.notices import NoticeBoard

# a terminal or a log keeps every line
_LINE_EVERY_S = 10.0


class SendingBoard:
    """Shows one line that is renewed, and takes it away at the end; without a front end, lines on stderr.

    Args:
        is_notebook: There is a front end.
    """

    def __init__(self, is_notebook: bool) -> None:
        self._display = NoticeBoard(is_notebook) if is_notebook else None
        self._due = 0.0

    def show(self, text: str) -> None:
        """Show `text`, "" takes it away. Called by the thread that sends."""
        if self._display is not None:
            self._display.show(text)
        elif text and time.monotonic() >= self._due:
            self._due = time.monotonic() + _LINE_EVERY_S
            sys.stderr.write(f"sgpu: {text}\n")
            sys.stderr.flush()
