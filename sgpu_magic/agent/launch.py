"""From a launch to its ranks: where packages and code have to be made ready first, that comes before the start."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence

import msgspec

from sgpu_magic.agent.environments import Environments
from sgpu_magic.agent.inputs.kept_inputs import CodeUnusable
from sgpu_magic.agent.inputs.launch_inputs import LaunchInputs, travels_by_blobs
from sgpu_magic.agent.node_context import place_here
from sgpu_magic.agent.ranks.standby_groups import StandbyGroups
from sgpu_magic.agent.reports import Reports
from sgpu_magic.agent.run_registry import RunRegistry
from sgpu_magic.agent.runs.fresh import FreshRun
from sgpu_magic.agent.runs.node_run import NodeRun, Surroundings
from sgpu_magic.agent.runs.preparing import PreparingRun
from sgpu_magic.agent.runs.session import Session, SessionRefuses
from sgpu_magic.packages.node.store import Built
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.failures import Failure
from sgpu_magic.wire.node import Launch
from sgpu_magic.wire.states import FailureKind, RunKind, RunState


class Launches:
    """Starts what the pool orders.

    Args:
        groups: Has the ranks.
        runs: Holds what was started.
        reports: Tells the pool service what could not be.
        here: What all runs share.
        environments: Builds packages.
        inputs: Brings what the notebook sent along.
    """

    def __init__(
        self,
        groups: StandbyGroups,
        runs: RunRegistry,
        reports: Reports,
        here: Surroundings,
        environments: Environments,
        inputs: LaunchInputs,
    ) -> None:
        self._groups = groups
        self._runs = runs
        self._reports = reports
        self._here = here
        self._environments = environments
        self._inputs = inputs

    def launch(self, launch: Launch, frames: Sequence[bytes]) -> None:
        """Start a run, a session or a cell in one."""
        spec = launch.spec
        if spec.in_session:
            if travels_by_blobs(launch):
                self._prepare(launch, frames, None)
            else:
                self._launch_in_session(launch, frames, None)
            return
        if spec.session and (session := self._runs.session(spec.session)) is not None:
            # new ranks beside the session's have what those have
            launch = msgspec.structs.replace(launch, environment=session.launch.environment)
        predecessor = self._runs.get(spec.run_id)
        environment = launch.environment if self._environments.needed(launch) else None
        built = None if environment is None else self._environments.at_hand(environment)
        if launch.code or (environment is not None and built is None) or travels_by_blobs(launch):
            self._prepare(launch, frames, predecessor)
            return
        if built is not None:
            self._reports.happened(spec.run_id, self._environments.found(built), ())
        self._start(launch, frames, built, {}, predecessor)
        if built is not None:
            # its zygote holds it from now on
            self._environments.leave(spec.run_id)

    def refuse(self, launch: Launch, message: str, kind: FailureKind = FailureKind.ENVIRONMENT) -> None:
        """The run can't be started."""
        failure = Failure(kind=kind, message=message, host=socket.gethostname(), at=time.time())
        self._reports.happened(launch.spec.run_id, RunEnded(state=RunState.FAILED, failure=failure), ())
        self._runs.ranks_gone(launch.spec.run_id)

    # ------------------------------------------------------------ within

    def _refuse_unrecorded(self, launch: Launch, error: OSError | ValueError) -> None:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        self.refuse(
            launch,
            f"the run can't be recorded on {socket.gethostname()}: {launch.run_dir} can't be written ({why}). Runs "
            "that go on are not concerned. Make room there, or make it writable, and run the cell again.",
            FailureKind.INTERNAL,
        )

    def _prepare(self, launch: Launch, frames: Sequence[bytes], predecessor: NodeRun | None) -> None:
        """Make ready what it needs, then go on."""
        try:
            run = PreparingRun(
                launch, frames, self._here, self._environments, self._inputs, self._prepared, predecessor
            )
        except (OSError, ValueError) as error:
            self._refuse_unrecorded(launch, error)
            return
        self._runs.add(run)
        run.start()

    def _prepared(self, run: PreparingRun, built: Built | None, code: Mapping[str, str]) -> None:
        """Everything is there."""
        if run.launch.spec.in_session:
            self._launch_in_session(run.launch, run.frames, run)
        else:
            self._start(run.launch, run.frames, built, code, run)

    def _start(
        self,
        launch: Launch,
        frames: Sequence[bytes],
        built: Built | None,
        code: Mapping[str, str],
        predecessor: NodeRun | None,
    ) -> None:
        try:
            launch = self._placed(launch, built, code)
        except OSError as error:
            self._refuse_unrecorded(launch, error)
            return
        try:
            group, warm = self._groups.take(launch)
        except OSError as error:
            self.refuse(launch, f"{launch.interpreter.executable} can't be started: {error}")
            return
        try:
            if launch.spec.kind is RunKind.SESSION:
                run = Session(launch, frames, group, warm, self._here)
            else:
                run = FreshRun(launch, frames, group, warm, self._here, predecessor)
        except BaseException as error:
            self._groups.dismiss(group)
            if not isinstance(error, OSError | ValueError):
                raise
            self._refuse_unrecorded(launch, error)
            return
        self._runs.add(run)
        run.start()

    def _launch_in_session(self, launch: Launch, frames: Sequence[bytes], predecessor: NodeRun | None) -> None:
        session = self._runs.session(launch.spec.session)
        try:
            if session is None:
                raise SessionRefuses("its session has ended. %sgpu_connect starts another one.")
            cell = session.execute(self._placed_in(session, launch), frames, predecessor)
        except SessionRefuses as error:
            self.refuse(launch, str(error), FailureKind.SESSION)
        except CodeUnusable as error:
            self.refuse(launch, str(error))
        except (OSError, ValueError) as error:
            self._refuse_unrecorded(launch, error)
        else:
            self._runs.add(cell)
            cell.start()

    def _placed(self, launch: Launch, built: Built | None, code: Mapping[str, str]) -> Launch:
        placed = self._inputs.uploaded.placed(place_here(launch, built, code))
        if built is None or placed.environment is None:
            return placed
        interpreter = self._environments.interpreter(placed.environment, built, placed)
        return msgspec.structs.replace(placed, interpreter=interpreter)

    def _placed_in(self, session: Session, launch: Launch) -> Launch:
        """A cell's launch stands where its session does."""
        built = None
        environment = session.launch.environment
        if environment is not None and self._environments.needed(session.launch):
            # the zygote of its ranks holds it
            built = self._environments.at_hand(environment)
        # the same bundles as before are a look-up
        code: Mapping[str, str] = self._inputs.code.unpack(launch.spec.session, launch.code) if launch.code else {}
        return self._inputs.uploaded.placed(place_here(launch, built, code))
