"""Starts the ranks of a launch: those of a standby group, or new ones.

Packages and code that need preparation are prepared first. Standby groups are kept for the next run and for each
session.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from sgpu_magic.agent.environments import Environments
from sgpu_magic.agent.node_context import CodeUnusable, built_interpreter, localize
from sgpu_magic.agent.run_registry import RunRegistry
from sgpu_magic.agent.runs.execution_kinds import FreshRun, SessionCell
from sgpu_magic.agent.runs.node_run import AgentServices, Attempt, NodeRun
from sgpu_magic.agent.runs.preparing import LaunchInputs, PreparingRun, needs_blobs
from sgpu_magic.agent.runs.session import NodeSession, SessionRefuses
from sgpu_magic.packages.node.store import Built
from sgpu_magic.wire.base import FailureKind, RunKind
from sgpu_magic.wire.node import Launch


class RunLauncher(msgspec.Struct, frozen=True):
    """Starts the runs, sessions and cells that the pool orders.

    Args:
        runs: Registers what was started; its groups provide the ranks.
        here: What all runs of the agent share.
        environments: Builds packages.
        inputs: Fetches the notebook's code and files.
    """

    runs: RunRegistry
    here: AgentServices
    environments: Environments
    inputs: LaunchInputs

    def launch(self, launch: Launch, frames: Sequence[bytes]) -> None:
        """Start a run, a session, or a cell in a session."""
        spec = launch.spec
        self.runs.groups.preloaded.pause()
        if spec.in_session:
            attempt = Attempt(launch, frames)
            session = self.runs.session(spec.session)
            if needs_blobs(launch) or (session is not None and session.runs_line_cell):
                self._prepare(attempt)
            else:
                self._begin(launch, lambda: self._cell(attempt))
            return
        if spec.session and (session := self.runs.session(spec.session)) is not None:
            # a fresh run on a session's lease uses the session's environment
            launch = replace(launch, environment=session.launch.environment)
        attempt = Attempt(launch, frames, self.runs.get(spec.run_id))
        environment = launch.environment if self.environments.needed(launch) else None
        built = None if environment is None else self.environments.at_hand(environment)
        if launch.code or (environment is not None and built is None) or needs_blobs(launch):
            self._prepare(attempt)
            return
        if built is not None:
            self.here.reports.report(spec.run_id, self.environments.ready_event(built), ())
        self._start(attempt, built, {})
        if built is not None:
            # the zygote holds the environment from now on
            self.environments.release(spec.run_id)

    # ------------------------------------------------------------ internals

    def _begin(self, launch: Launch, make: Callable[[], NodeRun | None]) -> None:
        """Make, register and start a run, or report why it can't be made."""
        try:
            run = make()
        except SessionRefuses as error:
            self.runs.report_failed(launch.spec.run_id, str(error), FailureKind.SESSION)
        except CodeUnusable as error:
            self.runs.report_failed(launch.spec.run_id, str(error), FailureKind.ENVIRONMENT)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.runs.report_failed(
                launch.spec.run_id,
                f"the run can't be recorded on {socket.gethostname()}: {launch.run_dir} can't be written ({why}). "
                "Other runs are not affected. Free some space there, or make it writable, and run the cell again.",
            )
        else:
            if run is not None:
                self.runs.add(run)
                run.start()

    def _prepare(self, attempt: Attempt) -> None:
        """Prepare packages and inputs, then start."""
        self._begin(attempt.launch, lambda: PreparingRun(attempt, self))

    def prepared(self, run: PreparingRun, built: Built | None, code: Mapping[str, str]) -> None:
        """Start a run whose packages and inputs are ready."""
        attempt = Attempt(run.launch, run.frames, run)
        if run.launch.spec.in_session:
            self._begin(run.launch, lambda: self._cell(attempt))
        else:
            self._start(attempt, built, code)

    def _start(self, attempt: Attempt, built: Built | None, code: Mapping[str, str]) -> None:
        self._begin(attempt.launch, lambda: self._with_ranks(attempt, built, code))

    def _with_ranks(
        self, attempt: Attempt, built: Built | None, code: Mapping[str, str]
    ) -> FreshRun | NodeSession | None:
        launch = self._with_node_paths(attempt.launch, built, code)
        try:
            group, warm = self.runs.groups.acquire(launch)
        except OSError as error:
            text = f"{launch.interpreter.executable} can't be started: {error}"
            self.runs.report_failed(launch.spec.run_id, text, FailureKind.ENVIRONMENT)
            return None
        kind = NodeSession if launch.spec.kind is RunKind.SESSION else FreshRun
        try:
            return kind(replace(attempt, launch=launch), group, warm, self.here)
        except BaseException:
            self.runs.groups.dismiss(group)
            raise

    def _cell(self, attempt: Attempt) -> SessionCell:
        session = self.runs.session(attempt.launch.spec.session)
        if session is None:
            raise SessionRefuses("its session has ended. %sgpu_connect starts another one.")
        return session.execute(replace(attempt, launch=self._localize_for(session, attempt.launch)))

    def _with_node_paths(self, launch: Launch, built: Built | None, code: Mapping[str, str]) -> Launch:
        local = self.inputs.uploaded.add_uploads(localize(launch, built, code))
        if built is None or local.environment is None:
            return local
        name = self.environments.name(local.environment)
        return replace(local, interpreter=built_interpreter(name, built, local))

    def _localize_for(self, session: NodeSession, launch: Launch) -> Launch:
        """Give a cell the context of its session."""
        built = None
        environment = session.launch.environment
        if environment is not None and self.environments.needed(session.launch):
            # the zygote of the session's ranks holds the environment
            built = self.environments.at_hand(environment)
        # bundles that are already unpacked cost only a look-up
        code: Mapping[str, str] = self.inputs.code.unpack(launch.spec.session, launch.code) if launch.code else {}
        return self.inputs.uploaded.add_uploads(localize(launch, built, code))
