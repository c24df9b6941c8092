"""One attempt of a run on the nodes of its lease: the commands to each node, repeated after a lost link.

The ids of nodes with runs are persisted: a restarted pool service waits for these nodes, and for what their agents
hold of each run, before it decides about any run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.files.atomic_file import read_json, write_whole
from sgpu_magic.nodes.joint_run import JointRun
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.client import ReclaimPayload, ResultsReceived
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.events import EventBody, RunEnded
from sgpu_magic.wire.node import (
    Adopt,
    DetachRun,
    EndRun,
    EventsKept,
    HeldRun,
    KillRanks,
    Launch,
    MasterBound,
    MasterKnown,
    NodePart,
    PartsEnded,
    PeerFailed,
    TakeStacks,
    ToAgent,
)
from sgpu_magic.wire.rank_events import RankFailed

HERE = ""
"""The node id in a pool of one machine, where devices and leases name no node."""

# a failure that looks like the loss of a peer waits this long for its cause on another node
_PATIENCE_WITH_VICTIM_S = 0.25

Send = Callable[[str, ToAgent, Sequence[bytes]], None]
# commands that are repeated to a node after it was unreachable; all are idempotent
_STANDING_ORDERS = (MasterKnown, DetachRun, EndRun, PeerFailed, PartsEnded, KillRanks, ReclaimPayload, ResultsReceived)


class DistributedRun:
    """Sends the commands of one attempt.

    Args:
        launch: The launch of all ranks, on the lease that was granted.
        nodes: The node of each part.
        send: Sends to a node if it is connected.
        numbers: As in `JointRun`.

    Attributes:
        joint: The merged events of its nodes.
        has_ended: All its ranks have exited, or it never had any.
    """

    def __init__(
        self, launch: Launch, nodes: Sequence[str], send: Send, numbers: Mapping[int, int] | None = None
    ) -> None:
        self.launch = launch
        self.run_id = launch.spec.run_id
        self.nodes = tuple(nodes)
        self._send = send
        self.joint = JointRun(len(self.nodes), numbers or dict.fromkeys(range(len(nodes)), launch.number))
        self.has_ended = False
        self._standing_orders: list[ToAgent] = []
        self._unstarted: set[int] = set()
        # parts that were launched but have sent nothing yet: the command may have been lost with a link
        self._silent: set[int] = set()
        self._ready: dict[int, MasterBound] = {}
        self._frames: Sequence[bytes] = ()

    @property
    def parts(self) -> dict[int, str]:
        """The node of each part that has, or may have, ranks."""
        return {index: node for index, node in enumerate(self.nodes) if not self.joint.parts[index].has_ended}

    def part_on(self, node: str) -> int | None:
        """The part on a node, None if there is none."""
        return self.nodes.index(node) if node in self.nodes else None

    def node_of(self, rank: int) -> str:
        """The node of a rank; the first node if there is no such rank."""
        nodes = [share.node for share in self.launch.lease.shares for _ in range(share.ranks)]
        return nodes[rank] if rank < len(nodes) else self.nodes[0]

    # ------------------------------------------------------------ orders

    def start(self, frames: Sequence[bytes], there: Callable[[str], bool]) -> None:
        """Launch every part, on nodes that are not connected yet as soon as they connect.

        Args:
            frames: Raw frames of the launch.
            there: Whether a node is connected.
        """
        self._frames = frames
        self._unstarted = set(range(len(self.nodes)))
        for node in self.nodes:
            if there(node):
                self.on_node_connected(node)

    def on_node_connected(self, node: str) -> bool:
        """Launch the part of a node that has just connected. Returns False if it has sent messages of it already."""
        index = self.nodes.index(node)
        if index not in self._unstarted | self._silent:
            return False
        self._unstarted.discard(index)
        self._silent.add(index)
        self._send(node, part_of(self.launch, index), self._frames)
        for order in self._standing_orders:
            self._send(node, order, ())
        return True

    def note_launched(self, index: int) -> None:
        """Record that the part was launched: its node has sent a message of it."""
        self._silent.discard(index)
        if not (self._unstarted or self._silent):
            self._frames = ()

    def drop_unstarted(self) -> list[int]:
        """Cancel the launch of parts whose nodes have not connected yet. Returns these parts."""
        dropped, self._unstarted = sorted(self._unstarted), set[int]()
        return dropped

    def order(self, order: ToAgent) -> None:
        """Send a command to every part that has been started."""
        if isinstance(order, _STANDING_ORDERS) and order not in self._standing_orders:
            self._standing_orders.append(order)
        for index, node in enumerate(self.nodes):
            if index not in self._unstarted:
                self._send(node, order, ())

    def adopt(self, index: int) -> None:
        """Resume a part whose agent has reconnected, or has connected to a new pool service."""
        self.note_launched(index)
        node = self.nodes[index]
        self._send(node, Adopt(run_id=self.run_id, number=self.joint.parts[index].passed), ())
        for order in self._standing_orders:
            self._send(node, order, ())

    def events_kept(self, numbers: Mapping[int, int]) -> None:
        """Tell the nodes that the pool has persisted these events, including those that were merged into them."""
        for index, node in enumerate(self.nodes):
            self._send(node, EventsKept(run_id=self.run_id, number=numbers.get(index, 0)), ())

    def take_stacks(self, request: int) -> None:
        """Request the stacks of the parts that have ranks."""
        for node in self.parts.values():
            self._send(node, TakeStacks(request=request, run_id=self.run_id), ())

    def master_bound(self, index: int, bound: MasterBound) -> None:
        """The ranks of a part are ready for rendezvous. Once all parts are, send them the master's address."""
        self.note_launched(index)
        self._ready[index] = bound
        if len(self._ready) == len(self.nodes):
            first = self._ready[0]
            known = MasterKnown(run_id=self.run_id, address=first.address, port=first.port)
            if known not in self._standing_orders:
                self.order(known)

    def forward_event(self, index: int, body: EventBody) -> None:
        """End the other parts if an event of one part requires it."""
        if len(self.nodes) == 1:
            return
        if isinstance(body, RankFailed) or (isinstance(body, RunEnded) and body.state is RunState.FAILED):
            if body.failure is not None and body.failure.is_consequence:
                # another part may be the cause, with its event still in transit; stopping it now would hide that
                asyncio.get_running_loop().call_later(_PATIENCE_WITH_VICTIM_S, self.part_failed, index)
            else:
                self.part_failed(index)
        elif isinstance(body, RunEnded) and body.state in (RunState.CANCELLED, RunState.TIMED_OUT):
            # ended by its own agent, for example because the run has no client any more
            self._order_others(
                index, EndRun(run_id=self.run_id, state=body.state, reason=body.reason, limit=body.limit)
            )

    def part_failed(self, index: int) -> None:
        """A rank of this part failed, or its node is lost: release the ranks of the other parts."""
        self._order_others(index, PeerFailed(run_id=self.run_id))

    def _order_others(self, index: int, order: PeerFailed | EndRun) -> None:
        """Send the command once, to all parts with ranks except one."""
        if not any(isinstance(standing, type(order)) for standing in self._standing_orders):
            self._standing_orders.append(order)
            for other, node in self.parts.items():
                if other != index:
                    self._send(node, order, ())

    def part_ended(self, index: int) -> None:
        """A part has ended; its `RunEnded` follows once its results have been transferred."""
        self.joint.parts[index].end_reported = True
        if self.joint.all_ended:
            self.all_ended()

    def all_ended(self) -> None:
        """Every part has ended: let the ranks exit. Those of a single part need no command."""
        if len(self.nodes) > 1:
            self.order(PartsEnded(run_id=self.run_id))


