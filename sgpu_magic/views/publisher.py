"""Shows an active run in outputs below the cell, in a terminal or another stream, or nowhere."""

from __future__ import annotations

import os
import sys
import unicodedata
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, Protocol, TextIO

from sgpu_magic.formatting import count_of
from sgpu_magic.views import ansi
from sgpu_magic.views.bundle import live_line, summary_line, unfinished_lines
from sgpu_magic.views.cell_outputs import OutputSlots
from sgpu_magic.views.failure import memory_lines
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.format_run import header_line
from sgpu_magic.views.format_summary import is_quiet, log_files, rank_label, rank_width, standing_warnings
from sgpu_magic.views.output_buffer import DisplayItem, GapItem, LineItem, count_fitting, display_text, gap_lines
from sgpu_magic.views.run_notes import finishing_text
from sgpu_magic.views.stacks import ending_stacks, stall_lines

FIRST_AFTER_S = 0.1
MESSAGE_INTERVAL_S = 0.1
MAX_MESSAGES_PER_TICK = 10
MAX_LIVE_BYTES = 40_000  # HTML; with its text and JSON's escapes a message stays under 64 kB
CLOCK_S = 1.0


class Publisher(Protocol):
    """Shows a view. Call `tick` after events were applied and about every 50 ms.

    Attributes:
        draws_displays: Whether it draws ranks' displays in their rich forms, such as tables.
    """

    @property
    def draws_displays(self) -> bool: ...

    def tick(self, now: float, final: bool = False) -> None:
        """Update what is shown.

        Args:
            now: Monotonic time in seconds.
            final: Show the final form, as the run has ended or is not followed further. Pass True only once.
        """
        ...


class SilentPublisher:
    """Shows nothing (`--ui none`)."""

    draws_displays = False

    def tick(self, now: float, final: bool = False) -> None:
        pass


def publisher_for(ui: str, view: RunView, stream: TextIO, notebook: bool) -> Publisher:
    """Return the publisher for `--ui`: `none`, `text`, `streams`, or the one that suits the front end.

    Args:
        ui: The option's value; `auto` and `widget` choose by `notebook`.
        view: The run.
        stream: Where text goes.
        notebook: The kernel has a front end that renders HTML.
    """
    if ui == "none":
        return SilentPublisher()
    if ui == "streams":
        return TerminalPublisher(view, stream, sys.stderr)
    if ui == "text" or not notebook:
        return TerminalPublisher(view, stream)
    return NotebookPublisher(view)


class NotebookPublisher:
    """Shows a run as outputs of the cell: text and displays in order, each updated by its display id.

    Nothing appears in the first 100 ms unless the run has ended. An active run sends at most 10 messages a second of
    at most 64 kB; at the end every output gets its final form.

    Args:
        view: The run.
        slots: Its outputs, if some were published already.
        pace: Limits the rate of messages, if some were sent already.

    Attributes:
        remark: A sentence below the live form that is not about the run, "" for none.
    """

    draws_displays = True

    def __init__(self, view: RunView, slots: OutputSlots | None = None, pace: Pace | None = None) -> None:
        self._view = view
        self._slots = slots or OutputSlots(view)
        self.remark = ""
        self._pace = pace or Pace()
        self._drawn_at = 0.0
        self._drawn_version = -1
        self._finished = False

    def tick(self, now: float, final: bool = False) -> None:
        due = self._pace.is_due(now)
        unchanged = self._view.version == self._drawn_version and now - self._drawn_at < CLOCK_S
        if self._finished or not (final or (due and not unchanged)):
            return
        self._finished = final
        draw = self._slots.draw
        sent, complete = draw() if final else draw(MAX_MESSAGES_PER_TICK, MAX_LIVE_BYTES, self.remark)
        self._pace.record_sent(now, sent)
        self._drawn_version, self._drawn_at = self._view.version if complete else -1, now


class Pace:
    """Limits the rate of messages: none in the first 100 ms, then at most 10 a second."""

    def __init__(self) -> None:
        self._next_at: float | None = None

    def is_due(self, now: float) -> bool:
        """Whether a message may be sent now; the first call starts the 100 ms."""
        if self._next_at is None:
            self._next_at = now + FIRST_AFTER_S
        return now >= self._next_at

    def record_sent(self, now: float, messages: int) -> None:
        """Note that `messages` messages were sent now."""
        self._next_at = now + MESSAGE_INTERVAL_S * max(messages, 1)


# ---------------------------------------------------------------- a terminal or another stream


class _Line(NamedTuple):
    """A line to write, whether a rank printed it to its standard output, and the rank; -1 for none."""

    text: str
    is_output: bool = False
    rank: int = -1


