"""What is submitted to a session: a cell, a call, names to set on its ranks, names to bring back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sgpu_magic.config import SEVEN_DAYS_S
from sgpu_magic.options.asked import Wishes
from sgpu_magic.payload.digest import Fingerprint
from sgpu_magic.payload.namespace import cell_sources, collect, submodules_read
from sgpu_magic.payload.pack import Packed, new_key, pack_namespace
from sgpu_magic.runs.notebook import cell_number, cell_numbers, future_flags, owner
from sgpu_magic.runs.sessions.namespace_sync import Effects, Plan
from sgpu_magic.runs.submit import pack_call
from sgpu_magic.runs.submit.cell_source import heavy_names, name_of, read_cell, transform_of, words_in
from sgpu_magic.runs.submit.redact import Parameters, scalars
from sgpu_magic.runs.submit.submit import Submission
from sgpu_magic.wire.ids import new_id
from sgpu_magic.wire.run import CellSource, OutputName, RunSpec, Shipped
from sgpu_magic.wire.states import RunKind

if TYPE_CHECKING:
    from sgpu_magic.runs.sessions.session import Session

RANK_NAMES = ("rank", "local_rank", "world_size", "device")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCell:
    """A cell as it is to run in a session.

    Args:
        body: The code.
        magic_line: The magic's own line, "" where the body is the whole cell.
        name: What to call it; "" is found in the code.
        only: The ranks that take part, ascending; empty means all.
        outputs: Names to bring back.
        extra: Names to ship that only `eval` reads.
        exclude: Names that stay in the notebook.
        variables: Environment on the ranks beside the session's own.
        timeout_s: Longest running time in seconds.
        wait_s: Longest time until it begins in seconds; None is as long as it takes.
        grace_s: As in `RunSpec`.
        reload: Load edited local modules anew first.
        auto: Sent by `%sgpu_auto`.
        wishes: Of them only `track`: the packages are the session's.
        profile: Each rank keeps a trace of torch's profiler.
    """

    body: str
    magic_line: str = ""
    name: str = ""
    only: tuple[int, ...] = ()
    outputs: tuple[OutputName, ...] = ()
    extra: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    timeout_s: float = SEVEN_DAYS_S
    wait_s: float | None = None
    grace_s: float | None = None
    reload: bool = False
    auto: bool = False
    wishes: Wishes = field(default_factory=Wishes)
    profile: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """Ready to be submitted to a session.

    Args:
        submission: The run.
        plan: What goes along, and what has to go before.
        effects: What it may do to the ranks' names.
    """

    submission: Submission
    plan: Plan
    effects: Effects


def prepare_cell(session: Session, cell: SessionCell) -> Prepared:
    """Read, capture and pack a cell. Nothing has started when this raises.

    Raises:
        CellSyntaxError: It does not compile.
        UsageError: An option names what does not exist.
        SerializationError: A variable can't leave the notebook.
    """
    begin = time.perf_counter()
    place = session.place
    number = cell_number(place.shell) if place.shell is not None else None
    source = f"{cell.magic_line}\n{cell.body}" if cell.magic_line else cell.body
    names = read_cell(source, number, transform_of(place.shell))
    namespace = place.namespace
    read = collect(names.read, namespace, extra=cell.extra, exclude=cell.exclude)
    ranks = session.ranks_of(cell.only)
    plan = session.shipping.plan(read, namespace, ranks, cell.exclude)
    key = new_key()
    packed = pack_namespace(
        {name: namespace[name] for name in plan.names},
        namespace,
        key,
        exclude=plan.stay.union(cell.exclude),
        submodules=submodules_read(words_in(cell.body), read.values()),
    )
    theirs = session.shipping.own_names(ranks)
    own_values = {name: value for name, value in read.items() if name not in theirs}
    hidden = (
        f"the notebook's variable `{name}` hides the rank's own `{name}`: --exclude {name} gives that back"
        for name in RANK_NAMES
        if name in packed.names
    )
    spec = _spec(
        session,
        RunKind.CELL,
        cell.name or name_of(cell.body, number),
        CellSource(
            body=cell.body,
            magic_line=cell.magic_line,
            execution_count=number,
            linecache=cell_sources(packed.files, cell_numbers(place.shell)),
            future_flags=future_flags(place.shell),
        ),
        only=cell.only,
        outputs=cell.outputs,
        shipped=_shipped(packed, begin, (*plan.notes, *hidden)),
        timeout_s=cell.timeout_s,
        wait_s=cell.wait_s,
        grace_s=cell.grace_s,
        variables=cell.variables,
        reload=cell.reload,
        auto=cell.auto,
        parameters=scalars(own_values),
        profile=cell.profile,
    )
    submission = _submission(session, spec, packed, key, cell.variables, cell.wishes)
    return Prepared(submission, plan, Effects(names.stored, names.deleted))


def prepare_call(
    session: Session,
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    name: str = "",
    only: tuple[int, ...] = (),
    exclude: tuple[str, ...] = (),
    variables: Mapping[str, str] | None = None,
    timeout_s: float = SEVEN_DAYS_S,
    wait_s: float | None = None,
    grace_s: float | None = None,
    wishes: Wishes | None = None,
    profile: bool = False,
) -> Prepared:
    """Check and pack a function's call. Arguments as in `SessionCell`.

    Raises:
        TypeError: The arguments do not fit the function.
        SerializationError: The function or an argument can't leave this process.
    """
    place = session.place
    needed = Fingerprint((function, args, dict(kwargs)), place.namespace)
    needed.forget_parts()
    plan = session.shipping.plan(needed.needs, place.namespace, session.ranks_of(only), exclude)
    call = pack_call.pack_call(place, function, args, kwargs, exclude=(*exclude, *plan.stay))
    spec = _spec(
        session,
        RunKind.CALL,
        name or call.name,
        call.cell,
        only=only,
        outputs=pack_call.OUTPUTS,
        shipped=call.shipped,
        timeout_s=timeout_s,
        wait_s=wait_s,
        grace_s=grace_s,
        variables=variables or {},
        parameters=call.parameters,
        profile=profile,
    )
    submission = _submission(session, spec, call.packed, call.key, variables or {}, wishes)
    return Prepared(submission, plan, Effects(needed.stores))


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
    key = new_key()
    chosen = {**{name: namespace[name] for name in names}, **values}
    stay = plan.stay.difference(chosen).union(exclude.difference(chosen))
    packed = pack_namespace(chosen, namespace, key, exclude=stay)
    spec = _spec(
        session,
        RunKind.PUSH,
        f"push {', '.join(chosen)}",
        CellSource(body="", linecache=cell_sources(packed.files, cell_numbers(place.shell))),
        only=only,
        shipped=_shipped(packed, begin),
    )
    return Prepared(_submission(session, spec, packed, key), plan, Effects())


def prepare_pull(session: Session, outputs: tuple[OutputName, ...], only: tuple[int, ...] = ()) -> Prepared:
    """Describe names to bring back.

    Args:
        session: The session.
        outputs: The names; of one rank the lowest that takes part.
        only: The ranks; empty means all.
    """
    place = session.place
    key = new_key()
    if not only and not any(output.all_ranks for output in outputs):
        # the others need not be free for it
        only = (0,)
    plan = session.shipping.plan((), place.namespace, session.ranks_of(only))
    name = f"pull {', '.join(output.name for output in outputs)}"
    spec = _spec(session, RunKind.PULL, name, CellSource(body=""), only=only, outputs=outputs)
    packed = pack_namespace({}, place.namespace, key)
    return Prepared(_submission(session, spec, packed, key), plan, Effects())


def _spec(
    session: Session,
    kind: RunKind,
    name: str,
    cell: CellSource,
    *,
    only: tuple[int, ...],
    outputs: tuple[OutputName, ...] = (),
    shipped: Shipped | None = None,
    timeout_s: float = SEVEN_DAYS_S,
    wait_s: float | None = None,
    grace_s: float | None = None,
    variables: Mapping[str, str] | None = None,
    reload: bool = False,
    auto: bool = False,
    parameters: Parameters = (),
    profile: bool = False,
) -> RunSpec:
    return RunSpec(
        run_id=new_id(),
        name=name,
        cell=cell,
        placement=session.placement,
        outputs=outputs,
        owner=owner(session.place.shell),
        timeout_s=timeout_s,
        wait_s=wait_s,
        grace_s=grace_s,
        env_names=(*session.variables, *(variables or {})),
        shipped=shipped or Shipped(),
        kind=kind,
        session=session.run_id,
        session_name=session.name,
        only=only if len(only) < session.ranks else (),
        reload=reload,
        auto=auto,
        parameters=parameters,
        profile=profile,
    )


def _submission(
    session: Session,
    spec: RunSpec,
    packed: Packed,
    key: bytes,
    variables: Mapping[str, str] | None = None,
    wishes: Wishes | None = None,
) -> Submission:
    given = {**session.variables, **(variables or {})}
    asked = session.wishes_with(wishes or Wishes())
    return Submission(spec, packed, key, session.environ(variables or {}), asked, frozenset(given))


def _shipped(packed: Packed, begin: float, notes: tuple[str, ...] = ()) -> Shipped:
    return Shipped(
        names=packed.names,
        total_bytes=packed.total_bytes,
        seconds=time.perf_counter() - begin,
        heavy=heavy_names(packed.sizes),
        notes=notes,
    )
