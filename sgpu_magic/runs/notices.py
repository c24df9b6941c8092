"""Notices below cells, published from any thread, and threads whose outputs stay below the cell that started them."""

from __future__ import annotations

import contextvars
import secrets
import sys
import threading
import time
from collections.abc import Callable
from html import escape

from sgpu_magic.runs.notebook import publish
from sgpu_magic.views.html_style import SANS, SOFT

# a terminal or a log keeps every line, so progress is printed rarely there
_LINE_INTERVAL_S = 10.0
JOIN_S = 2.0


class Background:
    """A thread whose outputs appear below the cell that started it.

    Args:
        name: The thread's name.
        work: The function to run; takes an event that is set to stop it.
    """

    def __init__(self, name: str, work: Callable[[threading.Event], None]) -> None:
        self._stopped = threading.Event()
        # with the cell's context, where ipykernel keeps the cell that outputs belong to
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(work, self._stopped), name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop the thread. If it waits for a pool's reply, it ends after the reply and shows nothing more."""
        self._stopped.set()
        self._thread.join(JOIN_S)


class NoticeBoard:
    """Shows and removes one notice at a time below the cell that ran last.

    Args:
        shown: Whether there is a front end; without one, only `%sgpu_status` shows notices.
    """

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._display_id = ""
        self._lock = threading.Lock()

    def notice(self, text: str) -> None:
        """Show `text`, or remove the notice if it is "". Does not block the link's thread, which calls this."""
        if self._shown and (text or self._display_id):
            threading.Thread(target=self.show, args=(text,), name="sgpu-notice", daemon=True).start()

    def show(self, text: str) -> None:
        """As `notice`, in the calling thread."""
        with self._lock:
            if not text and not self._display_id:
                return
            update = bool(self._display_id)
            display_id = self._display_id or f"sgpu-notice-{secrets.token_hex(4)}"
            self._display_id = display_id if text else ""
            html = f'<div style="{SANS};font-size:12px;{SOFT}">sgpu: {escape(text)}</div>' if text else ""
            data = {"text/plain": f"sgpu: {text}" if text else "", "text/html": html}
            publish(data, display_id, update=update)


class SendingBoard:
    """Shows the progress of long steps before a run starts in one line, and removes it; without a front end, on stderr.

    Args:
        is_notebook: Whether there is a front end.
        line_interval_s: Minimum time between two lines on stderr.
    """

    def __init__(self, is_notebook: bool, line_interval_s: float = _LINE_INTERVAL_S) -> None:
        self._display = NoticeBoard(is_notebook) if is_notebook else None
        self._line_interval_s = line_interval_s
        self._due = 0.0

    def show(self, text: str) -> None:
        """Show `text`; "" removes the line. Called by the thread that does the work."""
        if self._display is not None:
            self._display.show(text)
        elif text and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._line_interval_s
            sys.stderr.write(f"sgpu: {text}\n")
            sys.stderr.flush()
