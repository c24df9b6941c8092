"""An engine of nodes, each with an agent that connects, disconnects, and reconnects with the runs that it holds.

Subclasses decide where nodes come from and when a node is dead: they call `on_node_connected`, `on_node_message` and
`node_lost`, and may place each run themselves (`start_run`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.files.run_directory import contents_below
from sgpu_magic.nodes.distributed_run import BusyNodes, DistributedRun, HeldParts, nodes_of
from sgpu_magic.nodes.engine_reports import EngineListener, JointStacks, NodeChannel, merged_inventory
from sgpu_magic.nodes.joint_run import MergedEvent
from sgpu_magic.nodes.node_files import NodeFiles
from sgpu_magic.nodes.stale_runs import StaleRuns
from sgpu_magic.packages.node.store import needs_build
from sgpu_magic.wire.attachments import Environment
from sgpu_magic.wire.base import FailureKind, RunKind, RunLimit, RunState
from sgpu_magic.wire.client import ReclaimPayload, ResultsReceived, SendComms, Warm
from sgpu_magic.wire.devices import Inventory, Lease
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.files import CHECKPOINTS, FetchBlob, FetchRunFile, RunFile, StoreRunFile, ToStream
from sgpu_magic.wire.node import (
    AgentReady,
    Answered,
    CellTaken,
    DetachRun,
    DevicesFree,
    EndAgent,
    EndRun,
    FromAgent,
    InventoryTaken,
    KillRanks,
    Launch,
    MasterBound,
    PartEnded,
    Question,
    RanksGone,
    RelaySignal,
    RestartSessionRanks,
    RunEvent,
    SessionRanksRestarted,
    StacksTaken,
    TakeInventory,
    ToAgent,
    TrackingAsked,
    TrackingKnown,
    WarmZygote,
)
from sgpu_magic.wire.option_text import OptionName, Text, TextWithOptions, text_of
from sgpu_magic.wire.rank_events import Failure, RankStack
from sgpu_magic.wire.run import Interpreter, RankAnswer
from sgpu_magic.wire.streams import StreamClosed, StreamData, StreamEnded, StreamOpened, StreamTaken

RunOrder = TrackingKnown | DetachRun | KillRanks | ReclaimPayload | ResultsReceived
_NO_SESSION = "its session has ended"
_NOT_STARTED = "it has not started yet: the run's devices are being acquired"
# number of finished runs that are kept; the maximum if some have not reported their payload's release yet
_MOST_ENDED, _MOST_UNREPORTED = 200, 2000
# wait for nodes that had runs when the last pool service ended; nodes still missing after it are lost
_COME_BACK_S = 10.0
_NOT_BACK = "it had ranks of the run when the pool service ended, and has not reconnected since"
_NEW_AGENT = "its agent and its ranks ended unexpectedly"
_OfRun = RunEvent | PartEnded | DevicesFree | RanksGone | MasterBound


class Engine:
    """The common base of all engines: executes runs on the nodes that its subclass provides.

    The subclass calls, from the loop's thread: `on_node_connected`, `on_node_message`, `node_lost`,
    `inventory_changed`, `start_parts`, `refuse_lease`. It overrides as needed: `start_run`, `withdraw`, `lease_free`,
    `inventory`, `close`, and `start`, which must call `super().start(listener)` last.

    Args:
        settings: The pool's settings.
        name: The display name of the nodes as a whole.

    Attributes:
        far: The nodes have no access to the pool's files.
        come_and_go: The set of nodes changes: the ids of nodes with runs are persisted, and the next pool service
            waits for them.
        come_back_s: Seconds to wait for nodes that had runs when the pool service starts.
    """

    far = True
    come_and_go = True
    come_back_s = _COME_BACK_S
    # set by `start`; nothing is reported before that
    _listener: EngineListener

    def __init__(self, settings: Settings, name: str) -> None:
        self._settings = settings
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._channels: dict[str, NodeChannel] = {}
        self._busy = BusyNodes(settings.state_path / "busy-nodes.json")
        self._runs: dict[str, DistributedRun] = {}
        # finished runs, in the order of their ends
        self._ended: deque[DistributedRun] = deque()
        self._placing: dict[str, Launch] = {}
        self._leases: dict[str, Lease] = {}
        self._stacks = JointStacks()
        self._inventories: dict[str, Inventory] = {}
        self._addresses: dict[str, str] = {}
        self._hosts: dict[str, str] = {}
        self._awaited: set[str] = set(self._busy.known) if self.come_and_go else set()
        self._held = HeldParts()
        self._stale = StaleRuns(lambda node, order: self._send(node, order, ()))
        self._begun = False
        self._settled = False
        self._patience: asyncio.TimerHandle | None = None
        self._warm: Warm | None = None
        self._files = NodeFiles(settings)

    # ------------------------------------------------------------ messages of the nodes

    def on_node_connected(self, channel: NodeChannel, ready: AgentReady, address: str = "") -> None:
        """An agent has connected: for the first time, after a lost link, or with runs of an earlier service.

        Args:
            channel: The link to it; replaces an earlier one.
            ready: Its first message.
            address: The address at which other nodes reach it; "" if `inventory` provides it.
        """
        node = channel.node
        old = self._channels.get(node)
        if old is not None and old is not channel:
            old.close()
        self._channels[node] = channel
        self._inventories[node] = ready.inventory
        self._addresses[node] = address
        self._hosts[node] = ready.inventory.host
        if self._warm is not None:
            channel.send(WarmZygote(interpreter=self._warm.interpreter, ranks=self._warm.ranks))
        if self._settled:
            self._on_node_returned(node, ready)
            self.inventory_changed()
            return
        for where, run_id in self._held.add(node, ready.runs):
            self._stale.end(where, run_id)
        # a node that connected without its part has lost it
        self._awaited = (self._awaited | self._held.awaited) - self._channels.keys()
        self._report_held_if_all()

    def await_nodes(self, nodes: Iterable[str]) -> None:
        """Wait for nodes that may hold runs of an earlier service, for `come_back_s` from now on."""
        if self._settled:
            return
        self._awaited |= set(nodes) - self._channels.keys()
        if self._patience is not None:
            self._patience.cancel()
        self._patience = self._loop.call_later(self.come_back_s, self._report_held)

    def on_node_message(self, node: str, message: FromAgent, frames: Sequence[bytes] = ()) -> None:
        """Handle a message of an agent other than its first. A fault costs the run that the message is about."""
        try:
            self._handle(node, message, frames)
        except Exception as error:  # noqa: BLE001
            self._listener.failed(getattr(message, "run_id", ""), error)

    def _handle(self, node: str, message: FromAgent, frames: Sequence[bytes]) -> None:
        match message:
            case CellTaken():
                self._on_cell_taken(node, message)
            case RunEvent() | PartEnded() | DevicesFree() | RanksGone() | MasterBound():
                self._on_run_message(node, message, frames)
            case InventoryTaken(inventory=inventory):
                self._inventories[node] = inventory
                self.inventory_changed()
            case StacksTaken(request=request, run_id=run_id, stacks=stacks):
                run = self._runs.get(run_id)
                part = None if run is None else run.part_on(node)
                joined = None if part is None else self._stacks.take_part(request, part, stacks)
                if joined is not None:
                    self._listener.stacks_taken(request, joined)
            case SessionRanksRestarted() | Answered() | TrackingAsked():
                self._listener.on_node_message(message, frames)
            case StreamOpened() | StreamData() | StreamTaken() | StreamEnded() | StreamClosed():
                self._listener.on_node_message(message, frames)
            case FetchBlob() | FetchRunFile() | StoreRunFile():
                self._files.on_request(message, frames, lambda answer, data: self._send(node, answer, data))
            case AgentReady():
                pass

    def _on_cell_taken(self, node: str, message: CellTaken) -> None:
        """Hold a cell that its agent got over its session's line."""
        launch = message.launch
        session, run_id = self._runs.get(launch.spec.session), launch.spec.run_id
        if run_id in self._runs:
            return
        if session is None:
            self._stale.end(node, run_id)
            return
        self._runs[run_id] = DistributedRun(launch, session.nodes, self._send)
        self._tidy()
        self._listener.cell_taken(message)

    def _on_run_message(self, node: str, message: _OfRun, frames: Sequence[bytes]) -> None:
        run_id = message.run_id
        if self._stale.is_stale(node, run_id):
            if isinstance(message, RanksGone):
                self._stale.ranks_exited(node, run_id)
                if node not in self._stale.nodes:
                    self.inventory_changed()
            return
        run = self._runs.get(run_id)
        part = None if run is None else run.part_on(node)
        if run is None or part is None:
            return
        match message:
            case RunEvent():
                self._on_run_event(run, part, message, frames)
            case PartEnded():
                run.part_ended(part)
            case DevicesFree():
                run.joint.parts[part].free = True
                self._finish_if_over(run)
            case RanksGone():
                self._part_exited(run, part)
            case MasterBound():
                run.master_bound(part, message)

    def node_lost(self, node: str, why: str) -> None:
        """A node is dead or given up: its runs are lost, and their ranks on other nodes are ended.

        Args:
            node: The node's id; an unknown one is ignored.
            why: The evidence, for example `the node's raylet is dead`; without a full stop.
        """
        channel = self._channels.pop(node, None)
        if channel is not None:
            channel.close()
        self._inventories.pop(node, None)
        self._stale.node_lost(node)
        self._awaited.discard(node)
        if self._settled:
            self._runs_lost(node, [run for run in self._runs.values() if node in run.parts.values()], why)
            self.inventory_changed()
        else:
            self._held.node_lost(node)
            self._report_held_if_all()

    def inventory_changed(self) -> None:
        """The nodes' devices or other resources have changed: report the new inventory to the pool service."""
        if not self._settled:
            self._report_held_if_all()
            return
        if (inventory := self.inventory()) is not None:
            self._listener.inventory_taken(inventory)

    def inventory(self) -> Inventory | None:
        """The total inventory of the usable nodes; None while it is not known."""
        usable = {node: one for node, one in self._inventories.items() if node not in self._stale.nodes}
        return merged_inventory(self._name, usable, self._addresses)

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
            if session is None or session.has_ended:
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

    # ------------------------------------------------------------ requests of the pool service

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

    @property
    def agent_pid(self) -> int | None:
        """Pid of the agent on the pool's own machine; None without one. An adopted agent is no child of the pool."""
        return None

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
        return not run.has_ended

    def end_run(self, run_id: str, state: RunState, reason: Text, limit: RunLimit | None = None) -> None:
        launch = self._placing.pop(run_id, None)
        if launch is not None:
            self.withdraw(run_id)
        elif (run := self._runs.get(run_id)) is not None:
            never = run.drop_unstarted()
            if len(never) == len(run.nodes):
                run.has_ended = True
                self._ended.append(run)
                launch = run.launch
            else:
                run.order(EndRun(run_id=run_id, state=state, reason=reason, limit=limit))
                for part in never:
                    self._part_exited(run, part)
        if launch is not None:
            # deferred: the caller is still changing its own state
            self._loop.call_soon(self._end_unstarted, launch, RunEnded(state=state, reason=str(reason), limit=limit))

    def give_back(self, run_id: str) -> None:
        """Release the lease of a run without ranks; a session's only once its `--fresh` runs are over too."""
        beside = (run for run in self._runs.values() if run.launch.spec.session == run_id and run.launch.spec.fresh)
        if run_id in self._leases and all(run.has_ended for run in beside):
            self.lease_free(run_id, self._leases.pop(run_id))

    def take_stacks(self, request: int, run_id: str) -> None:
        run = self._runs.get(run_id)
        if run is not None and not run.has_ended:
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
        if run is None or run.has_ended:
            if isinstance(order, Question):
                answer = Answered(request=order.request, answer=RankAnswer(problem=_NO_SESSION))
            else:
                answer = SessionRanksRestarted(request=order.request, session=order.session, problem=_NO_SESSION)
            self._listener.on_node_message(answer, ())

    def offer_line(self, session: str, token: bytes) -> str:
        """Let the session's agent admit one connection that presents this token.

        Returns:
            The agent's socket on this machine; "" if it has none here.
        """
        return ""

    def forward(self, run_id: str, rank: int, message: ToStream | SendComms, frames: Sequence[bytes]) -> None:
        """Forward a message of a stream or to widgets to the node of a run's rank.

        `EngineListener.on_node_message` reports the answers.
        """
        run = self._runs.get(run_id)
        if run is not None:
            self._send(run.node_of(rank), message, frames)

    def start(self, listener: EngineListener) -> None:
        """Start to handle messages of the nodes."""
        self._listener = listener
        self._begun = True
        self.await_nodes(())
        # deferred: the pool service is not ready yet
        self._loop.call_soon(self._report_held_if_all)

    def warm(self, order: Warm) -> None:
        self._warm = order
        for channel in self._channels.values():
            channel.send(WarmZygote(interpreter=order.interpreter, ranks=order.ranks))

    def take_inventory(self) -> None:
        for channel in self._channels.values():
            channel.send(TakeInventory())

    def prepare(self, run_id: str, interpreter: Interpreter, environment: Environment) -> None:
        """Build the environment of a queued run in advance.

        The default does nothing: the run's nodes are not known yet.
        """

    def builds(self, interpreter: Interpreter, environment: Environment) -> bool:
        """Whether the nodes build this environment; otherwise they use the kernel's own interpreter."""
        return needs_build(self._settings, environment)

    def adopt(self, run_id: str, numbers: Mapping[int, int]) -> None:
        """Adopt a run that agents hold from an earlier service.

        Args:
            run_id: The run.
            numbers: By part (0 if the run has only one), the number of the newest event that is persisted already.
        """
        held = self._held.runs.get(run_id)
        if held is None:
            return
        whole = held.whole
        run = self._runs[run_id] = DistributedRun(whole.launch, held.nodes, self._send, numbers)
        if not whole.launch.spec.session:
            self._leases[run_id] = whole.launch.lease
        for part in held.parts:
            run.adopt(part)
        if len(held.parts) == len(held.nodes) and whole.state.is_final:
            run.all_ended()

    def relay_signal(self, number: int) -> None:
        """Send a signal to the ranks on all nodes that handle it."""
        for channel in self._channels.values():
            channel.send(RelaySignal(number=number))

    def close(self) -> None:
        """End every rank and every agent."""
        if self._patience is not None:
            self._patience.cancel()
        for channel in self._channels.values():
            channel.send(EndAgent())
            channel.close()
        self._channels.clear()
        self._files.close()
        self._busy.write(())

    # ------------------------------------------------------------ events of the parts

    def _on_run_event(self, run: DistributedRun, part: int, event: RunEvent, frames: Sequence[bytes]) -> None:
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

    def _runs_lost(self, node: str, runs: Sequence[DistributedRun], why: str) -> None:
        """Report that runs have lost a node, and end their other parts."""
        if not runs:
            return
        host = self._hosts.get(node, node)
        for run in runs:
            part = run.nodes.index(node)
            self._pass_on(run.joint.part_lost(part))
            self._part_silent(run, part)
        message = f"the node {host} was lost: {why}"
        self._listener.runs_lost([run.run_id for run in runs], message, host)
        for run in runs:
            run.part_failed(run.nodes.index(node))
            # parts that have finished wait for the others
            run.all_ended()
            self._finish_if_over(run)

    def _pass_on(self, events: Sequence[MergedEvent]) -> None:
        for event, frames in events:
            self._listener.on_run_event(event, frames)

    def _part_silent(self, run: DistributedRun, part: int) -> None:
        for request, stacks in self._stacks.part_silent(run.run_id, part):
            self._listener.stacks_taken(request, stacks)

    def _finish_if_over(self, run: DistributedRun) -> None:
        if run.has_ended:
            return
        if not run.joint.has_exited:
            if run.joint.free:
                self._listener.devices_free(run.run_id)
            return
        run.has_ended = True
        self._ended.append(run)
        run_id = run.run_id
        if run.joint.is_lost:
            # before the run is placed elsewhere
            self.give_back(run_id)
        self._listener.ranks_exited(run_id)
        if self._runs.get(run_id) is run and run_id not in self._placing:
            # otherwise it was restarted on its lease
            self.give_back(run_id)
        session = self._runs.get(run.launch.spec.session)
        if run.launch.spec.fresh and (session is None or session.has_ended):
            self.give_back(run.launch.spec.session)
        self._tidy()

    # ------------------------------------------------------------ nodes with runs of an earlier service

    def _report_held_if_all(self) -> None:
        if self._begun and not self._settled and not self._awaited:
            self._report_held()

    def _report_held(self) -> None:
        """Report the held runs to the pool service, and give up nodes that have not reconnected."""
        inventory = self.inventory()
        if self._settled:
            return
        if inventory is None:
            # the subclass calls `inventory_changed` when it is known
            self._awaited.clear()
            return
        self._settled = True
        if self._patience is not None:
            self._patience.cancel()
        held = self._held.runs
        self._listener.node_found(inventory, [run.whole for run in held.values()])
        missing = {
            node: [self._runs[run_id] for run_id in held if run_id in self._runs and node in held[run_id].missing]
            for node in self._held.awaited
        }
        self._held = HeldParts()
        for node, runs in missing.items():
            self._runs_lost(node, runs, _NOT_BACK)

    def _on_node_returned(self, node: str, ready: AgentReady) -> None:
        """Resume the parts of a node that has reconnected, or launch those of a new one."""
        held = {one.launch.spec.run_id: one for one in ready.runs}
        missing: list[DistributedRun] = []
        for run_id, run in list(self._runs.items()):
            part = run.part_on(node)
            if part is None or run.joint.parts[part].lost:
                continue
            one = held.get(run_id)
            if one is not None and one.launch.attempt == run.launch.attempt:
                del held[run_id]
                run.adopt(part)
            elif part in run.parts and not run.on_node_connected(node):
                missing.append(run)
        for run_id in held:
            self._stale.end(node, run_id)
        self._runs_lost(node, missing, _NEW_AGENT)

    def _refuse(self, launch: Launch, message: Text) -> None:
        text = message if isinstance(message, TextWithOptions) else None
        failure = Failure(kind=FailureKind.SESSION, message=str(message), text=text, at=time.time())
        # deferred: the caller is still changing its own state
        self._loop.call_soon(self._end_unstarted, launch, RunEnded(state=RunState.FAILED, failure=failure))

    def _end_unstarted(self, launch: Launch, ended: RunEnded) -> None:
        """Report the end of a run that never had ranks."""
        run_id = launch.spec.run_id
        event = RunEvent(run_id=run_id, number=launch.number + 1, at=time.time(), body=ended)
        self._listener.on_run_event(event, ())
        self.give_back(run_id)
        self._listener.ranks_exited(run_id)

    def _send(self, node: str, order: ToAgent, frames: Sequence[bytes]) -> None:
        channel = self._channels.get(node)
        if channel is not None:
            channel.send(order, frames)

    def _tidy(self) -> None:
        """Persist which nodes have runs, and forget the oldest finished runs."""
        if self.come_and_go:
            self._busy.write({node for run in self._runs.values() if not run.has_ended for node in run.nodes})
        while len(self._ended) > _MOST_ENDED and (self._ended[0].joint.released or len(self._ended) > _MOST_UNREPORTED):
            run = self._ended.popleft()
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


def _too_wide(lease: Lease) -> Text:
    hosts = ", ".join(share.host for share in lease.shares)
    return text_of(
        f"a session's ranks must be on one node, and these would be on {len(lease.shares)} ({hosts}): after a "
        "failed cell, its process groups could not be reconnected across nodes. Connect with ",
        OptionName("placement", "strict_pack"),
        " or fewer ",
        OptionName("gpus"),
        "; runs without a session may use several nodes.",
    )