def part_of(launch: Launch, index: int) -> Launch:
    """The launch of one part; the whole launch if there is only one."""
    shares = launch.lease.shares
    if len(shares) < 2:
        return launch
    share = shares[index]
    part = NodePart(
        index=index,
        nodes=len(shares),
        first_rank=sum(other.ranks for other in shares[:index]),
        ranks=share.ranks,
        address=share.address,
    )
    return msgspec.structs.replace(launch, part=part)


def nodes_of(lease: Lease) -> tuple[str, ...]:
    """The nodes of a lease in the order of its parts; `HERE` in a pool of one machine."""
    return tuple(share.node for share in lease.shares) or (HERE,)


# ---------------------------------------------------------------- when a pool service starts


class HeldRunParts(msgspec.Struct):
    """A run of an earlier service that agents still hold.

    Args:
        nodes: The node of each part of its lease.
        parts: What the agents hold of it, by part.
    """

    nodes: tuple[str, ...]
    parts: dict[int, HeldRun] = msgspec.field(default_factory=dict[int, HeldRun])

    @property
    def attempt(self) -> int:
        return max(held.launch.attempt for held in self.parts.values())

    @property
    def missing(self) -> set[str]:
        """The nodes whose parts no agent has reported."""
        return {node for index, node in enumerate(self.nodes) if index not in self.parts}

    @property
    def whole(self) -> HeldRun:
        """The run as a single agent would hold it."""
        held = list(self.parts.values())
        going = [one.state for one in held if not one.state.is_final]
        first = held[0]
        return msgspec.structs.replace(
            first,
            launch=msgspec.structs.replace(first.launch, part=None),
            state=going[0] if going else first.state,
            started_s=max(one.started_s for one in held),
            have_ranks_exited=all(one.have_ranks_exited for one in held),
            locks=0,
        )


