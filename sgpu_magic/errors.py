"""Every error that sgpu-magic raises, drawn once.

    SgpuError                     one paragraph: the side, the cause, the remedy
    ├── UsageError                an option, a name or a cell that can't mean anything (notebook)
    │   ├── CellSyntaxError       the cell does not compile
    │   ├── RunUnknown            the pool has no such run
    │   └── RunFileUnknown        a run has no such file at its pool
    ├── CapacityError             the pool can't place the run, now or ever (pool)
    ├── SerializationError        something can't leave or enter the notebook (notebook or rank)
    ├── EnvironmentFailed         the ranks' Python could not be prepared (pool)
    ├── PoolError                 the pool can't be reached, started or understood (pool)
    │   ├── PoolVersionError      it speaks another version
    │   └── KeyRefused            it does not know this user's key, or is not the pool whose key was written down
    ├── SessionError              there is no such session, or it can't take the cell (pool)
    ├── RunFailed                 a run ended badly; has .rank, .run_id, .remote_traceback
    │   ├── RemoteError           user code raised a type that does not exist here
    │   ├── WorkerDied            a rank's process ended by a signal or an exit
    │   ├── NodeLost              the agent or its machine went away
    │   ├── RunTimeout            the run's time ended
    │   └── InternalError         a fault of sgpu-magic itself
    └── RunCancelled              also a KeyboardInterrupt: the user stopped the run

An exception that user code raised on a rank is raised in the notebook as its own type where that type
exists here, with the three attributes of `RunFailed` set on it; see `views.remote_error`.

Each class has a `topic`, a page in the folder `help`, and names what shows it.
"""

from __future__ import annotations

import sys
from typing import ClassVar

from sgpu_magic.wire.states import FailureKind

OUT_OF_MEMORY = "memory"
"""The page about allocations that failed, by whatever exception."""


def see(topic: str) -> str:
    """Return the line that names what shows a page of help: the magic in a notebook, else the command.

    The Jupyter server draws what a kernel has shown.
    """
    loaded = "sgpu_magic.magics" in sys.modules or "sgpu_magic.server" in sys.modules
    return f"See `%sgpu_help {topic}`." if loaded else f"See `sgpu help {topic}` in a shell."


def topic_of(kind: FailureKind, *, out_of_memory: bool = False) -> str:
    """Return the page about runs that failed like this."""
    return OUT_OF_MEMORY if out_of_memory else _ERRORS[kind].topic


class SgpuError(Exception):
    """Base of all errors of sgpu-magic.

    In a notebook it shows as one paragraph without a traceback: what went wrong lies in what was asked for,
    not in this package's lines.

    Attributes:
        topic: Page of help.
    """

    topic: ClassVar[str] = "internal"

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else ""

    def _render_traceback_(self) -> list[str]:
        """IPython's hook for exceptions that draw themselves (`InteractiveShell.showtraceback`)."""
        return [f"{type(self).__name__}: {self.message}", see(self.topic)]


class UsageError(SgpuError):
    """An option, a name or a cell that can't mean anything."""

    topic = "usage"


class CellSyntaxError(UsageError):
    """The cell does not compile. No SyntaxError: IPython would draw the magic's own frames above it.

    Args:
        message: What the compiler says.
        place: The cell's name and the line in it.
        excerpt: The line, and a caret below it.
    """

    def __init__(self, message: str, place: str = "", excerpt: str = "") -> None:
        super().__init__(f"{message} ({place})" if place else message)
        self._lines = [text for text in (place and f"  {place}", excerpt, f"SyntaxError: {message}") if text]

    def _render_traceback_(self) -> list[str]:
        return [*self._lines, see(self.topic)]


class RunUnknown(UsageError):
    """The pool has no run of that id, or no longer its record."""


class RunFileUnknown(UsageError):
    """A run's directory at its pool has no such file, or it can't be read."""


class CapacityError(SgpuError):
    """The pool can't place the run: it lacks the devices, or the queue's time is over."""

    topic = "room"


class SerializationError(SgpuError):
    """A value can't be pickled on its way to or from the ranks."""

    topic = "values"


class EnvironmentFailed(SgpuError):
    """The Python that the ranks were to run in could not be started."""

    topic = "environment"


class PoolError(SgpuError):
    """The pool can't be started or reached."""

    topic = "pool"


class PoolVersionError(PoolError):
    """The running pool speaks a protocol that this client does not know.

    Attributes:
        is_used: Runs go on there, as far as it tells.
    """

    is_used = False


class KeyRefused(PoolError):
    """The pool does not admit this user's key, or has not the key that it should have."""


class SessionError(SgpuError):
    """There is no such session, it has ended, or a rank of it is dead."""

    topic = "session"


class RunFailed(SgpuError):
    """A run ended badly.

    Attributes:
        rank: The culprit's global rank, None when no single rank is to blame.
        run_id: The run, as `sgpu logs` takes it.
        remote_traceback: The rank's traceback as plain text, "" when there is none.
    """

    def __init__(self, message: str, *, rank: int | None = None, run_id: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.run_id = run_id
        self.remote_traceback = remote_traceback


class RemoteError(RunFailed):
    """User code on a rank raised an exception whose type can't be had here.

    Attributes:
        type_name: The exception's qualified type name on the rank.
    """

    topic = "exception"

    def __init__(
        self,
        message: str,
        *,
        type_name: str,
        rank: int | None = None,
        run_id: str = "",
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message, rank=rank, run_id=run_id, remote_traceback=remote_traceback)
        self.type_name = type_name


class WorkerDied(RunFailed):
    """A rank's process ended without saying so: a signal, `os._exit`, or a crash in C."""

    topic = "rank-died"


class NodeLost(RunFailed):
    """The agent that held the ranks, or its machine, went away."""

    topic = "node-lost"


class RunTimeout(RunFailed):
    """The run's time limit ended it."""

    topic = "timeout"


class InternalError(RunFailed):
    """A fault of sgpu-magic itself; the message says what to report."""

    topic = "internal"


class RunCancelled(SgpuError, KeyboardInterrupt):
    """The run was cancelled. Also a KeyboardInterrupt, so that Run All stops as it does for a plain cell."""

    topic = "cancelled"

    def __init__(self, message: str, *, run_id: str = "") -> None:
        super().__init__(message)
        self.run_id = run_id


_ERRORS: dict[FailureKind, type[SgpuError]] = {
    FailureKind.USER_CODE: RemoteError,
    FailureKind.SERIALIZATION: SerializationError,
    FailureKind.ENVIRONMENT: EnvironmentFailed,
    FailureKind.WORKER_DIED: WorkerDied,
    FailureKind.NODE_LOST: NodeLost,
    FailureKind.TIMEOUT: RunTimeout,
    FailureKind.CAPACITY: CapacityError,
    FailureKind.SESSION: SessionError,
    FailureKind.INTERNAL: InternalError,
}
