"""What is said of a session in its own view: how long, how many cells, what it used, which of its ranks are dead."""

from __future__ import annotations

import time

from sgpu_magic.views.cost import mark
from sgpu_magic.views.measured import busy_text
from sgpu_magic.views.session_state import restart_command
from sgpu_magic.views.surroundings import tracked_text
from sgpu_magic.views.units import count_of, format_ranks, format_seconds, format_span
from sgpu_magic.views.view import RunView
from sgpu_magic.wire.prices import format_money
from sgpu_magic.wire.states import RunState

_A_DAY_S = 20 * 3600.0


def session_meta(view: RunView, now: float | None = None) -> list[str]:
    """Return further words for a session's header.

    Args:
        view: The session's.
        now: Time of day in seconds since the epoch; the present when left out.
    """
    session = view.session
    if session is None:
        return []
    cells = count_of(session.cells, "cell") if session.cells or view.is_final else ""
    if view.is_final:
        words = [cells, device_hours(view), _cost(view), busy_text(view.usage), why_ended(view)]
    else:
        words = [cells, idle_since(session.idle_at, now), _idle_end(view)]
    return [word for word in words if word]


def standing_warnings(view: RunView) -> list[str]:
    """Return what is wrong as long as it is: a link that is silent, which ranks are dead and how they come back."""
    silence = [view.silence] if view.silence and not view.is_final else []
    if view.session is None or view.is_final or not view.session.dead:
        return silence
    dead = view.session.dead
    verb, them = ("is", "it") if len(dead) == 1 else ("are", "them")
    command = restart_command(dead)
    return [
        *silence,
        f"{format_ranks(dead)} {verb} dead; {command} starts {them} anew, and the others keep their state",
    ]


def session_summary(view: RunView) -> str:
    """Return a session's last line: how long it was there, how many cells it ran, what it used, why it ended."""
    lasted = f"{view.name} ended after {format_span(view.elapsed_s())}"
    return " · ".join([lasted, *session_meta(view), *filter(None, [tracked_text(view)]), f"run {view.short_id}"])


def device_hours(view: RunView) -> str:
    """Return `0.82 GPU h`: the time for which the session held its GPUs, of all together; "" on CPU slots."""
    lease = view.lease
    if lease is None or lease.device_type == "cpu":
        return ""
    hours = view.elapsed_s() * lease.ranks / 3600
    return f"{hours:.{1 if hours >= 9.95 else 2}f} GPU h" + (" (simulated)" if lease.simulated else "")


def _cost(view: RunView) -> str:
    ended = view.ended
    if ended is None or ended.cost is None:
        return ""
    return format_money(ended.cost, ended.currency) + ("" if device_hours(view) else mark(view))


def why_ended(view: RunView) -> str:
    """Return why it ended, where that is not a failure."""
    if view.ended is None or view.state not in (RunState.CANCELLED, RunState.SUCCEEDED):
        return ""
    return view.ended.reason or view.reason


def idle_since(at: float | None, now: float | None = None) -> str:
    """Return `idle since 14:05`, the day before it when that was not today; "" for None."""
    if at is None:
        return ""
    now = time.time() if now is None else now
    form = "%H:%M" if now - at < _A_DAY_S else "%b %d, %H:%M"
    return f"idle since {time.strftime(form, time.localtime(at))}"


def _idle_end(view: RunView) -> str:
    idle_s = view.spec.idle_s
    return f"ends after {format_seconds(idle_s)} without a cell" if idle_s is not None else ""
