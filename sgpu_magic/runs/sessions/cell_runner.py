"""Runs cells, calls, pushes and pulls in a session, and records which names its ranks have afterwards."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sgpu_magic.client.result import RunResult
from sgpu_magic.client.run import ClientRun
from sgpu_magic.errors import RunCancelled, SessionError
from sgpu_magic.formatting import format_ranks
from sgpu_magic.options.option_records import RunOptions
from sgpu_magic.payload.call import FunctionCall
from sgpu_magic.payload.digest import Fingerprint
from sgpu_magic.payload.namespace import collect
from sgpu_magic.runs.follow.outcome import Names
from sgpu_magic.runs.handle import Run as Handle
from sgpu_magic.runs.sessions.comparison import Comparison
from sgpu_magic.runs.sessions.namespace_sync import Effects, ShippingPlan, effects_of
from sgpu_magic.runs.submit.cell_source import pack_cell, read_cell
from sgpu_magic.runs.submit.pack_call import pack_call
from sgpu_magic.runs.submit.spec import PackedCode, Submission, describe, nothing_packed, pack
from sgpu_magic.runs.submit.submit import release, submit
from sgpu_magic.views.fold import RunView
from sgpu_magic.wire.base import CancelReason, FailureKind, RunKind, RunState
from sgpu_magic.wire.run import CellSource, OutputName, RankQuestion

if TYPE_CHECKING:
    from collections.abc import Callable

    from sgpu_magic.runs.sessions.session import Session


_ASK_TIMEOUT_S = 0.3
_END_PATIENCE_S = 0.5
# a session reports a rank's death at once
_DEATH_PATIENCE_S = 0.5


class Prepared(msgspec.Struct, frozen=True):
    """A run ready to be submitted to a session.

    Args:
        submission: The run.
        plan: The names that are sent with it and before it.
        effects: How it may change the ranks' names.
    """

    submission: Submission
    plan: ShippingPlan
    effects: Effects


# ---------------------------------------------------------------- preparing submissions


def prepare_cell(session: Session, magic_line: str, body: str, options: RunOptions) -> Prepared:
    """Read and pack a cell. Starts nothing.

    Args:
        session: The session.
        magic_line: The magic's line; "" if the body is the whole cell.
        body: The code.
        options: The cell's options.

    Raises:
        CellSyntaxError: The cell does not compile.
        UsageError: An option names a variable that does not exist.
        SerializationError: A variable can't be pickled.
    """
    context, ranks = session.context, session.ranks_of(options.only)
    cell = read_cell(context, magic_line, body, options)
    plan = session.shipping.plan(
        cell.read,
        context.namespace,
        ranks,
        options.exclude,
        absent=cell.names.read - cell.read.keys(),
        comparison=_comparison(session),
    )
    theirs = session.shipping.own_names(ranks)
    code = pack_cell(context, cell, options, names=plan.names, stay=plan.stay, not_own=theirs, notes=plan.notes)
    return _prepared(session, code, options, plan, effects_of(cell.names, context.namespace))


def prepare_call(session: Session, call: FunctionCall, options: RunOptions) -> Prepared:
    """Check and pack a function call.

    Raises:
        TypeError: The arguments do not match the function's signature.
        SerializationError: The function or an argument can't be pickled.
    """
    context = session.context
    needed = Fingerprint((call.function, call.args, call.kwargs), context.namespace, content=False)
    needed.forget_parts()
    ranks = session.ranks_of(options.only)
    plan = session.shipping.plan(
        needed.needs,
        context.namespace,
        ranks,
        options.exclude,
        absent=needed.absent,
        comparison=_comparison(session),
    )
    code = pack_call(context, call, options, stay=plan.stay)
    return _prepared(session, code, options, plan, Effects(needed.stores))


def prepare_push(
    session: Session,
    names: tuple[str, ...],
    values: Mapping[str, object],
    only: tuple[int, ...] = (),
    exclude: frozenset[str] = frozenset(),
) -> Prepared:
    """Pack names to set on the ranks, overwriting existing values.

    Args:
        session: The session.
        names: Names of the notebook.
        values: Further names with their values.
        only: The ranks; empty means all.
        exclude: Names that the values read, but whose values on the ranks are kept.

    Raises:
        UsageError: The notebook has no such name.
        SerializationError: A value can't be pickled.
    """
    begin = time.perf_counter()
    context = session.context
    namespace = context.namespace
    collect((), namespace, extra=names)
    plan = session.shipping.plan(names, namespace, session.ranks_of(only), comparison=_comparison(session))
    chosen = {**{name: namespace[name] for name in names}, **values}
    stay = plan.stay.difference(chosen).union(exclude.difference(chosen))
    name = f"push {', '.join(chosen)}"
    code = pack(context, RunKind.PUSH, name, CellSource(body=""), chosen, begin=begin, exclude=stay)
    return _prepared(session, code, RunOptions(only=only), plan)


def prepare_pull(session: Session, outputs: tuple[OutputName, ...], only: tuple[int, ...] = ()) -> Prepared:
    """Prepare to bring names back.

    Args:
        session: The session.
        outputs: The names; a name without `:all` is read from the lowest of the ranks.
        only: The ranks; empty means all.
    """
    context = session.context
    if not only and not any(output.all_ranks for output in outputs):
        # the other ranks may be busy
        only = (0,)
    plan = session.shipping.plan((), context.namespace, session.ranks_of(only))
    name = f"pull {', '.join(output.name for output in outputs)}"
    return _prepared(session, nothing_packed(context, RunKind.PULL, name, outputs), RunOptions(only=only), plan)


def _comparison(session: Session) -> Comparison:
    return Comparison(session.name, session.context.progress.show)


def _prepared(
    session: Session, code: PackedCode, options: RunOptions, plan: ShippingPlan, effects: Effects | None = None
) -> Prepared:
    submission = describe(session.context, code, options, session.fresh_target(None), session)
    return Prepared(submission, plan, effects or Effects())


# ---------------------------------------------------------------- running


def run_in(session: Session, prepare: Callable[[], Prepared], ui: str = "auto", into: Names | None = None) -> RunResult:
    """Submit a run to a session's ranks, wait for its end and return its result.

    Args:
        session: The session.
        prepare: Prepares the submission; called under the session's lock, as it depends on what was sent before.
        ui: As in `%%distributed`.
        into: Receives names that are brought back instead of the notebook.

    Raises:
        RunCancelled: The run was cancelled.
        SessionError: The session can't run it.
        Exception: The exception of the rank that failed first.
    """
    context = session.context
    run, prepared = start_in(session, prepare, waits=True)
    try:
        on_end = functools.partial(finish_cell, session, prepared)
        result = context.collect(run, ui, interrupts=session.interrupts, into=into, on_end=on_end)
    except RunCancelled as error:
        raise _with_dead_ranks(session, error) from None
    except SessionError:
        _note_reported_end(session)
        raise
    if result is None:
        raise RunCancelled(f"run {run.run_id[:8]} was detached and continues without this cell.", run_id=run.run_id)
    if into is None:
        _record_results(session, run)
    return result


def begin_in(session: Session, prepare: Callable[[], Prepared], ui: str = "auto") -> Handle[Any]:
    """Submit a run to a session's ranks and return its handle; when it ends, its names of `--out` are set.

    Args:
        session: The session.
        prepare: As in `run_in`.
        ui: How the handle shows the run.

    Raises:
        SgpuError: As in `run_in`.
    """
    run, prepared = start_in(session, prepare)

    # the next cell may be sent before this one has ended
    before = session.shipping.record_started(prepared.effects, prepared.plan, session.context.namespace)

    def on_end(view: RunView) -> None:
        if view.warm is None:
            session.shipping.undo_started(before)
        finish_cell(session, prepared, view)
        if view.state is RunState.SUCCEEDED:
            _record_results(session, run)

    return Handle(session.context, run, RunState.QUEUED, on_end, ui)


def _record_results(session: Session, run: ClientRun) -> None:
    """Record that the notebook's values of the run's outputs now equal the ranks' own."""
    if run.spec.outputs and run.spec.kind is not RunKind.CALL:
        names = [output.name for output in run.spec.outputs]
        session.shipping.set_on_ranks(names, session.context.namespace, session.ranks_of(()))


