"""Where a cell runs: in a session's ranks, in new processes on its devices, or on a lease of its own."""

from __future__ import annotations

from dataclasses import replace

from sgpu_magic.errors import UsageError
from sgpu_magic.magics.arguments import NO_SESSION, CellOptions
from sgpu_magic.runs.choice.default_choice import MAGIC_WAYS, Asked, with_choice
from sgpu_magic.runs.package_options import refuse_in_session
from sgpu_magic.runs.sessions import registry
from sgpu_magic.runs.sessions.session import Session
from sgpu_magic.runs.workplace import Workplace


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


def with_notebooks_choice(place: Workplace, options: CellOptions) -> CellOptions:
    """Return the options of a cell that runs in no session, with what the notebook's choice says where nothing was.

    Raises:
        UsageError: As `default_choice.with_choice`.
        EnvironmentFailed: As that.
    """
    asked = Asked(options.devices, options.wishes, options.pool)
    found = with_choice(place, asked, MAGIC_WAYS)
    if found is asked:
        return options
    return replace(options, devices=found.devices, wishes=found.wishes, pool=found.pool)


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
