"""The words around a run in its view: what is left of its time, what goes on before it runs, its footer."""

from __future__ import annotations

from typing import NamedTuple

from sgpu_magic.config import SEVEN_DAYS_S
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.session_words import session_meta
from sgpu_magic.views.units import format_clock, format_seconds
from sgpu_magic.views.usage_words import billed_text, busy_text
from sgpu_magic.views.words import (
    device_words,
    label_text,
    packages_text,
    place_words,
    ranks_text,
    returned_text,
    session_text,
    shipped_text,
    tracked_link,
    tracked_text,
)
from sgpu_magic.wire.states import RunState


class Place(NamedTuple):
    """Where it runs, in the header's words."""

    devices: str
    pool: str
    host: str


_WORTH_TELLING_S = 1.0
_MAX_VALUE_PROBLEMS = 4
_BEFORE_RUNNING = (RunState.QUEUED, RunState.PREPARING, RunState.STARTING)


def place(view: RunView) -> Place:
    """Return where it runs; a cell in a session names the session, which says where that is."""
    if view.spec.in_session:
        return Place(" · ".join(place_words(view)), "", "")
    return Place(device_words(view), view.pool, view.host)


def meta(view: RunView, now: float) -> list[str]:
    """Return further words for the header."""
    if view.session is not None and not view.left:
        return session_meta(view, now)
    words = [f"beside {session_text(view)}"] if view.spec.session and not view.spec.in_session else []
    if view.ended is not None:
        words += [billed_text(view), busy_text(view.usage)]
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
    """Return what is going on before the ranks run, a line each; empty then, and where a session's ranks are there."""
    is_there = view.spec.in_session and view.state is not RunState.QUEUED
    if view.state not in _BEFORE_RUNNING or is_there:
        return []
    lines: list[str] = []
    if view.state is RunState.QUEUED:
        place = f"position {view.position} in the queue" if view.position else ""
        lines.append(": ".join(filter(None, [place, view.waiting_for or view.reason])))
        lines.append(_patience(view, now))
    elif view.reason:
        lines.append(view.reason)
    lines += [packages_text(view), shipped_text(view)]
    if view.state is RunState.STARTING:
        lines.append(f"starting {ranks_text(view)}")
    return [line for line in lines if line]


def footer(view: RunView) -> list[str]:
    """Return what was returned and shipped, what stayed where it was, and what to do next."""
    parts = [
        f"rank {result.rank}'s last value stayed there: {result.value_problem}"
        for result in view.results
        if result.value_problem
    ]
    parts = parts[:_MAX_VALUE_PROBLEMS]
    is_told_above = view.state in _BEFORE_RUNNING and not view.spec.in_session
    if not is_told_above and (not view.is_final or view.state is RunState.SUCCEEDED):
        # before, it stands among what is going on
        parts += [returned_text(view), shipped_text(view), label_text(view)]
    if view.is_final and tracked_link(view) is None:
        # a page stands in the picture as a link
        parts.append(tracked_text(view))
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
