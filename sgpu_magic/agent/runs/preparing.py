"""A run whose packages, code and variables are being prepared on this node, before its ranks start.

launch -> everything is ready -> handed on (the launch of a fresh run, a session or a cell in one)
       -> preparation failed  -> ended(failed) -> gone
       -> asked to end        -> ended(...)    -> gone
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping

from sgpu_magic.agent import faults
from sgpu_magic.agent.environments import Environments
from sgpu_magic.agent.faults import call_in_background
from sgpu_magic.agent.inputs.blobs import BlobMissing
from sgpu_magic.agent.inputs.launch_inputs import LaunchInputs, travels_by_blobs
from sgpu_magic.agent.runs.node_run import Attempt, NodeRun, Surroundings
from sgpu_magic.packages.node.store import Built
from sgpu_magic.wire.attachments import StoredPayload
from sgpu_magic.wire.events import EnvironmentMoved, RunEnded
from sgpu_magic.wire.node import MasterKnown, PartsOver, PeerFailed
from sgpu_magic.wire.rank_events import Failure, RankStack
from sgpu_magic.wire.states import FailureKind, RunKind, RunState


class PreparingRun(NodeRun):
    """Holds a launch until its ranks can be started.

    Args:
        attempt: The launch and its payload.
        here: What all runs of the agent share.
        environments: Builds its packages.
        inputs: Fetches the notebook's code and files.
        go_on: Starts the ranks when everything is ready. Called with this run, the environment and the code.

    Raises:
        OSError: The run's directory can't be made.
    """

    def __init__(
        self,
        attempt: Attempt,
        here: Surroundings,
        environments: Environments,
        inputs: LaunchInputs,
        go_on: Callable[[PreparingRun, Built | None, Mapping[str, str]], None],
    ) -> None:
        super().__init__(attempt, here)
        self.frames = attempt.frames
        self._environments = environments
        self._inputs = inputs
        self._arriving: asyncio.Task[None] | None = None
        # handed on as soon as the payload has arrived too
        self._ready: tuple[Built | None, EnvironmentMoved | None, Mapping[str, str]] | None = None
        self._go_on = go_on
        self._state = RunState.PREPARING

    def start(self) -> None:
        if travels_by_blobs(self.launch):
            self._arriving = faults.in_background(self._arrive())
        else:
            self._begin()

    def _begin(self) -> None:
        """Prepare the environment and the code; archives and wheels are on this node."""
        stored = isinstance(self.launch.payload.source, StoredPayload)
        if self.launch.spec.kind is not RunKind.SESSION and not stored:
            try:
                # preparation may take minutes, and a detached run's notebook may exit meanwhile
                self.files.memory.open_payload()
            except OSError as error:
                self._fail(f"the run could not be started on {self._host}: {error}.", FailureKind.INTERNAL)
                return
        self.files.describe(RunState.PREPARING)
        environment = self.launch.environment
        if environment is not None and self._environments.needed(self.launch):
            self._environments.wait(self.run_id, environment, self)
        else:
            self._unpack_code(None)

    # ------------------------------------------------------------ from the environments

    def environment_moved(self, moved: EnvironmentMoved) -> None:
        with faults.guarded(self.faulted):
            if not self.ended:
                self._say(moved)

    def environment_ready(self, built: Built, moved: EnvironmentMoved) -> None:
        with faults.guarded(self.faulted):
            if not self.ended:
                self._unpack_code(built, moved)

    def environment_failed(self, message: str) -> None:
        with faults.guarded(self.faulted):
            if not self.ended:
                self._fail(message)

    # ------------------------------------------------------------ within

    async def _arrive(self) -> None:
        source = self.launch.payload.source
        try:
            self.launch = await self._inputs.luggage(self.launch)
            self._begin()
            if isinstance(source, StoredPayload) and self.files.memory.payload_fd < 0:
                # the payload arrives while the packages are being built
                self.files.memory.take_payload(*await self._inputs.payload(self.launch, source))
        except (BlobMissing, OSError, ValueError) as error:
            if not self.ended:
                self._fail(f"the run's variables can't be transferred to {self._host}: {error}.", FailureKind.INTERNAL)
            return
        self._arriving = None
        if self._ready is not None and not self.ended:
            self._hand_on(*self._ready)

    def _unpack_code(self, built: Built | None, moved: EnvironmentMoved | None = None) -> None:
        if self.launch.spec.in_session or not self.launch.code:
            # a session's cell gets its code when it is launched in the session
            self._hand_on(built, moved, {})
            return
        unpack = functools.partial(self._inputs.code.unpack, self.run_id, self.launch.code)
        unpacked = call_in_background(unpack, "sgpu-code")

        def done() -> None:
            error = unpacked.exception()
            if self.ended:
                return
            if error is None:
                self._hand_on(built, moved, unpacked.result())
            else:
                self._fail(str(error))

        unpacked.add_done_callback(lambda future: done())

    def _hand_on(self, built: Built | None, moved: EnvironmentMoved | None, code: Mapping[str, str]) -> None:
        if self._arriving is not None:
            self._ready = built, moved, code
            return
        if moved is not None:
            self._say(moved)
        # the next run takes the payload over
        self.ended = self.gone = True
        self._environments.leave(self.run_id)
        self._go_on(self, built, code)
        self._inputs.over(self.run_id)

    def fail_whole(self, kind: FailureKind, message: str) -> None:
        """Fail the run and stop the preparation."""
        if not self.ended:
            self._end(RunState.FAILED, "", self._failure_now(kind, message))

    def _fail(self, message: str, kind: FailureKind = FailureKind.ENVIRONMENT) -> None:
        self.fail_whole(kind, message)

    def _end(self, state: RunState, reason: str, failure: Failure | None = None) -> None:
        self.ended = True
        self._state = state
        if self._arriving is not None:
            self._arriving.cancel()
        self._inputs.over(self.run_id)
        self._environments.leave(self.run_id)
        self._say(RunEnded(state=state, reason=reason, failure=failure, starting_s=self.age_s))
        self._is_over()

    # ------------------------------------------------------------ the agent's interface (NodeRun)

    def end_as(self, state: RunState, reason: str) -> None:
        """End at once, since there are no ranks."""
        if not self.ended:
            self._end(state, reason)

    @property
    def pids(self) -> list[int]:
        return []

    @property
    def state(self) -> RunState:
        return self._state

    def kill(self) -> None:
        """Do nothing: there are no ranks."""

    def give_payload_up(self) -> None:
        if self.gone:
            self.files.memory.give_payload_up()

    def heard_of_others(self, message: MasterKnown | PeerFailed | PartsOver) -> None:
        """Handle a message about the run's other nodes."""
        if isinstance(message, PeerFailed) and not self.ended:
            self._end(RunState.FAILED, "")

    def take_stacks(self, done: Callable[[tuple[RankStack, ...]], None]) -> None:
        problem = "it has not started yet: the run's packages are being prepared"
        done(tuple(RankStack(rank=rank, problem=problem) for rank in self.launch.spec.rank_numbers))
