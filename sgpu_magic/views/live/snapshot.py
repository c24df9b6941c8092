"""`RunView` -> `Snapshot`: everything that is drawn of a run but the lines of its log. No I/O."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sgpu_magic.views import ansi
from sgpu_magic.views.failure import other_lines
from sgpu_magic.views.failure_text import cut_lines, stall_lines
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.live.bars import bar_of_all
from sgpu_magic.views.live.failure_block import drawn_failure, first_failure
from sgpu_magic.views.live.fitting import fitted
from sgpu_magic.views.live.picture import VERSION, Cost, Link, Snapshot
from sgpu_magic.views.live.rank_cards import rank_cards
from sgpu_magic.views.live.words import footer, meta, place, preparing
from sgpu_magic.views.session_words import standing_warnings
from sgpu_magic.views.usage_words import cost_text, idle_lines, mark
from sgpu_magic.views.words import attempt_text, mark_text, state_word, tracked_link
from sgpu_magic.wire.prices import HOUR_S
from sgpu_magic.wire.states import RunState

_MAX_NOTES = 20
_MAX_CHARS = 500
_MAX_STALL_CHARS = 6_000


def snapshot_of(view: RunView, seq: int, log_lines: Sequence[int], now: float | None = None) -> Snapshot:
    """Return what is drawn of a run.

    Args:
        view: The run.
        seq: The snapshot's number.
        log_lines: Lines of each rank's log so far.
        now: Time of day in seconds since the epoch; the present when left out.

    Returns:
        At most 60 kB of JSON: of many ranks the curves become coarser and the details fewer.
    """
    now = time.time() if now is None else now
    cards = rank_cards(view)
    failure = first_failure(view)
    ended_badly = view.is_final and view.state is not RunState.SUCCEEDED
    others = other_lines(view.others, failure.rank if failure else None) if ended_badly else []
    notes = view.notes
    left_out = len(notes) - _MAX_NOTES
    word, where = state_word(view), place(view)
    goes_on = not (view.is_final or view.left)
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
            devices=_plain(where.devices),
            pool=_plain(where.pool),
            host=_plain(where.host),
            attempt=attempt_text(view),
            elapsed_s=round(view.elapsed_s(now), 3),
            ticking=goes_on and view.elapsed_s(now) > 0,
            cost=_cost(view, now),
            meta=tuple(map(_plain, meta(view, now))),
            preparing=tuple(map(_plain, preparing(view, now))) if goes_on else (),
            bar=bar_of_all([card.bar for card in cards]),
            ranks=cards,
            only=view.spec.only,
            idle=tuple(map(_plain, [*standing_warnings(view), *idle_lines(view)])) if goes_on else (),
            notes=(
                *([f"{left_out} earlier notes are left out"] if left_out > 0 else []),
                *map(_plain, notes[-_MAX_NOTES:]),
            ),
            stall=tuple(cut_lines(list(map(ansi.plain, stall_lines(view))), _MAX_STALL_CHARS)),
            failure=drawn_failure(view, failure),
            others=tuple(map(_plain, others)),
            footer=tuple(map(_plain, footer(view))),
            tracked=_tracked(view),
            lines=tuple(log_lines),
            can_cancel=goes_on and view.state is not RunState.CANCELLING,
            stop="Cancel" if view.session is None else "Disconnect",
            attach=f"%sgpu_attach {view.short_id}",
        )
    )


def _plain(text: str) -> str:
    text = ansi.plain(text)
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} ..."


def _cost(view: RunView, now: float) -> Cost | None:
    text = cost_text(view, now)
    if not text:
        return None
    seconds = None if view.spec.session else view.metered_s(now)
    if seconds is None or view.hourly is None:
        return Cost(text=text, per_s=0.0, seconds=0.0, currency="", mark="")
    per_s = view.hourly / HOUR_S
    return Cost(text=text, per_s=per_s, seconds=round(seconds, 3), currency=view.currency, mark=mark(view))


def _tracked(view: RunView) -> Link | None:
    link = tracked_link(view)
    return None if link is None else Link(text=_plain(link.text), url=link.url)
