"""What runs in a session: a cell, a call, names to set on its ranks, names to bring back. What it has set is known."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sgpu_magic.client.result import RunResult
from sgpu_magic.client.run import Run
from sgpu_magic.errors import RunCancelled, SessionError
from sgpu_magic.options.asked import RunOptions
from sgpu_magic.options.values import format_ranks
from sgpu_magic.payload.digest import Fingerprint
from sgpu_magic.payload.namespace import collect
from sgpu_magic.runs.sessions.namespace_sync import Effects, Plan
from sgpu_magic.runs.submit.cell_source import pack_cell, read_cell
from sgpu_magic.runs.submit.pack_call import pack_call
from sgpu_magic.runs.submit.spec import PackedCode, Submission, describe, nothing_packed, pack
from sgpu_magic.runs.submit.submit import let_go, submit
from sgpu_magic.views.fold import RunView
from sgpu_magic.wire.rank import RankQuestion
from sgpu_magic.wire.run import CellSource, OutputName
from sgpu_magic.wire.states import FailureKind, RunKind, RunState

if TYPE_CHECKING:
    from collections.abc import Callable

    from sgpu_magic.runs.sessions.session import Session


_ASK_TIMEOUT_S = 0.3
_END_PATIENCE_S = 0.5
# the session tells of a death at once
_DEATH_PATIENCE_S = 0.5


class Prepared(msgspec.Struct, frozen=True):
    """Ready to be submitted to a session.

    Args:
        submission: The run.
        plan: What goes along, and what has to go before.
        effects: What it may do to the ranks' names.
    """

    submission: Submission
    plan: Plan
    effects: Effects


# ---------------------------------------------------------------- what is submitted


def prepare_cell(session: Session, magic_line: str, body: str, options: RunOptions) -> Prepared:
    """Read a cell and pack it. Nothing has started when this raises.

    Args:
        session: The session.
        magic_line: The magic's own line, "" where the body is the whole cell.
        body: The code.
        options: What is asked for.

    Raises:
        CellSyntaxError: It does not compile.
        UsageError: An option names what does not exist.
        SerializationError: A variable can't leave the notebook.
    """
    place, ranks = session.place, session.ranks_of(options.only)
    cell = read_cell(place, magic_line, body, options)
    plan = session.shipping.plan(cell.read, place.namespace, ranks, options.exclude)
    theirs = session.shipping.own_names(ranks)
    code = pack_cell(place, cell, options, names=plan.names, stay=plan.stay, not_own=theirs, notes=plan.notes)
    return _prepared(session, code, options, plan, Effects(cell.names.stored, cell.names.deleted))


def prepare_call(
    session: Session,
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    options: RunOptions,
) -> Prepared:
    """Check and pack a function's call.

    Raises:
        TypeError: The arguments do not fit the function.
        SerializationError: The function or an argument can't leave this process.
    """
    place = session.place
    needed = Fingerprint((function, args, dict(kwargs)), place.namespace)
    needed.forget_parts()
    ranks = session.ranks_of(options.only)
    plan = session.shipping.plan(needed.needs, place.namespace, ranks, options.exclude)
    code = pack_call(place, function, args, kwargs, options, stay=plan.stay)
    return _prepared(session, code, options, plan, Effects(needed.stores))


def prepare_push(
    session: Session,
    names: tuple[str, ...],
    values: Mapping[str, object],
    only: tuple[int, ...] = (),
    exclude: frozenset[str] = frozenset(),
) -> Prepared:
    """Pack names to be set on the ranks, whatever the ranks have under them.

    Args:
        session: The session.
        names: Names of the notebook.
        values: Further names, with values that the notebook does not have.
        only: The ranks; empty means all.
        exclude: Names that the values read and that the ranks keep their own of.

    Raises:
        UsageError: The notebook has no such name.
        SerializationError: A value can't leave the notebook.
    """
    begin = time.perf_counter()
    place = session.place
    namespace = place.namespace
    collect((), namespace, extra=names)
    plan = session.shipping.plan(names, namespace, session.ranks_of(only))
    chosen = {**{name: namespace[name] for name in names}, **values}
    stay = plan.stay.difference(chosen).union(exclude.difference(chosen))
    name = f"push {', '.join(chosen)}"
    code = pack(place, RunKind.PUSH, name, CellSource(body=""), chosen, begin=begin, exclude=stay)
    return _prepared(session, code, RunOptions(only=only), plan)


def prepare_pull(session: Session, outputs: tuple[OutputName, ...], only: tuple[int, ...] = ()) -> Prepared:
    """Describe names to bring back.

    Args:
        session: The session.
        outputs: The names; of one rank the lowest that takes part.
        only: The ranks; empty means all.
    """
    place = session.place
    if not only and not any(output.all_ranks for output in outputs):
        # the others need not be free for it
        only = (0,)
    plan = session.shipping.plan((), place.namespace, session.ranks_of(only))
    name = f"pull {', '.join(output.name for output in outputs)}"
    return _prepared(session, nothing_packed(place, RunKind.PULL, name, outputs), RunOptions(only=only), plan)


def _prepared(
    session: Session, code: PackedCode, options: RunOptions, plan: Plan, effects: Effects | None = None
) -> Prepared:
    submission = describe(session.place, code, options, session.lends(None), session)
    return Prepared(submission, plan, effects or Effects())


# ---------------------------------------------------------------- how it runs


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
        result = place.bring_back(
            run,
            ui,
            interrupts=session.interrupts,
            into=into,
            over=lambda view: settle(session, prepared, view),
        )
    except RunCancelled as error:
        raise _with_the_dead(session, error) from None
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
