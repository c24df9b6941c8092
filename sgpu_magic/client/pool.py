"""`Pool`: the API of one pool. It connects on first use."""

from __future__ import annotations

import contextlib
import os
import threading

from msgspec.structs import replace

from sgpu_magic.client.connection import (
    REPLY_TIMEOUT_S,
    LocalConnection,
    RemotePoolConnection,
    ask,
    ask_this_or_next,
)
from sgpu_magic.client.link import PoolLink
from sgpu_magic.client.local_transport import OnNotice
from sgpu_magic.client.mirror import note_end
from sgpu_magic.client.payload_memory import PayloadMemory
from sgpu_magic.client.pools_file import LOCAL, PoolEntry
from sgpu_magic.client.run import Attachments, ClientRun
from sgpu_magic.client.submitter import Submitter
from sgpu_magic.client.this_machine import find_pool
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import CapacityError, PoolError, SessionError, SgpuError, UsageError
from sgpu_magic.payload.pack import Packed
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.client import (
    Accepted,
    AskRank,
    AskStacks,
    Attach,
    Attached,
    Cancel,
    Describe,
    Detach,
    KeepEnvironment,
    RankAnswered,
    RestartRanks,
    Stacks,
    TrackRun,
    Warm,
)
from sgpu_magic.wire.pool_status import AskStatus, PoolStatus, with_changes
from sgpu_magic.wire.run import RankAnswer, RankQuestion, RunSpec

# the replacement processes join a process group: the same limit as for a session's start when a rank is missing
RESTART_TIMEOUT_S = 120.0
_NOTHING = Attachments()
# settings of single runs: `%env SGPU_TRACK=off` in a running kernel applies from the next run on
_OF_RUNS = ("env_version", "variables", "track", "tracking_uri", "code_warn_bytes", "code_limit_bytes")


