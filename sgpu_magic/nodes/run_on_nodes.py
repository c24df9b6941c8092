"""One attempt of a run on the nodes of its lease: what each is ordered, and ordered again after a lost link.

Which nodes have runs is written down: a pool service that is started again waits for them, and for what their agents
hold of each run, before it judges one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.files.whole_file import write_whole
from sgpu_magic.nodes.joint_run import JointRun
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
    Part,
    PartsOver,
    PeerFailed,
    TakeStacks,
    ToAgent,
)
from sgpu_magic.wire.rank_events import RankFailed
from sgpu_magic.wire.states import RunState

HERE = ""
"""The node of a pool of one machine, whose devices and leases name none."""

# seconds for which what looks like the loss of a peer waits for its cause on another node
_PATIENCE_WITH_VICTIM_S = 0.25

Send = Callable[[str, ToAgent, Sequence[bytes]], None]
# what a node that was out of reach may have missed, and may be told twice
_STANDING = (MasterKnown, DetachRun, EndRun, PeerFailed, PartsOver, KillRanks, ReclaimPayload, ResultsReceived)


class RunOnNodes:
    """Orders one attempt.

    Args:
        launch: The whole of it, on the lease that it really has.
        nodes: Of each part.
        send: Sends to a node, if it is there.
        numbers: As of `JointRun`.

    Attributes:
        joint: What its nodes say, joined.
        over: Its ranks are gone everywhere, or it never had any.
    """

    def __init__(
        self, launch: Launch, nodes: Sequence[str], send: Send, numbers: Mapping[int, int] | None = None
    ) -> None:
        self.launch = launch
        self.run_id = launch.spec.run_id
        self.nodes = tuple(nodes)
        self._send = send
        self.joint = JointRun(len(self.nodes), numbers or dict.fromkeys(range(len(nodes)), launch.number))
        self.over = False
        self._standing: list[ToAgent] = []
        self._unstarted: set[int] = set()
        # launched, and nothing has come from there: the order may have been lost with a link
        self._silent: set[int] = set()
        self._ready: dict[int, MasterBound] = {}
        self._frames: Sequence[bytes] = ()

    @property
    def parts(self) -> dict[int, str]:
        """The node of each part that has ranks, or may have some."""
        return {index: node for index, node in enumerate(self.nodes) if not self.joint.parts[index].is_over}

    def part_on(self, node: str) -> int | None:
        """Which part is on a node, None when none is."""
        return self.nodes.index(node) if node in self.nodes else None

    def node_of(self, rank: int) -> str:
        """The node of a rank; the first where there is no such rank."""
        nodes = [share.node for share in self.launch.lease.shares for _ in range(share.ranks)]
        return nodes[rank] if rank < len(nodes) else self.nodes[0]

    # ------------------------------------------------------------ orders

    def start(self, frames: Sequence[bytes], there: Callable[[str], bool]) -> None:
        """Launch every part; those whose nodes are not there yet when they come.

        Args:
            frames: Raw frames of the launch.
            there: Whether a node is.
        """
        self._frames = frames
        self._unstarted = set(range(len(self.nodes)))
        for node in self.nodes:
            if there(node):
                self.node_came(node)

    def node_came(self, node: str) -> bool:
        """Launch the part of a node that was awaited, or does not know of it. False when it has said something."""
        index = self.nodes.index(node)
        if index not in self._unstarted | self._silent:
            return False
        self._unstarted.discard(index)
        self._silent.add(index)
        self._send(node, part_of(self.launch, index), self._frames)
        for order in self._standing:
            self._send(node, order, ())
        return True

    def was_heard(self, index: int) -> None:
        """The part was launched: its node has said something of it."""
        self._silent.discard(index)
        if not (self._unstarted or self._silent):
            self._frames = ()

    def drop_unstarted(self) -> list[int]:
        """Launch no part any more whose node has not come yet. Returns those parts."""
        dropped, self._unstarted = sorted(self._unstarted), set[int]()
        return dropped

    def order(self, order: ToAgent) -> None:
        """Order the same of every part."""
        if isinstance(order, _STANDING) and order not in self._standing:
            self._standing.append(order)
        for index, node in enumerate(self.nodes):
            if index not in self._unstarted:
                self._send(node, order, ())

    def adopt(self, index: int) -> None:
        """Go on with a part whose agent has come back, or has come to a new pool service."""
        self.was_heard(index)
        node = self.nodes[index]
        self._send(node, Adopt(run_id=self.run_id, number=self.joint.passed(index)), ())
        for order in self._standing:
            self._send(node, order, ())

    def events_kept(self, numbers: Mapping[int, int]) -> None:
        """The pool has these events on disk, those that they were joined of included."""
        for index, node in enumerate(self.nodes):
            self._send(node, EventsKept(run_id=self.run_id, number=numbers.get(index, 0)), ())

    def take_stacks(self, request: int) -> None:
        """Ask the parts that have ranks."""
        for node in self.parts.values():
            self._send(node, TakeStacks(request=request, run_id=self.run_id), ())

    def master_bound(self, index: int, bound: MasterBound) -> None:
        """The ranks of a part are ready to meet the others. Once all are, tell them where."""
        self.was_heard(index)
        self._ready[index] = bound
        if len(self._ready) == len(self.nodes):
            first = self._ready[0]
            known = MasterKnown(run_id=self.run_id, address=first.address, port=first.port)
            if known not in self._standing:
                self.order(known)

    def tell_others(self, index: int, body: EventBody) -> None:
        """What a part has said may end the others."""
        if len(self.nodes) == 1:
            return
        if isinstance(body, RankFailed) or (isinstance(body, RunEnded) and body.state is RunState.FAILED):
            if body.failure is not None and body.failure.is_consequence:
                # who is told of it now would be taken for a victim, and may be the cause that is still on its way
                asyncio.get_running_loop().call_later(_PATIENCE_WITH_VICTIM_S, self.part_failed, index)
            else:
                self.part_failed(index)
        elif isinstance(body, RunEnded) and body.state in (RunState.CANCELLED, RunState.TIMED_OUT):
            # by its own agent, as when nobody wants the run any more
            self._order_others(index, EndRun(run_id=self.run_id, state=body.state, reason=body.reason))

    def part_failed(self, index: int) -> None:
        """A rank of this part has failed, or its node is lost: free those on the others."""
        self._order_others(index, PeerFailed(run_id=self.run_id))

    def _order_others(self, index: int, order: PeerFailed | EndRun) -> None:
        """Order this once of the parts that have ranks, but for one."""
        if not any(isinstance(standing, type(order)) for standing in self._standing):
            self._standing.append(order)
            for other, node in self.parts.items():
                if other != index:
                    self._send(node, order, ())

    def part_ended(self, index: int) -> None:
        """A part has ended, and says its last word when its results are here."""
        self.joint.parts[index].told_end = True
        if self.joint.all_ended:
            self.all_ended()

    def all_ended(self) -> None:
        """Every part has ended: its ranks may leave. Those of a single one need not be told."""
        if len(self.nodes) > 1:
            self.order(PartsOver(run_id=self.run_id))


def part_of(launch: Launch, index: int) -> Launch:
    """The launch of one part; the whole where there is only one."""
    shares = launch.lease.shares
    if len(shares) < 2:
        return launch
    share = shares[index]
    part = Part(
        index=index,
        nodes=len(shares),
        first_rank=sum(other.ranks for other in shares[:index]),
        ranks=share.ranks,
        address=share.address,
    )
    return msgspec.structs.replace(launch, part=part)


def nodes_of(lease: Lease) -> tuple[str, ...]:
    """The nodes of a lease, in order of the parts; `HERE` in a pool of one machine."""
    return tuple(share.node for share in lease.shares) or (HERE,)


# ---------------------------------------------------------------- when a pool service begins


class HeldRunParts(msgspec.Struct):
    """A run that agents of an earlier service hold.

    Args:
        nodes: Of each part of its lease.
        parts: What is held of it, by part.
    """

    nodes: tuple[str, ...]
    parts: dict[int, HeldRun] = msgspec.field(default_factory=dict[int, HeldRun])

    @property
    def attempt(self) -> int:
        return max(held.launch.attempt for held in self.parts.values())

    @property
    def missing(self) -> set[str]:
        """Nodes whose part nobody has shown."""
        return {node for index, node in enumerate(self.nodes) if index not in self.parts}

    @property
    def whole(self) -> HeldRun:
        """As one agent would hold it."""
        held = list(self.parts.values())
        going = [one.state for one in held if not one.state.is_final]
        first = held[0]
        return msgspec.structs.replace(
            first,
            launch=msgspec.structs.replace(first.launch, part=None),
            state=going[0] if going else first.state,
            started_s=max(one.started_s for one in held),
            gone=all(one.gone for one in held),
            locks=0,
        )


class HeldParts:
    """What the nodes that have come hold, until the pool takes it over."""

    def __init__(self) -> None:
        self.runs: dict[str, HeldRunParts] = {}

    def add(self, node: str, held: Iterable[HeldRun]) -> list[tuple[str, str]]:
        """A node holds these. Returns (node, run) where there is only a part of an attempt that is over."""
        stale: list[tuple[str, str]] = []
        # sessions first: what runs in them has their nodes
        for one in sorted(held, key=lambda one: bool(one.launch.spec.session)):
            spec = one.launch.spec
            run_id = spec.run_id
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
        """Nodes that must have more of these runs."""
        return {node for run in self.runs.values() for node in run.missing}

    def node_lost(self, node: str) -> None:
        """A node that had come is gone again."""
        for run_id, run in list(self.runs.items()):
            for index, own in enumerate(run.nodes):
                if own == node:
                    run.parts.pop(index, None)
            if not run.parts:
                del self.runs[run_id]


class BusyNodes:
    """A file of node ids.

    Args:
        path: The file; its directory is there.

    Attributes:
        known: As last written, by this service or the one before.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.known = frozenset[str]()
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self.known = frozenset(msgspec.json.decode(path.read_bytes(), type=list[str]))

    def write(self, nodes: Iterable[str]) -> None:
        """Write down which have runs now. A full disk is of no account: nodes that come by themselves are heard."""
        new = frozenset(nodes)
        if new != self.known:
            self.known = new
            with contextlib.suppress(OSError):
                write_whole(self._path, msgspec.json.encode(sorted(new)))
