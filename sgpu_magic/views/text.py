"""The text forms: for terminals, headless runs, and the text/plain of every saved output."""

from __future__ import annotations

from sgpu_magic.views import ansi
from sgpu_magic.views.cost import billed_text, cost_text
from sgpu_magic.views.failure import (
    cell_excerpt,
    death_sentence,
    error_line,
    last_words,
    limit_of,
    other_lines,
    place,
    timeout_sentence,
    traceback_body,
)
from sgpu_magic.views.heading import attempt_text, header_line, returned_text
from sgpu_magic.views.items import (
    HEAD_SHARE,
    DisplayItem,
    GapItem,
    LineItem,
    display_text,
    gap_lines,
    line_bytes,
    trim,
)
from sgpu_magic.views.measured import busy_text, idle_lines
from sgpu_magic.views.memory import memory_lines
from sgpu_magic.views.quiet import is_quiet, quiet_line
from sgpu_magic.views.segments import TextSegment, segments
from sgpu_magic.views.session_words import session_meta, session_summary, standing_warnings
from sgpu_magic.views.stacks import group_lines, group_stacks, summary, verdict
from sgpu_magic.views.state_words import state_word
from sgpu_magic.views.surroundings import packages_text, tracked_text
from sgpu_magic.views.units import format_seconds, format_span
from sgpu_magic.views.view import RunView
from sgpu_magic.wire.states import FailureKind, RunState

_MAX_TRACEBACK_LINES = 400


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
    return " · ".join([_failed_line(view, brief=True), *_bill_words(view), *_name_words(view)])


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


def stall_lines(view: RunView) -> list[str]:
    """Return where the ranks of a run wait in which nothing moves; empty while it moves."""
    if view.stalled is None or view.is_final or view.left:
        return []
    stacks, cell = view.stalled.stacks, view.spec.cell
    groups = [f"  {ansi.plain(line)}" for line in group_lines(group_stacks(stacks, cell))]
    told = [*map(ansi.plain, verdict(stacks, cell)), "%sgpu_stacks shows everything", f"run {view.short_id}"]
    return [f"no progress for {format_seconds(view.stalled.seconds)}", *groups, " · ".join(told)]


def ending_stacks(view: RunView) -> list[str]:
    """Return where the ranks were when the run ended: all of it when a limit ended it, a line when it had stalled."""
    if view.ended is None:
        return []
    if view.ended.stacks:
        return [limit_of(view.failure).then, *summary(view.ended.stacks, view.spec.cell)]
    if view.stalled is None:
        return []
    groups = "; ".join(
        " ".join(line.split()) for line in group_lines(group_stacks(view.stalled.stacks, view.spec.cell))
    )
    return [ansi.plain(f"nothing had moved for {format_seconds(view.stalled.seconds)}: {groups}")]


def failure_lines(view: RunView, whole: bool = True) -> list[str]:
    """Return the culprit with its own lines and the others in a line each, without the run's id.

    Args:
        view: A run that has ended badly.
        whole: All frames of the traceback, else the cell's own.
    """
    lines = [_failed_line(view)]
    failure = view.failure
    if failure is not None:
        body, left_out = cell_excerpt(failure)
        if whole and left_out:
            body = traceback_body(failure)
        if body:
            lines.extend(_bounded(body))
        elif failure.kind is FailureKind.USER_CODE:
            lines.append(error_line(failure))
        elif failure.kind is FailureKind.WORKER_DIED:
            lines.extend(culprits_last_words(view))
        lines.extend(memory_lines(view, failure))
    lines.extend(ending_stacks(view))
    lines.extend(other_lines(view.others, failure.rank if failure else None))
    return lines


def culprits_last_words(view: RunView) -> list[str]:
    """Return the last Python line and the last output of a rank that died without a traceback."""
    failure = view.failure
    if failure is None or failure.rank is None:
        return []
    return last_words(failure, view.spec.cell, ansi.plain(view.last_lines.get(failure.rank, "")))


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


def _failed_line(view: RunView, brief: bool = False) -> str:
    """Return the first line of a failure, with the error in it when `brief` or when there is no traceback."""
    elapsed = view.elapsed_s()
    # what was refused was never there
    after = f" after {format_seconds(elapsed)}" if elapsed >= 0.0005 else ""
    failure = view.failure
    word = limit_of(failure).word if view.state is RunState.TIMED_OUT else view.state
    start = f"{view.name} · {word}{after}"
    if view.state is RunState.CANCELLED or failure is None:
        return f"{start} · {view.reason}" if view.reason else start
    if failure.kind is FailureKind.USER_CODE:
        where = place(failure, view.ranks)
        return " · ".join(part for part in (start, where, error_line(failure) if brief else "") if part)
    sentence = failure_sentence(view)
    return f"{start} · {sentence.split(chr(10), 1)[0] if brief else sentence}"


def failure_sentence(view: RunView) -> str:
    """Return why a run whose failure has no traceback of the user's code ended."""
    failure = view.failure
    if failure is None:
        return ""
    if failure.kind is FailureKind.TIMEOUT:
        return failure.message.strip() or timeout_sentence(view.spec.timeout_s)
    return death_sentence(failure, view.ranks)


def _bounded(lines: list[str]) -> list[str]:
    if len(lines) <= _MAX_TRACEBACK_LINES:
        return lines
    half = _MAX_TRACEBACK_LINES // 2
    left_out = len(lines) - 2 * half
    return [*lines[:half], f"... {left_out:,} lines of the traceback ...", *lines[-half:]]
