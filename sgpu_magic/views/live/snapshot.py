"""`RunView` -> `Snapshot`: everything that a view shows except log lines, small enough for one message. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from sgpu_magic.config import SEVEN_DAYS_S
from sgpu_magic.formatting import clipped, ends, format_elapsed, format_seconds
from sgpu_magic.views import ansi
from sgpu_magic.views.failure import failure_block
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.format_run import (
    BEFORE_RANKS,
    attempt_text,
    format_devices,
    format_moved,
    format_placement,
    mark_text,
    next_step,
    packages_text,
    ranks_text,
    session_text,
    shipped_text,
    state_word,
    tracked_link,
    tracked_text,
    values_left_there,
)
from sgpu_magic.views.format_summary import (
    billed_text,
    busy_text,
    cost_text,
    dead_rank_lines,
    idle_lines,
    mark,
    session_meta,
    silence_lines,
)
from sgpu_magic.views.live.messages import json_bytes
from sgpu_magic.views.live.schema import (
    VERSION,
    Cost,
    Curve,
    FailureBlock,
    FailureLine,
    HoldingSession,
    RankCard,
    Snapshot,
)
from sgpu_magic.views.live.widget_bars import widget_bars
from sgpu_magic.views.metric_charts import SUMMARY_METRICS, metric_charts
from sgpu_magic.views.metrics import metrics_text
from sgpu_magic.views.ranks import rank_cards
from sgpu_magic.views.run_notes import finishing_text, other_lines, session_name
from sgpu_magic.views.stacks import stall_lines
from sgpu_magic.views.tracebacks import cut_lines
from sgpu_magic.views.units import steady_time
from sgpu_magic.views.usage import thinned
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.costs import HOUR_S
from sgpu_magic.wire.devices import backend
from sgpu_magic.wire.rank_events import Failure

_MAX_NOTES = 20
_MAX_CHARS = 500
_MAX_STALL_CHARS = 6_000
_MAX_EXCERPT_CHARS = 8_000
_MAX_WHOLE_CHARS = 16_000
_MAX_LINE_CHARS = 1_000
_WORTH_TELLING_S = 1.0
_BEFORE_RUNNING = (*BEFORE_RANKS, RunState.STARTING)
MAX_SNAPSHOT_BYTES = 60_000
# leaves the rest of the message for the rank cards
_MAX_TEXT_BYTES = 30_000
# lines of each list, characters of each line
_TEXT_LEVELS = ((200, 400), (60, 200), (20, 120), (8, 80))
_TEXTS = ("meta", "preparing", "idle", "warnings", "notes", "stall", "others", "footer")

# each step reduces the result of the previous one: curves and their points, the last line, details
_SMALLER_CARDS: tuple[Callable[[RankCard], RankCard], ...] = (
    lambda card: replace(card, curves=card.curves[:2]),
    lambda card: replace(card, curves=tuple(_coarse(curve, 60) for curve in card.curves[:1]), last=card.last[:100]),
    lambda card: replace(card, curves=tuple(_coarse(curve, 30) for curve in card.curves)),
    lambda card: replace(card, details=()),
    lambda card: replace(card, curves=(), last=card.last[:40]),
)


def snapshot_of(view: RunView, seq: int, log_lines: Sequence[int], now: float | None = None) -> Snapshot:
    """Return a run's snapshot.

    Args:
        view: The run.
        seq: The snapshot's number.
        log_lines: Number of lines in each rank's log so far.
        now: Time by the views' clock; by default the present.

    Returns:
        A snapshot of at most 60 kB of JSON; for many ranks it has coarser curves and fewer details.
    """
    now = steady_time() if now is None else now
    cards, charts = rank_cards(view), metric_charts(view.metrics)
    failure = _first_failure(view)
    ended_badly = view.is_final and view.state is not RunState.SUCCEEDED
    others = other_lines(view.others, failure.rank if failure else None) if ended_badly else []
    is_active = not (view.is_final or view.left)
    warned = frozenset(view.warnings)
    notes = [
        *(note for note in view.notes if note not in warned),
        *view.past_stall,
        *(silence_lines(view) if is_active else []),
    ]
    left_out = len(notes) - _MAX_NOTES
    word, link = state_word(view), tracked_link(view)
    # a cell in a session names the session, whose view shows the location
    session = " · ".join(format_placement(view)) if view.spec.in_session else ""
    return fitted(
        Snapshot(
            version=VERSION,
            seq=seq,
            run_id=view.run_id,
            short_id=view.short_id,
            name=_plain(view.name),
            mark=mark_text(view),
            state=_plain(word.text),
            tone=word.tone,
            final=view.is_final,
            devices=_plain(session or format_devices(view)),
            pool="" if session else _plain(view.pool),
            host="" if session else _plain(view.host),
            attempt=attempt_text(view),
            elapsed_s=round(view.times.running_s(now), 3),
            starting_s=round(view.times.starting_s(now), 3),
            ticking=is_active and view.times.placed_at is not None,
            cost=_cost(view, now),
            meta=tuple(map(_plain, _meta(view, now))),
            preparing=tuple(map(_plain, _preparing(view, now))) if is_active else (),
            bar=view.progress.bar(view.rank_numbers, widget_bars(view)) if is_active and view.session is None else None,
            ranks=cards,
            metrics=charts,
            metrics_text=metrics_text(view.metrics, SUMMARY_METRICS),
            more_metrics=view.metrics.more(len(charts)),
            only=view.spec.only,
            idle=tuple(map(_plain, [*dead_rank_lines(view), *idle_lines(view)])) if is_active else (),
            warnings=tuple(map(_plain, view.warnings[-_MAX_NOTES:])),
            notes=(
                *([f"{left_out} earlier notes are left out"] if left_out > 0 else []),
                *map(_plain, notes[-_MAX_NOTES:]),
            ),
            stall=tuple(cut_lines(list(map(ansi.plain, stall_lines(view, has_buttons=True))), _MAX_STALL_CHARS)),
            failure=_failure(view, failure) if failure is not None else None,
            others=tuple(map(_plain, others)),
            footer=tuple(map(_plain, _footer(view))),
            tracked=replace(link, text=_plain(link.text)) if link is not None else None,
            lines=tuple(log_lines),
            can_cancel=is_active and view.state is not RunState.CANCELLING,
            own_sessions=tuple(
                HoldingSession(each.run_id, _plain(session_name(each.run_id, each.name))) for each in view.own_sessions
            ),
            stop="Cancel" if view.session is None else "End session",
            attach=f"%sgpu_attach {view.short_id}",
        )
    )


def _plain(text: str) -> str:
    return clipped(ansi.plain(text), _MAX_CHARS)


def _cost(view: RunView, now: float) -> Cost | None:
    text = cost_text(view, now)
    if not text:
        return None
    seconds = None if view.spec.session else view.times.metered_s(now)
    if seconds is None or view.hourly is None:
        return Cost(text=text, per_s=0.0, seconds=0.0, currency="", mark="")
    per_s = view.hourly / HOUR_S
    return Cost(text=text, per_s=per_s, seconds=round(seconds, 3), currency=view.currency, mark=mark(view))


def _first_failure(view: RunView) -> Failure | None:
    """Return the root cause; while the run is still stopping, the first failure that a rank has reported."""
    # a session continues when one of its ranks dies
    if view.is_final or view.session is not None:
        return view.failure if view.state is not RunState.SUCCEEDED else None
    return min(
        view.rank_failures.values(), key=lambda failure: (failure.after_stop, failure.is_consequence), default=None
    )


def _failure(view: RunView, failure: Failure) -> FailureBlock:
    block = failure_block(view, failure, _MAX_EXCERPT_CHARS, _MAX_WHOLE_CHARS)
    return replace(block, lines=_begun(block.lines), whole=_begun(block.whole))


def _begun(lines: tuple[FailureLine, ...]) -> tuple[FailureLine, ...]:
    return tuple(replace(line, text=line.text[:_MAX_LINE_CHARS]) for line in lines)


def _meta(view: RunView, now: float) -> list[str]:
    """Return further words for the header."""
    if view.session is not None and not view.left:
        return [word for word in (finishing_text(view.finishing), *session_meta(view, now)) if word]
    words = [f"beside {session_text(view)}"] if view.spec.session and not view.spec.in_session else []
    if view.ended is not None:
        queued_s, reason = view.ended.queued_s, view.ended.reason or view.reason
        words += [billed_text(view), busy_text(view.usage)]
        words += [f"{format_seconds(queued_s)} in the queue"] if queued_s >= _WORTH_TELLING_S else []
        words += [reason] if view.state is RunState.CANCELLED else []
    elif not view.left:
        words += [
            finishing_text(view.finishing),
            _time_left(view, now),
            view.reason if view.state not in _BEFORE_RUNNING else "",
        ]
    return [word for word in words if word]


def _time_left(view: RunView, now: float) -> str:
    """Return `7 min 12 s left` when a time limit was set, or when less than a quarter of it is left."""
    limit, began = view.spec.timeout_s, view.times.metered_at
    left = max(began + limit - now, 0.0) if began is not None else limit
    is_near = began is not None and (limit < SEVEN_DAYS_S or left < limit / 4)
    return f"{_until(left)} left" if is_near else ""


def _preparing(view: RunView, now: float) -> list[str]:
    """Return what happens before the ranks run, as lines; empty afterwards, and for a started cell in a session."""
    is_there = view.spec.in_session and view.state is not RunState.QUEUED
    if view.state not in _BEFORE_RUNNING or is_there:
        return []
    lines = [view.reason]
    if view.state is RunState.QUEUED:
        queue_words = f"position {view.position} in the queue" if view.position else ""
        lines = [": ".join(filter(None, [queue_words, view.waiting_for or view.reason])), _patience(view, now)]
    lines += [packages_text(view), shipped_text(view)]
    if view.state is RunState.STARTING:
        steps = f": processes, torch, then the {backend(view.lease)} process group" if view.lease else ""
        lines.append(f"starting {ranks_text(view)}{steps}")
    return [line for line in lines if line]


def _footer(view: RunView) -> list[str]:
    """Return what was returned and shipped, values that could not be returned, and what to do next."""
    # before the ranks run, a part of it is in `_preparing`
    is_shown_above = view.state in _BEFORE_RUNNING and not view.spec.in_session
    moved = [] if is_shown_above else format_moved(view)
    # a web page is shown as a link
    tracked = tracked_text(view) if view.is_final and tracked_link(view) is None else ""
    parts = [*values_left_there(view), *moved, tracked, next_step(view), f"run {view.short_id}"]
    return [part for part in parts if part]


def _patience(view: RunView, now: float) -> str:
    if view.spec.wait_s is None or not view.spec.submitted_at:
        return ""
    return f"gives up in {_until(view.submitted_at + view.spec.wait_s - now)} (--wait)"


def _until(left_s: float) -> str:
    return format_elapsed(left_s) if left_s >= 1 else "0 s"


# ---------------------------------------------------------------- small enough for one message


def fitted(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with texts and cards reduced until it fits into one message."""
    for lines, characters in _TEXT_LEVELS:
        if json_bytes(replace(snapshot, ranks=(), metrics=())) <= _MAX_TEXT_BYTES:
            break
        snapshot = _shorter(snapshot, lines, characters)
    for smaller in _SMALLER_CARDS:
        if json_bytes(snapshot) <= MAX_SNAPSHOT_BYTES:
            return snapshot
        snapshot = replace(snapshot, ranks=tuple(map(smaller, snapshot.ranks)))
    return _fewer(snapshot)


