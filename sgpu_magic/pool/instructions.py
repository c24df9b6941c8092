"""Does what the scheduler says, one instruction after the other."""

from __future__ import annotations

import asyncio
import time

from sgpu_magic.pool.active_runs import PoolRun
from sgpu_magic.pool.adoption import Adoption
from sgpu_magic.pool.launches import Launches
from sgpu_magic.pool.parts import PoolParts
from sgpu_magic.pool.scheduling import stimuli as sched
from sgpu_magic.pool.submissions import Submissions
from sgpu_magic.pool.tracker import Tracker
from sgpu_magic.wire.events import Noted, QueueMoved, StateChanged
from sgpu_magic.wire.states import FailureKind, RunState


class Instructions:
    """Of one service.

    Args:
        pool: What all parts work with.
        launches: Starts groups of ranks.
        adoption: Has runs that wait to be submitted again.
        submissions: Had runs' packages prepared.
        tracker: Follows runs.
    """

    def __init__(
        self, pool: PoolParts, launches: Launches, adoption: Adoption, submissions: Submissions, tracker: Tracker
    ) -> None:
        self._pool = pool
        self._launches = launches
        self._adoption = adoption
        self._submissions = submissions
        self._tracker = tracker
        self._loop = asyncio.get_running_loop()

    def obey(self, instruction: sched.Instruction) -> None:
        """Do one."""
        run = self._pool.active.get(instruction.run_id)
        if run is None:
            return
        match instruction:
            case sched.RefuseRun(error=error, message=message):
                self._refuse(run, message, error)
            case sched.LaunchRun(lease=lease) if self._accept(run):
                if run.spec.in_session:
                    # its ranks wait for it: everything else can be done while they work
                    self._launches.order(run, lease)
                    self._launches.launched(run, lease, self._pool.stock.inventory)
                else:
                    self._launches.launch(run, lease, self._pool.stock.inventory)
            case sched.TellQueue(position=position, reason=reason) if self._accept(run):
                self._pool.active.tell(run, QueueMoved(position=position, reason=reason), time.time())
            case sched.MoveRun(state=state, reason=reason):
                self._pool.active.move(run, state)
                if state is not RunState.STARTING or not run.spec.in_session:
                    self._pool.active.tell(run, StateChanged(state=state, reason=reason), time.time())
            case sched.Remark(text=text):
                self._pool.active.tell(run, Noted(text=text), time.time())
            case sched.StopRun(state=state, reason=reason):
                self._pool.engine.end_run(instruction.run_id, state, reason)
            case sched.EndRun(state=state, reason=reason):
                self._submissions.unprepare(run)
                kind = instruction.kind if state is RunState.FAILED else FailureKind.TIMEOUT
                self._pool.active.end_without_ranks(run, state, reason, kind)
                self._pool.active.forget(instruction.run_id)
            case sched.LaunchRun() | sched.TellQueue():
                # it could not be recorded, and was refused
                pass

    def end_of_fault(self, run: PoolRun, why: str, gone: bool) -> None:
        """Let a run end of a fault of the service; what it has elsewhere ends behind it.

        Args:
            run: The run.
            why: A sentence.
            gone: Its ranks are gone.
        """
        now = time.monotonic()
        if run.log is None:
            self._adoption.submitted(run.run_id)
            self._refuse(run, why, "InternalError")
        elif not run.ended:
            self._pool.active.end_without_ranks(run, RunState.FAILED, why, FailureKind.INTERNAL)
        state = run.ended_as or RunState.FAILED
        run.failed = None
        if run.ordered and not gone:
            self._pool.engine.end_run(run.run_id, state, why)
            self._loop.call_soon(self._pool.feed, sched.RunMoved(run.run_id, state, now, why))
            return
        if not gone:
            self._submissions.unprepare(run)
        self._pool.active.forget(run.run_id)
        self._loop.call_soon(self._pool.feed, sched.RunOver(run.run_id, state, now))

    # ------------------------------------------------------------ within

    def _accept(self, run: PoolRun) -> bool:
        """Whether the run is recorded; else it was refused."""
        self._adoption.submitted(run.run_id)
        why = self._pool.active.accept(run)
        if why:
            self._refuse(run, why, "PoolError")
            self._loop.call_soon(self._pool.feed, sched.RunOver(run.run_id, RunState.FAILED, time.monotonic()))
            return False
        self._tracker.follow(run)
        return True

    def _refuse(self, run: PoolRun, message: str, error: str) -> None:
        self._submissions.unprepare(run)
        self._pool.active.forget(run.run_id)
        if run.owner is not None:
            self._pool.server.refuse(run.owner, run.submit.request, message, error)
