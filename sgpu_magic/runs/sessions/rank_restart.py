"""The restart of a session's ranks: the notebook's values are sent to the new processes again."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from sgpu_magic.errors import SerializationError, UsageError
from sgpu_magic.formatting import format_ranks, names_text
from sgpu_magic.runs.sessions.cell_runner import names_on, push
from sgpu_magic.wire.run import OutputName

if TYPE_CHECKING:
    from sgpu_magic.runs.sessions.session import Session

# how many names a sentence lists
_MOST_NAMES = 12
# a rank that dies again at once stays among the dead ones
_RESTART_PATIENCE_S = 2.0


def restart_ranks(session: Session, only: tuple[int, ...]) -> str:
    """Replace ranks, send the notebook's values to them again, and return a sentence about their names.

    Args:
        session: The session.
        only: The ranks; empty means all.

    Raises:
        SessionError: A cell is running on the ranks, or they could not be started.
    """
    context, ranks = session.context, session.ranks_of(only)
    lost = _names_lost(session, ranks)
    pushed = _pushed_values(session, ranks)
    session.pool.restart_ranks(session.run_id, only)
    session.wait_for_restarted_ranks(ranks, _RESTART_PATIENCE_S)
    again: set[str] = set()
    for names, some in session.shipping.restarted(ranks).items():
        if there := [name for name in names if name in context.namespace]:
            push(session, there, some if len(some) < session.ranks else ())
            again.update(there)
    if pushed:
        session.push(**pushed, ranks=ranks)
    listed = functools.partial(names_text, most=_MOST_NAMES)
    sentences = [f"{format_ranks(ranks).capitalize()} of session {session.name} restarted."]
    if again:
        sentences.append(f"Sent again: {listed(sorted(again))}.")
    if pushed:
        sentences.append(f"Copied from another rank: {listed(sorted(pushed))}.")
    if lost_names := sorted(lost - again - set(pushed)):
        on_ranks = f" with --ranks {','.join(map(str, only))}" if only else ""
        sentences.append(f"Lost (set by cells): {listed(lost_names)}. Rerun those cells{on_ranks}.")
    else:
        sentences.append("No variable was lost.")
    return " ".join(sentences)


def _pushed_values(session: Session, ranks: tuple[int, ...]) -> dict[str, Any]:
    """Return the values pushed to these ranks, read from a rank that stays. Values that can't be read are lost."""
    found: dict[str, Any] = {}
    for rank, names in session.shipping.pushed_names({*ranks, *session.dead}).items():
        for name in names:
            with contextlib.suppress(UsageError, SerializationError):
                session.pull_into(found, (OutputName(name),), (rank,), "none")
    return found


def _names_lost(session: Session, ranks: tuple[int, ...]) -> frozenset[str]:
    """Return the names that cells set on these ranks, as reported by a live rank, otherwise as known here."""
    own = session.shipping.own_names(ranks)
    living = [rank for rank in range(session.ranks) if rank not in session.dead]
    for rank in sorted(living, key=lambda rank: rank in ranks):
        if (there := names_on(session, rank)) is not None:
            # only names that no rank is known to have: for the others, the records per rank decide
            return own | session.shipping.unknown(there)
    return own