def _note_reported_end(session: Session) -> None:
    """Record that an error has reported the session's end, if it has ended; its final event may still arrive."""
    session.end_reported = session.wait_for_end(_END_PATIENCE_S)


def start_in(session: Session, prepare: Callable[[], Prepared], *, waits: bool = False) -> tuple[ClientRun, Prepared]:
    """Submit a run to a session's ranks; the caller must call `settle` when it is done with the run.

    Args:
        session: The session.
        prepare: As in `run_in`.
        waits: The caller waits for the run's end next, so that it may go over the session's line.

    Raises:
        SgpuError: As in `run_in`.
    """
    session.checked()
    with session.lock:
        try:
            prepared = prepare()
        except KeyboardInterrupt:
            raise RunCancelled("interrupted before the run was submitted; nothing was started.") from None
    for ranks, names in prepared.plan.before:
        # names that only some ranks lack are sent to those alone; the others keep their own values
        push(session, names, ranks, exclude=prepared.plan.stay)
    submission, plan = prepared.submission, prepared.plan
    with session.lock:
        try:
            run = submit(session.pool, submission, placed=session.placed if waits else None)
        except SessionError:
            _note_reported_end(session)
            raise
        try:
            session.shipping.record_sent(submission.packed.names, plan.prints, plan.ranks)
        except BaseException:
            # interrupted: the run would be left without a follower
            run.cancel(CancelReason.INTERRUPT)
            release(session.pool, run)
            raise
    return run, prepared


