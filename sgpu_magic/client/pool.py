"""`Pool`: the API of one pool. It connects on first use."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sgpu_magic.client.blob_sender import Sending
from sgpu_magic.client.connector import (
    REPLY_TIMEOUT_S,
    Connector,
    LocalConnector,
    RemoteConnector,
    SshConnector,
    ask,
    ask_this_or_next,
)
from sgpu_magic.client.link import OnNotice, PoolLink, PoolLost
from sgpu_magic.client.mirror import mirror_path, note_end, note_sent
from sgpu_magic.client.payload_memory import PayloadMemory
from sgpu_magic.client.pools_file import LOCAL, PoolEntry
from sgpu_magic.client.run import Attachments, ClientRun, Submitted
from sgpu_magic.client.send_queue import Answer, EventQueue
from sgpu_magic.client.session_line import SessionLines
from sgpu_magic.client.this_machine import running_pool, this_context, this_interpreter
from sgpu_magic.client.upload_files import send_attachments
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import CapacityError, PoolError, RunUnknown, SessionError, SgpuError, UsageError
from sgpu_magic.payload.pack import Packed
from sgpu_magic.wire.attachments import FilePayload
from sgpu_magic.wire.base import CancelReason, RunState
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
    Submit,
    TrackRun,
    Warm,
)
from sgpu_magic.wire.events import Placed
from sgpu_magic.wire.pool_status import AskStatus, PoolStatus, with_changes
from sgpu_magic.wire.run import RankAnswer, RankQuestion, RunSpec

# how long to look for, or start, the next pool service in order to cancel a run
_CANCEL_PATIENCE_S = 60.0
_CANCEL_PAUSE_S = 0.2
# the replacement processes join a process group: the same limit as for a session's start when a rank is missing
RESTART_TIMEOUT_S = 120.0
_NOTHING = Attachments()
# settings of single runs: `%env SGPU_TRACK=off` in a running kernel applies from the next run on
_OF_RUNS = ("env_version", "files", "variables", "track", "tracking_uri", "code_warn_bytes", "code_limit_bytes")


class Pool:
    """A pool as seen by a kernel or a command. Thread-safe.

    Args:
        settings: Settings, with the directories of the local pool.
        on_notice: Called in the link's thread with each notice of the pool, "" when a notice is withdrawn.
        entry: Entry of a pool on another machine; None for the local pool.
        on_sending: Called about once a second with the progress of a run's uploads, "" when they are complete.

    Attributes:
        name: The pool's name.
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
        self._on_sending = on_sending
        self.entry = entry
        self.name = LOCAL if entry is None else entry.name
        self._settings = settings
        self._memory = PayloadMemory()
        self._lock = threading.Lock()
        # number of submissions in progress
        self._submitting = 0
        self._kept_settings = ""
        # the last status, and the link that it came over
        self._known_status: tuple[PoolLink | None, PoolStatus | None] = (None, None)
        self._lines = SessionLines()
        callbacks = (settings, self._link_lost, self._noticed)
        self._connector: Connector
        if entry is None:
            self._connector = LocalConnector(*callbacks)
        elif (address := entry.ssh) is not None:
            self._connector = SshConnector(*callbacks, entry, address)
        else:
            self._connector = RemoteConnector(*callbacks, entry)

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
        self,
        spec: RunSpec,
        packed: Packed,
        key: bytes,
        environ: dict[str, str],
        along: Attachments = _NOTHING,
        placed: Placed | None = None,
    ) -> ClientRun:
        """Send the payload and queue the run; returns when the pool has accepted it.

        Args:
            spec: The run.
            packed: Its payload.
            key: Its HMAC key.
            environ: The ranks' environment variables.
            along: What is submitted with it.
            placed: For a cell in a session, the session's devices, so that it may go over the session's line. The pool
                may then still refuse it when its events are waited for. None for other runs.

        Raises:
            PoolError: The pool can't be reached or started.
            UsageError: The pool refuses the run, or there is not enough space for its payload.
            CapacityError: No devices are free and the run does not wait.
        """
        try:
            return self._submit(spec, packed, key, environ, along, placed)
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
        self._kept_settings = self._connector.apply_settings()
        return self._kept_settings

    def new_simulation(self) -> str:
        """Return, once for each local pool, that it simulates devices by the setting of another process; else "".

        Raises:
            PoolError: The pool can't be reached or started.
            UsageError: A variable has an invalid value.
        """
        return self._connector.new_simulation()

    @property
    def sees_client(self) -> bool:
        """Whether the pool's nodes see this machine's files and run its Python; starts the local pool if needed.

        Raises:
            PoolError: The pool can't be started or reached.
        """
        return self._connector.get_link(start=True).welcome.sees_client

    @property
    def saw_client(self) -> bool:
        """As `sees_client`, for the service that this process has been connected to, even if that has ended."""
        link = self._connector.last
        return self.sees_client if link is None else link.welcome.sees_client

    @property
    def connected(self) -> object | None:
        """An object that identifies the link: a different one after a reconnection to another service, None without."""
        return self._connector.alive

    def open_line(self, session: str) -> None:
        """Open the line of a session that has just connected, so that its first cell need not wait for that."""
        if (link := self._connector.alive) is not None:
            self._lines.opened(session, link)

    def notify(self, message: KeepEnvironment | Describe | TrackRun | Warm) -> None:
        """Send a message without waiting for a reply; dropped if there is no link."""
        if (link := self._connector.alive) is not None:
            link.send(message)

    def on_run_ended(self, run_id: str, state: RunState, ended_at: float) -> None:
        """Record a run's end, so that later look-ups need not ask a remote pool."""
        if self.entry is not None:
            note_end(self._settings, run_id, state, ended_at)

    def reuse_payload(self, run_id: str) -> None:
        """Mark a run as ended: its payload memory may be reused."""
        self._memory.on_run_ended(run_id, accepted=True)

    def give_payload_up(self, run_id: str) -> None:
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
            self._connector, lambda link: (link, ask(link, Attach(request=0, run=run), Attached)), start=True
        )
        spec = answer.spec
        events = link.attached(answer.request, spec.run_id)
        return self.run_of(spec, answer.key, link, events), answer.state

    def find_again(self, run: ClientRun) -> None:
        """Attach to a run again after its pool service died, through the next service, which is started if needed.

        A run that was still queued is submitted again.

        Raises:
            RunUnknown: The run had started, and the new service does not have it.
            PoolLost: The new service died too.
            PoolError: The new service can't be started or reached.
        """
        link = self._connector.get_link(start=True)
        question = Attach(request=0, run=run.run_id, after=run.last_seq, owns=run.owned)
        try:
            answer = ask(link, question, Attached)
        except RunUnknown:
            if run.submission is None:
                raise
            message, frames = run.submission
            events = link.follow(run.run_id)
            self._memory.submitted(run.run_id, link)
            ask(link, message, Accepted, frames=frames)
            run.move_to(link, events, from_start=True)
            return
        self._memory.submitted(run.run_id, link)
        run.move_to(link, link.attached(answer.request, run.run_id))

    def cancel_in_background(self, run: ClientRun, reason: str) -> None:
        """Cancel a run whose pool service died, through the next service, in a background thread."""

        # a run that was still queued ended with its pool
        run.submission = None

        def work() -> None:
            deadline = time.monotonic() + _CANCEL_PATIENCE_S
            while time.monotonic() < deadline:
                try:
                    self.find_again(run)
                except PoolError:
                    # the next service is starting, or has died too
                    time.sleep(_CANCEL_PAUSE_S)
                except SgpuError:
                    # no pool has the run any more
                    return
                else:
                    run.cancel(reason)
                    return

        threading.Thread(target=work, name="sgpu-cancel", daemon=True).start()

    def run_of(
        self, spec: RunSpec, key: bytes, link: PoolLink, events: EventQueue, submission: Submitted | None = None
    ) -> ClientRun:
        """Return the handle of a run of this pool; arguments as for `ClientRun`."""
        run = ClientRun(spec, key, link, events, self._directory(link, spec.run_id), submission)
        run.pool = self.name
        return run

    def detach(self, run: str, timeout_s: float = REPLY_TIMEOUT_S, *, start: bool = False) -> str:
        """Detach a run, so that it continues without its notebook, and return a sentence for the user.

        Args:
            run: A unique prefix of its id; "" means every run of this process.
            timeout_s: Time to wait for the reply, in seconds.
            start: Start a pool if there is none: it may have runs to take over.

        Raises:
            UsageError: No run, or more than one, matches.
        """
        return ask(self._connector.get_link(start=start), Detach(request=0, run=run), Accepted, timeout_s).text

    def stacks(self, run: str, *, start: bool = False) -> Stacks:
        """Return the current stack of every rank of an active run; `run` as in `attach`, `start` as in `detach`.

        Raises:
            RunUnknown: There is no such active run.
        """
        return ask(self._connector.get_link(start=start), AskStacks(request=0, run=run), Stacks)

    def status(
        self, recent: int = 20, *, start: bool = True, timeout_s: float = REPLY_TIMEOUT_S, history: int = 0
    ) -> PoolStatus | None:
        """Return the pool's devices, queue and runs; None if no pool is running and `start` is False.

        Args:
            recent: Number of newest runs to include, besides all active ones.
            start: Start a pool if there is none.
            timeout_s: Time to wait for the reply, in seconds.
            history: As in `AskStatus`.

        Raises:
            PoolError: The pool can't be started or reached, or does not answer.
        """
        if not start and self.entry is None and self.connected is None and running_pool(self._settings) is None:
            return None
        question = AskStatus(request=0, recent=recent, history=history)
        return ask_this_or_next(self._connector, lambda link: self._status(link, question, timeout_s), start=start)

    def _status(self, link: PoolLink, question: AskStatus, timeout_s: float) -> PoolStatus:
        of, known = self._known_status
        if of is not link:
            known = None
        question = replace(question, known="" if known is None else known.version)
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
        return ask(self._connector.get_link(start=False), order, Accepted).text

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
        with self._connector.get_link(start=False).ask(order) as answer:
            try:
                return answer.wait(Accepted, timeout_s).text
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
        return self.ask_ranks(session, [question], timeout_s)[0]

    def ask_ranks(self, session: str, questions: Sequence[RankQuestion], timeout_s: float) -> list[RankAnswer]:
        """Ask several idle ranks of a session at once, as `ask_rank` does, and return the answers in that order.

        Args:
            session: The session's run id.
            questions: What to ask each rank.
            timeout_s: Time to wait for all answers together, in seconds.
        """
        if (link := self._connector.alive) is None:
            return [RankAnswer(problem=f"the {self.name} pool is not connected.") for _ in questions]
        until = time.monotonic() + timeout_s
        with contextlib.ExitStack() as asked:
            orders = [AskRank(request=0, session=session, question=question) for question in questions]
            pending = [asked.enter_context(link.ask(order)) for order in orders]
            return [_answered(answer, until, timeout_s) for answer in pending]

    def link(self) -> PoolLink:
        """Return the link, for messages without a reply. Does not start a pool.

        Raises:
            PoolError: No pool is running, or it can't be reached.
        """
        return self._connector.get_link(start=False)

    def stop(self, *, force: bool) -> bool:
        """Stop the pool. For the local pool, wait until its process has exited, and return False if there was none.

        Raises:
            PoolError: Runs are active and `force` is not set, or the pool does not exit.
        """
        if not self._connector.stop(force=force):
            return False
        self.close()
        return True

    def close(self) -> None:
        """Close the link; the pool cancels the runs that this kernel follows."""
        self._connector.close()
        self._lines.close()
        self._memory.close()

    def close_if_unused(self) -> None:
        """Close the link if it is idle; it is made again on next use."""
        link = self._connector.alive
        if link is not None and not link.is_used:
            self._unless_submitting(self._connector.close)

    # ------------------------------------------------------------ internals

    def _submit(
        self,
        spec: RunSpec,
        packed: Packed,
        key: bytes,
        environ: dict[str, str],
        along: Attachments,
        placed: Placed | None,
    ) -> ClientRun:
        with self._lock:
            self._submitting += 1
        session = spec.session if spec.in_session else ""
        try:
            if session and not self._lines.begin(session, spec.run_id):
                placed = None
            # an open line needs no pool service
            link = self._connector.last if placed is not None and self._lines.get(session) is not None else None
            link = link or self._connector.get_link(start=True)
            try:
                run = self._submit_once(link, spec, packed, key, environ, along, placed)
            except PoolLost:
                # the pool ended either before it accepted the run or after
                link = self._connector.get_link(start=True)
                try:
                    run = self._taken_before(link, spec, key)
                except RunUnknown:
                    run = self._submit_once(link, spec, packed, key, environ, along, None)
        except BaseException:
            self._lines.end(session, spec.run_id)
            raise
        finally:
            with self._lock:
                self._submitting -= 1
        if session:
            run.on_done = functools.partial(self._lines.end, session, spec.run_id)
        if run.mirror is not None:
            note_sent(self._settings, self.name, run.spec)
        return run

    def _taken_before(self, link: PoolLink, spec: RunSpec, key: bytes) -> ClientRun:
        answer = ask(link, Attach(request=0, run=spec.run_id, owns=True), Attached)
        self._memory.forget(spec.run_id)
        run = self.run_of(spec, key, link, link.attached(answer.request, spec.run_id))
        run.owned = True
        return run

    def _submit_once(
        self,
        link: PoolLink,
        spec: RunSpec,
        packed: Packed,
        key: bytes,
        environ: dict[str, str],
        along: Attachments,
        placed: Placed | None,
    ) -> ClientRun:
        with Sending(self.name, link, self._on_sending) as sending:
            payload, frames = self._memory.put(packed, spec.run_id, link, self._settings, sending)
            along, notes = send_attachments(along, link, self._settings.state_path, sending)
        spec = spec.with_notes(notes)
        events = link.follow(spec.run_id)
        try:
            self._memory.submitted(spec.run_id, link)
            working_context = msgspec.structs.asdict(along.working_context) if along.working_context is not None else {}
            message = Submit(
                request=0,
                spec=spec,
                interpreter=along.interpreter or this_interpreter(environ),
                context=replace(
                    this_context(environ, key), is_remote=along.is_remote, cell=along.cell, **working_context
                ),
                payload=payload,
                environment=along.environment,
                code=along.code,
                tracking=along.tracking,
                uploads=along.uploads,
            )
            run = self.run_of(spec, key, link, events, (message, frames))
            if placed is None or not self._goes_over_line(run, message, frames, placed):
                ask(link, message, Accepted, frames=frames)
        except BaseException:
            # also on an interrupt: a run that was accepted nevertheless must not continue unnoticed
            cancel = Cancel(request=0, run=spec.run_id, reason=CancelReason.INTERRUPT)
            link.send(cancel)
            if (line := self._lines.get(spec.session)) is not None:
                line.send(cancel)
            link.unfollow(spec.run_id, events)
            if isinstance(payload.source, FilePayload):
                Path(payload.source.path).unlink(missing_ok=True)
            self._memory.on_run_ended(spec.run_id, accepted=False)
            raise
        return run

    def _goes_over_line(self, run: ClientRun, message: Submit, frames: Sequence[bytes], placed: Placed) -> bool:
        """Send a cell over its session's line, if it has one and takes the cell. Returns whether it was sent."""
        if message.environment is not None or message.code or message.uploads or not frames:
            return False
        if (line := self._lines.opened(run.spec.session, run.link)) is None:
            return False
        if not line.submit(message, frames, placed, run.events):
            return False
        run.go_over(line, lambda: self._submit_refused(run, message, frames))
        return True

    def _submit_refused(self, run: ClientRun, message: Submit, frames: Sequence[bytes]) -> None:
        """Submit a cell to the pool that its session's agent has not started."""
        run.submission = message, frames
        with contextlib.suppress(PoolLost):
            # the follower finds the next service, which gets the submission then
            ask(run.link, message, Accepted, frames=frames)

    def _directory(self, link: PoolLink, run_id: str) -> Path:
        """Return the local directory of a run's files: the run's own, or the mirror of a run on another machine."""
        if link.welcome.same_host:
            state_dir = dict(link.welcome.settings).get("state_dir", self._settings.state_dir)
            return replace(self._settings, state_dir=state_dir).runs_path / run_id
        return mirror_path(self._settings, self.name, run_id)

    def _unless_submitting(self, act: Callable[[], None]) -> None:
        """Call `act` unless a submission is in progress."""
        with self._lock:
            if not self._submitting:
                act()

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
            self._connector.warm_up()


def _answered(answer: Answer, until: float, timeout_s: float) -> RankAnswer:
    """Wait until `until`, on the monotonic clock, for a rank's answer."""
    try:
        return answer.wait(RankAnswered, max(until - time.monotonic(), 0.0)).answer
    except TimeoutError:
        return RankAnswer(problem=f"no answer within {timeout_s:g} s.")
    except SgpuError as error:
        return RankAnswer(problem=error.message)


def _variables_of_runs() -> list[str | None]:
    return [os.environ.get(f"SGPU_{name.upper()}") for name in _OF_RUNS]
