"""Text renderers: for headless runs, for `text/plain` of every saved output, and for terminals during a run."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, TextIO

from sgpu_magic.views import ansi
from sgpu_magic.views.failure import failure_lines, memory_lines
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.output import TextSegment, share_of
from sgpu_magic.views.output_buffer import (
    HEAD_SHARE,
    DisplayItem,
    GapItem,
    Item,
    LineItem,
    display_text,
    first_and_last,
    gap_lines,
    line_bytes,
    text_limit,
    trim,
)
from sgpu_magic.views.run_notes import other_lines
from sgpu_magic.views.stacks import ending_stacks, stall_lines
from sgpu_magic.views.summary_words import (
    billed_text,
    busy_text,
    cost_text,
    idle_lines,
    is_quiet,
    log_files,
    quiet_line,
    rank_label,
    rank_width,
    session_meta,
    session_summary,
    standing_warnings,
)
from sgpu_magic.views.units import count_of, format_elapsed, format_span
from sgpu_magic.views.words import (
    attempt_text,
    failed_line,
    header_line,
    packages_text,
    returned_text,
    state_word,
    tracked_text,
)
from sgpu_magic.wire.states import RunState

# bytes of a segment's lines, however little is left
_MIN_BYTES = 500


def render_segment_text(view: RunView, segment: TextSegment, first: bool, last: bool, limit: int | None = None) -> str:
    """Return one segment as text: the first has the header and the notes, the last the summary.

    Args:
        view: The run.
        segment: One of `segments(view)`.
        first: It is the first segment.
        last: It is the last segment.
        limit: Bytes allowed for a live form, which shows the newest lines.
    """
    if is_quiet(view):
        return quiet_line(view) if first else ""
    lines: list[str] = []
    if first:
        lines.append(header_line(view))
        lines.extend(
            f"note: {note}" for note in [*view.notes, *view.past_stall, *standing_warnings(view), *idle_lines(view)]
        )
    ending = _ending(view) if last or limit is None else []
    items: Sequence[Item] = segment.items
    if limit is None:
        items = first_and_last(items)
        room = text_limit(view.output_limit) - sum(map(line_bytes, ending))
        bound, head_share = max(share_of(view, segment, room), _MIN_BYTES), HEAD_SHARE
    else:
        bound, head_share = limit, 0.0
    width = rank_width(view)
    sizes = [line_bytes(item.text) if isinstance(item, LineItem) else 0 for item in items]
    for item in trim(items, sizes, bound, head_share):
        if isinstance(item, GapItem):
            lines.extend(gap_lines(item, view.short_id, log_files(view)))
        elif isinstance(item, LineItem):
            lines.append(f"{rank_label(item.rank, width)} {ansi.plain(item.text)}")
    return "\n".join([*lines, *(ending if last else [])])


def summary_line(view: RunView) -> str:
    """Return the run's last line, or `live_line` while it is active."""
    if not view.is_final:
        return live_line(view)
    if is_quiet(view):
        return quiet_line(view)
    if view.session is not None and view.failure is None:
        return session_summary(view)
    if view.state is RunState.SUCCEEDED:
        used = (billed_text(view), busy_text(view.usage), returned_text(view))
        duration = view.times.text()
        # ranks that were done at once took only their start
        succeeded = f"succeeded in {duration.removeprefix('start ')}" if duration else "succeeded"
        return " · ".join([succeeded, *filter(None, used), *_name_words(view)])
    return " · ".join([failed_line(view, brief=True), *_last_words(view)])


def live_line(view: RunView) -> str:
    """Return one line about an active run: its position in the queue, or its state and time."""
    if view.left:
        return view.left
    if is_quiet(view):
        return quiet_line(view)
    run, word = f"run {view.short_id}", state_word(view).text
    if view.state is RunState.QUEUED:
        position = f", position {view.position}" if view.position else ""
        words = (f"{word}{position}", view.waiting_for or view.reason, packages_text(view), run)
        return " · ".join(part for part in words if part)
    elapsed, starting_s = view.elapsed_s(), view.times.starting_s()
    lasts = view.times.text() if elapsed else format_elapsed(starting_s) if starting_s else ""
    since = f" for {lasts}" if lasts else ""
    if view.session is not None:
        # no "for": the time counts from its start, not from this state
        since = f" · {format_span(elapsed)}" if elapsed else ""
    words = (
        f"{word}{since}",
        cost_text(view),
        attempt_text(view),
        packages_text(view),
        *session_meta(view),
        view.reason,
        run,
    )
    return " · ".join(part for part in words if part)