class TerminalPublisher:
    """Writes a run to a text stream.

    It writes the header once, then finished lines and the text of displays, each with its rank, and the summary last.
    A run that groups its lines by rank has them written at its end.
    On a terminal each rank's unfinished line is drawn below and erased again; elsewhere it is written when
    it is finished.

    Args:
        view: The run.
        stream: A terminal, a file, or a notebook's stdout.
        errors: Receives the ranks' standard error and messages about the run, so that `stream` gets only the ranks'
            standard output; None to write everything to `stream`.
    """

    draws_displays = False

    def __init__(self, view: RunView, stream: TextIO, errors: TextIO | None = None) -> None:
        self._view = view
        self._stream = stream
        self._errors = errors
        self._is_terminal = stream.isatty()
        self._live: list[str] = []
        self._live_at = 0.0
        self._began: float | None = None
        self._has_header = False
        self._notes = 0
        # the last lines written about each topic
        self._lines: dict[str, list[str]] = {}
        self._finished = False
        self._pending = _fresh_lines(view)

    def tick(self, now: float, final: bool = False) -> None:
        """Write what is new.

        Args:
            now: Monotonic time in seconds.
            final: Also write unfinished lines and the summary, as the run has ended. Pass True only once.
        """
        if self._finished:
            return
        self._began = now if self._began is None else self._began
        self._finished = final
        lines = self._new_lines(now - self._began, final)
        if self._errors is not None:
            for is_output, group in groupby(lines, key=attrgetter("is_output")):
                stream = self._stream if is_output else self._errors
                stream.write("".join(f"{line.text}\n" for line in group))
                stream.flush()
            return
        live = [] if final or not self._is_terminal else self._live_lines()
        if not (lines or final or (live != self._live and now - self._live_at >= MESSAGE_INTERVAL_S)):
            return
        erase = f"\x1b[{len(self._live)}A\r\x1b[J" if self._live else ""
        text = "".join(f"{line.text}\n" for line in lines)
        self._stream.write(erase + text + "".join(f"{line}\n" for line in live))
        self._stream.flush()
        self._live, self._live_at = live, now

    def _new_lines(self, waited_s: float, final: bool) -> list[_Line]:
        view = self._view
        fresh, self._pending = self._pending + _fresh_lines(view), []
        if view.spec.grouped and not final:
            self._pending, fresh = fresh, []
        elif view.spec.grouped:
            fresh.sort(key=attrgetter("rank"))
        if is_quiet(view):
            return [_Line(summary_line(view))] if final else []
        lines: list[str] = []
        after: list[str] = []
        if not self._has_header and (view.lease is not None or fresh or final):
            self._has_header = True
            lines.append(header_line(view))
        elif not self._has_header and not self._is_terminal and waited_s >= FIRST_AFTER_S:
            heading = [f"{view.name} · {live_line(view)}"]
            lines += heading if view.waiting_for and self._has_changed("queue", heading) else []
        if self._has_header:
            notes, warnings = view.notes, standing_warnings(view)
            lines += [f"note: {ansi.plain(note)}" for note in notes[self._notes :]]
            self._notes = len(notes)
            lines += [f"note: {line}" for line in warnings] if self._has_changed("warnings", warnings) else []
        draw = ansi.colours_only if self._is_terminal else ansi.plain
        printed = [line._replace(text=draw(line.text)) for line in fresh]
        if final:
            after = [] if view.is_final else unfinished_lines(view)
            after += [*memory_lines(view, view.failure), *ending_stacks(view), summary_line(view)]
        elif not self._is_terminal:
            stall = stall_lines(view)
            after = (stall or ["progress resumed"]) if self._has_changed("stall", stall) else []
            finishing = finishing_text(view.finishing)
            after += [finishing] if finishing and self._has_changed("finishing", [finishing]) else []
        return [*map(_Line, lines), *printed, *map(_Line, after)]

    def _has_changed(self, about: str, lines: list[str]) -> bool:
        """Whether the lines about a topic differ from the last ones."""
        before, self._lines[about] = self._lines.get(about, []), lines
        return lines != before

    def _live_lines(self) -> list[str]:
        size = _terminal_size(self._stream)
        view = self._view
        lines = [f"{view.name} · {live_line(view)}"] if view.waiting_for else []
        if self._has_header:
            lines = [*unfinished_lines(view), *stall_lines(view)]
        room = max(size.lines - 2, 1)
        if len(lines) > room:
            lines = [*lines[: room - 1], f"... and {count_of(len(lines) - room + 1, 'more rank')}"]
        return [_fit(line, size.columns - 1) for line in lines]


def _terminal_size(stream: TextIO) -> os.terminal_size:
    try:
        size = os.get_terminal_size(stream.fileno())
    except OSError:  # no file descriptor (io.UnsupportedOperation is an OSError), or not a terminal
        return os.terminal_size((80, 24))
    return os.terminal_size((size.columns or 80, size.lines or 24))


def _fit(line: str, columns: int) -> str:
    """Cut a line to the terminal's width, as a wrapped line could not be erased again."""
    line = line.replace("\t", "    ")
    if line.isascii():
        return line[:columns]
    return line[: count_fitting((1 + (unicodedata.east_asian_width(char) in "WF") for char in line), columns)]


def _fresh_lines(view: RunView) -> list[_Line]:
    """Return the lines finished since the last call, with the prefix `[0] `; displays as their text."""
    lines: list[_Line] = []
    width = rank_width(view)
    for item in view.output.take_items():
        match item:
            case LineItem(rank=rank, stream=stream, text=text):
                lines.append(_Line(f"{rank_label(rank, width)} {text}", stream == "stdout", rank))
            case DisplayItem(rank=rank):
                label = rank_label(rank, width)
                lines.extend(_Line(f"{label} {line}", True, rank) for line in display_text(item).split("\n"))
            case GapItem():
                lines.extend(map(_Line, gap_lines(item, view.short_id, log_files(view))))
    return lines
