"""One run in one group: launch, gather, find the root cause, stop, say when every process is gone.

The life of a run here:

    launch -> all joined -> all finished -> ended(succeeded) -> leave -> gone
                         -> one failed   -> others released  -> ended(failed) -> stop -> gone
           -> asked to end               -> interrupted      -> ended(...)    -> stop -> gone

`ended` is what the notebook waits for; the devices are free at `gone`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from sgpu_magic.agent import leftovers, release, root_cause
from sgpu_magic.agent.group import Group
from sgpu_magic.agent.keeper import Keeper, KeepJob
from sgpu_magic.agent.run_directory import PAYLOAD, RunDirectory
from sgpu_magic.agent.variables import torchrun_variables
from sgpu_magic.config import Settings
from sgpu_magic.protocol.events import (
    DisplayPublished,
    EventBody,
    Noted,
    OutputCleared,
    OutputWritten,
    PayloadReleased,
    RankFailed,
    RanksStarted,
    RunEnded,
)
from sgpu_magic.protocol.messages import (
    Cleared,
    Displayed,
    Execute,
    Failed,
    Finished,
    FromRank,
    Joined,
    Launch,
)
from sgpu_magic.protocol.records import Failure, InlinePayload, Payload, RankResult, SharedPayload
from sgpu_magic.protocol.states import FailureKind, RunState

# from one rung of the stop path to the next, where no grace is given
_RUNG_S = 0.3
# a cell that an interrupt reaches in Python ends as KeyboardInterrupt; only then are the connections shut
_INTERRUPT_LEAD_S = 0.03
# nothing may compete with the result on its way to the notebook
_LEAVE_DELAY_S = 0.03
_EXIT_HANDLERS_S = 5.0


class ExecutionListener(Protocol):
    """The agent."""

    def happened(self, run_id: str, body: EventBody, frames: Sequence[bytes]) -> None: ...
    def run_gone(self, execution: Execution) -> None: ...


class Execution:
    """Runs one launch in a group (a `GroupListener`).

    Args:
        launch: What to run.
        frames: Raw frames of the launch; the first is an inline payload.
        group: Its ranks, forked or being forked.
        warm: How the group came: `standby`, `zygote` or `cold`.
        keeper: Who copies large parts into the run's directory.
        settings: For the largest payload that is kept and the default grace.
        listener: Who hears what happened.
    """

    def __init__(
        self,
        launch: Launch,
        frames: Sequence[bytes],
        group: Group,
        warm: str,
        keeper: Keeper,
        settings: Settings,
        listener: ExecutionListener,
    ) -> None:
        self.launch = launch
        self.run_id = launch.spec.run_id
        self.group = group
        self.results_fds: dict[int, int] = {}
        self._frames = frames
        self._warm = warm
        self._keeper = keeper
        self._keep_payload = settings.keep_payload
        self._default_grace_s = settings.grace_s
        self._grace_s = launch.spec.grace_s
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []
        self._launched_at = time.monotonic()
        self._started_at: float | None = None
        self._joined: set[int] = set()
        self._results: dict[int, RankResult] = {}
        self._failures: dict[int, Failure] = {}
        self._exception_frames: dict[int, bytes] = {}
        self._result_frames: dict[int, bytes] = {}
        self._ending_as: RunState | None = None
        self._end_reason = ""
        self._releasing = False
        self._ended = False
        self._deciding = False
        self._gone = False
        self._payload_fd = -1
        self._keep_job: KeepJob | None = None
        self._payload_released = launch.payload.source.__class__ is InlinePayload
        self._directory = RunDirectory(launch)
        group.listener = self

    # ------------------------------------------------------------ start

    def start(self) -> None:
        """Send every rank its cell. Failures come as events like any other."""
        launch = self.launch
        try:
            self._payload_fd = self._open_payload()
            for process in self.group.ranks:
                process.output.begin_log(self._directory.log_path(process.rank))
            self._send_cells()
        except OSError as error:
            self._fail_whole(
                FailureKind.INTERNAL, f"the run could not be started on {socket.gethostname()}: {error}."
            )
            return
        if self.group.broken:
            self.group_broken(self.group.broken)
        try:
            self._directory.describe()
            if isinstance(launch.payload.source, InlinePayload):
                self._directory.write(PAYLOAD, self._frames[0])
                self._directory.payload_done(True, "")
        except OSError as error:
            self._say(
                Noted(
                    text=f"the run's directory {self._directory.path} could not be written: {error.strerror}"
                )
            )

    def _open_payload(self) -> int:
        match self.launch.payload.source:
            case SharedPayload(pid=pid, fd=fd):
                # a number that is not a live process's descriptor fails here, before any rank hears of the run
                return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            case InlinePayload():
                return -1
            case source:
                return os.open(source.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def _send_cells(self) -> None:
        launch = self.launch
        lease = launch.lease
        device = "cuda" if lease.uuids and not lease.simulated else "cpu"
        inline = isinstance(launch.payload.source, InlinePayload)
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as rendezvous:
            port = rendezvous.getsockname()[1]
            for process in self.group.ranks:
                rank = process.rank
                order = Execute(
                    run_id=self.run_id,
                    cell=launch.spec.cell,
                    context=launch.context,
                    layout=launch.payload.layout,
                    inline=inline,
                    outputs=launch.spec.outputs,
                    device=device,
                    visible_devices=lease.uuids if device == "cuda" else (),
                    rank_variables=torchrun_variables(launch, rank, port, device),
                )
                descriptors = [] if inline else [os.dup(self._payload_fd)]
                if rank == 0:
                    descriptors.append(os.dup(rendezvous.fileno()))
                self.group.execute(rank, order, self._frames[:1] if inline else (), descriptors)

    # ------------------------------------------------------------ from the group

    def rank_said(self, rank: int, message: FromRank, frames: Sequence[bytes]) -> None:
        match message:
            case Joined():
                self._joined.add(rank)
                if len(self._joined) == len(self.group.ranks) and self._started_at is None:
                    self._started_at = time.monotonic()
                    self._say(RanksStarted(pids=tuple(self.group.pids), warm=self._warm))
            case Displayed():
                self.group.ranks[rank].output.drain()
                self._say(
                    DisplayPublished(
                        rank=rank,
                        bundle=message.bundle,
                        metadata=message.metadata,
                        display_id=message.display_id,
                        update=message.update,
                    )
                )
            case Cleared():
                self.group.ranks[rank].output.drain()
                self._say(OutputCleared(rank=rank, wait=message.wait))
            case Finished():
                self._take_result(rank, message.result, frames)
            case Failed():
                if frames:
                    self._exception_frames[rank] = frames[0]
                self._take_failure(message.failure)

    def rank_wrote(self, batch: OutputWritten) -> None:
        if not self._ended:
            self._say(batch)

    def rank_exited(self, rank: int, status: int) -> None:
        if not self._has_reported(rank) and not self._ended:
            output = self.group.ranks[rank].output
            output.drain()
            failure = root_cause.death(
                rank, len(self.group.ranks), socket.gethostname(), status, time.time(), output.tail()
            )
            self._take_failure(failure)
        elif rank in self._results and not self._ended and rank not in self._failures:
            self._take_failure(
                root_cause.death(rank, len(self.group.ranks), socket.gethostname(), status, time.time(), "")
            )
        self._finish_if_gone()

    def group_broken(self, message: str) -> None:
        self._fail_whole(FailureKind.ENVIRONMENT, message)

    # ------------------------------------------------------------ gather

    def _has_reported(self, rank: int) -> bool:
        return rank in self._results or rank in self._failures

    def _take_result(self, rank: int, result: RankResult, frames: Sequence[bytes]) -> None:
        output = self.group.ranks[rank].output
        output.drain()
        payload = result.payload
        if payload is not None and isinstance(payload.source, SharedPayload):
            stream = self.group.ranks[rank].stream
            if stream is None:
                return
            (descriptor,) = stream.take_descriptors(1)
            self.results_fds[rank] = descriptor
            source = SharedPayload(pid=os.getpid(), fd=descriptor, size=payload.source.size)
            payload = Payload(source=source, layout=payload.layout)
        elif frames:
            self._result_frames[rank] = frames[0]
        self._results[rank] = msgspec.structs.replace(
            result, payload=payload, lines=output.lines, output_bytes=output.total_bytes
        )
        self._check_all_reported()

    def _take_failure(self, failure: Failure) -> None:
        rank = failure.rank
        if rank is None or rank in self._failures:
            return
        self.group.ranks[rank].output.drain()
        self._failures[rank] = failure
        if self._ended:
            return
        if self._ending_as is None:
            self._say(RankFailed(failure=failure))
            if not self._deciding:
                self._deciding = True
                patience = (
                    root_cause.PATIENCE_WITH_VICTIM_S
                    if failure.is_consequence
                    else root_cause.PATIENCE_WITH_CAUSE_S
                )
                self._later(patience, self._blame)
            elif not failure.is_consequence:
                self._later(root_cause.PATIENCE_WITH_CAUSE_S, self._blame)
        self._check_all_reported()

    def _check_all_reported(self) -> None:
        if self._ended or not all(self._has_reported(process.rank) for process in self.group.ranks):
            return
        if self._ending_as is not None:
            self._end(self._ending_as)
        elif self._failures:
            self._end(RunState.FAILED)
        else:
            self._end(RunState.SUCCEEDED)

    # ------------------------------------------------------------ stop path

    def end_as(self, state: RunState, reason: str) -> None:
        """Stop the run: interrupt, release, TERM, grace, KILL."""
        if self._ended or self._ending_as is not None:
            return
        self._ending_as = state
        self._end_reason = reason
        self._stop_ranks(interrupt_first=True)

    def _blame(self) -> None:
        """The culprit is known: free the others."""
        if not self._ended and self._ending_as is None and not self._releasing:
            self._stop_ranks(interrupt_first=False)

    def _stop_ranks(self, *, interrupt_first: bool) -> None:
        self._releasing = True
        steps = (self._interrupt, self._release) if interrupt_first else (self._release, self._interrupt)
        steps[0]()
        self._later(_INTERRUPT_LEAD_S, steps[1])
        self._later(_RUNG_S, self._stop_waiting)

    def _interrupt(self) -> None:
        for process in self.group.ranks:
            if not self._has_reported(process.rank):
                process.signal(signal.SIGINT)

    def _release(self) -> None:
        if not all(self._has_reported(process.rank) for process in self.group.ranks):
            self.group.release(release.connections_between(self.group.pids))

    def _stop_waiting(self) -> None:
        if not self._ended:
            self._end(self._ending_as or RunState.FAILED)

    def _fail_whole(self, kind: FailureKind, message: str) -> None:
        """The run failed as a whole; no rank is to blame."""
        if self._ended:
            self._finish_if_gone()
            return
        failure = Failure(kind=kind, message=message, host=socket.gethostname(), at=time.time())
        self._failures.setdefault(-1, failure)
        self._end(RunState.FAILED)

    # ------------------------------------------------------------ end

    def _end(self, state: RunState) -> None:
        for process in self.group.ranks:
            process.output.drain(last=True)
            if process.output.log_problem:
                self._say(Noted(text=process.output.log_problem))
        self._ended = True
        now = time.monotonic()
        started = self._started_at or now
        failure: Failure | None = None
        others: tuple[Failure, ...] = ()
        frames: list[bytes] = []
        results: tuple[RankResult, ...] = ()
        blamed = root_cause.find_root_cause(self._failures.values())
        if state is RunState.FAILED and blamed is not None:
            failure, others = blamed
            if failure.exception is not None and failure.rank is not None:
                frames.append(self._exception_frames[failure.rank])
            # only the culprit's exception travels
            others = tuple(msgspec.structs.replace(other, exception=None) for other in others)
        elif state is RunState.SUCCEEDED:
            results = tuple(self._results[process.rank] for process in self.group.ranks)
            frames += [self._result_frames[rank] for rank in sorted(self._result_frames)]
        elif state is RunState.TIMED_OUT:
            failure = Failure(
                kind=FailureKind.TIMEOUT, message=self._end_reason, host=socket.gethostname(), at=time.time()
            )
        if not results:
            self._close_results()
        self._say(
            RunEnded(
                state=state,
                failure=failure,
                reason=self._end_reason if state is RunState.CANCELLED else "",
                others=others,
                results=results,
                starting_s=started - self._launched_at,
                running_s=now - started,
            ),
            frames,
        )
        self._final_state = state
        self._later(_LEAVE_DELAY_S, self._let_leave)
        self._finish_if_gone()

    def _let_leave(self) -> None:
        """Ranks that are done exit; the others get TERM, the grace, KILL."""
        self.group.leave()
        unreported = [process for process in self.group.ranks if not self._has_reported(process.rank)]
        for process in unreported:
            process.signal(signal.SIGTERM, whole_session=True)
        if not unreported:
            self._later(_EXIT_HANDLERS_S, self._kill)
        elif self._ending_as is not None:
            self._later(self._default_grace_s if self._grace_s is None else self._grace_s, self._kill)
        else:
            # survivors of a failure get none unless it was asked for
            self._later(self._grace_s or 0.0, self._kill)

    def _kill(self) -> None:
        for process in self.group.ranks:
            process.signal(signal.SIGKILL, whole_session=True)

    def _finish_if_gone(self) -> None:
        if not self._ended or self._gone or not self.group.gone:
            return
        self._gone = True
        for timer in self._timers:
            timer.cancel()
        leftovers.kill_leftovers(self.run_id, set(self.group.pids))
        self.group.close()
        try:
            self._directory.ended(self._final_state)
        except OSError as error:
            self._say(Noted(text=f"run.json could not be written: {error.strerror}"))
        self._listener.run_gone(self)

    # ------------------------------------------------------------ payload and results

    def keep_large_parts(self) -> None:
        """Copy the payload's and the results' memory files into the run's directory, in the background."""
        for rank, descriptor in list(self.results_fds.items()):
            size = os.fstat(descriptor).st_size
            if size <= self._keep_payload:
                target = self._directory.path / f"result-{rank}.bin"
                self._keeper.keep(KeepJob(os.dup(descriptor), size, target, lambda kept, why: None))
        if self._payload_released:
            return
        if self._payload_fd < 0:
            self._payload_is_done(False, "it was never read")
            return
        descriptor, self._payload_fd = self._payload_fd, -1
        size = os.fstat(descriptor).st_size
        if size > self._keep_payload:
            os.close(descriptor)
            self._payload_is_done(False, f"it has {size / 1e9:.1f} GB, more than keep_payload allows")
            return
        job = KeepJob(descriptor, size, self._directory.path / PAYLOAD, self._kept_in_thread)
        self._keep_job = job
        self._keeper.keep(job)

    def give_payload_up(self) -> None:
        """The notebook wants its memory file back."""
        if self._payload_released:
            return
        if self._keep_job is not None:
            self._keep_job.given_up.set()
        elif self._gone or self._ended:
            if self._payload_fd >= 0:
                os.close(self._payload_fd)
                self._payload_fd = -1
            self._payload_is_done(False, "the notebook's next run used the same memory before it was copied")

    def results_received(self) -> None:
        """The notebook holds the results itself."""
        self._close_results()

    def close(self) -> None:
        """Free what is still held."""
        self._close_results()
        if self._payload_fd >= 0:
            os.close(self._payload_fd)
            self._payload_fd = -1

    def _close_results(self) -> None:
        for descriptor in self.results_fds.values():
            os.close(descriptor)
        self.results_fds.clear()

    def _kept_in_thread(self, kept: bool, why: str) -> None:
        self._loop.call_soon_threadsafe(self._payload_is_done, kept, why)

    def _payload_is_done(self, kept: bool, why: str) -> None:
        if self._payload_released:
            return
        self._payload_released = True
        try:
            self._directory.payload_done(kept, why)
        except OSError as error:
            why = f"run.json could not be written: {error.strerror}"
        self._say(PayloadReleased(kept=kept, reason=why))

    # ------------------------------------------------------------ within

    def _say(self, body: EventBody, frames: Sequence[bytes] = ()) -> None:
        self._listener.happened(self.run_id, body, frames)

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._timers.append(self._loop.call_later(delay_s, call))
