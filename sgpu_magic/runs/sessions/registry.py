"""The sessions of this process: connects them, finds them by name, keeps the current one, and closes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from sgpu_magic.errors import SessionError, UsageError
from sgpu_magic.options.option_records import RunOptions, SessionOptions, misfits
from sgpu_magic.options.python_form import EnvVersion, of_session
from sgpu_magic.options.table import as_argument, options_spelled
from sgpu_magic.options.values import Duration, Upload
from sgpu_magic.packages.snapshot import take_snapshot
from sgpu_magic.runs.kernel_context import KernelContext, kernel_context
from sgpu_magic.runs.sessions.session import Session
from sgpu_magic.runs.submit.spec import describe, nothing_packed
from sgpu_magic.runs.submit.submit import submit
from sgpu_magic.runs.submit.target import with_target
from sgpu_magic.wire.base import RunKind

# a restart must not wait for a pool that does not answer
_RESTART_PATIENCE_S = 0.5
# a cell and the panel may connect at the same time; names must be unique
_beginning = threading.Lock()
_lock = threading.RLock()
_sessions: dict[str, Session] = {}

when_dropped: list[Callable[[], None]] = []
"""Called whenever a session is removed from the registry."""


# ---------------------------------------------------------------- connecting


def connect(
    gpus: int | None = None,
    gpu_type: str | None = None,
    *,
    name: str = "",
    idle: Duration | None = None,
    wait: Duration | None = None,
    timeout: Duration | None = None,
    env: Mapping[str, str] | None = None,
    env_version: EnvVersion | None = None,
    torch: str | None = None,
    allow_build: bool = False,
    track: bool | None = None,
    upload: Upload = (),
    max_cost: float | None = None,
    allow_busy: bool = False,
    min_memory: str | float | None = None,
    nodes: int | None = None,
    placement: str | None = None,
    pool: str = "",
    ui: str = "none",
) -> Session:
    """Lease devices and start ranks that stay alive between cells.

    Returns immediately. Use the session in `with` or `async with`, or `await` it, to wait until it is connected.

        with sgpu_magic.connect(4, "a10") as session:
            session.push(cfg=cfg)
            session.run("model = build(cfg).to(device)")
            losses = session.call(train, epochs=3)

    Args:
        gpus: Number of ranks, one per GPU. Default: 2 on CPU, else all GPUs of one type. Required for GPUs of a shared
            pool.
        gpu_type: `"a10"`, `"h100"` ..., `"cpu"` or `"any"`. Default: what the pool has.
        name: The session's name. Default: `main`.
        idle: End the session after this time without a cell: seconds, a text such as `"60m"` or a `timedelta`; 0 never
            ends it. Default: the setting `session_idle_s`, an hour.
        wait: Maximum time in the queue, as for `idle`; 0 gets the devices now or fails. Default: no limit.
        timeout: Maximum lifetime of the session. Default and maximum: 7 days.
        env: Environment variables to set on the ranks.
        env_version: The ranks' packages: `"4"` or `"ai-4"` (base environments), a requirements or pylock file, an
            environment saved with `%sgpu_env`, or `"none"` for the packages of this notebook or program. Default: the
            setting `env_version`, else `"none"`.
        torch: The torch to use if packages are installed for the session: `"node"` for the node's (default), `"mine"`
            to install the notebook's.
        allow_build: Allow packages without a wheel to be built from source for the session.
        track: False does not create an MLflow run. Default: the setting `track`.
        upload: A folder or file, or several, to make available to the ranks, which get the path from
            `sgpu_magic.runtime.upload_path("data")`.
        max_cost: End the session before it costs more, in the currency of the settings. Default: no limit.
        allow_busy: Also use GPUs that other programs use.
        min_memory: Minimum memory of each device, `"40GB"` or bytes. Without `gpu_type`, the cheapest type that has it
            is used.
        nodes: Number of nodes to spread the ranks over evenly. Default: the pool's choice.
        placement: `"pack"` on as few nodes as possible (default), `"strict_pack"` on one, `"spread"` over many.
        pool: The pool's name, or `"reserved"` or `"on-demand"` for any pool of that kind. Default: the setting `pool`,
            else a reserved pool that has the type, else an on-demand one, else this machine's own.
        ui: How the session itself is shown: `"auto"`, `"widget"`, `"text"` or `"none"`.

    Raises:
        UsageError: An argument is invalid, or a session with that name is connected.
        CapacityError: The pool can't provide the devices.
        PoolError: The pool can't be reached.
    """
    options = of_session(locals())
    context = kernel_context()
    with options_spelled(as_argument):
        context.wanted_pool(pool)
        return begin(context, options, ui)


def begin(context: KernelContext, options: SessionOptions, ui: str, *, of_cell: bool = True) -> Session:
    """Submit a session and make it the current one. Thread-safe.

    Args:
        context: The kernel's context.
        options: The requested options; the notebook's choice fills in those left out.
        ui: How the session itself is shown.
        of_cell: Whether the running cell requests the session.

    Raises:
        UsageError: A session with that name is connected.
    """
    with _beginning:
        name = options.name
        if (known := find(name)) is not None:
            raise UsageError(
                f"session {name} is already connected ({known.ranks} ranks). End it first (`%sgpu_disconnect {name}`, "
                "or close()), or give the new one another name."
            )
        options, found = with_target(context, options)
        if options.idle_s is None:
            options = replace(options, idle_s=context.current_settings().session_idle_s)
        nothing = nothing_packed(context, RunKind.SESSION, name)
        submission = describe(context, nothing, options, found, of_cell=of_cell)
        # the packages at the start; taken before the submission, so that an interrupt can't leave an unknown session
        packages = take_snapshot()
        run = submit(found.pool, submission)
        followed = context.followed(run, ui, error_follows=False)
        session = Session(context, followed, options.variables, options.environment, packages)
        add(session)
        if context.restarts is not None:
            context.restarts.before = end_for_restart
        return session


# ---------------------------------------------------------------- the connected sessions


def add(session: Session) -> None:
    """Register a session under its name and make it the current one, in which cells run by default."""
    with _lock:
        _sessions.pop(session.name, None)
        # the last one is the current one
        _sessions[session.name] = session


def find(name: str) -> Session | None:
    """Return the session with that name, or None if there is none or it has ended."""
    with _lock:
        session = _sessions.get(name)
        if session is not None and session.has_ended:
            drop(session)
            return None
        return session


def current(name: str = "") -> Session | None:
    """Return the session with that name, for `""` the one connected last; None if none is connected.

    Raises:
        UsageError: There is no session with that name.
        SessionError: The session has ended since its last use. Raised only once.
    """
    with _lock:
        # a refused cell has already reported the end of these sessions
        for ended in [session for session in _sessions.values() if session.end_reported]:
            drop(ended)
            ended.close()
        if not name and not _sessions:
            return None
        session = _sessions.get(name) if name else next(reversed(_sessions.values()))
        if session is None:
            known = f"You have: {', '.join(_sessions)}." if _sessions else "You have none: connect with %sgpu_connect."
            raise UsageError(f"this notebook has no session {name!r}. {known}")
        if not session.has_ended:
            return session
        drop(session)
        # its view and its link are not needed any more
        session.close()
        raise SessionError(
            f"session {session.name} has ended: {session.ending}. Its ranks' variables are lost, and nothing was run. "
            f"Start another with `%sgpu_connect --gpus {session.ranks}`; without one, %%distributed starts new ranks "
            "for each cell."
        )


def get_session(name: str = "") -> Session:
    """Return the session with that name, or the current one for `""`.

    Raises:
        UsageError: There is no such session.
        SessionError: The session has ended.
    """
    if (session := current(name)) is None:
        raise UsageError("no session is connected: start one with %sgpu_connect --gpus N, or sgpu_magic.connect(N).")
    return session


def idle() -> Session | None:
    """Return the current session if its ranks are idle, otherwise None. Does not report a session that has ended."""
    with _lock:
        session = next(reversed(_sessions.values()), None)
        return session if session is not None and session.is_idle else None


def lending(options: RunOptions) -> Session | None:
    """Return a connected session whose lease fits a call, the current session first; None if there is none."""
    for session in reversed(all_sessions()):
        if session.is_connected and misfits(session, options, fewer=True) in ([], ["busy"]):
            return session
    return None


def names() -> list[str]:
    """Return the names of all sessions, the current one last."""
    with _lock:
        return list(_sessions)


def all_sessions() -> list[Session]:
    with _lock:
        return list(_sessions.values())


def drop(session: Session) -> None:
    """Remove a session from the registry and call `when_dropped`."""
    with _lock:
        if _sessions.get(session.name) is session:
            del _sessions[session.name]
    for on_drop in tuple(when_dropped):
        on_drop()


def close_all() -> None:
    """Close all sessions of this process."""
    sessions = all_sessions()
    for session in sessions:
        session.end("its notebook closed it")
    for session in sessions:
        session.close()
        drop(session)


def end_for_restart() -> None:
    """End all sessions before the kernel restarts, so that their views below the cells show the reason."""
    for session in all_sessions():
        session.end("the kernel was restarted, and a session ends with its kernel")
    for session in all_sessions():
        session.wait_for_end(_RESTART_PATIENCE_S)