def _ending(view: RunView) -> list[str]:
    if not view.is_final:
        return [*_unfinished(view), *stall_lines(view), summary_line(view)]
    problems = [
        f"rank {result.rank}: the last expression's value could not be sent: {result.value_problem}"
        for result in view.results
        if result.value_problem
    ]
    if view.state is RunState.SUCCEEDED or view.failure is None:
        return [*problems, summary_line(view)]
    lines = failure_lines(view)
    if view.session is not None:
        return [*lines, " · ".join([*session_meta(view), *_name_words(view)])]
    last = " · ".join(_last_words(view))
    if len(lines) == 1 or other_lines(view.others, view.failure.rank)[-1:] == lines[-1:]:
        lines[-1] += f" · {last}"
    else:
        lines.append(last)
    return lines


def _unfinished(view: RunView) -> list[str]:
    """Return the unfinished line of each rank."""
    width = rank_width(view)
    return [f"{rank_label(rank, width)} {ansi.plain(text)}" for rank, text in view.output.live_lines.items()]


def _last_words(view: RunView) -> list[str]:
    """Return what an unsuccessful run was billed, and its identifiers."""
    return [*filter(None, [billed_text(view)]), *_name_words(view)]


def _name_words(view: RunView) -> list[str]:
    """Return the run's identifiers in MLflow and here."""
    return [*filter(None, [tracked_text(view)]), f"run {view.short_id}"]


REDRAW_S = 0.1
HEADER_AFTER_S = 0.1


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
        self._said: dict[str, list[str]] = {}
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
        lines = self._new_lines(now, final)
        if self._errors is not None:
            _write_apart(lines, self._stream, self._errors)
            return
        live = [] if final or not self._is_terminal else self._live_lines()
        redraw = bool(lines) or final or (live != self._live and now - self._live_at >= REDRAW_S)
        if not redraw:
            return
        erase = f"\x1b[{len(self._live)}A\r\x1b[J" if self._live else ""
        text = "".join(f"{line.text}\n" for line in lines)
        self._stream.write(erase + text + "".join(f"{line}\n" for line in live))
        self._stream.flush()
        self._live, self._live_at = live, now

    def _new_lines(self, now: float, final: bool) -> list[_Line]:
        began = now if self._began is None else self._began
        view = self._view
        fresh = self._pending + _fresh_lines(view)
        self._pending = []
        if view.spec.grouped:
            if not final:
                self._pending, fresh = fresh, []
            fresh.sort(key=attrgetter("rank"))
        if is_quiet(view):
            return [_Line(summary_line(view))] if final else []
        lines: list[str] = []
        after: list[str] = []
        placed = view.lease is not None
        if not self._has_header and (placed or fresh or final):
            self._has_header = True
            lines.append(header_line(view))
        elif not self._has_header and not self._is_terminal and now - began >= HEADER_AFTER_S:
            place = [f"{view.name} · {live_line(view)}"]
            lines.extend(place if view.waiting_for and self._has_changed("queue", place) else [])
        if self._has_header:
            notes = view.notes
            lines.extend(f"note: {ansi.plain(note)}" for note in notes[self._notes :])
            self._notes = len(notes)
            warnings = standing_warnings(view)
            if self._has_changed("warnings", warnings):
                lines.extend(f"note: {line}" for line in warnings)
        draw = ansi.colours_only if self._is_terminal else ansi.plain
        printed = [line._replace(text=draw(line.text)) for line in fresh]
        if not final and not self._is_terminal:
            stall = stall_lines(view)
            after.extend((stall or ["progress resumed"]) if self._has_changed("stall", stall) else [])
        if final:
            if not view.is_final:
                after.extend(_unfinished(view))
            after.extend(memory_lines(view, view.failure))
            after.extend(ending_stacks(view))
            after.append(summary_line(view))
        return [*map(_Line, lines), *printed, *map(_Line, after)]

    def _has_changed(self, about: str, lines: list[str]) -> bool:
        """Whether the lines about a topic differ from the last ones."""
        before, self._said[about] = self._said.get(about, []), lines
        return lines != before

    def _live_lines(self) -> list[str]:
        size = _terminal_size(self._stream)
        view = self._view
        if not self._has_header:
            lines = [f"{view.name} · {live_line(view)}"] if view.waiting_for else []
        else:
            lines = [*_unfinished(view), *stall_lines(view)]
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
    used = 0
    for at, char in enumerate(line):
        used += 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if used > columns:
            return line[:at]
    return line


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


def _write_apart(lines: list[_Line], out: TextIO, errors: TextIO) -> None:
    for is_output, group in groupby(lines, key=attrgetter("is_output")):
        stream = out if is_output else errors
        stream.write("".join(f"{line.text}\n" for line in group))
        stream.flush()
