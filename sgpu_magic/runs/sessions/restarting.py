"""Ranks that are replaced by new processes: what they had from the notebook is sent again, what is lost is said."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from sgpu_magic.errors import SerializationError, UsageError
from sgpu_magic.runs.sessions.rank_lists import format_ranks
from sgpu_magic.runs.sessions.running import names_on, push
from sgpu_magic.wire.records import OutputName

if TYPE_CHECKING:
    from sgpu_magic.runs.sessions.session import Session

_MOST_NAMES = 12


def restart(session: Session, only: tuple[int, ...]) -> str:
    """Replace ranks, push what the notebook had shipped to them, and return what became of their names.

    Args:
        session: The session.
        only: The ranks; empty means all.

    Raises:
        SessionError: A cell runs in them, or they could not be started.
    """
    place, ranks = session.place, session.ranks_of(only)
    lost = _names_lost(session, ranks)
    pushed = _pushed_values(session, ranks)
    session.pool.restart_ranks(session.run_id, only)
    again: set[str] = set()
    for names, some in session.shipping.restarted(ranks).items():
        there = [name for name in names if name in place.namespace]
        if there:
            push(session, there, some if len(some) < session.ranks else ())
            again.update(there)
    if pushed:
        session.push(**pushed, ranks=ranks)
    one = len(ranks) == 1
    what = f"{format_ranks(ranks)} of session {session.name} {'is a new process' if one else 'are new processes'}"
    sent = f"sent again from the notebook: {_listed(again)}" if again else "the notebook had shipped nothing"
    if pushed:
        sent += f"; from another rank: {_listed(set(pushed))}"
    gone = sorted(lost - again - set(pushed))
    if not gone:
        return f"{what}; {sent}; no name that a cell had set was lost."
    again_on = f" with --ranks {','.join(map(str, only))}" if only else ""
    return f"{what}; {sent}; lost, as cells had set it there: {_listed(gone)}. Run those cells again{again_on}."


def _pushed_values(session: Session, ranks: tuple[int, ...]) -> dict[str, Any]:
    """Return what was pushed to these ranks, as a rank has it that stays. What can't be had from there is lost."""
    found: dict[str, Any] = {}
    for rank, names in session.shipping.pushed_names({*ranks, *session.dead}).items():
        for name in names:
            with contextlib.suppress(UsageError, SerializationError):
                session.pull_into(found, (OutputName(name),), (rank,), "none")
    return found


def _names_lost(session: Session, ranks: tuple[int, ...]) -> frozenset[str]:
    """Return what cells have set on these ranks, as a rank says that still lives; else as far as it is known here."""
    own = session.shipping.own_names(ranks)
    living = [rank for rank in range(session.ranks) if rank not in session.dead]
    for rank in sorted(living, key=lambda rank: rank in ranks):
        there = names_on(session, rank)
        if there is not None:
            # what is known is known by rank
            return own | session.shipping.unknown(there)
    return own


def _listed(names: set[str] | frozenset[str] | list[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _MOST_NAMES
    return ", ".join(ordered[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