def _with_dead_ranks(session: Session, error: RunCancelled) -> RunCancelled:
    """Return the error, with a sentence about ranks that a second interrupt killed."""
    if not session.interrupts.has_killed():
        return error
    if not (dead := session.wait_for_dead_ranks(_DEATH_PATIENCE_S)):
        return error
    was, its, them = ("was", "its", "it") if len(dead) == 1 else ("were", "their", "them")
    numbers = ",".join(map(str, dead))
    return RunCancelled(
        f"{error.message} {format_ranks(dead).capitalize()} had not stopped and {was} killed: {its} variables are "
        f"lost, and %sgpu_restart --rank {numbers} restarts {them}.",
        run_id=error.run_id,
    )


def push(
    session: Session, names: Sequence[str], ranks: tuple[int, ...], exclude: frozenset[str] = frozenset()
) -> RunResult:
    """Set names of the notebook on some ranks, without a view."""
    return run_in(session, lambda: prepare_push(session, tuple(names), {}, ranks, exclude), "none")


def names_on(session: Session, rank: int) -> frozenset[str] | None:
    """Ask a rank for the names that cells and the notebook have set on it; None if it does not answer."""
    answer = session.pool.ask_rank(session.run_id, RankQuestion(rank=rank, what="names"), _ASK_TIMEOUT_S)
    return None if answer.problem else frozenset(answer.names)


def finish_cell(session: Session, prepared: Prepared, view: RunView) -> None:
    """Record which names the ranks have after a run that this process is done with."""
    packed, plan, shipping = prepared.submission.packed, prepared.plan, session.shipping
    ended = view.ended
    if view.warm is None and ended is not None:
        # the run never started
        shipping.record_not_arrived(packed.names, plan.ranks)
        return
    failure = ended.failure if ended is not None else None
    if failure is not None and failure.kind is FailureKind.SERIALIZATION:
        shipping.record_not_arrived(packed.names, plan.ranks)
    shipping.record_ended(
        prepared.effects,
        plan,
        session.context.namespace,
        succeeded=ended is not None and ended.state is RunState.SUCCEEDED,
        names_of=lambda rank: names_on(session, rank),
    )
