"""Orphans that a rank adopts, beside the children that its code starts.

A rank is a subreaper: a process that its code detaches, however it does that, becomes the rank's child when its own
parent ends. So it stays below the rank, and ends with it. In a script such a process becomes a child of init, which
reaps it. Here the rank reaps it, without taking the status of a child that its code waits for; and `os.wait` finds only
children that the rank has started, as in a script.

Children that Python starts are recorded. Others are either orphans or were started by C code, which waits for them at
once, so one that has ended and has not been waited for in a minute is an orphan.
"""

from __future__ import annotations

import _posixsubprocess
import contextlib
import errno
import functools
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

from sgpu_magic.system import processes

_REAP_AFTER_S = 60.0
# what `waitpid` returns for no child
_NONE = (0, 0)


class _Children:
    """The rank's own children. In other processes, and before `adopt`, it only records."""

    def __init__(self) -> None:
        self._rank = 0
        self._own: set[int] = set()
        # orphans that had ended at the last check, and the time of the next check
        self._ended: set[int] = set()
        self._check_at = 0.0
        self._waitpid = os.waitpid

    def install(self) -> None:
        """Record the children that Python starts from now on, and let `os.wait` and `os.waitpid` know the orphans."""
        for module, name in (
            (os, "fork"),
            (os, "forkpty"),
            (os, "posix_spawn"),
            (os, "posix_spawnp"),
            (_posixsubprocess, "fork_exec"),
        ):
            if hasattr(module, name):
                setattr(module, name, self._recording(getattr(module, name)))
        if hasattr(subprocess, "_fork_exec"):
            setattr(subprocess, "_fork_exec", _posixsubprocess.fork_exec)  # noqa: B010  private

        @functools.wraps(os.waitpid)
        def waitpid(pid: int, options: int, /) -> tuple[int, int]:
            return self._wait_for(pid, options)

        @functools.wraps(os.wait)
        def wait() -> tuple[int, int]:
            return self._wait_for(-1, 0)

        os.waitpid, os.wait = waitpid, wait

    def adopt(self) -> None:
        """Make this process a subreaper: it is a rank."""
        self._rank = os.getpid()
        self._own.clear()
        self._check_at = time.monotonic() + _REAP_AFTER_S
        processes.become_subreaper()

    def reap(self) -> None:
        """Reap orphans that ended a minute ago or more. Costs nothing until a minute has passed."""
        now = time.monotonic()
        if now < self._check_at or os.getpid() != self._rank:
            return
        self._check_at = now + _REAP_AFTER_S
        known = set(self._own)
        children = set(processes.child_pids())
        # a child that is started meanwhile is in neither set
        self._own -= known - children
        ended = {pid for pid in children - self._own if self._has_ended(pid)}
        for pid in ended & self._ended:
            with contextlib.suppress(ChildProcessError):
                self._waitpid(pid, os.WNOHANG)
        self._ended = ended - self._ended

    def _recording(self, start: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(start)
        def starting(*args: Any, **kwargs: Any) -> Any:
            started = start(*args, **kwargs)
            # forkpty returns the terminal's descriptor too; 0 in the child
            pid = started if isinstance(started, int) else started[0]
            if pid:
                self._own.add(pid)
            return started

        return starting

    @staticmethod
    def _has_ended(pid: int) -> bool:
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return False

    def _wait_for(self, pid: int, options: int) -> tuple[int, int]:
        if pid != -1 or options & ~os.WNOHANG or os.getpid() != self._rank:
            return self._waitpid(pid, options)
        while True:
            children = set(processes.child_pids())
            if children <= self._own:
                return self._waitpid(pid, options)
            if not children & self._own:
                raise ChildProcessError(errno.ECHILD, os.strerror(errno.ECHILD))
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | (options & os.WNOHANG))
            if found is None:
                return _NONE
            ended = self._waitpid(found.si_pid, os.WNOHANG)
            if found.si_pid in self._own:
                return ended


_children = _Children()
install = _children.install
adopt = _children.adopt
reap = _children.reap
