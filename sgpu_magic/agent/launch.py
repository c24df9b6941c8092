"""Turns a launch into ranks: those of a standby group, or new ones.

Packages and code that need preparation are prepared first. Standby groups are kept for the next run and for each
session.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from sgpu_magic.agent.environments import Environments
from sgpu_magic.agent.node_context import CodeUnusable, built_interpreter, localize
from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.agent.ranks.orders import device_of, prepare
from sgpu_magic.agent.ranks.zygotes import Zygotes
from sgpu_magic.agent.run_registry import RunRegistry
from sgpu_magic.agent.runs.execution_kinds import FreshRun, SessionCell
from sgpu_magic.agent.runs.node_run import AgentServices, Attempt, NodeRun
from sgpu_magic.agent.runs.preparing import LaunchInputs, PreparingRun, travels_by_blobs
from sgpu_magic.agent.runs.session import Session, SessionRefuses
from sgpu_magic.config import Settings
from sgpu_magic.packages.node.store import Built
from sgpu_magic.wire.base import FailureKind, RunKind
from sgpu_magic.wire.node import Launch, Part
from sgpu_magic.wire.run import Interpreter

# above this size, ranks of a standby group join late, since gloo's loops cost CPU while they wait
_JOIN_EARLY_MAX = 8
# a standby group that is not needed for this long is paused
_PAUSE_S = 2.0


class Launches(msgspec.Struct, frozen=True):
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
        if spec.in_session:
            attempt = Attempt(launch, frames)
            if travels_by_blobs(launch):
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
        if launch.code or (environment is not None and built is None) or travels_by_blobs(launch):
            self._prepare(attempt)
            return
        if built is not None:
            self.here.reports.happened(spec.run_id, self.environments.found(built), ())
        self._start(attempt, built, {})
        if built is not None:
            # the zygote holds the environment from now on
            self.environments.leave(spec.run_id)

    # ------------------------------------------------------------ within

    def _begin(self, launch: Launch, make: Callable[[], NodeRun | None]) -> None:
        """Make, register and start a run, or report why it can't be made."""
        try:
            run = make()
        except SessionRefuses as error:
            self.runs.say_over(launch.spec.run_id, str(error), FailureKind.SESSION)
        except CodeUnusable as error:
            self.runs.say_over(launch.spec.run_id, str(error), FailureKind.ENVIRONMENT)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.runs.say_over(
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

    def _with_ranks(self, attempt: Attempt, built: Built | None, code: Mapping[str, str]) -> FreshRun | Session | None:
        launch = self._placed(attempt.launch, built, code)
        try:
            group, warm = self.runs.groups.take(launch)
        except OSError as error:
            text = f"{launch.interpreter.executable} can't be started: {error}"
            self.runs.say_over(launch.spec.run_id, text, FailureKind.ENVIRONMENT)
            return None
        kind = Session if launch.spec.kind is RunKind.SESSION else FreshRun
        try:
            return kind(replace(attempt, launch=launch), group, warm, self.here)
        except BaseException:
            self.runs.groups.dismiss(group)
            raise

    def _cell(self, attempt: Attempt) -> SessionCell:
        session = self.runs.session(attempt.launch.spec.session)
        if session is None:
            raise SessionRefuses("its session has ended. %sgpu_connect starts another one.")
        return session.execute(replace(attempt, launch=self._placed_in(session, attempt.launch)))

    def _placed(self, launch: Launch, built: Built | None, code: Mapping[str, str]) -> Launch:
        placed = self.inputs.uploaded.placed(localize(launch, built, code))
        if built is None or placed.environment is None:
            return placed
        name = self.environments.name(placed.environment)
        return replace(placed, interpreter=built_interpreter(name, built, placed))

    def _placed_in(self, session: Session, launch: Launch) -> Launch:
        """Give a cell the context of its session."""
        built = None
        environment = session.launch.environment
        if environment is not None and self.environments.needed(session.launch):
            # the zygote of the session's ranks holds the environment
            built = self.environments.at_hand(environment)
        # bundles that are already unpacked cost only a look-up
        code: Mapping[str, str] = self.inputs.code.unpack(launch.spec.session, launch.code) if launch.code else {}
        return self.inputs.uploaded.placed(localize(launch, built, code))


# ---------------------------------------------------------------- standby groups


class StandbyGroups:
    """The node's zygotes and its standby groups: one for runs, and one for each session that has had a fresh run.

    Args:
        settings: The pool's settings.

    Attributes:
        zygotes: The node's zygotes.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.zygotes = Zygotes(settings.state_path / "logs", settings.zygote_idle_s)
        # by session; "" is for runs with their own lease
        self._standbys: dict[str, Group] = {}
        self._last_on_gpus = False
        self._departing: list[Group] = []

    def take(self, launch: Launch) -> tuple[Group, str]:
        """Return a group for the run, forked or being forked, and how it was started: `standby`, `zygote` or `cold`.

        Raises:
            OSError: The interpreter can't be executed.
        """
        interpreter, ranks, on_gpus = launch.interpreter, launch.spec.placement.ranks, device_of(launch) == "cuda"
        session, part = launch.spec.session, launch.part
        if part is None:
            for key in (session, "") if session else ("",):
                standby = self._standbys.get(key)
                fits = standby is not None and _fits(standby, interpreter, ranks, on_gpus)
                if standby is not None and fits and not standby.has_dead_rank():
                    del self._standbys[key]
                    standby.resume()
                    return standby, "standby"
            self.drop(session)
        warm = "zygote" if self.zygotes.get(interpreter).ready else "cold"
        # ranks that have joined each other can't be part of a larger group
        return self._make(interpreter, ranks, part is None and not on_gpus, part=part), warm

    def dismiss(self, group: Group) -> None:
        """End a group without a run."""
        group.dismiss()
        self._departing.append(group)

    def warm(self, interpreter: Interpreter, ranks: int) -> None:
        """Start this interpreter's zygote, and a standby group of `ranks` (0 for none)."""
        # an error is reported when a run needs it
        with contextlib.suppress(OSError):
            self.zygotes.get(interpreter)
            if ranks:
                self._replenish("", interpreter, ranks, self._last_on_gpus)

    def replenish_after(self, launch: Launch) -> None:
        """Keep a standby group like this run's for the next run."""
        if launch.part is not None:
            return
        self._last_on_gpus = device_of(launch) == "cuda"
        self._replenish("", launch.interpreter, launch.spec.placement.ranks, self._last_on_gpus)

    def keep_for_session(self, session: Launch) -> None:
        """Keep a standby group for the session's next fresh run; on GPUs it creates its CUDA contexts.

        Args:
            session: The session's own launch.
        """
        key, on_gpus = session.spec.run_id, device_of(session) == "cuda"
        self._replenish(key, session.interpreter, session.spec.placement.ranks, on_gpus)
        group = self._standbys.get(key)
        if group is not None and on_gpus and not group.master_port:
            try:
                prepare(session, group, range(len(group.ranks)), stays=False)
            except OSError:
                self.drop(key)

    def drop(self, session: str) -> None:
        """Drop the standby group of a session, such as one that ends; "" is for runs with their own lease."""
        standby = self._standbys.pop(session, None)
        if standby is not None:
            self.dismiss(standby)

    def tend(self) -> None:
        """Drop broken and idle standby groups, pause others; free groups whose ranks have exited; retire zygotes."""
        for key, standby in list(self._standbys.items()):
            is_idle = not key and self._loop.time() - standby.wanted_at > self._settings.standby_idle_s
            if standby.broken or is_idle:
                self.drop(key)
            elif self._loop.time() - standby.wanted_at > _PAUSE_S:
                standby.pause()
        for group in [group for group in self._departing if group.is_dead()]:
            group.close()
            self._departing.remove(group)
        self.zygotes.retire()

    def _make(
        self, interpreter: Interpreter, ranks: int, join_early: bool, rehearse: bool = False, part: Part | None = None
    ) -> Group:
        return Group(
            self.zygotes.get(interpreter),
            ranks if part is None else part.ranks,
            join_early,
            self._settings.output_limit,
            self._settings.runtime_path,
            rehearse=rehearse,
            first_rank=0 if part is None else part.first_rank,
            world_size=ranks,
        )

    def _replenish(self, key: str, interpreter: Interpreter, ranks: int, on_gpus: bool) -> None:
        if not self._settings.standby:
            return
        standby = self._standbys.get(key)
        if standby is not None:
            if _fits(standby, interpreter, ranks, on_gpus):
                standby.wanted_at = self._loop.time()
                return
            self.drop(key)
        with contextlib.suppress(OSError):
            join_early = ranks <= _JOIN_EARLY_MAX and not on_gpus
            self._standbys[key] = self._make(interpreter, ranks, join_early, rehearse=join_early)


def _fits(group: Group, interpreter: Interpreter, ranks: int, on_gpus: bool) -> bool:
    if group.broken or group.zygote.interpreter.key != interpreter.key or len(group.ranks) != ranks:
        return False
    # a group that has joined uses gloo; NCCL would initialize CUDA before the ranks know their devices
    return not (on_gpus and group.join_early)
