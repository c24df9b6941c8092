"""Where a run is shown while it goes on: a notebook's outputs, or nowhere; `terminal` is beside it."""

from __future__ import annotations

import sys
from typing import Protocol, TextIO

from sgpu_magic.views.slots import OutputSlots
from sgpu_magic.views.terminal import TerminalPublisher
from sgpu_magic.views.view import RunView
from sgpu_magic.wire.events import Event

__all__ = ["NotebookPublisher", "Publisher", "SilentPublisher", "TerminalPublisher", "publisher_for"]

FIRST_AFTER_S = 0.1
MESSAGE_INTERVAL_S = 0.1
MAX_MESSAGES_PER_TICK = 10
MAX_LIVE_BYTES = 40_000  # HTML; with its text and JSON's escapes a message stays under 64 kB
CLOCK_S = 1.0


class Publisher(Protocol):
    """Shows a view. Call `tick` whenever events were applied and about every 50 ms."""

    def applied(self, event: Event) -> None:
        """An event was applied to the view."""
        ...

    def tick(self, now: float, final: bool = False) -> None:
        """Bring what is shown up to date.

        Args:
            now: Monotonic time in seconds.
            final: The run is over, or will not be followed further: show the final form. Once.
        """
        ...


class SilentPublisher:
    """Shows nothing (`--ui none`)."""

    def applied(self, event: Event) -> None:
        pass

    def tick(self, now: float, final: bool = False) -> None:
        pass


def publisher_for(ui: str, view: RunView, stream: TextIO, notebook: bool) -> Publisher:
    """Return the publisher of `--ui`: `none`, `text`, `streams`, or what suits the place (`auto`, `widget`).

    Args:
        ui: The option's value.
        view: The run.
        stream: Where text goes.
        notebook: Whether the kernel has a front end that draws HTML.
    """
    if ui == "none":
        return SilentPublisher()
    if ui == "streams":
        return TerminalPublisher(view, stream, sys.stderr)
    if ui == "text" or not notebook:
        return TerminalPublisher(view, stream)
    return NotebookPublisher(view)


class NotebookPublisher:
    """Shows a run as outputs of the cell: text and displays in place, each updated by its display id.

    Nothing appears in the first 100 ms unless the run has ended. While it goes on there are at most 10
    messages a second of at most 64 kB; at the end every output takes its final form.

    Args:
        view: The run.
        slots: Its outputs, when something stands there already.
        pace: When messages may go out, when some have.

    Attributes:
        remark: A sentence below the live form that is not about the run, "" for none.
    """

    def __init__(self, view: RunView, slots: OutputSlots | None = None, pace: Pace | None = None) -> None:
        self._view = view
        self._slots = slots or OutputSlots(view)
        self.remark = ""
        self._pace = pace or Pace()
        self._drawn_at = 0.0
        self._drawn_version = -1
        self._finished = False

    def applied(self, event: Event) -> None:
        pass

    def tick(self, now: float, final: bool = False) -> None:
        due = self._pace.is_due(now)
        if self._finished or not (final or due):
            return
        if not final and self._view.version == self._drawn_version and now - self._drawn_at < CLOCK_S:
            return
        self._finished = final
        self._drawn_version, self._drawn_at = self._view.version, now
        if final:
            sent, complete = self._slots.draw()
        else:
            sent, complete = self._slots.draw(MAX_MESSAGES_PER_TICK, MAX_LIVE_BYTES, self.remark)
        self._pace.sent(now, sent)
        if not complete:
            self._drawn_version = -1


class Pace:
    """When the next messages may go out: not in the first 100 ms, and then at most 10 a second."""

    def __init__(self) -> None:
        self._next_at: float | None = None

    def is_due(self, now: float) -> bool:
        """Whether something may be sent now; the first call begins the 100 ms."""
        if self._next_at is None:
            self._next_at = now + FIRST_AFTER_S
        return now >= self._next_at

    def sent(self, now: float, messages: int) -> None:
        """So many messages went out now."""
        self._next_at = now + MESSAGE_INTERVAL_S * max(messages, 1)
