"""Asks a session's idle ranks for their variables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgpu_magic.errors import SessionBusy, SessionError
from sgpu_magic.formatting import format_ranks
from sgpu_magic.views.run_notes import restart_command
from sgpu_magic.views.variable_table import VariableListing
from sgpu_magic.wire.run import RankQuestion

if TYPE_CHECKING:
    from sgpu_magic.runs.sessions.session import Session

# the ranks answer within milliseconds, unless a thread that a cell has started keeps the interpreter lock
_TIMEOUT_S = 5.0


def list_variables(session: Session, patterns: tuple[str, ...] = (), only: tuple[int, ...] = ()) -> VariableListing:
    """Return the variables that the ranks have. A session that is not connected yet has none.

    Args:
        session: The session.
        patterns: Names, or patterns such as `loss*`; empty for all names that do not begin with `_`.
        only: The ranks to ask; empty for all.

    Raises:
        SessionBusy: A cell runs in it, or ranks are being started.
        SessionError: The session has ended, or none of the ranks answers.
    """
    session.checked()
    listing = VariableListing(session=session.name, ranks=session.ranks, patterns=patterns, by_rank={})
    if not session.is_connected:
        return listing.with_notes(f"the session is not connected yet: {session.state}")
    dead = [rank for rank in session.ranks_of(only) if rank in session.dead]
    asked = [rank for rank in session.ranks_of(only) if rank not in dead]
    notes = [_dead_note(dead)] if dead else []
    questions = [RankQuestion(rank=rank, what="variables", patterns=patterns) for rank in asked]
    answers = dict(zip(asked, session.pool.ask_ranks(session.run_id, questions, _TIMEOUT_S), strict=True))
    if any(answer.busy for answer in answers.values()):
        raise SessionBusy(_busy(session))
    notes += [f"rank {rank} gave no answer: {each.problem}" for rank, each in answers.items() if each.problem]
    answered = {rank: answer for rank, answer in answers.items() if not answer.problem}
    if not answered:
        raise SessionError(
            f"no variables of session {session.name} can be listed: {notes[0].rstrip('.')}. `%sgpu_status "
            f"{session.name}` shows its state."
        )
    return listing.with_answers(answered).with_notes(*notes)


def _dead_note(dead: list[int]) -> str:
    has, it = ("is", "it") if len(dead) == 1 else ("are", "them")
    return f"{format_ranks(dead)} {has} dead; {restart_command(tuple(dead))} replaces {it}"


def _busy(session: Session) -> str:
    runs = f"is running {session.running[0]}" if session.running else "is running a cell or restarting ranks"
    return (
        f"session {session.name} {runs}, and variables can be listed between cells only. Run %sgpu_who again when it "
        f"has ended; `%sgpu_status {session.name}` shows it."
    )
