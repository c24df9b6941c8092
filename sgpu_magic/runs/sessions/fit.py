"""Checks whether a connected session matches the options of a cell, a call or a connect."""

from __future__ import annotations

from sgpu_magic.errors import UsageError
from sgpu_magic.options.asked import Devices, RunOptions, Wishes, refuse_in_session
from sgpu_magic.runs.sessions import registry
from sgpu_magic.runs.sessions.session import Session


def check_cell(session: Session | None, options: RunOptions, magic: str) -> None:
    """Reject options of a cell that contradict its session.

    Args:
        session: The session that it runs in; None for a new lease.
        options: The cell's options.
        magic: The cell's magic: `%%distributed`, `%%rank` or `%%ray_launch`.

    Raises:
        UsageError: An option contradicts the session.
    """
    if session is None:
        if options.only:
            option = "--ranks" if magic == "%%distributed" else "%%rank"
            raise UsageError(
                f"{option} names ranks of a session, and this cell runs in none. Connect first: %sgpu_connect "
                f"--gpus {max(options.only) + 1}, or leave {option} out."
            )
        return
    has = f"session {session.name} has {session.ranks} rank{'s' * (session.ranks > 1)} on {session.device_type}"
    ways = "--session none gives the cell a lease of its own"
    if not options.fresh:
        ways = f"--ranks runs it on some of them, --fresh in new processes on the session's devices, and {ways}"
    asks = {
        "ranks": f", and --gpus {options.ranks} asks for others. Leave --gpus out; {ways}.",
        "type": f", and --type {options.device_type} asks for others. Leave --type out; {ways}.",
        "busy": ", and --allow-busy chooses others. Leave it out: %sgpu_connect takes it.",
        "devices": ", and --min-memory, --nodes and --placement choose others. Leave them out: %sgpu_connect "
        "takes them.",
        "pool": f" in the pool {session.pool.name}, and --pool {options.pool} names another. Leave --pool out; {ways}.",
    }
    differs = next(iter(_misfits(session, options, fewer=options.fresh)), "")
    if differs in asks:
        raise UsageError(f"{has}{asks[differs]}")
    own = "give the cell a lease of its own with --session none"
    refuse_in_session(session.name, options.wishes, options.max_cost, own)
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


def check_call(session: Session, options: RunOptions) -> None:
    """Reject options of a function call that contradict its session.

    Raises:
        UsageError: An option contradicts the session.
    """
    if {"ranks", "type"} & _misfits(session, options).keys():
        raise UsageError(
            f"session {session.name} has {session.ranks} ranks on {session.device_type}, and the options ask for "
            f"{options.ranks or session.ranks} on {options.device_type or session.device_type}. Leave gpus and "
            "gpu_type out, or leave session out: then new ranks are started."
        )
    refuse_in_session(session.name, options.wishes, options.max_cost, "leave session out")
    if options.retries:
        raise UsageError("a run in a session is not retried automatically. Leave retries or session out.")


def lending(options: RunOptions) -> Session | None:
    """Return a connected session whose lease fits a call, the current session first; None if there is none."""
    for session in reversed(registry.all_sessions()):
        if session.is_connected and _misfits(session, options, fewer=True).keys() <= {"busy"}:
            return session
    return None


def has_devices(session: Session, devices: Devices, pool: str) -> bool:
    """Whether a session has the requested devices, in the named pool; "" means any pool."""
    placement = session.spec.placement
    return (
        devices.ranks in (None, session.ranks)
        and devices.device_type in (None, placement.device_type, session.device_type)
        and devices.min_memory_bytes in (0, placement.min_memory_bytes)
        and devices.nodes in (0, placement.nodes)
        and pool in ("", session.pool.name)
    )


def is_same(session: Session, ask: RunOptions) -> bool:
    """Whether a session matches the options of a connect."""
    spec = session.spec
    return (
        has_devices(session, ask.devices, ask.pool)
        and ask.idle_s in (None, spec.idle_s or 0)
        and all(session.variables.get(name) == value for name, value in ask.variables.items())
        and ask.wishes in (Wishes(), session.wishes)
        and ask.max_cost in (None, spec.max_cost)
    )


def _misfits(session: Session, options: RunOptions, *, fewer: bool = False) -> dict[str, bool]:
    """Return the options that the session does not match, as keys in the order of reporting.

    Args:
        session: The session.
        options: The requested options.
        fewer: Accept fewer ranks than the session has.
    """
    devices, wishes, ranks = options.devices, options.wishes, options.ranks or session.ranks
    found = {
        "ranks": ranks > session.ranks if fewer else ranks != session.ranks,
        "type": options.device_type not in (None, "any", session.device_type, session.placement.device_type),
        "busy": devices.allow_busy,
        "devices": bool(devices.min_memory_bytes or devices.nodes or devices.strategy),
        "pool": options.pool not in ("", session.pool.name),
        "packages": bool(wishes.env_version or wishes.torch_mine or wishes.allow_build),
        "cost": options.max_cost is not None,
    }
    return {name: True for name, differs in found.items() if differs}