class HeldParts:
    """Runs that the connected nodes hold, until the pool adopts them."""

    def __init__(self) -> None:
        self.runs: dict[str, HeldRunParts] = {}

    def add(self, node: str, held: Iterable[HeldRun]) -> list[tuple[str, str]]:
        """Add the runs that a node holds. Returns (node, run id) of each part that belongs to an outdated attempt."""
        stale: list[tuple[str, str]] = []
        # sessions first: runs in a session have its nodes
        for one in sorted(held, key=lambda one: bool(one.launch.spec.session)):
            run_id = one.launch.spec.run_id
            index = one.launch.part.index if one.launch.part is not None else 0
            run = self.runs.get(run_id)
            if run is None or run.attempt < one.launch.attempt:
                stale += [] if run is None else [(run.nodes[part], run_id) for part in run.parts]
                run = self.runs[run_id] = HeldRunParts(nodes_of(one.launch.lease))
            elif run.attempt > one.launch.attempt:
                stale.append((node, run_id))
                continue
            run.parts[index] = one
        return stale

    @property
    def awaited(self) -> set[str]:
        """Nodes that must have further parts of these runs."""
        return {node for run in self.runs.values() for node in run.missing}

    def node_lost(self, node: str) -> None:
        """Drop the parts of a node that was lost after it had connected."""
        for run_id, run in list(self.runs.items()):
            for index, own in enumerate(run.nodes):
                if own == node:
                    run.parts.pop(index, None)
            if not run.parts:
                del self.runs[run_id]


class BusyNodes:
    """The ids of nodes with runs, kept in a file.

    Args:
        path: The file; its directory must exist.

    Attributes:
        known: The ids as last written, by this service or the one before.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.known = read_json(path, frozenset[str]) or frozenset()

    def write(self, nodes: Iterable[str]) -> None:
        """Write the ids of nodes that have runs now. Write errors are ignored: agents also reconnect by themselves."""
        new = frozenset(nodes)
        if new != self.known:
            self.known = new
            with contextlib.suppress(OSError):
                write_whole(self._path, msgspec.json.encode(sorted(new)))
