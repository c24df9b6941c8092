"""The runs that an agent holds, from their launch until nothing can request their data any more."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from sgpu_magic.agent import faults
from sgpu_magic.agent.reports import EventReports
from sgpu_magic.agent.runs.execution import Execution
from sgpu_magic.agent.runs.execution_kinds import FreshRun
from sgpu_magic.agent.runs.node_run import NodeRun
from sgpu_magic.agent.runs.send_files_to_pool import FilesToPool
from sgpu_magic.agent.runs.session import NodeSession
from sgpu_magic.agent.timers import call_about
from sgpu_magic.wire.base import FailureKind, RunLimit, RunState
from sgpu_magic.wire.codec import UnreadableLaunch
from sgpu_magic.wire.events import EventBody, RunEnded
from sgpu_magic.wire.node import Launch
from sgpu_magic.wire.option_text import Text
from sgpu_magic.wire.rank_events import Failure

if TYPE_CHECKING:
    from sgpu_magic.agent.standby_groups import StandbyGroups

T = TypeVar("T")
_REPLENISH_DELAY_S = 0.15
# imports are executed ahead when no run follows for so long
_PRELOAD_DELAY_S = 1.0
_KEEP_DELAY_S = 2.0
# unfetched results are dropped with their run after this
_RESULTS_KEPT_S = 600.0
# a run that was hit by a fault has this long, besides its grace, to end normally
_FAULT_S, _FAULT_POLL_S = 3.0, 0.2
_FAULT_CHARS = 2_000


@dataclass(eq=False, repr=False)
class RunRegistry:
    """Fresh runs, sessions and the cells in them, by id. Receives the runs' events.

    Args:
        groups: Keeps ranks on standby when runs are over.
        reports: Reports events to the pool service.
        has_service: Returns whether a pool service is connected; without one nothing is forgotten.
        drop: Releases a run's code and uploads.
        far: Sends run files to a pool on another machine.
        log: The file to which faults of the agent are logged; None when unknown.
    """

    groups: StandbyGroups
    reports: EventReports
    has_service: Callable[[], bool]
    drop: Callable[[str], None]
    far: FilesToPool
    log: Path | None

    def __post_init__(self) -> None:
        # runs that were hit by a fault of the agent
        self._struck: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self._runs: dict[str, NodeRun] = {}
        # descriptors of device locks by run: a device stays locked while a rank may use it
        self._locks: dict[str, Sequence[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._runs)

    def all(self) -> list[NodeRun]:
        """Return all runs in order of launch."""
        return list(self._runs.values())

    def get(self, run_id: str) -> NodeRun | None:
        return self._runs.get(run_id)

    def session(self, run_id: str) -> NodeSession | None:
        """Return the session with that id, or None."""
        run = self._runs.get(run_id)
        return run if isinstance(run, NodeSession) else None

    def add(self, run: NodeRun) -> None:
        """Register a run; a new attempt replaces the previous one."""
        self._runs[run.run_id] = run

    def hold_locks(self, run_id: str, locks: Sequence[int]) -> None:
        """Keep the run's device locks until its ranks are gone."""
        self._locks[run_id] = locks

    def locks(self, run_id: str) -> Sequence[int]:
        return self._locks.get(run_id, ())

    def end(self, run: NodeRun, state: RunState, reason: Text, limit: RunLimit | None = None) -> None:
        """Stop a run by the stop path. The pool service itself ends fresh runs on a session's lease."""
        run.end_as(state, reason, limit)
        if isinstance(run, NodeSession):
            self.groups.drop(run.run_id)

    def ranks_exited(self, run_id: str) -> None:
        """Release the run's locks and inputs: its processes are dead and reaped, or it never had any."""
        for descriptor in self._locks.pop(run_id, ()):
            os.close(descriptor)
        with faults.guarded(None):
            self.drop(run_id)
        self.far.ranks_exited(run_id)

    # ------------------------------------------------------------ faults of the agent

    def fault_message(self, error: Exception) -> str:
        """Return the message that users read about a fault."""
        where = f"{self.log} on {socket.gethostname()}" if self.log is not None else "the node's log"
        text = str(error)[:_FAULT_CHARS]
        return (
            f"an internal error in the agent on {socket.gethostname()}: {type(error).__name__}: {text}. The "
            f"traceback is in {where}; please report it."
        )

    def refuse(self, launch: UnreadableLaunch) -> None:
        """Fail a run whose launch can't be decoded."""
        self.report_failed(
            launch.run_id,
            f"the agent on {socket.gethostname()} can't read the pool's order to start this run, so it started none "
            f"of its ranks: {(launch.problem or '')[:_FAULT_CHARS]}. The pool and the agent may have been started from "
            "different installations of sgpu-magic: restart the pool, which starts new agents (`sgpu pool stop`; a "
            "served pool's operator restarts it), and submit the run again. If that fails too, please report it.",
        )

    def faulted(self, run_id: str, error: Exception) -> None:
        """End the run, and no other, after an exception in a callback that served it."""
        run, words = self._runs.get(run_id), self.fault_message(error)
        if run is None or run.has_exited:
            self.report_failed(run_id, words)
        elif run_id in self._struck:
            self._abandon(run, words)
        else:
            self._struck.add(run_id)
            grace_s = run.launch.spec.grace_s or 0.0
            self._loop.call_later(_FAULT_POLL_S, self._see_it_end, run, words, self._loop.time() + grace_s + _FAULT_S)
            try:
                run.fail_whole(FailureKind.INTERNAL, words)
            except Exception as second:  # noqa: BLE001  a guard: its stop path is broken too
                with faults.charging(None):
                    faults.report(second)
                self._abandon(run, words)

    def _see_it_end(self, run: NodeRun, words: str, until: float) -> None:
        with faults.charging(None):
            if run.has_exited:
                self.report_failed(run.run_id, words)
            elif self._loop.time() > until or (isinstance(run, FreshRun | NodeSession) and run.group.is_dead()):
                self._abandon(run, words)
            else:
                self._loop.call_later(_FAULT_POLL_S, self._see_it_end, run, words, until)

    def _abandon(self, run: NodeRun, words: str) -> None:
        """End a run by force when a fault prevents it from ending normally."""
        with faults.charging(None):
            session = self.session(run.launch.spec.session) if run.launch.spec.in_session else None
            if session is not None and not session.has_exited:
                session.fail_whole(FailureKind.INTERNAL, words)
            with faults.guarded(None):
                run.abandon()
            if isinstance(run, FreshRun | NodeSession):
                run.group.listener = None
                for process in run.group.ranks:
                    process.signal(signal.SIGKILL, whole_session=True)
                self.groups.dismiss(run.group)
            self.report_failed(run.run_id, words)

    def report_failed(self, run_id: str, words: str, kind: FailureKind = FailureKind.INTERNAL) -> None:
        """Report that the run failed and that its ranks are gone, unless that was reported: it can't go on."""
        self._struck.discard(run_id)
        if not self.reports.has_ended(run_id):
            failure = Failure(kind=kind, message=words, host=socket.gethostname(), at=time.time())
            with faults.guarded(None):
                self.reports.report(run_id, RunEnded(state=RunState.FAILED, failure=failure), ())
        if not self.reports.have_ranks_exited(run_id):
            self.ranks_exited(run_id)
            if (run := self._runs.get(run_id)) is not None:
                self._loop.call_later(_KEEP_DELAY_S, self._keep, run)

    # ------------------------------------------------------------ from the runs

    def on_event(self, run_id: str, body: EventBody, frames: Iterable[bytes]) -> None:
        self.far.report(run_id, body, tuple(frames))

    def imported(self, run: Execution, modules: Sequence[str]) -> None:
        """Note imports of a run that took long: later runs of this Python may have them ahead."""
        interpreter = run.run_ranks.group.zygote.interpreter
        self.groups.preloaded.learn(replace(run.launch, interpreter=interpreter), modules)

    def run_exited(self, run: NodeRun) -> None:
        self.ranks_exited(run.run_id)
        spec = run.launch.spec
        if isinstance(run, NodeSession):
            self._end_fresh_runs(run)
        elif spec.session:
            session = self.session(spec.session)
            if spec.fresh and session is not None:
                self._later(_REPLENISH_DELAY_S, self._keep_for_session, session)
        elif isinstance(run, Execution) and not run.group.broken:
            self._later(_REPLENISH_DELAY_S, self._replenish, run.launch)
        with faults.charging(None):
            call_about(_PRELOAD_DELAY_S, self._preload)
        call_about(_KEEP_DELAY_S, self._keep, run)

    # ------------------------------------------------------------ internals

    def _preload(self) -> None:
        self.groups.preloaded.tend(is_busy=self.busy)

    def _later(self, delay_s: float, call: Callable[[T], None], of: T) -> None:
        """Schedule work on standby groups; its faults are not charged to the run that preceded it."""
        with faults.charging(None):
            self._loop.call_later(delay_s, call, of)

    @property
    def busy(self) -> bool:
        """Whether ranks compute, so that background work would slow them down."""
        return any(_computes(run) for run in self._runs.values())

    def _end_fresh_runs(self, session: NodeSession) -> None:
        """End the fresh runs that use the session's lease."""
        self.groups.drop(session.run_id)
        for run in list(self._runs.values()):
            if run.launch.spec.session == session.run_id and run.launch.spec.fresh:
                with faults.guarded(functools.partial(self.faulted, run.run_id)):
                    run.end_as(RunState.CANCELLED, "its session ended")

    def _replenish(self, launch: Launch) -> None:
        if not self.busy:
            self.groups.replenish_after(launch)

    def _keep_for_session(self, session: NodeSession) -> None:
        if not session.connected:
            return
        if self.busy:
            self._later(_REPLENISH_DELAY_S, self._keep_for_session, session)
        else:
            self.groups.keep_for_session(session.launch)

    def _keep(self, run: NodeRun) -> None:
        if self._runs.get(run.run_id) is not run:
            # the run was started again, and the next attempt owns the payload
            return
        with faults.guarded(None):
            run.files.memory.keep()
        if run.files.memory.in_use:
            self._loop.call_later(_RESULTS_KEPT_S, self._forget, run)
        else:
            self._forget(run)

    def _forget(self, run: NodeRun) -> None:
        if self._runs.get(run.run_id) is not run:
            return
        if not self.has_service() or self.reports.has_unkept(run.run_id):
            call_about(_KEEP_DELAY_S, self._forget, run)
        else:
            run.files.memory.close()
            self.reports.forget(run.run_id)
            del self._runs[run.run_id]


def _computes(run: NodeRun) -> bool:
    if isinstance(run, NodeSession):
        return run.busy
    return not run.has_exited and run.state is not RunState.PREPARING
