"""What one can ask of a pool. One `Pool` per kernel; it connects when first needed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from sgpu_magic.client.connection import REPLY_TIMEOUT_S, Connection, FarConnection, LocalConnection, ask
from sgpu_magic.client.link import PoolLink, PoolLost
from sgpu_magic.client.mirror import note_end
from sgpu_magic.client.pools_file import LOCAL, PoolEntry
from sgpu_magic.client.run import Run
from sgpu_magic.client.submitter import Attachments, PayloadMemory, Submitter
from sgpu_magic.client.this_process import CurrentSettings
from sgpu_magic.config import Settings
from sgpu_magic.errors import CapacityError, PoolError, SessionError, SgpuError, UsageError
from sgpu_magic.payload.pack import Packed
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
from sgpu_magic.wire.pool_status import AskStatus, PoolStatus
from sgpu_magic.wire.rank import RankAnswer, RankQuestion
from sgpu_magic.wire.run import Interpreter, RunSpec
from sgpu_magic.wire.states import RunState

# new processes that join a group: as long as a session's start may take where a rank does not come
RESTART_TIMEOUT_S = 120.0
_NOTHING = Attachments()


class Pool:
    """A pool as a kernel or a command sees it. Methods may be called by any thread.

    Args:
        settings: Where the local pool lives.
        on_notice: Called in a thread of the link with what the pool wants to be known, "" when it takes that back.
        entry: A pool of another machine; None is the local one.
        on_sending: Called about once a second with how much of a run's luggage is at the pool, "" when all is.

    Attributes:
        notice: The pool's last notice.
    """

    def __init__(
        self,
        settings: Settings,
        on_notice: Callable[[str], None] | None = None,
        entry: PoolEntry | None = None,
        on_sending: Callable[[str], None] | None = None,
    ) -> None:
        self._home = settings
        self._settings = CurrentSettings(settings)
        self.notice = ""
        self._on_notice = on_notice
        self.entry = entry
        self.name = LOCAL if entry is None else entry.name
        self._memory = PayloadMemory()
        self._kept_settings = ""
        told = (settings, self._link_lost, self._noticed)
        self._connection: Connection = LocalConnection(*told) if entry is None else FarConnection(*told, entry)
        self._submitter = Submitter(self._connection, self._memory, settings, self.name, on_sending)

    @property
    def settings(self) -> Settings:
        """Where the pool lives, as it was given; what is read for each run, as the environment says now.

        Raises:
            UsageError: A variable has a value that means nothing.
        """
        return self._settings.now()

    def warm_in_background(self) -> threading.Thread:
        """Start the pool and this interpreter's zygote, unless they are there, without anybody waiting."""
        thread = threading.Thread(target=self._warm, name="sgpu-warm", daemon=True)
        thread.start()
        return thread

    def warm(self, interpreter: Interpreter, ranks: int) -> None:
        """Ask for this interpreter's zygote and a standby group of `ranks`, if the pool is there; nobody waits."""
        self.tell(Warm(interpreter=interpreter, ranks=ranks))

    def submit(
        self, spec: RunSpec, packed: Packed, key: bytes, environ: dict[str, str], along: Attachments = _NOTHING
    ) -> Run:
        """Ship the payload and queue the run; returns when the pool has taken it.

        Raises:
            PoolError: The pool can't be reached or started.
            UsageError: The pool refuses the run, or there is no room for its payload.
            CapacityError: There is no room now and the run was not to wait.
        """
        try:
            run = self._submitter.submit(spec, packed, key, environ, along)
        except (UsageError, CapacityError) as error:
            if not self._kept_settings:
                raise
            raise type(error)(f"{error.message} {self._kept_settings}") from None
        run.pool = self.name
        return run

    def apply_settings(self) -> str:
        """Have a local pool with the settings that this process states; one that nobody uses is restarted for them.

        Returns:
            Why the pool keeps others, and what to do; "" when it has them.

        Raises:
            PoolError: It can't be reached or started.
            UsageError: A variable has a value that means nothing.
        """
        self._kept_settings = self._connection.settings_applied()
        return self._kept_settings

    @property
    def sees_client(self) -> bool:
        """Whether its nodes see this machine's files and run its Python; starts the pool when there is none.

        Raises:
            PoolError: It can't be started or reached.
        """
        return self._connection.made(start=True).welcome.sees_client

    @property
    def connected(self) -> object | None:
        """What stands for the link to the pool: another one when its service is. None while there is no link."""
        return self._connection.alive

    def tell(self, message: KeepEnvironment | Describe | TrackRun | Warm) -> None:
        """Tell the pool something that nobody waits for; lost when there is no pool."""
        if (link := self._connection.alive) is not None:
            link.send(message)

    def heard_end(self, run_id: str, state: RunState, ended_at: float) -> None:
        """A run's last event has come: who looks for it later need not ask another machine's pool."""
        if self.entry is not None:
            note_end(self._home, run_id, state, ended_at)

    def run_over(self, run_id: str) -> None:
        """The run ended: its memory may be used for the next one."""
        self._memory.run_over(run_id, accepted=True)

    def run_left(self, run_id: str) -> None:
        """The run goes on without this process, or is lost: its memory is never written again."""
        self._memory.forget(run_id)

    def attach(self, run: str) -> tuple[Run, RunState]:
        """Follow a run from its first event on.

        Args:
            run: A unique prefix of its id; "" is the newest run that goes on without a notebook, else the newest.

        Returns:
            Its handle, and its state now.

        Raises:
            RunUnknown: There is no such run.
        """
        link = self._connection.made(start=True)
        answer = ask(link, Attach(request=0, run=run), Attached)
        spec = answer.spec
        events = link.attached(answer.request, spec.run_id)
        found = Run(spec, answer.key, link, events, self._submitter.directory(link, spec.run_id))
        found.pool = self.name
        return found, answer.state

    def find_again(self, run: Run) -> None:
        """Follow a run on after the pool service has died: with the next one, which may have to be started.

        A run that was still queued is submitted again: nobody else has it.

        Raises:
            RunUnknown: It had started, and the new service does not have it.
            PoolLost: The new service died too.
            PoolError: It can't be started or reached.
        """
        self._submitter.find_again(run)

    def cancel_in_background(self, run: Run, reason: str) -> None:
        """Cancel a run whose pool service has died, when the next one is there; nobody waits."""
        self._submitter.cancel_in_background(run, reason)

    def detach(self, run: str, timeout_s: float = REPLY_TIMEOUT_S, *, start: bool = False) -> str:
        """Let a run go on without its notebook and return a sentence.

        Args:
            run: A unique prefix of its id; "" is every run of this process.
            timeout_s: How long to wait for the answer in seconds.
            start: Start a pool when there is none: it may have runs to take over.

        Raises:
            UsageError: No run, or more than one, has an id like that.
        """
        return ask(self._connection.made(start=start), Detach(request=0, run=run), Accepted, timeout_s).text

    def stacks(self, run: str, *, start: bool = False) -> Stacks:
        """Ask where every rank of a run is now; `run` as in `attach`, of runs that go on; `start` as in `detach`.

        Raises:
            RunUnknown: No such run goes on.
        """
        return ask(self._connection.made(start=start), AskStacks(request=0, run=run), Stacks)

    def status(self, recent: int = 20, *, start: bool = True, timeout_s: float = REPLY_TIMEOUT_S) -> PoolStatus | None:
        """Ask for devices, queue and runs; None when no pool runs and none shall be started.

        Args:
            recent: So many of the newest runs, and all that go on.
            start: Start a pool when there is none.
            timeout_s: How long to wait for the answer in seconds.

        Raises:
            PoolError: It can't be started or reached, or does not answer.
        """
        if not start and self._connection.alive is None and not self._connection.exists:
            return None
        question = AskStatus(request=0, recent=recent)
        try:
            return ask(self._connection.made(start=start), question, PoolStatus, timeout_s)
        except PoolLost:
            # it had ended, and the link had not noticed yet; the next pool answers
            if not start:
                raise
            return ask(self._connection.made(start=start), question, PoolStatus, timeout_s)

    def cancel(self, run: str, reason: str, *, kill: bool = False) -> str:
        """Cancel a run by a unique prefix of its id and return a sentence.

        Args:
            run: The prefix.
            reason: Who or what wants that.
            kill: As in `Run.cancel`.

        Raises:
            UsageError: No run, or more than one, has an id like that.
        """
        order = Cancel(request=0, run=run, reason=reason, kill=kill)
        return ask(self._connection.made(start=False), order, Accepted).text

    def restart_ranks(self, session: str, ranks: tuple[int, ...] = (), timeout_s: float = RESTART_TIMEOUT_S) -> str:
        """Replace ranks of a session by new processes and return a sentence when they are in it.

        Args:
            session: The session's run id.
            ranks: Which; empty means all.
            timeout_s: How long to wait for them in seconds.

        Raises:
            SessionError: There is no such session, a cell runs in it, or the new ranks did not join.
        """
        order = RestartRanks(request=0, session=session, ranks=ranks)
        with self._connection.made(start=False).ask(order) as answer:
            try:
                return answer.of(Accepted, timeout_s).text
            except TimeoutError:
                raise SessionError(
                    f"the new ranks have not joined their session within {timeout_s:g} s. It goes on as soon as they "
                    "do; %sgpu_disconnect ends it."
                ) from None

    def ask_rank(self, session: str, question: RankQuestion, timeout_s: float = 1.0) -> RankAnswer:
        """Ask an idle rank of a session about its namespace. Whatever is in the way is told in the answer.

        Args:
            session: The session's run id.
            question: What to ask.
            timeout_s: How long to wait for the answer in seconds; a user who types waits meanwhile.
        """
        link = self._connection.alive
        if link is None:
            return RankAnswer(problem=f"the {self.name} pool is not connected.")
        with link.ask(AskRank(request=0, session=session, question=question)) as answer:
            try:
                return answer.of(RankAnswered, timeout_s).answer
            except TimeoutError:
                return RankAnswer(problem=f"no answer within {timeout_s:g} s.")
            except SgpuError as error:
                return RankAnswer(problem=error.message)

    def link(self) -> PoolLink:
        """Return the link, for messages that are no questions. Starts no pool.

        Raises:
            PoolError: No pool runs, or it can't be reached.
        """
        return self._connection.made(start=False)

    def stop(self, *, force: bool) -> bool:
        """Stop the local pool and wait until it is gone. False when there was none. Another is asked to stop.

        Raises:
            PoolError: Runs are going on and `force` is not set, or it does not end.
        """
        if not self._connection.stop(force=force):
            return False
        self.close()
        return True

    def close(self) -> None:
        """Say goodbye; runs that this kernel follows are cancelled."""
        self._connection.close()
        self._memory.close()

    def close_if_unused(self) -> None:
        """End the link if nothing goes on over it; it is made again when it is needed."""
        link = self._connection.alive
        if link is not None and not link.is_used:
            self._submitter.unless_submitting(self._connection.close)

    # ------------------------------------------------------------ within

    def _link_lost(self) -> None:
        self._memory.pool_lost()
        self._noticed("")

    def _noticed(self, text: str) -> None:
        if text != self.notice:
            self.notice = text
            if self._on_notice is not None:
                self._on_notice(text)

    def _warm(self) -> None:
        # the first run meets the same problem and tells it where it can be seen
        with contextlib.suppress(PoolError):
            self._connection.warmed()
