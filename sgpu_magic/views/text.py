"""The text forms: for terminals, headless runs, and the text/plain of every saved output."""

from __future__ import annotations

from sgpu_magic.views import ansi
from sgpu_magic.views.failure import (
    other_lines,
)
from sgpu_magic.views.failure_text import failed_line, failure_lines, stall_lines
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.output_items import (
    HEAD_SHARE,
    DisplayItem,
    GapItem,
    LineItem,
    TextSegment,
    display_text,
    gap_lines,
    line_bytes,
    segments,
    trim,
)
from sgpu_magic.views.session_words import is_quiet, quiet_line, session_meta, session_summary, standing_warnings
from sgpu_magic.views.units import format_seconds, format_span
from sgpu_magic.views.usage_words import billed_text, busy_text, cost_text, idle_lines
from sgpu_magic.views.words import attempt_text, header_line, packages_text, returned_text, state_word, tracked_text
from sgpu_magic.wire.states import RunState


def render_text(view: RunView) -> str:
    """Return the whole run as text: header, lines with their ranks, summary or failure."""
    parts = segments(view)
    drawn: list[str] = []
    for at, part in enumerate(parts):
        if isinstance(part, DisplayItem):
            drawn.append(display_lines(part))
        else:
            drawn.append(render_segment_text(view, part, at == 0, at == len(parts) - 1))
    return "\n".join(text for text in drawn if text)


def render_segment_text(view: RunView, segment: TextSegment, first: bool, last: bool, limit: int | None = None) -> str:
    """Return one segment: the first has the header and the notes, the last the summary.

    Args:
        view: The run.
        segment: One of `segments(view)`.
        first: It is the first of them.
        last: It is the last of them.
        limit: Bytes allowed for a live form, which shows the newest lines.
    """
    if is_quiet(view):
        return quiet_line(view) if first else ""
    lines: list[str] = []
    if first:
        lines.append(header_line(view))
        lines.extend(f"note: {note}" for note in [*view.notes, *standing_warnings(view), *idle_lines(view)])
    items = segment.items
    sizes = [line_bytes(item.text) if isinstance(item, LineItem) else 0 for item in items]
    bound, head_share = (view.output_limit, HEAD_SHARE) if limit is None else (limit, 0.0)
    for item in trim(items, sizes, bound, head_share):
        if isinstance(item, GapItem):
            lines.extend(gap_lines(item, view.short_id))
        elif isinstance(item, LineItem):
            lines.append(f"[{item.rank}] {ansi.plain(item.text)}")
    if last:
        lines.extend(_ending(view))
    return "\n".join(lines)


def summary_line(view: RunView) -> str:
    """Return the run's last line, or where it stands while it goes on."""
    if not view.is_final:
        return live_line(view)
    if is_quiet(view):
        return quiet_line(view)
    if view.session is not None and view.failure is None:
        return session_summary(view)
    duration = format_seconds(view.elapsed_s())
    if view.state is RunState.SUCCEEDED:
        parts = (f"succeeded in {duration}", billed_text(view), busy_text(view.usage), returned_text(view))
        return " · ".join(part for part in (*parts, *_name_words(view)) if part)
    return " · ".join([failed_line(view, brief=True), *_bill_words(view), *_name_words(view)])


def live_line(view: RunView) -> str:
    """Return one line about a run that goes on: its place in the queue, or its state and time."""
    if view.left:
        return view.left
    if is_quiet(view):
        return quiet_line(view)
    run, word = f"run {view.short_id}", state_word(view).text
    if view.state is RunState.QUEUED:
        position = f", position {view.position}" if view.position else ""
        words = (f"{word}{position}", view.waiting_for or view.reason, packages_text(view), run)
        return " · ".join(part for part in words if part)
    elapsed = view.elapsed_s()
    since = f" for {format_seconds(elapsed)}" if elapsed else ""
    if view.session is not None:
        # it is there for longer than it is in this state
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


def display_lines(item: DisplayItem) -> str:
    """Return a display's text with its rank before every line."""
    return "\n".join(f"[{item.rank}] {ansi.plain(line)}" for line in display_text(item).split("\n"))


def _ending(view: RunView) -> list[str]:
    if not view.is_final:
        live = [f"[{rank}] {ansi.plain(text)}" for rank, text in view.live_lines.items()]
        return [*live, *stall_lines(view), summary_line(view)]
    problems = [
        f"rank {result.rank}: the last expression's value stayed there: {result.value_problem}"
        for result in view.results
        if result.value_problem
    ]
    if view.state is RunState.SUCCEEDED or view.failure is None:
        return [*problems, summary_line(view)]
    lines = failure_lines(view)
    if view.session is not None:
        return [*lines, " · ".join([*session_meta(view), *_name_words(view)])]
    last = " · ".join([*_bill_words(view), *_name_words(view)])
    if len(lines) == 1 or other_lines(view.others, view.failure.rank)[-1:] == lines[-1:]:
        lines[-1] += f" · {last}"
    else:
        lines.append(last)
    return lines


def _bill_words(view: RunView) -> list[str]:
    return [text for text in (billed_text(view),) if text]


def _name_words(view: RunView) -> list[str]:
    """Return how the run is found again: in MLflow, and here."""
    return [text for text in (tracked_text(view), f"run {view.short_id}") if text]
