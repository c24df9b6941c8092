"""Runs on the nodes of an engine: leases, parts, and the events of the parts merged into one run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.files.run_directory import contents_below
from sgpu_magic.nodes.distributed_run import BusyNodes, DistributedRun, nodes_of
from sgpu_magic.nodes.engine_reports import EngineListener, JointStacks, NodeChannel
from sgpu_magic.nodes.joint_run import MergedEvent
from sgpu_magic.wire.base import FailureKind, RunKind, RunState
from sgpu_magic.wire.client import ReclaimPayload, ResultsReceived, SendComms
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.files import CHECKPOINTS, RunFile, ToStream
from sgpu_magic.wire.node import (
    Answered,
    DetachRun,
    EndRun,
    KillRanks,
    Launch,
    Question,
    RestartSessionRanks,
    RunEvent,
    SessionRanksRestarted,
    ToAgent,
    TrackingKnown,
)
from sgpu_magic.wire.rank_events import Failure, RankStack
from sgpu_magic.wire.run import RankAnswer

RunOrder = TrackingKnown | DetachRun | KillRanks | ReclaimPayload | ResultsReceived
_NO_SESSION = "its session has ended"
_NOT_STARTED = "it has not started yet: the run's devices are being acquired"
# number of finished runs that are kept; the maximum if some have not reported their payload's release yet
_GONE_KEPT, _UNTOLD_KEPT = 200, 2000


class EngineRuns:
    """The runs of an engine and the commands for them (the base class of `Engine`).

    Args:
        settings: The pool's settings.

    Attributes:
        far: The nodes have no access to the pool's files.
        come_and_go: The set of nodes changes: the ids of nodes with runs are persisted, and the next pool service
            waits for them.
    """

    far = True
    come_and_go = True
    # set by `start`; nothing is reported before that
    _listener: EngineListener

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._channels: dict[str, NodeChannel] = {}
        self._busy = BusyNodes(settings.state_path / "busy-nodes.json")
        self._runs: dict[str, DistributedRun] = {}
        # finished runs, in the order of their ends
        self._over: deque[DistributedRun] = deque()
        self._placing: dict[str, Launch] = {}
        self._leases: dict[str, Lease] = {}
        self._stacks = JointStacks()
        self._loop = asyncio.get_running_loop()

    # ------------------------------------------------------------ leases

    def start_run(self, launch: Launch, frames: Sequence[bytes]) -> None:
        """Acquire devices for the proposed lease; then call `start_parts` with the granted lease, or `refuse_lease`."""
        self.start_parts(launch, frames)

    def withdraw(self, run_id: str) -> None:
        """Stop placing a run: release what was acquired for it and drop its requests."""

    def lease_free(self, run_id: str, lease: Lease) -> None:
        """Release the devices of a lease that no rank uses any more."""

    def start_parts(self, launch: Launch, frames: Sequence[bytes]) -> None:
        """Start the run's ranks on each node of the granted lease, or as soon as the node connects.

        Args:
            launch: The launch, with the granted lease.
            frames: Its raw frames.
        """
        spec = launch.spec
        self._placing.pop(spec.run_id, None)
        nodes = nodes_of(launch.lease)
        if spec.session:
            session = self._runs.get(spec.session)
            if session is None or session.over:
                self._refuse(launch, f"{_NO_SESSION}. %sgpu_connect starts another one.")
                return
            nodes = session.nodes
        else:
            self._leases[spec.run_id] = launch.lease
        if spec.kind is RunKind.SESSION and len(nodes) > 1:
            self._refuse(launch, _too_wide(launch.lease))
            return
        if self.far:
            launch = msgspec.structs.replace(launch, far=True, checkpoints=_checkpoints(launch))
        run = self._runs[spec.run_id] = DistributedRun(launch, nodes, self._send)
        self._tidy()
        run.start(frames, self._channels.__contains__)
        if not spec.in_session:
            self._listener.lease_granted(spec.run_id, launch.lease)

    def refuse_lease(self, run_id: str, uuids: tuple[str, ...], why: str) -> None:
        """Report that the devices of a run can't be acquired now; the run returns to the queue.

        Args:
            run_id: The run.
            uuids: The devices that are unavailable.
            why: The reason, a sentence.
        """
        if self._placing.pop(run_id, None) is not None:
            self._listener.lease_refused(run_id, uuids, why)

    # ------------------------------------------------------------ from the pool service

    def launch(self, launch: Launch, frames: Sequence[bytes]) -> None:
        """Acquire the lease's devices and start the ranks. A run in a session uses the session's devices.

        The lease is a proposal: `EngineListener.lease_granted` or `lease_refused` answers it.
        """
        run_id = launch.spec.run_id
        kept = self._leases.get(run_id)
        if launch.spec.session or kept == launch.lease:
            self.start_parts(launch, frames)
            return
        if kept is not None:
            self.give_back(run_id)
        self._placing[run_id] = launch
        self.start_run(launch, frames)

    def events_kept(self, run_id: str, numbers: Mapping[int, int]) -> None:
        """Acknowledge events that are persisted. `numbers` as in `Engine.adopt`."""
        if (run := self._runs.get(run_id)) is not None:
            run.events_kept(numbers)

    def order(self, order: RunOrder) -> bool:
        """Send a command to all parts of a run. Returns False if the run is unknown or over."""
        run = self._runs.get(order.run_id)
        if run is None:
            return False
        run.order(order)
        return not run.over

    def end_run(self, run_id: str, state: RunState, reason: str) -> None:
        launch = self._placing.pop(run_id, None)
        if launch is not None:
            self.withdraw(run_id)
        elif (run := self._runs.get(run_id)) is not None:
            never = run.drop_unstarted()
            if len(never) == len(run.nodes):
                run.over = True
                self._over.append(run)
                launch = run.launch
            else:
                run.order(EndRun(run_id=run_id, state=state, reason=reason))
                for part in never:
                    self._part_exited(run, part)
        if launch is not None:
            # deferred: the caller is still changing its own state
            self._loop.call_soon(self._end_unstarted, launch, RunEnded(state=state, reason=reason))

    def give_back(self, run_id: str) -> None:
        """Release the lease of a run without ranks; a session's only once its `--fresh` runs are over too."""
        beside = (run for run in self._runs.values() if run.launch.spec.session == run_id and run.launch.spec.fresh)
        if run_id in self._leases and all(run.over for run in beside):
            self.lease_free(run_id, self._leases.pop(run_id))

    def take_stacks(self, request: int, run_id: str) -> None:
        run = self._runs.get(run_id)
        if run is not None and not run.over:
            self._stacks.ask(request, run_id, run.parts)
            run.take_stacks(request)
        else:
            launch = self._placing.get(run_id)
            ranks = () if launch is None else launch.spec.rank_numbers
            self._listener.stacks_taken(request, tuple(RankStack(rank=rank, problem=_NOT_STARTED) for rank in ranks))

    def ask_session(self, order: RestartSessionRanks | Question) -> None:
        """Pass a request to the ranks of a session; `EngineListener.on_node_message` reports the answer."""
        run = self._runs.get(order.session)
        if run is not None:
            run.order(order)
        if run is None or run.over:
            if isinstance(order, Question):
                answer = Answered(request=order.request, answer=RankAnswer(problem=_NO_SESSION))
            else:
                answer = SessionRanksRestarted(request=order.request, session=order.session, problem=_NO_SESSION)
            self._listener.on_node_message(answer, ())

    def forward(self, run_id: str, rank: int, message: ToStream | SendComms, frames: Sequence[bytes]) -> None:
        """Forward a message of a stream or to widgets to the node of a run's rank; `on_node_message` reports the answers."""
        run = self._runs.get(run_id)
        if run is not None:
            self._send(run.node_of(rank), message, frames)

    # ------------------------------------------------------------ events of the parts

    def _happened(self, run: DistributedRun, part: int, event: RunEvent, frames: Sequence[bytes]) -> None:
        ended = run.joint.ended
        run.note_launched(part)
        merged = run.joint.on_event(part, event, frames, time.time())
        run.forward_event(part, event.body)
        self._pass_on(merged)
        if run.joint.ended and not ended:
            run.all_ended()

    def _part_exited(self, run: DistributedRun, part: int) -> None:
        self._pass_on(run.joint.part_exited(part))
        self._part_silent(run, part)
        self._finish_if_over(run)

    def _lose(self, node: str, runs: Sequence[DistributedRun], why: str, host: str) -> None:
        """These runs have lost the node."""
        if not runs:
            return
        for run in runs:
            part = run.nodes.index(node)
            self._pass_on(run.joint.part_lost(part))
            self._part_silent(run, part)
        self._listener.runs_lost([run.run_id for run in runs], why, host)
        for run in runs:
            run.part_failed(run.nodes.index(node))
            # parts that have finished wait for the others
            run.all_ended()
            self._finish_if_over(run)

    def _pass_on(self, events: Sequence[MergedEvent]) -> None:
        for event, frames in events:
            self._listener.run_happened(event, frames)

    def _part_silent(self, run: DistributedRun, part: int) -> None:
        for request, stacks in self._stacks.part_silent(run.run_id, part):
            self._listener.stacks_taken(request, stacks)

    def _finish_if_over(self, run: DistributedRun) -> None:
        if run.over:
            return
        if not run.joint.has_exited:
            if run.joint.free:
                self._listener.devices_free(run.run_id)
            return
        run.over = True
        self._over.append(run)
        run_id = run.run_id
        if run.joint.lost:
            # before the run is placed elsewhere
            self.give_back(run_id)
        self._listener.ranks_exited(run_id)
        if self._runs.get(run_id) is run and run_id not in self._placing:
            # otherwise it was restarted on its lease
            self.give_back(run_id)
        session = self._runs.get(run.launch.spec.session)
        if run.launch.spec.fresh and (session is None or session.over):
            self.give_back(run.launch.spec.session)
        self._tidy()

    # ------------------------------------------------------------ internals

    def _refuse(self, launch: Launch, message: str) -> None:
        failure = Failure(kind=FailureKind.SESSION, message=message, at=time.time())
        # deferred: the caller is still changing its own state
        self._loop.call_soon(self._end_unstarted, launch, RunEnded(state=RunState.FAILED, failure=failure))

    def _end_unstarted(self, launch: Launch, ended: RunEnded) -> None:
        """Report the end of a run that never had ranks."""
        run_id = launch.spec.run_id
        event = RunEvent(run_id=run_id, number=launch.number + 1, at=time.time(), body=ended)
        self._listener.run_happened(event, ())
        self.give_back(run_id)
        self._listener.ranks_exited(run_id)

    def _send(self, node: str, order: ToAgent, frames: Sequence[bytes]) -> None:
        channel = self._channels.get(node)
        if channel is not None:
            channel.send(order, frames)

    def _tidy(self) -> None:
        """Persist which nodes have runs, and forget the oldest finished runs."""
        if self.come_and_go:
            self._busy.write({node for run in self._runs.values() if not run.over for node in run.nodes})
        while len(self._over) > _GONE_KEPT and (self._over[0].joint.released or len(self._over) > _UNTOLD_KEPT):
            run = self._over.popleft()
            if self._runs.get(run.run_id) is run:
                # otherwise it was restarted
                del self._runs[run.run_id]


def _checkpoints(launch: Launch) -> tuple[RunFile, ...]:
    """The checkpoints of earlier attempts in the run's directory on the pool's disk, to be sent to the nodes."""
    if not launch.attempt:
        return ()
    with contextlib.suppress(OSError):
        return tuple(contents_below(Path(launch.run_dir), CHECKPOINTS).files)
    return ()


def _too_wide(lease: Lease) -> str:
    hosts = ", ".join(share.host for share in lease.shares)
    return (
        f"a session's ranks must be on one node, and these would be on {len(lease.shares)} ({hosts}): after a "
        "failed cell, its process groups could not be reconnected across nodes. Connect with --placement "
        "strict_pack or fewer --gpus; runs without a session may use several nodes."
    )
