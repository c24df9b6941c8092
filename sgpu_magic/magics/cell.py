"""A cell and its options become what is submitted, to a session's ranks or to new ones."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping

from IPython.core.interactiveshell import InteractiveShell

from sgpu_magic.errors import UsageError
from sgpu_magic.options.argparse_form import NO_SESSION
from sgpu_magic.options.asked import CellOptions, refuse_in_session
from sgpu_magic.payload.names import CellNames
from sgpu_magic.payload.namespace import cell_sources, collect, submodules_read
from sgpu_magic.payload.pack import new_key, pack_namespace
from sgpu_magic.runs.notebook import cell_number, cell_numbers, future_flags, owner
from sgpu_magic.runs.sessions import registry
from sgpu_magic.runs.sessions.cells import RANK_NAMES, SessionCell
from sgpu_magic.runs.sessions.session import Session
from sgpu_magic.runs.submit.cell_source import heavy_names, name_of, read_cell, transform_of, words_in
from sgpu_magic.runs.submit.placing import Found
from sgpu_magic.runs.submit.redact import scalars
from sgpu_magic.runs.submit.submit import Submission
from sgpu_magic.wire.ids import new_id
from sgpu_magic.wire.run import CellSource, RunSpec, Shipped


def session_for(options: CellOptions, magic: str) -> Session | None:
    """Return the session that the options name, else the current one; None without one.

    Raises:
        UsageError: There is no such session, or the options contradict it.
        SessionError: It has ended since it was used last.
    """
    session: Session | None = None
    if options.session and options.session != NO_SESSION:
        session = registry.named(options.session)
    elif not options.session:
        session = registry.current()
    if session is None:
        if options.only:
            option = "--ranks" if magic == "%%distributed" else "%%rank"
            raise UsageError(
                f"{option} names ranks of a session, and this cell runs in none. Connect first: %sgpu_connect "
                f"--gpus {max(options.only) + 1}, or leave {option} out."
            )
        return None
    _check_against(session, options)
    return session


def _check_against(session: Session, options: CellOptions) -> None:
    """Refuse options that ask for something else than the session has."""
    has = f"session {session.name} has {session.ranks} rank{'s' * (session.ranks > 1)} on {session.device_type}"
    ways = "--session none gives the cell a lease of its own"
    if not options.fresh:
        ways = f"--ranks runs it on some of them, --fresh in new processes on the session's devices, and {ways}"
    asked = options.ranks
    if asked is not None and (asked > session.ranks if options.fresh else asked != session.ranks):
        raise UsageError(f"{has}, and --gpus {asked} asks for others. Leave --gpus out; {ways}.")
    known = ("any", session.device_type, session.placement.device_type)
    if options.device_type is not None and options.device_type not in known:
        raise UsageError(f"{has}, and --type {options.device_type} asks for others. Leave --type out; {ways}.")
    devices = options.devices
    if devices.allow_busy:
        raise UsageError(f"{has}, and --allow-busy chooses others. Leave it out: %sgpu_connect takes it.")
    if devices.min_memory_bytes or devices.nodes or devices.strategy:
        raise UsageError(
            f"{has}, and --min-memory, --nodes and --placement choose others. Leave them out: %sgpu_connect takes them."
        )
    if options.pool and options.pool != session.pool.name:
        raise UsageError(
            f"{has} in the pool {session.pool.name}, and --pool {options.pool} names another. Leave --pool out; {ways}."
        )
    refuse_in_session(
        session.name, options.wishes, options.max_cost, "give the cell a lease of its own with --session none"
    )
    if options.detach:
        raise UsageError(
            f"--detach is not possible in session {session.name}: its ranks end with this notebook, and all that runs "
            "on their devices. Leave it out, or give the cell a lease of its own with --session none."
        )
    if (options.retries or options.retry_any) and not options.fresh:
        raise UsageError(
            f"--retries is not possible in session {session.name}: its ranks stay, and the cell is not started again. "
            "Use --fresh for new processes on its devices, or --session none for a lease of its own."
        )


def prepare(
    magic_line: str,
    body: str,
    options: CellOptions,
    shell: InteractiveShell,
    place: Found,
    session: Session | None = None,
    *,
    ray: bool = False,
) -> Submission:
    """Check, capture and pack a cell for ranks of its own. Nothing has started when this raises.

    Args:
        magic_line: The magic's own line.
        body: The code below it.
        options: What stands on that line.
        shell: The notebook's.
        place: Where it goes, decided by the caller.
        session: Whose lease it uses (`--fresh`); None for a lease of its own.
        ray: It is the driver of a Ray cluster of its own.

    Raises:
        UsageError: An option names what does not exist.
        CellSyntaxError: It does not compile.
        SerializationError: A variable can't leave the notebook.
    """
    begin = time.perf_counter()
    magic_line = without_values(magic_line)
    number = cell_number(shell)
    found = read_cell(f"{magic_line}\n{body}", number, transform_of(shell))
    namespace = shell.user_ns
    names = collect(found.read, namespace, extra=options.extra, exclude=options.exclude)
    _check_outputs(found, options, names)
    key = new_key()
    packed = pack_namespace(
        names,
        namespace,
        key,
        exclude=frozenset(options.exclude),
        submodules=submodules_read(words_in(body), names.values()),
    )
    shipped = Shipped(
        names=packed.names,
        total_bytes=packed.total_bytes,
        seconds=time.perf_counter() - begin,
        heavy=heavy_names(packed.sizes),
        notes=(
            *place.notes,
            *(
                f"the notebook's variable `{name}` hides the rank's own `{name}`: --exclude {name} gives that back"
                for name in RANK_NAMES
                if name in packed.names
            ),
        ),
    )
    environ = {**os.environ, **options.variables}
    wishes, given = options.wishes, frozenset(options.variables)
    if session is not None:
        wishes, given = session.wishes_with(options.wishes), given.union(session.variables)
        environ = session.environ(options.variables)
    spec = RunSpec(
        run_id=new_id(),
        name=options.name or name_of(body, number),
        cell=CellSource(
            body=body,
            magic_line=magic_line,
            execution_count=number,
            linecache=cell_sources(packed.files, cell_numbers(shell)),
            future_flags=future_flags(shell),
        ),
        placement=place.placement,
        outputs=options.outputs,
        owner=owner(shell),
        timeout_s=options.timeout_s,
        wait_s=options.wait_s,
        grace_s=options.grace_s,
        retries=options.retries,
        retry_any=options.retry_any,
        detach=options.detach,
        env_names=(*(session.variables if session is not None else ()), *options.variables),
        shipped=shipped,
        session=session.run_id if session is not None else "",
        session_name=session.name if session is not None else "",
        fresh=session is not None,
        parameters=scalars(names),
        profile=options.profile,
        max_cost=options.max_cost,
        ray=ray,
    )
    return Submission(spec, packed, key, environ, wishes, given, pool=place.pool.name)


def for_session(magic_line: str, body: str, options: CellOptions, session: Session) -> SessionCell:
    """Return a cell as it is to run in a session's ranks.

    Raises:
        UsageError: It names a rank that the session does not have.
    """
    return SessionCell(
        body=body,
        magic_line=without_values(magic_line),
        name=options.name,
        only=session.only(options.only or None),
        outputs=options.outputs,
        extra=options.extra,
        exclude=options.exclude,
        variables=options.variables,
        timeout_s=options.timeout_s,
        wait_s=options.wait_s,
        grace_s=options.grace_s,
        reload=options.reload,
        wishes=options.wishes,
        profile=options.profile,
    )


def without_values(magic_line: str) -> str:
    """The magic's line as it may be written down: values of --env are often secrets."""
    words = shlex.split(magic_line, comments=True)
    shown = [_without_value(word, before) for word, before in zip(words, ["", *words], strict=False)]
    return " ".join(shown) if any(word == "--env" or word.startswith("--env=") for word in words) else magic_line


def _without_value(word: str, before: str) -> str:
    option, setting = ("--env=", word.removeprefix("--env=")) if word.startswith("--env=") else ("", word)
    if not option and before != "--env":
        return shlex.quote(word)
    return f"{option}{shlex.quote(setting.partition('=')[0])}=***"


def has_code(body: str) -> bool:
    """Whether a cell has more than blank lines and comments: else it would start ranks for nothing."""
    return any(text and not text.startswith("#") for text in map(str.strip, body.splitlines()))


def _check_outputs(found: CellNames, options: CellOptions, shipped: Mapping[str, object]) -> None:
    """Refuse what the cell can't return, rather than run it for nothing."""
    if found.stored is None:
        return
    for output in options.outputs:
        if output.name not in found.stored and output.name not in shipped:
            known = ", ".join(sorted(found.stored)) or "none"
            raise UsageError(
                f"--out names `{output.name}`, which the cell never sets. It sets: {known}. Set it in the cell or "
                "take it out of --out."
            )
