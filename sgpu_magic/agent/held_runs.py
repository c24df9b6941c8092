"""The runs that an agent holds: from their launch until nobody can want anything of them any more."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence

from sgpu_magic.agent.execution import Execution
from sgpu_magic.agent.far_runs import FarRuns
from sgpu_magic.agent.groups import Groups
from sgpu_magic.agent.node_run import NodeRun
from sgpu_magic.agent.reports import Reports
from sgpu_magic.agent.session import Session
from sgpu_magic.protocol.events import EventBody, Noted, RanksStarted
from sgpu_magic.protocol.node_messages import Launch, MasterBound
from sgpu_magic.protocol.states import RunState

_REPLENISH_DELAY_S = 0.15
_KEEP_DELAY_S = 2.0
# results that nobody fetched are given up with their run after this
_RESULTS_KEPT_S = 600.0


class HeldRuns:
    """Fresh runs, sessions and the cells in them, by id (a `NodeRunListener`).

    Args:
        groups: Ranks are kept at hand there when runs are over.
        reports: Tells the pool service what happened.
        has_service: There is a pool service; without one nothing is forgotten.
        drop: Lets go of what a run has of the notebook's code and files.
        far: Brings what belongs to the pool's machine there, where that is another one.
    """

    def __init__(
        self,
        groups: Groups,
        reports: Reports,
        has_service: Callable[[], bool],
        drop: Callable[[str], None],
        far: FarRuns,
    ) -> None:
        self._far = far
        self._groups = groups
        self._reports = reports
        self._has_service = has_service
        self._drop = drop
        self._loop = asyncio.get_running_loop()
        self._runs: dict[str, NodeRun] = {}
        # descriptors of device locks by run: a device is locked for as long as a rank may use it
        self._locks: dict[str, Sequence[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._runs)

    def all(self) -> list[NodeRun]:
        """In order of launch."""
        return list(self._runs.values())

    def get(self, run_id: str) -> NodeRun | None:
        return self._runs.get(run_id)

    def session(self, run_id: str) -> Session | None:
        """The session of that id, None when there is none."""
        run = self._runs.get(run_id)
        return run if isinstance(run, Session) else None

    def add(self, run: NodeRun) -> None:
        """Hold a run; a further attempt takes the place of the one before."""
        self._runs[run.run_id] = run

    def hold_locks(self, run_id: str, locks: Sequence[int]) -> None:
        """Keep the run's device locks until its ranks are gone."""
        self._locks[run_id] = locks

    def locks(self, run_id: str) -> Sequence[int]:
        return self._locks.get(run_id, ())

    def end(self, run: NodeRun, state: RunState, reason: str) -> None:
        """Take the stop path with a run. Fresh runs on a session's lease the pool service ends by itself."""
        run.end_as(state, reason)
        if isinstance(run, Session):
            self._groups.session_over(run.run_id)

    def ranks_gone(self, run_id: str) -> None:
        """Every process of the run is dead and reaped, or it never had one."""
        for descriptor in self._locks.pop(run_id, ()):
            os.close(descriptor)
        self._drop(run_id)
        self._far.gone(
            run_id,
            lambda: self._reports.gone(run_id),
            lambda text: self._reports.happened(run_id, Noted(text=text), ()),
        )

    # ------------------------------------------------------------ from the runs (NodeRunListener)

    def happened(self, run_id: str, body: EventBody, frames: Iterable[bytes]) -> None:
        kept = tuple(frames)
        self._far.happened(run_id, body, lambda body: self._reports.happened(run_id, body, kept))
        if isinstance(body, RanksStarted) and (session := self.session(run_id)) is not None:
            self._loop.call_later(_REPLENISH_DELAY_S, self._keep_for_session, session)

    def tracking_asked(self, run_id: str) -> None:
        self._reports.tracking_asked(run_id)

    def master_bound(self, bound: MasterBound) -> None:
        self._reports.master_bound(bound)

    def run_gone(self, run: NodeRun) -> None:
        self.ranks_gone(run.run_id)
        spec = run.launch.spec
        if isinstance(run, Session):
            self._end_fresh_runs(run)
        elif spec.session:
            session = self.session(spec.session)
            if spec.fresh and session is not None:
                self._loop.call_later(_REPLENISH_DELAY_S, self._keep_for_session, session)
        elif isinstance(run, Execution) and not run.group.broken:
            self._loop.call_later(_REPLENISH_DELAY_S, self._replenish, run.launch)
        self._loop.call_later(_KEEP_DELAY_S, self._keep, run)

    # ------------------------------------------------------------ within

    @property
    def busy(self) -> bool:
        """Ranks compute: nothing may compete with them."""
        return any(_computes(run) for run in self._runs.values())

    def _end_fresh_runs(self, session: Session) -> None:
        """Runs beside the session's ranks use its lease."""
        self._groups.session_over(session.run_id)
        for run in list(self._runs.values()):
            if run.launch.spec.session == session.run_id and run.launch.spec.fresh:
                run.end_as(RunState.CANCELLED, "its session ended")

    def _replenish(self, launch: Launch) -> None:
        if not self.busy:
            self._groups.replenish_after(launch)

    def _keep_for_session(self, session: Session) -> None:
        if not session.connected:
            return
        if self.busy:
            self._loop.call_later(_REPLENISH_DELAY_S, self._keep_for_session, session)
        else:
            self._groups.keep_for_session(session.launch)

    def _keep(self, run: NodeRun) -> None:
        if self._runs.get(run.run_id) is not run:
            # its group was started again, and the next attempt has the payload
            return
        run.belongings.keep_large_parts()
        if run.belongings.in_memory:
            self._loop.call_later(_RESULTS_KEPT_S, self._forget, run)
        else:
            self._forget(run)

    def _forget(self, run: NodeRun) -> None:
        if self._runs.get(run.run_id) is not run:
            return
        if not self._has_service() or self._reports.has_unkept(run.run_id):
            self._loop.call_later(_KEEP_DELAY_S, self._forget, run)
        else:
            run.belongings.close()
            self._reports.forget(run.run_id)
            del self._runs[run.run_id]


def _computes(run: NodeRun) -> bool:
    if isinstance(run, Session):
        return run.busy
    return not run.gone and run.state is not RunState.PREPARING
