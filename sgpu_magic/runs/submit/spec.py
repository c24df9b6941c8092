"""Builds a run's spec from its options and packed code, and redacts secrets in it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.client.submitter import Stand
from sgpu_magic.options.asked import RunOptions, Wishes
from sgpu_magic.packages.secrets import SecretsOf, blanked_settings, is_secret
from sgpu_magic.payload.namespace import cell_sources
from sgpu_magic.payload.pack import Packed, new_key, pack_namespace
from sgpu_magic.runs.notebook import cell_numbers, owner
from sgpu_magic.runs.submit.placing import Found
from sgpu_magic.wire.record import new_id
from sgpu_magic.wire.run import CellSource, Interpreter, OutputName, RunSpec, Shipped
from sgpu_magic.wire.states import RunKind

if TYPE_CHECKING:
    from sgpu_magic.runs.sessions.session import Session
    from sgpu_magic.runs.workplace import Workplace

Parameters = tuple[tuple[str, str], ...]

_NO_NAMES = Shipped()
_HEAVY_BYTES = 100_000_000
_MOST_SCALARS = 100
_LONGEST_TEXT = 250
_secrets = SecretsOf()
_lock = threading.Lock()


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
        wishes: Options for packages, tracking and uploads.
        given: Names of variables that the user set for this run or session (`--env`); these are sent to any pool.
        interpreter: The ranks' Python; None means this process's.
        stand: The ranks' working directory and `sys.path`; None means this process's.
        pool: Name of the pool that it is submitted to.
    """

    spec: RunSpec
    packed: Packed
    key: bytes
    environ: dict[str, str]
    wishes: Wishes = msgspec.field(default_factory=Wishes)
    given: frozenset[str] = frozenset()
    interpreter: Interpreter | None = None
    stand: Stand | None = None
    pool: str = "local"


def pack(
    place: Workplace,
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
        place: This process's workplace.
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
    packed = pack_namespace(values, place.namespace, key, exclude=exclude, submodules=submodules)
    sources = cell_sources(packed.files, cell_numbers(place.shell))
    shipped = Shipped(
        names=packed.names,
        total_bytes=packed.total_bytes,
        seconds=time.perf_counter() - begin,
        heavy=tuple((name, size) for name, size in packed.sizes.items() if size > _HEAVY_BYTES),
    )
    return PackedCode(kind, name, msgspec.structs.replace(cell, linecache=sources), packed, key, outputs, shipped)


def nothing_packed(place: Workplace, kind: RunKind, name: str, outputs: tuple[OutputName, ...] = ()) -> PackedCode:
    """Return empty packed code for a run that executes none."""
    key = new_key()
    return PackedCode(kind, name, CellSource(body=""), pack_namespace({}, place.namespace, key), key, outputs)


def describe(
    place: Workplace,
    code: PackedCode,
    options: RunOptions,
    found: Found,
    session: Session | None = None,
    *,
    of_cell: bool = True,
) -> Submission:
    """Build a submission from packed code and options. Starts nothing.

    Args:
        place: This process's workplace.
        code: The packed code.
        options: The run's options.
        found: The run's pool and placement.
        session: The session whose ranks it uses, or with `options.fresh` whose devices; None requests a new lease.
        of_cell: Whether the running cell submits the run.
    """
    variables, wishes = dict(options.variables), options.wishes
    if session is not None:
        variables, wishes = {**session.variables, **variables}, session.wishes_with(wishes)
    stays = session is not None and not options.fresh
    spec = RunSpec(
        run_id=new_id(),
        name=options.name or code.name,
        cell=code.cell,
        placement=found.placement,
        outputs=code.outputs,
        owner=owner(place.shell, of_cell=of_cell),
        timeout_s=options.timeout_s,
        wait_s=options.wait_s,
        grace_s=options.grace_s,
        retries=options.retries,
        retry_any=options.retry_any,
        detach=options.detach,
        env_names=tuple(variables),
        shipped=msgspec.structs.replace(code.shipped, notes=(*found.notes, *code.shipped.notes)),
        kind=code.kind,
        session=session.run_id if session is not None else "",
        session_name=session.name if session is not None else "",
        fresh=session is not None and options.fresh,
        only=options.only if len(options.only) < found.placement.ranks else (),
        reload=stays and options.reload,
        auto=options.auto,
        idle_s=options.idle_s or None,
        parameters=code.parameters,
        max_cost=options.max_cost,
        profile=options.profile,
        grouped=options.group,
        ray=options.ray,
    )
    environ = {**os.environ, **variables}
    return Submission(spec, code.packed, code.key, environ, wishes, frozenset(variables), pool=found.pool.name)


# ---------------------------------------------------------------- redaction


def without_secrets(spec: RunSpec, environ: Mapping[str, str]) -> tuple[RunSpec, CellSource | None]:
    """Redact secrets in the spec's source, parameters and name.

    Args:
        spec: The run's spec.
        environ: The ranks' variables; values of secret variables are redacted, as are known kinds of tokens.

    Returns:
        The redacted spec and the source to execute; None instead of the source if nothing was redacted.
    """
    with _lock:
        blanker = _secrets.blanker(environ)
    cell = spec.cell
    shown = msgspec.structs.replace(
        cell,
        body=blanked_settings(cell.body, blanker.clear),
        magic_line=blanker.clear(cell.magic_line),
        arguments=tuple(map(blanker.clear, cell.arguments)),
        linecache=tuple(
            (file, blanked_settings(source, blanker.clear), number) for file, source, number in cell.linecache
        ),
    )
    parameters = tuple((name, blanker.clear(value)) for name, value in spec.parameters)
    name = blanker.clear(spec.name)
    if shown == cell and parameters == spec.parameters and name == spec.name:
        return spec, None
    return msgspec.structs.replace(spec, cell=shown, parameters=parameters, name=name), cell


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
        text = value if isinstance(value, str) else _number(value)
        if text is not None and 0 < len(text) <= _LONGEST_TEXT and not is_secret(name, text):
            found.append((name, text))
            if len(found) == _MOST_SCALARS:
                break
    return tuple(found)


def _number(value: object) -> str | None:
    try:
        return repr(value)
    except ValueError:
        # an int with more digits than Python converts to text
        return None
