"""A prepared cell runs in its session: handed over, followed to its end, and what it has set is remembered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sgpu_magic.client.result import RunResult
from sgpu_magic.client.run import Run
from sgpu_magic.errors import RunCancelled, SessionError
from sgpu_magic.options.values import format_ranks
from sgpu_magic.runs.follow import run_loop
from sgpu_magic.runs.sessions.cells import Prepared, prepare_push
from sgpu_magic.runs.submit.submit import let_go, submit
from sgpu_magic.views.fold import RunView
from sgpu_magic.wire.rank import RankQuestion
from sgpu_magic.wire.states import FailureKind, RunKind, RunState

if TYPE_CHECKING:
    from collections.abc import Callable

    from sgpu_magic.runs.sessions.session import Session


_ASK_TIMEOUT_S = 0.3
_END_PATIENCE_S = 0.5
# the session tells of a death at once
_DEATH_PATIENCE_S = 0.5


def run_in(
    session: Session, prepare: Callable[[], Prepared], ui: str = "auto", into: dict[str, Any] | None = None
) -> RunResult:
    """Run something in a session's ranks and return its result.

    Args:
        session: The session.
        prepare: Makes what is submitted; one at a time, for it depends on what was shipped before.
        ui: As of `%%distributed`.
        into: Takes names that come back in the notebook's place.

    Raises:
        RunCancelled: It was cancelled.
        SessionError: The session can't take it.
        Exception: What the culprit rank raised.
    """
    place = session.place
    run, prepared = start_in(session, prepare)
    try:
        # inside, for a place to show it is made here: an interrupt now must not leave a run that nobody follows
        followed = place.followed(run, ui)
        try:
            result = run_loop.bring_back(followed, place.namespace, place.restarts, session.interrupts, into)
        except RunCancelled as error:
            raise _with_the_dead(session, error) from None
        finally:
            settle(session, prepared, followed.view)
    finally:
        let_go(session.pool, run)
    if result is None:
        raise RunCancelled(f"run {run.run_id[:8]} was detached and goes on without this cell.", run_id=run.run_id)
    if into is None and run.spec.outputs and run.spec.kind is not RunKind.CALL:
        # what the notebook has now is the ranks' own value
        names = [output.name for output in run.spec.outputs]
        session.shipping.set_on_ranks(names, place.namespace, session.ranks_of(()))
    return result


def start_in(session: Session, prepare: Callable[[], Prepared]) -> tuple[Run, Prepared]:
    """Hand something over to a session's ranks; `settle` has to be called when it is over.

    Args:
        session: The session.
        prepare: As for `run_in`.

    Raises:
        SgpuError: As `run_in`.
    """
    with session.lock:
        try:
            prepared = prepare()
        except KeyboardInterrupt:
            raise RunCancelled("interrupted before the run was submitted; nothing was started.") from None
    for ranks, names in prepared.plan.before:
        # what only some ranks lack goes to those alone: the others' own values stay
        push(session, names, ranks, exclude=prepared.plan.stay)
    submission, plan = prepared.submission, prepared.plan
    with session.lock:
        try:
            run = submit(session.pool, submission)
        except SessionError:
            # told by this very error where the session has ended; its own last word may be on its way
            session.ending_told = session.wait_for_end(_END_PATIENCE_S)
            raise
        try:
            session.shipping.sent(submission.packed.names, plan.prints, plan.ranks)
        except BaseException:
            # interrupted: nobody would follow it
            run.cancel("it was interrupted while it was submitted")
            let_go(session.pool, run)
            raise
    return run, prepared


def _with_the_dead(session: Session, error: RunCancelled) -> RunCancelled:
    """Say which ranks a second interrupt has killed."""
    if not session.interrupts.has_killed():
        return error
    dead = session.wait_for_the_dead(_DEATH_PATIENCE_S)
    if not dead:
        return error
    was, it, them = ("was", "it", "it") if len(dead) == 1 else ("were", "they", "them")
    numbers = ",".join(map(str, dead))
    return RunCancelled(
        f"{error.message} {format_ranks(dead).capitalize()} had not stopped and {was} killed: what {it} had is lost, "
        f"and %sgpu_restart --rank {numbers} starts {them} anew.",
        run_id=error.run_id,
    )


def push(
    session: Session, names: Sequence[str], ranks: tuple[int, ...], exclude: frozenset[str] = frozenset()
) -> RunResult:
    """Set names of the notebook on some ranks, without a word."""
    return run_in(session, lambda: prepare_push(session, tuple(names), {}, ranks, exclude), "none")


def names_on(session: Session, rank: int) -> frozenset[str] | None:
    """Ask a rank for the names that its cells and the notebook have set; None when it does not answer."""
    question = RankQuestion(rank=rank, what="names")
    answer = session.pool.ask_rank(session.run_id, question, _ASK_TIMEOUT_S)
    return None if answer.problem else frozenset(answer.names)


def settle(session: Session, prepared: Prepared, view: RunView) -> None:
    """The cell is over for this process: remember what its ranks have now."""
    packed, plan, shipping = prepared.submission.packed, prepared.plan, session.shipping
    ended = view.ended
    if not view.warm and ended is not None:
        # it never began
        shipping.not_arrived(packed.names, plan.ranks)
        return
    failure = ended.failure if ended is not None else None
    if failure is not None and failure.kind is FailureKind.SERIALIZATION:
        shipping.not_arrived(packed.names, plan.ranks)
    shipping.cell_over(
        prepared.effects,
        plan,
        session.place.namespace,
        succeeded=ended is not None and ended.state is RunState.SUCCEEDED,
        names_of=lambda rank: names_on(session, rank),
    )