class Pool(Submitter):
    """A pool as seen by a kernel or a command. Thread-safe.

    Args:
        settings: Settings, with the directories of the local pool.
        on_notice: Called in the link's thread with each notice of the pool, "" when a notice is withdrawn.
        entry: Entry of a pool on another machine; None for the local pool.
        on_sending: Called about once a second with the progress of a run's uploads, "" when they are complete.

    Attributes:
        notice: The pool's current notice, "" for none.
    """

    def __init__(
        self,
        settings: Settings,
        on_notice: OnNotice | None = None,
        entry: PoolEntry | None = None,
        on_sending: OnNotice | None = None,
    ) -> None:
        self._current = settings
        self._variables = _variables_of_runs()
        self.notice = ""
        self._on_notice = on_notice
        self.entry = entry
        self._kept_settings = ""
        # the last status, and the link that it came over
        self._known_status: tuple[PoolLink | None, PoolStatus | None] = (None, None)
        callbacks = (settings, self._link_lost, self._noticed)
        connection = LocalConnection(*callbacks) if entry is None else RemotePoolConnection(*callbacks, entry)
        name = LOCAL if entry is None else entry.name
        super().__init__(connection, PayloadMemory(), settings, name, on_sending)

    @property
    def settings(self) -> Settings:
        """The settings: directories as they were given, per-run settings from the current environment.

        Takes microseconds while the variables are unchanged.

        Raises:
            UsageError: A variable has an invalid value.
        """
        if (variables := _variables_of_runs()) != self._variables:
            anew = load_settings()
            self._current = replace(self._current, **{name: getattr(anew, name) for name in _OF_RUNS})
            self._variables = variables
        return self._current

    def warm_in_background(self) -> threading.Thread:
        """Start the pool and this interpreter's zygote in a background thread, if they are not running."""
        thread = threading.Thread(target=self._warm, name="sgpu-warm", daemon=True)
        thread.start()
        return thread

    def submit(
        self, spec: RunSpec, packed: Packed, key: bytes, environ: dict[str, str], along: Attachments = _NOTHING
    ) -> ClientRun:
        """Send the payload and queue the run; returns when the pool has accepted it.

        Raises:
            PoolError: The pool can't be reached or started.
            UsageError: The pool refuses the run, or there is no room for its payload.
            CapacityError: No devices are free and the run does not wait.
        """
        try:
            return super().submit(spec, packed, key, environ, along)
        except (UsageError, CapacityError) as error:
            if not self._kept_settings:
                raise
            raise type(error)(f"{error.message} {self._kept_settings}") from None

    def apply_settings(self) -> str:
        """Apply this process's pool settings to the local pool, by restarting it if it is idle.

        Returns:
            Why a pool in use keeps other settings, and the remedy; "" if the settings are in effect.

        Raises:
            PoolError: The pool can't be reached or started.
            UsageError: A variable has an invalid value.
        """
        self._kept_settings = self._connection.settings_applied()
        return self._kept_settings

    @property
    def sees_client(self) -> bool:
        """Whether the pool's nodes see this machine's files and run its Python; starts the local pool if needed.

        Raises:
            PoolError: The pool can't be started or reached.
        """
        return self._connection.made(start=True).welcome.sees_client

    @property
    def connected(self) -> object | None:
        """An object that identifies the link: a different one after a reconnection to another service, None without."""
        return self._connection.alive

    def notify(self, message: KeepEnvironment | Describe | TrackRun | Warm) -> None:
        """Send a message without waiting for a reply; dropped if there is no link."""
        if (link := self._connection.alive) is not None:
            link.send(message)

    def on_run_ended(self, run_id: str, state: RunState, ended_at: float) -> None:
        """Record a run's end, so that later look-ups need not ask a remote pool."""
        if self.entry is not None:
            note_end(self._settings, run_id, state, ended_at)

    def run_over(self, run_id: str) -> None:
        """Mark a run as ended: its payload memory may be reused."""
        self._memory.run_over(run_id, accepted=True)

    def run_left(self, run_id: str) -> None:
        """Give up a run that continues without this process, or is lost: its payload memory is never written again."""
        self._memory.forget(run_id)

    def attach(self, run: str) -> tuple[ClientRun, RunState]:
        """Attach to a run and receive its events from the first one.

        Args:
            run: A unique prefix of its id; "" means the newest active detached run, else the newest run.

        Returns:
            Its handle and its current state.

        Raises:
            RunUnknown: There is no such run.
        """
        link, answer = ask_this_or_next(
            self._connection, lambda link: (link, ask(link, Attach(request=0, run=run), Attached)), start=True
        )
        spec = answer.spec
        events = link.attached(answer.request, spec.run_id)
        return self.run_of(spec, answer.key, link, events), answer.state

    def detach(self, run: str, timeout_s: float = REPLY_TIMEOUT_S, *, start: bool = False) -> str:
        """Detach a run, so that it continues without its notebook, and return a sentence for the user.

        Args:
            run: A unique prefix of its id; "" means every run of this process.
            timeout_s: Time to wait for the reply, in seconds.
            start: Start a pool if there is none: it may have runs to take over.

        Raises:
            UsageError: No run, or more than one, matches.
        """
        return ask(self._connection.made(start=start), Detach(request=0, run=run), Accepted, timeout_s).text

    def stacks(self, run: str, *, start: bool = False) -> Stacks:
        """Return the current stack of every rank of an active run; `run` as in `attach`, `start` as in `detach`.

        Raises:
            RunUnknown: There is no such active run.
        """
        return ask(self._connection.made(start=start), AskStacks(request=0, run=run), Stacks)

    def status(self, recent: int = 20, *, start: bool = True, timeout_s: float = REPLY_TIMEOUT_S) -> PoolStatus | None:
        """Return the pool's devices, queue and runs; None if no pool is running and `start` is False.

        Args:
            recent: Number of newest runs to include, besides all active ones.
            start: Start a pool if there is none.
            timeout_s: Time to wait for the reply, in seconds.

        Raises:
            PoolError: The pool can't be started or reached, or does not answer.
        """
        if not start and self.entry is None and self.connected is None and find_pool(self._settings) is None:
            return None
        return ask_this_or_next(self._connection, lambda link: self._status(link, recent, timeout_s), start=start)

    def _status(self, link: PoolLink, recent: int, timeout_s: float) -> PoolStatus:
        of, known = self._known_status
        if of is not link:
            known = None
        question = AskStatus(request=0, recent=recent, known="" if known is None else known.version)
        status = with_changes(known, ask(link, question, PoolStatus, timeout_s))
        self._known_status = link, status
        return status

    def cancel(self, run: str, reason: str, *, kill: bool = False) -> str:
        """Cancel a run and return a sentence for the user.

        Args:
            run: A unique prefix of its id.
            reason: Who or what cancels it.
            kill: As in `Run.cancel`.

        Raises:
            UsageError: No run, or more than one, matches.
        """
        order = Cancel(request=0, run=run, reason=reason, kill=kill)
        return ask(self._connection.made(start=False), order, Accepted).text

    def restart_ranks(self, session: str, ranks: tuple[int, ...] = (), timeout_s: float = RESTART_TIMEOUT_S) -> str:
        """Replace ranks of a session by new processes; return a sentence for the user when they have joined.

        Args:
            session: The session's run id.
            ranks: The ranks to replace; empty means all.
            timeout_s: Time to wait for the new ranks, in seconds.

        Raises:
            SessionError: There is no such session, a cell runs in it, or the new ranks did not join.
        """
        order = RestartRanks(request=0, session=session, ranks=ranks)
        with self._connection.made(start=False).ask(order) as answer:
            try:
                return answer.of(Accepted, timeout_s).text
            except TimeoutError:
                raise SessionError(
                    f"the new ranks have not joined their session within {timeout_s:g} s. It continues as soon as they "
                    "do; %sgpu_disconnect ends it."
                ) from None

    def ask_rank(self, session: str, question: RankQuestion, timeout_s: float = 1.0) -> RankAnswer:
        """Ask an idle rank of a session about its namespace. Errors are returned in the answer's `problem`.

        Args:
            session: The session's run id.
            question: What to ask.
            timeout_s: Time to wait for the answer, in seconds; the user is typing meanwhile.
        """
        if (link := self._connection.alive) is None:
            return RankAnswer(problem=f"the {self.name} pool is not connected.")
        with link.ask(AskRank(request=0, session=session, question=question)) as answer:
            try:
                return answer.of(RankAnswered, timeout_s).answer
            except TimeoutError:
                return RankAnswer(problem=f"no answer within {timeout_s:g} s.")
            except SgpuError as error:
                return RankAnswer(problem=error.message)

    def link(self) -> PoolLink:
        """Return the link, for messages without a reply. Does not start a pool.

        Raises:
            PoolError: No pool is running, or it can't be reached.
        """
        return self._connection.made(start=False)

    def stop(self, *, force: bool) -> bool:
        """Stop the pool. For the local pool, wait until its process has exited, and return False if there was none.

        Raises:
            PoolError: Runs are active and `force` is not set, or the pool does not exit.
        """
        if not self._connection.stop(force=force):
            return False
        self.close()
        return True

    def close(self) -> None:
        """Close the link; the pool cancels the runs that this kernel follows."""
        self._connection.close()
        self._memory.close()

    def close_if_unused(self) -> None:
        """Close the link if it is idle; it is made again on next use."""
        link = self._connection.alive
        if link is not None and not link.is_used:
            self.unless_submitting(self._connection.close)

    # ------------------------------------------------------------ internals

    def _link_lost(self) -> None:
        self._memory.pool_lost()
        self._noticed("")

    def _noticed(self, text: str) -> None:
        if text != self.notice:
            self.notice = text
            if self._on_notice is not None:
                self._on_notice(text)

    def _warm(self) -> None:
        # the first run fails with the same error and shows it to the user
        with contextlib.suppress(PoolError):
            self._connection.warmed()


def _variables_of_runs() -> list[str | None]:
    return [os.environ.get(f"SGPU_{name.upper()}") for name in _OF_RUNS]
