"""All errors that sgpu-magic raises.

    SgpuError                     base class, shown as one paragraph: the cause and the remedy
    ├── UsageError                an invalid option, name or cell (notebook or pool)
    │   ├── CellSyntaxError       the cell does not compile
    │   ├── RunUnknown            the pool has no such run
    │   └── RunFileUnknown        the run has no such file at its pool
    ├── CapacityError             the run gets no devices, now or ever (notebook or pool)
    ├── SerializationError        a value can't leave or enter the notebook (notebook or rank)
    ├── EnvironmentFailed         the ranks' Python can't be prepared (notebook or pool)
    ├── PoolError                 the pool can't be reached, started or understood (pool)
    │   ├── PoolVersionError      the pool speaks another protocol version
    │   ├── PoolIdle              no pool runs on the machine that the user logs in to, and none was to be started
    │   └── KeyRefused            the pool does not admit this user's key, or lacks the key listed for it
    ├── SessionError              the session does not exist or can't take the cell (notebook or pool)
    │   └── SessionBusy           a cell runs in it, or ranks are being started (notebook)
    ├── RunFailed                 a run failed; has .rank, .run_id, .remote_traceback, .failures
    │   ├── RemoteError           user code raised an exception whose type can't be imported here
    │   ├── WorkerDied            a rank's process was killed, crashed or exited
    │   ├── NodeLost              the agent or its machine was lost
    │   ├── RunTimeout            the run exceeded its time or cost limit
    │   └── InternalError         a bug in sgpu-magic, or an exhausted machine
    └── RunCancelled              the run was cancelled; also a KeyboardInterrupt

The words in parentheses name the side that the error comes from. An exception that user code raises on a rank is
raised in the notebook as its own type if that type can be imported, with the attributes of `RunFailed` set on
it; see `views.remote_error`.

Each class has a `topic`, the name of its page in the folder `views/help`. The error's last line says how to show it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar

from sgpu_magic.suggestions import did_you_mean
from sgpu_magic.wire.option_text import OptionName, Text, TextWithOptions

if TYPE_CHECKING:
    from sgpu_magic.wire.rank_events import Failure


def see(topic: str) -> str:
    """Return the line that says how to show a help page: with the magic in a notebook, else with the command.

    The Jupyter server counts as a notebook, because it renders what a kernel shows.
    """
    loaded = "sgpu_magic.magics" in sys.modules or "sgpu_magic.server" in sys.modules
    return f"See `%sgpu_help {topic}`." if loaded else f"See `sgpu help {topic}` in a shell."


class SgpuError(Exception):
    """Base class of all errors of sgpu-magic.

    A notebook shows it as one paragraph without a traceback, because the cause is in the request and not in this
    package's code.

    Attributes:
        topic: Name of the help page.
        points_to_help: Whether a line below the message says how to show that page.
    """

    topic: ClassVar[str] = "internal"
    points_to_help: bool = True

    @property
    def text(self) -> Text:
        """The message, with the options that it names as data if it names any."""
        text: object = self.args[0] if self.args else ""
        return text if isinstance(text, TextWithOptions) else str(text)

    @property
    def message(self) -> str:
        """The message. Options in it are spelled as on a command line, or as `spell_options` has set."""
        return str(self.text)

    def spell_options(self, spell: Callable[[OptionName], str]) -> None:
        """Set how the message spells the options that it names."""
        if isinstance(text := self.text, TextWithOptions):
            self.args = (text.spelled(spell), *self.args[1:])

    def _render_traceback_(self) -> list[str]:
        """IPython's hook for exceptions that render themselves (`InteractiveShell.showtraceback`)."""
        pointer = [see(self.topic)] if self.points_to_help else []
        return [f"{type(self).__name__}: {self.message}", *pointer]


class UsageError(SgpuError):
    """An option, a name or a cell is invalid, or the pool does not have the requested devices.

    Args:
        message: The cause and the remedy.
        says_remedy: The message needs no pointer to a help page, because it names what to write instead.
    """

    topic = "usage"

    def __init__(self, message: object = "", *, says_remedy: bool = False) -> None:
        super().__init__(message)
        self.points_to_help = not says_remedy

    @classmethod
    def of_unknown_name(
        cls, message: str, given: str, known: Iterable[str], *, otherwise: str | None = None, most: int = 1
    ) -> UsageError:
        """Return the error for a name that does not exist: ``... no command `log`. Did you mean `logs`?``.

        Args:
            message: What does not exist, a sentence.
            given: The name.
            known: The names that exist.
            otherwise: What follows the message if none of them is similar.
            most: How many names are suggested.
        """
        suggestion = did_you_mean(given, known, most)
        ending = otherwise if suggestion is None else suggestion
        return cls(message if ending is None else f"{message} {ending}", says_remedy=suggestion is not None)


