"""The words around a run in its view: what is left of its time, what goes on before it runs, its footer."""

from __future__ import annotations

from sgpu_magic.config import SEVEN_DAYS_S
from sgpu_magic.protocol.states import RunState
from sgpu_magic.render.measured import busy_text
from sgpu_magic.render.text import returned_text, shipped_text
from sgpu_magic.render.units import count_of, format_clock, format_seconds
from sgpu_magic.render.view import RunView

_WORTH_TELLING_S = 1.0
_MAX_VALUE_PROBLEMS = 4
_BEFORE_RUNNING = (RunState.QUEUED, RunState.PREPARING, RunState.STARTING)


def meta(view: RunView, now: float) -> list[str]:
    """Return further words for the header."""
    words: list[str] = []
    if view.ended is not None:
        words += [busy_text(view.usage)]
        if view.ended.queued_s >= _WORTH_TELLING_S:
            words.append(f"{format_seconds(view.ended.queued_s)} in the queue")
        reason = view.ended.reason or view.reason
        words += [reason if view.state is RunState.CANCELLED else ""]
    elif not view.left:
        words += [time_left(view, now)]
        words += [view.reason if view.state not in _BEFORE_RUNNING else ""]
    return [word for word in words if word]


def time_left(view: RunView, now: float) -> str:
    """Return `07:12 left` when a time limit was asked for, or when less than a quarter of it is left."""
    limit = view.spec.timeout_s
    if view.deadline is None or view.is_final:
        return ""
    left = max(view.deadline - now, 0.0)
    return f"{format_clock(left)} left" if limit < SEVEN_DAYS_S or left < limit / 4 else ""


def preparing(view: RunView, now: float) -> list[str]:
    """Return what is going on before the ranks run, a line each; empty then."""
    if view.state not in _BEFORE_RUNNING:
        return []
    lines: list[str] = []
    if view.state is RunState.QUEUED:
        place = f"position {view.position} in the queue" if view.position else ""
        lines.append(": ".join(filter(None, [place, view.waiting_for or view.reason])))
        lines.append(_patience(view, now))
    elif view.reason:
        lines.append(view.reason)
    lines.append(shipped_text(view))
    if view.state is RunState.STARTING:
        lines.append(f"starting {count_of(view.ranks, 'rank')}")
    return [line for line in lines if line]


def footer(view: RunView) -> list[str]:
    """Return what was returned and shipped, what stayed where it was, and what to do next."""
    parts = [
        f"rank {result.rank}'s last value stayed there: {result.value_problem}"
        for result in view.results
        if result.value_problem
    ]
    parts = parts[:_MAX_VALUE_PROBLEMS]
    if view.state not in _BEFORE_RUNNING and (not view.is_final or view.state is RunState.SUCCEEDED):
        # before, it stands among what is going on
        parts += [returned_text(view), shipped_text(view)]
    if view.left:
        parts.append(view.left)
    elif view.is_final and view.state is RunState.FAILED:
        parts.append(f"sgpu logs {view.short_id}")
    parts.append(f"run {view.short_id}")
    return [part for part in parts if part]


def _patience(view: RunView, now: float) -> str:
    if view.spec.wait_s is None or not view.spec.submitted_at:
        return ""
    left = view.spec.submitted_at + view.spec.wait_s - now
    return f"gives up in {format_clock(left)} (--wait)"
