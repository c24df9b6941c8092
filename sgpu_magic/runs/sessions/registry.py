"""This process's sessions: by name, and the one that cells run in when they name none."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sgpu_magic.errors import SessionError, UsageError
from sgpu_magic.runs.sessions.session import Session

# a restart is not to wait for a pool that does not answer
_RESTART_PATIENCE_S = 0.5
_lock = threading.RLock()
_sessions: dict[str, Session] = {}
_ends: list[Callable[[], None]] = []


def add(session: Session) -> None:
    """From now on it is known by its name, and the current one."""
    with _lock:
        _sessions.pop(session.name, None)
        # the last one is the current one
        _sessions[session.name] = session


def make_current(session: Session) -> None:
    """Cells that name no session run in this one."""
    add(session)


def find(name: str) -> Session | None:
    """Return the session of that name, None when there is none or it has ended."""
    with _lock:
        session = _sessions.get(name)
        if session is not None and session.has_ended:
            drop(session)
            return None
        return session


def current() -> Session | None:
    """Return the session that was connected last, None without one.

    Raises:
        SessionError: It has ended since it was used last. That is told once.
    """
    with _lock:
        _drop_told()
        if not _sessions:
            return None
        return _usable(next(reversed(_sessions.values())))


def named(name: str) -> Session:
    """Return the session of that name.

    Raises:
        UsageError: There is none.
        SessionError: It has ended since it was used last. That is told once.
    """
    with _lock:
        _drop_told()
        session = _sessions.get(name)
        if session is None:
            known = f"You have: {', '.join(_sessions)}." if _sessions else "You have none: connect with %sgpu_connect."
            raise UsageError(f"this notebook has no session {name!r}. {known}")
        return _usable(session)


def chosen(name: str = "") -> Session:
    """Return the session of that name, the current one for "".

    Raises:
        UsageError: There is none.
        SessionError: It has ended.
    """
    session = named(name) if name else current()
    if session is None:
        raise UsageError("no session is connected: begin one with %sgpu_connect --gpus N, or sgpu_magic.connect(N).")
    return session


def idle() -> Session | None:
    """Return the current session when its ranks are idle; None else. Tells nothing."""
    with _lock:
        session = next(reversed(_sessions.values()), None)
        return session if session is not None and session.is_idle else None


def names() -> list[str]:
    """Return the names of all sessions, the current one's last."""
    with _lock:
        return list(_sessions)


def all_sessions() -> list[Session]:
    with _lock:
        return list(_sessions.values())


def drop(session: Session) -> None:
    """Forget a session, and tell who wants to know of it."""
    with _lock:
        if _sessions.get(session.name) is session:
            del _sessions[session.name]
        told = list(_ends)
    for tell in told:
        tell()


def on_drop(tell: Callable[[], None]) -> Callable[[], None]:
    """Have `tell` called whenever a session is forgotten; return what undoes that."""
    with _lock:
        _ends.append(tell)

    def undo() -> None:
        with _lock:
            if tell in _ends:
                _ends.remove(tell)

    return undo


def close_all() -> None:
    """End every session of this process."""
    sessions = all_sessions()
    for session in sessions:
        session.end("its notebook has let go of it")
    for session in sessions:
        session.close()
        drop(session)


def end_for_restart() -> None:
    """The kernel is restarted: what stands below the cells that connected says so, for nobody else will."""
    for session in all_sessions():
        session.end("the kernel was restarted, and a session ends with its kernel")
    for session in all_sessions():
        session.wait_for_end(_RESTART_PATIENCE_S)


def _drop_told() -> None:
    """Forget the sessions whose end a refused cell has told."""
    for session in [session for session in _sessions.values() if session.ending_told]:
        drop(session)
        session.close()


def _usable(session: Session) -> Session:
    if not session.has_ended:
        return session
    drop(session)
    # its view and its link are not needed any more
    session.close()
    raise SessionError(
        f"session {session.name} has ended: {session.ending}. What its ranks had is gone, and nothing was run. Begin "
        f"another with `%sgpu_connect --gpus {session.ranks}`; without one, %%distributed starts new ranks for each "
        "cell."
    )
