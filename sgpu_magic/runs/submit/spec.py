"""Builds a run's spec from its options and packed code."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.client.run import WorkingContext
from sgpu_magic.errors import SerializationError
from sgpu_magic.options.option_records import EnvironmentOptions, RunOptions
from sgpu_magic.packages.secrets import is_secret
from sgpu_magic.payload.explain import explain_parts
from sgpu_magic.payload.namespace import cell_sources
from sgpu_magic.payload.pack import Packed, new_key, pack_namespace
from sgpu_magic.payload.parts import missing
from sgpu_magic.runs.notebook import cell_numbers, owner
from sgpu_magic.runs.submit.target import ResolvedTarget
from sgpu_magic.system.process_settings.notebook_settings import left_behind
from sgpu_magic.wire.base import RunKind, new_id
from sgpu_magic.wire.run import CellSource, Interpreter, OutputName, RunSpec, Shipped

if TYPE_CHECKING:
    from sgpu_magic.runs.kernel_context import KernelContext
    from sgpu_magic.runs.sessions.session import Session

Parameters = tuple[tuple[str, str], ...]

# fields of a spec that are options of the same names
_SAME = ("timeout_s", "wait_s", "grace_s", "retries", "retry_on_any", "detach", "auto", "max_cost", "profile", "ray")
_NO_NAMES = Shipped()
_MOST_SCALARS = 100
_LONGEST_TEXT = 250


class PackedCode(msgspec.Struct, frozen=True):
    """Packed code and values of a run.

    Args:
        kind: Kind of the run.
        name: Default name of the run.
        cell: Source that the ranks execute.
        packed: The packed values.
        key: The run's HMAC key.
        outputs: Names to bring back.
        shipped: Summary of what is shipped, for the view.
        parameters: Scalar values, as parameters for tracking.
    """

    kind: RunKind
    name: str
    cell: CellSource
    packed: Packed
    key: bytes
    outputs: tuple[OutputName, ...] = ()
    shipped: Shipped = _NO_NAMES
    parameters: Parameters = ()


class Submission(msgspec.Struct, frozen=True):
    """A run ready to be submitted.

    Args:
        spec: The run's spec. Secrets in its source are redacted on submission, before it is written to disk.
        packed: The packed values.
        key: The run's HMAC key.
        environ: The ranks' environment variables.
        environment: Options for packages, tracking and uploads.
        given: Names of variables that the user set for this run or session (`--env`); these are sent to any pool.
        interpreter: The ranks' Python; None means this process's.
        working_context: The ranks' working directory and `sys.path`; None means this process's.
        pool: Name of the pool that it is submitted to.
    """

    spec: RunSpec
    packed: Packed
    key: bytes
    environ: dict[str, str]
    environment: EnvironmentOptions = msgspec.field(default_factory=EnvironmentOptions)
    given: frozenset[str] = frozenset()
    interpreter: Interpreter | None = None
    working_context: WorkingContext | None = None
    pool: str = "local"


def pack(
    context: KernelContext,
    kind: RunKind,
    name: str,
    cell: CellSource,
    values: dict[str, object],
    *,
    begin: float,
    outputs: tuple[OutputName, ...] = (),
    exclude: frozenset[str] = frozenset(),
    submodules: Iterable[str] = (),
) -> PackedCode:
    """Pack values with the names of this process's namespace that they read, and the sources that defined them.

    Args:
        context: The kernel's context.
        kind: Kind of the run.
        name: Default name of the run.
        cell: Source that the ranks execute.
        values: Values to ship, by their names on the ranks.
        begin: When the capture began, by the performance counter.
        outputs: Names to bring back.
        exclude: Names that are not shipped, even if values read them.
        submodules: Names of loaded modules to import on the ranks too.

    Raises:
        SerializationError: A value can't be pickled.
    """
    key = new_key()
    packed = pack_namespace(values, context.namespace, key, exclude=exclude, submodules=submodules)
    sources = cell_sources(packed.files, cell_numbers(context.shell))
    shipped = Shipped(
        names=packed.names,
        total_bytes=packed.total_bytes,
        seconds=time.perf_counter() - begin,
        sizes=tuple(packed.sizes.items()),
    )
    return PackedCode(kind, name, msgspec.structs.replace(cell, linecache=sources), packed, key, outputs, shipped)


def nothing_packed(
    context: KernelContext, kind: RunKind, name: str, outputs: tuple[OutputName, ...] = ()
) -> PackedCode:
    """Return empty packed code for a run that executes none."""
    key = new_key()
    return PackedCode(kind, name, CellSource(body=""), pack_namespace({}, context.namespace, key), key, outputs)


def describe(
    context: KernelContext,
    code: PackedCode,
    options: RunOptions,
    found: ResolvedTarget,
    session: Session | None = None,
    *,
    of_cell: bool = True,
) -> Submission:
    """Build a submission from packed code and options. Starts nothing.

    Args:
        context: The kernel's context.
        code: The packed code.
        options: The run's options.
        found: The run's pool and placement.
        session: The session whose ranks it uses, or with `options.fresh` whose devices; None requests a new lease.
        of_cell: Whether the running cell submits the run.

    Raises:
        SerializationError: A value holds parts of other ranks than those that receive it.
    """
    _check_parts(code, options.only or tuple(range(found.placement.ranks)), found.placement.ranks)
    variables, environment = dict(options.variables), options.environment
    if session is not None:
        variables, environment = {**session.variables, **variables}, session.environment_with(environment)
    stays = session is not None and not options.fresh
    spec = RunSpec(
        run_id=new_id(),
        name=options.name or code.name,
        cell=code.cell,
        placement=found.placement,
        outputs=code.outputs,
        owner=owner(context.shell, of_cell=of_cell),
        env_names=tuple(variables),
        shipped=msgspec.structs.replace(
            code.shipped, notes=(*found.notes, *code.shipped.notes, *_settings_left_behind())
        ),
        kind=code.kind,
        session=session.run_id if session is not None else "",
        session_name=session.name if session is not None else "",
        fresh=session is not None and options.fresh,
        only=options.only if len(options.only) < found.placement.ranks else (),
        reload=stays and options.reload,
        idle_s=options.idle_s or None,
        parameters=code.parameters,
        grouped=options.group,
        **{name: getattr(options, name) for name in _SAME},
    )
    environ = {**os.environ, **variables}
    return Submission(spec, code.packed, code.key, environ, environment, frozenset(variables), pool=found.pool.name)


_noted_settings: set[str] = set()


def _settings_left_behind() -> Iterable[str]:
    """Return a note about this process's settings that ranks can't have; about each once."""
    new = [each for each in left_behind() if each not in _noted_settings]
    _noted_settings.update(new)
    if new:
        yield f"set in the notebook only, as a function or an object can't be taken over: {', '.join(new)}"


def _check_parts(code: PackedCode, ranks: tuple[int, ...], world_size: int) -> None:
    for name, parts in code.packed.parts.items():
        lacking = missing(parts, ranks, world_size)
        if lacking is None:
            continue
        is_call = code.kind is RunKind.CALL and name not in code.shipped.names
        label = f"an argument of {code.name}" if is_call else f"`{name}`"
        raise SerializationError(explain_parts(label, "" if is_call else name, lacking, world_size))


# ---------------------------------------------------------------- tracking


def scalars(values: Mapping[str, object]) -> Parameters:
    """Return the numbers, booleans and short strings among `values` as text, without those that look like secrets.

    Args:
        values: Values by name.
    """
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        # exact types, because subclasses may have any repr
        if type(value) not in (int, float, bool, str) or name.startswith("_"):
            continue
        try:
            text = value if isinstance(value, str) else repr(value)
        except ValueError:
            # an int with more digits than Python converts to text
            continue
        if 0 < len(text) <= _LONGEST_TEXT and not is_secret(name, text):
            found.append((name, text))
            if len(found) == _MOST_SCALARS:
                break
    return tuple(found)