class NoSuchName(UsageError, KeyError):
    """A rank does not have the name that was asked for."""

    def __str__(self) -> str:
        # a KeyError shows the quoted form
        return self.message


class CellSyntaxError(UsageError):
    """The cell does not compile.

    It is not a `SyntaxError`, for which IPython would also show the magic's own frames.

    Args:
        message: The compiler's message.
        location: The cell's name and the line in it.
        excerpt: The source line, with a caret below it.
    """

    def __init__(self, message: str, location: str = "", excerpt: str = "") -> None:
        super().__init__(f"{message} ({location})" if location else message)
        self._lines = [text for text in (location and f"  {location}", excerpt, f"SyntaxError: {message}") if text]

    def _render_traceback_(self) -> list[str]:
        return [*self._lines, see(self.topic)]


class RunUnknown(UsageError):
    """The pool has no run with that id, or has removed its record."""


class RunFileUnknown(UsageError):
    """The run's directory at its pool has no such file, or the file can't be read."""


class CapacityError(SgpuError):
    """The run gets no devices: its time in the queue is over, or a quota, the budget or `--min-memory` rules it out."""

    topic = "room"


class SerializationError(SgpuError):
    """A value can't be pickled on its way to or from the ranks."""

    topic = "values"


class EnvironmentFailed(SgpuError):
    """The ranks' Python could not be started, or its packages could not be installed."""

    topic = "environment"


class PoolError(SgpuError):
    """The pool can't be started or reached.

    Attributes:
        step: What failed on the way to a machine over ssh, such as `host key`; "" elsewhere.
    """

    topic = "pool"
    step = ""


class PoolVersionError(PoolError):
    """The running pool speaks a protocol version that this client does not support.

    Attributes:
        is_used: Whether the pool reports that it has active runs.
    """

    is_used = False


class PoolIdle(PoolError):
    """No pool runs on the machine that the user logs in to; a run starts one."""


class KeyRefused(PoolError):
    """The pool does not admit this user's key, or can't prove that it has the key listed in `pools.toml`."""


class SessionError(SgpuError):
    """The session does not exist, has ended, or has a dead rank that the cell needs."""

    topic = "session"


class SessionBusy(SessionError):
    """A cell runs in the session, or ranks are being started."""


class RunFailed(SgpuError):
    """A run failed.

    Attributes:
        rank: Global rank that failed first; None if no single rank is the cause.
        run_id: Id of the run, for example for `sgpu logs`.
        remote_traceback: Traceback of that rank as plain text; "" if there is none.
        failures: The `Failure` of every rank that failed: `.rank`, `.host`, `.type_name`, `.message`,
            `.traceback_text`; the root cause first.
    """

    failures: tuple[Failure, ...] = ()

    def __init__(self, message: str, *, rank: int | None = None, run_id: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.run_id = run_id
        self.remote_traceback = remote_traceback


class RemoteError(RunFailed):
    """User code on a rank raised an exception whose type can't be imported here.

    Attributes:
        type_name: Qualified name of the exception's type on the rank.
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
    """A rank's process ended without an exception: by a signal, `os._exit`, or a crash in C code."""

    topic = "rank-died"


class NodeLost(RunFailed):
    """The agent that ran the ranks, or its machine, was lost."""

    topic = "node-lost"


class RunTimeout(RunFailed):
    """The run reached its time limit, its cost limit, or the pool's budget, and was stopped."""

    topic = "timeout"


class InternalError(RunFailed):
    """A bug in sgpu-magic, or an exhausted machine; the help page says what to report."""

    topic = "internal"


class RunCancelled(SgpuError, KeyboardInterrupt):
    """The run was cancelled. Also a `KeyboardInterrupt`, so Run All stops as at any interrupted cell."""

    topic = "cancelled"

    def __init__(self, message: str, *, run_id: str = "") -> None:
        super().__init__(message)
        self.run_id = run_id
