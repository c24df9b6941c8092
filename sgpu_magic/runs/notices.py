"""Sentences below the cell that ran last: what the pool wants to be known, and how far a transfer to it is."""

from __future__ import annotations

import secrets
import sys
import threading
import time
from html import escape

from sgpu_magic.views.html_style import SANS, SOFT


class NoticeBoard:
    """Shows one notice at a time below the cell that ran last, and takes it away again.

    Args:
        shown: Whether there is a front end; without one `%sgpu_status` alone tells it.
    """

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._display_id = ""
        self._lock = threading.Lock()

    def notice(self, text: str) -> None:
        """Show `text`, or take away what is shown when it is "". The link's thread calls this and goes on."""
        if self._shown and (text or self._display_id):
            threading.Thread(target=self.show, args=(text,), name="sgpu-notice", daemon=True).start()

    def clear(self) -> None:
        """A run starts: whatever was said is no longer so."""
        if self._display_id:
            self.show("")

    def show(self, text: str) -> None:
        """As `notice`, in the thread that calls it."""
        # IPython declares no types here
        from IPython.display import publish_display_data  # pyright: ignore[reportUnknownVariableType]

        with self._lock:
            if not text and not self._display_id:
                return
            update = bool(self._display_id)
            display_id = self._display_id or f"sgpu-notice-{secrets.token_hex(4)}"
            self._display_id = display_id if text else ""
            html = f'<div style="{SANS};font-size:12px;{SOFT}">sgpu: {escape(text)}</div>' if text else ""
            data = {"text/plain": f"sgpu: {text}" if text else "", "text/html": html}
            publish_display_data(data, transient={"display_id": display_id}, update=update)


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
