"""An engine of nodes, each with an agent that connects, disconnects, and reconnects with the runs that it holds.

Subclasses decide where nodes come from and when a node is dead: they call `node_came`, `on_node_message` and `node_lost`,
and may place each run themselves (`start_run`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from sgpu_magic.config import Settings
from sgpu_magic.nodes.distributed_run import DistributedRun, HeldParts
from sgpu_magic.nodes.engine_reports import EngineListener, NodeChannel, merged_inventory
from sgpu_magic.nodes.engine_runs import EngineRuns
from sgpu_magic.nodes.node_files import NodeFiles
from sgpu_magic.packages.node.store import needs_build
from sgpu_magic.wire.attachments import Environment
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.client import Warm
from sgpu_magic.wire.devices import Inventory
from sgpu_magic.wire.files import FetchBlob, FetchRunFile, StoreRunFile
from sgpu_magic.wire.node import (
    Adopt,
    AgentReady,
    Answered,
    DevicesFree,
    EndAgent,
    EndRun,
    EventsKept,
    FromAgent,
    InventoryTaken,
    KillRanks,
    MasterBound,
    PartEnded,
    RanksGone,
    RelaySignal,
    RunEvent,
    SessionRanksRestarted,
    StacksTaken,
    TakeInventory,
    TrackingAsked,
    WarmZygote,
)
from sgpu_magic.wire.run import Interpreter
from sgpu_magic.wire.streams import StreamClosed, StreamData, StreamEnded, StreamOpened, StreamTaken

# wait for nodes that had runs when the last pool service ended; nodes still missing after it are lost
_COME_BACK_S = 10.0
_GIVEN_UP = "its node reconnected after it was given up"
_NOT_BACK = "it had ranks of the run when the pool service ended, and has not reconnected since"
_NEW_AGENT = "its agent and its ranks ended unexpectedly"
# an event number above all others: acknowledges every event
_ALL_EVENTS = 1 << 60
_OfRun = RunEvent | PartEnded | DevicesFree | RanksGone | MasterBound


class Engine(EngineRuns):
    """The common base of all engines: executes runs on the nodes that its subclass provides.

    The subclass calls, from the loop's thread: `node_came`, `on_node_message`, `node_lost`, `inventory_changed`,
    `start_parts`, `refuse_lease`. It overrides as needed: `start_run`, `withdraw`, `lease_free`, `inventory`, `close`,
    and `start`, which must call `super().start(listener)` last.

    Args:
        settings: The pool's settings.
        name: The display name of the nodes as a whole.

    Attributes:
        come_back_s: Seconds to wait for nodes that had runs when the pool service starts.
    """

    come_back_s = _COME_BACK_S

    def __init__(self, settings: Settings, name: str) -> None:
        super().__init__(settings)
        self._name = name
        self._inventories: dict[str, Inventory] = {}
        self._addresses: dict[str, str] = {}
        self._hosts: dict[str, str] = {}
        self._awaited: set[str] = set(self._busy.known) if self.come_and_go else set()
        self._held = HeldParts()
        # by node, runs that were given up while it was unreachable; the node is usable once they have ended there
        self._stale: dict[str, set[str]] = {}
        self._begun = False
        self._settled = False
        self._patience: asyncio.TimerHandle | None = None
        self._warm: Warm | None = None
        self._files = NodeFiles(settings)

    # ------------------------------------------------------------ joining and lost nodes

    def node_came(self, channel: NodeChannel, ready: AgentReady, address: str = "") -> None:
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
            self._came_back(node, ready)
            self.inventory_changed()
            return
        for where, run_id in self._held.add(node, ready.runs):
            self._end_stale(where, run_id)
        # a node that connected without its part has lost it
        self._awaited = (self._awaited | self._held.awaited) - self._channels.keys()
        self._settle_if_all()

    def await_nodes(self, nodes: Iterable[str]) -> None:
        """Wait for nodes that may hold runs of an earlier service, for `come_back_s` from now on."""
        if self._settled:
            return
        self._awaited |= set(nodes) - self._channels.keys()
        if self._patience is not None:
            self._patience.cancel()
        self._patience = self._loop.call_later(self.come_back_s, self._settle)

    def on_node_message(self, node: str, message: FromAgent, frames: Sequence[bytes] = ()) -> None:
        """Handle a message of an agent other than its first. A fault costs the run that the message is about."""
        try:
            self._handle(node, message, frames)
        except Exception as error:  # noqa: BLE001
            self._listener.failed(getattr(message, "run_id", ""), error)

    def _handle(self, node: str, message: FromAgent, frames: Sequence[bytes]) -> None:
        match message:
            case RunEvent() | PartEnded() | DevicesFree() | RanksGone() | MasterBound():
                self._on_run_message(node, message, frames)
            case InventoryTaken(inventory=inventory):
                self._inventories[node] = inventory
                self.inventory_changed()
            case StacksTaken(request=request, run_id=run_id, stacks=stacks):
                run = self._runs.get(run_id)
                part = None if run is None else run.part_on(node)
                joined = None if part is None else self._stacks.taken(request, part, stacks)
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

    def _on_run_message(self, node: str, message: _OfRun, frames: Sequence[bytes]) -> None:
        run_id = message.run_id
        if run_id in self._stale.get(node, ()):
            if isinstance(message, RanksGone):
                self._on_stale_exited(node, run_id)
            return
        run = self._runs.get(run_id)
        part = None if run is None else run.part_on(node)
        if run is None or part is None:
            return
        match message:
            case RunEvent():
                self._happened(run, part, message, frames)
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
        self._stale.pop(node, None)
        self._awaited.discard(node)
        if self._settled:
            self._lost(node, [run for run in self._runs.values() if node in run.parts.values()], why)
            self.inventory_changed()
        else:
            self._held.node_lost(node)
            self._settle_if_all()

    def inventory_changed(self) -> None:
        """The nodes' devices or other resources have changed: report the new inventory to the pool service."""
        if not self._settled:
            self._settle_if_all()
            return
        if (inventory := self.inventory()) is not None:
            self._listener.inventory_taken(inventory)

    def inventory(self) -> Inventory | None:
        """The total inventory of the usable nodes; None while it is not known."""
        usable = {node: one for node, one in self._inventories.items() if node not in self._stale}
        return merged_inventory(self._name, usable, self._addresses)

    # ------------------------------------------------------------ from the pool service

    def start(self, listener: EngineListener) -> None:
        """Start to handle messages of the nodes."""
        self._listener = listener
        self._begun = True
        self.await_nodes(())
        # deferred: the pool service is not ready yet
        self._loop.call_soon(self._settle_if_all)

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

    # ------------------------------------------------------------ internals

    def _settle_if_all(self) -> None:
        if self._begun and not self._settled and not self._awaited:
            self._settle()

    def _settle(self) -> None:
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
            self._lost(node, runs, _NOT_BACK)

    def _came_back(self, node: str, ready: AgentReady) -> None:
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
            elif part in run.parts and not run.node_came(node):
                missing.append(run)
        for run_id in held:
            self._end_stale(node, run_id)
        self._lost(node, missing, _NEW_AGENT)

    def _end_stale(self, node: str, run_id: str) -> None:
        """End ranks on a node whose run continues without them or has ended."""
        self._stale.setdefault(node, set()).add(run_id)
        for order in (
            Adopt(run_id=run_id, number=_ALL_EVENTS),
            EndRun(run_id=run_id, state=RunState.CANCELLED, reason=_GIVEN_UP),
            KillRanks(run_id=run_id),
            EventsKept(run_id=run_id, number=_ALL_EVENTS),
        ):
            self._send(node, order, ())

    def _on_stale_exited(self, node: str, run_id: str) -> None:
        self._send(node, EventsKept(run_id=run_id, number=_ALL_EVENTS), ())
        self._stale[node].discard(run_id)
        if not self._stale[node]:
            del self._stale[node]
            self.inventory_changed()

    def _lost(self, node: str, runs: Sequence[DistributedRun], why: str) -> None:
        host = self._hosts.get(node, node)
        self._lose(node, runs, f"the node {host} was lost: {why}", host)