def _shorter(snapshot: Snapshot, lines: int, characters: int) -> Snapshot:
    """Cut each list of texts to its beginning and end, and each text to its beginning."""

    def cut(block: tuple[FailureLine, ...]) -> tuple[FailureLine, ...]:
        kept = ends(block, lines, FailureLine(text="...", kind="text"))
        return tuple(replace(line, text=clipped(line.text, characters)) for line in kept)

    failure = snapshot.failure
    if failure is not None:
        failure = replace(failure, lines=cut(failure.lines), whole=cut(failure.whole))
    texts = {name: ends(getattr(snapshot, name), lines, "...") for name in _TEXTS}
    cut_texts = {name: tuple(clipped(text, characters) for text in kept) for name, kept in texts.items()}
    return replace(snapshot, failure=failure, **cut_texts)


def _fewer(snapshot: Snapshot) -> Snapshot:
    """Leave out cards from the end until it fits, first those without a warning or failure."""
    cards, smaller = snapshot.ranks, snapshot
    while len(cards) > 1 and json_bytes(smaller) > MAX_SNAPSHOT_BYTES:
        dull = [card for card in cards if card.tone not in ("bad", "warn") and not card.idle]
        dropped = {card.rank for card in (dull or cards)[-max(len(cards) // 8, 1) :]}
        cards = tuple(card for card in cards if card.rank not in dropped)
        left_out = len(snapshot.ranks) - len(cards)
        note = f"{left_out} of {len(snapshot.ranks)} ranks are not drawn: too many for one view"
        smaller = replace(snapshot, ranks=cards, notes=(*snapshot.notes, note))
    return smaller


def _coarse(curve: Curve, most: int) -> Curve:
    """Return a curve of at most `most` points, each the mean of several."""
    means, every = thinned(curve.values, most)
    if every == 1:
        return curve
    values = tuple(None if mean is None else round(mean, 1) for mean in means)
    return replace(curve, values=values, step_s=curve.step_s * every)
