"""What is said of a session in its own view, and in one line of what only moves names to and from it."""

from __future__ import annotations

import time

from sgpu_magic.system.byte_sizes import format_bytes
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.html_style import SANS, SOFT, safe
from sgpu_magic.views.run_notes import restart_command
from sgpu_magic.views.units import count_of, format_ranks, format_seconds, format_span
from sgpu_magic.views.usage_words import busy_text, device_hours, mark
from sgpu_magic.views.words import names_text, returned_bytes, session_text, tracked_text
from sgpu_magic.wire.costs import format_money
from sgpu_magic.wire.run import OutputName
from sgpu_magic.wire.states import RunKind, RunState

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
        words = [cells, _gpu_hours(view), _cost(view), busy_text(view.usage), why_ended(view)]
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


def _gpu_hours(view: RunView) -> str:
    """Return `0.82 GPU h`: the time for which the session held its GPUs, of all together; "" on CPU slots."""
    lease = view.lease
    if lease is None or lease.device_type == "cpu":
        return ""
    return device_hours(view.elapsed_s() * lease.ranks) + mark(view)


def _cost(view: RunView) -> str:
    ended = view.ended
    if ended is None or ended.cost is None:
        return ""
    return format_money(ended.cost, ended.currency) + ("" if _gpu_hours(view) else mark(view))


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


def is_quiet(view: RunView) -> bool:
    """Whether a line is all that is to be said of it: it is a push or a pull that has not gone wrong."""
    badly = view.is_final and view.state is not RunState.SUCCEEDED
    return view.spec.kind in (RunKind.PUSH, RunKind.PULL) and not badly and not view.left


def quiet_line(view: RunView) -> str:
    """Return `sent cfg, loader (1.2 MB) to 4 ranks of session work`, `brought history (1.2 kB) from rank 0 ...`."""
    over = view.state is RunState.SUCCEEDED
    if view.spec.kind is RunKind.PUSH:
        shipped = view.spec.shipped
        what = f"{names_text(shipped.names)} ({format_bytes(shipped.total_bytes)})"
        line = f"{'sent' if over else 'sending'} {what} to {_ranks(view)} of {session_text(view)}"
    else:
        size = f" ({format_bytes(returned_bytes(view))})" if over else ""
        line = f"{'brought' if over else 'bringing'} {_origins(view)} of {session_text(view)}{size}"
    waits = "" if over else view.waiting_for
    return " · ".join([line, *([waits] if waits else []), *view.notes])


def quiet_html(view: RunView) -> str:
    """Return the same as HTML."""
    return f'<div style="{SANS};font-size:12px;{SOFT};padding:1px 0">{safe(quiet_line(view))}</div>'


def _ranks(view: RunView) -> str:
    return format_ranks(view.rank_numbers) if view.spec.only else count_of(view.ranks, "rank")


def _origins(view: RunView) -> str:
    """Return `history from rank 0 and loss from 4 ranks`."""
    origins: dict[str, list[OutputName]] = {}
    for output in view.spec.outputs:
        of = _ranks(view) if output.all_ranks else format_ranks(view.rank_numbers[:1])
        origins.setdefault(of, []).append(output)
    return " and ".join(f"{names_text([each.name for each in names])} from {of}" for of, names in origins.items())
