"""The grid of a run's ranks."""

from __future__ import annotations

from sgpu_magic.views import ansi
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.live.bars import bar_of, without_bar
from sgpu_magic.views.live.schema import Curve, RankCard, Tone
from sgpu_magic.views.run_notes import died_of, error_line, last_part, restart_command
from sgpu_magic.views.usage import Drawn, detail_lines, use_text
from sgpu_magic.views.words import new_host
from sgpu_magic.wire.rank_events import Failure, RankSample
from sgpu_magic.wire.states import FailureKind, RunState

_MAX_LAST_CHARS = 160
_MAX_SEEN_CHARS = 1000
_MAX_LABEL_CHARS = 80
_WITHOUT_RANKS = (RunState.QUEUED, RunState.PREPARING)


def rank_cards(view: RunView) -> tuple[RankCard, ...]:
    """Return a card for each rank; none before the ranks are being started."""
    never_started = view.lease is None and not view.rank_failures
    is_there = view.spec.in_session and view.state is not RunState.QUEUED
    if (view.state in _WITHOUT_RANKS and not is_there) or never_started:
        return ()
    failures = {failure.rank: failure for failure in reversed(view.others) if failure.rank is not None}
    failures |= {rank: failure for rank, failure in view.rank_failures.items() if rank >= 0}
    if view.failure is not None and view.failure.rank is not None and view.state is not RunState.SUCCEEDED:
        failures[view.failure.rank] = view.failure
    said = view.output.last_lines
    return tuple(
        _card(view, at, failures.get(rank), ansi.plain(said.get(rank, "")[:_MAX_SEEN_CHARS]))
        for at, rank in enumerate(view.rank_numbers)
    )


def _card(view: RunView, at: int, failure: Failure | None, last: str) -> RankCard:
    rank = view.rank_numbers[at]
    state, tone = _state(view, rank, failure)
    usage = view.usage.ranks.get(rank)
    latest = usage.latest if usage is not None else None
    return RankCard(
        rank=rank,
        state=state,
        tone=tone,
        label=ansi.plain(view.labels[rank])[:_MAX_LABEL_CHARS] if rank < len(view.labels) else "",
        last=_last(rank, state, failure, without_bar(last) or _place(state, latest))[:_MAX_LAST_CHARS],
        bar=bar_of(last) if state == "running" else None,
        use=use_text(latest) if latest is not None else "",
        details=tuple(ansi.plain(line)[:200] for line in detail_lines(latest)) if latest is not None else (),
        curves=tuple(map(_curve, usage.curves())) if usage is not None else (),
        idle=ansi.plain(usage.idle_text)[:200] if usage is not None else "",
        host=new_host(view, view.rank_numbers, at),
    )


def _state(view: RunView, rank: int, failure: Failure | None) -> tuple[str, Tone]:
    if view.session is not None and not view.is_final:
        if rank in view.session.dead:
            return "dead", "bad"
        if view.state is RunState.RUNNING:
            return "alive", "good"
    if view.state is RunState.SUCCEEDED:
        return "done", "good"
    if failure is not None:
        if failure.is_consequence:
            return "released", "plain"
        if last_part(failure.type_name) == "KeyboardInterrupt":
            # the stop path interrupts ranks that are not blocked in a collective
            return "ended", "plain"
        return "failed", "bad"
    if view.is_final:
        return "ended", "plain"
    return ("waiting", "plain") if view.state is RunState.STARTING else ("running", "busy")


def _last(rank: int, state: str, failure: Failure | None, last: str) -> str:
    """Return the rank's last line, or its failure or restart command, which take precedence."""
    if state == "dead":
        return restart_command((rank,))
    if failure is None or state != "failed":
        return last
    silent = failure.kind is FailureKind.WORKER_DIED and not failure.message
    return ansi.plain(died_of(failure) if silent else error_line(failure))


def _place(state: str, latest: RankSample | None) -> str:
    """Return `at line 3: import torch` for a rank that runs and has printed nothing."""
    return f"at {ansi.plain(latest.line)}" if state == "running" and latest is not None and latest.line else ""


def _curve(drawn: Drawn) -> Curve:
    return Curve(
        name=drawn.name,
        unit=drawn.unit,
        values=drawn.series.values,
        began_s=round(drawn.series.began_s, 1),
        step_s=drawn.series.step_s,
        top=drawn.top,
    )
