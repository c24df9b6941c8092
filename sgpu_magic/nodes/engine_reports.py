"""What an engine reports to the pool service, its channel to a node, and merging the reports of several nodes.

No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from sgpu_magic.agent.failures import find_root_cause
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.devices import Device, Inventory, Lease, Node
from sgpu_magic.wire.events import PayloadReleased, RanksStarted, RunEnded
from sgpu_magic.wire.files import FromStream
from sgpu_magic.wire.node import Answered, CellTaken, HeldRun, RunEvent, SessionRanksRestarted, ToAgent, TrackingAsked
from sgpu_magic.wire.rank_events import Failure, RankStack

# slowest first: the slowest start of any node counts for the run
_WARMTH = ("cold", "zygote", "standby", "session")
# how the run was stopped takes precedence over how single nodes ended
_RANKING = (RunState.TIMED_OUT, RunState.CANCELLED, RunState.FAILED, RunState.SUCCEEDED)


NodeMessage = SessionRanksRestarted | Answered | TrackingAsked | FromStream


class EngineListener(Protocol):
    """The pool service, as an engine sees it."""

    def node_found(self, inventory: Inventory, held: Sequence[HeldRun]) -> None:
        """The nodes are known. Answer each run that they hold from an earlier service with `adopt`."""
        ...

    def inventory_taken(self, inventory: Inventory) -> None: ...
    def on_run_event(self, event: RunEvent, frames: Sequence[bytes]) -> None: ...

    def cell_taken(self, taken: CellTaken) -> None:
        """A session's agent got this cell over the session's line. Its events follow."""
        ...

    def devices_free(self, run_id: str) -> None:
        """All processes of the run have exited, but files are still being transferred: `ranks_exited` follows.

        May be called repeatedly. Answer with `Engine.give_back` if the run does not need the devices again.
        """
        ...

    def ranks_exited(self, run_id: str) -> None:
        """All processes of the run have exited on every node, and its files have arrived."""
        ...

    def stacks_taken(self, request: int, stacks: tuple[RankStack, ...]) -> None: ...

    def on_node_message(self, message: NodeMessage, frames: Sequence[bytes]) -> None:
        """A node has answered a request, or asks for a run's MLflow target: answer with `TrackingKnown`."""
        ...

    def lease_granted(self, run_id: str, lease: Lease) -> None:
        """The engine acquired devices for the run, maybe others than the scheduler proposed. Its ranks start."""
        ...

    def lease_refused(self, run_id: str, uuids: tuple[str, ...], why: str) -> None:
        """The engine can't acquire the devices.

        Args:
            uuids: The devices that are unavailable.
            why: The reason, a sentence.
        """
        ...

    def runs_lost(self, run_ids: Sequence[str], why: str, host: str) -> None:
        """A node died or is unreachable for good, so these runs lost all or some of their ranks.

        Their ranks on other nodes are being ended: `ranks_exited` of each run follows.

        Args:
            run_ids: The runs.
            why: A sentence that names the node, without a full stop.
            host: The node's host name.
        """
        ...

    def nodes_lost(self, why: str) -> None:
        """All ranks died with their agent. A new agent accepts launches from now on."""
        ...

    def degraded(self, why: str) -> None:
        """No rank can be started for now, though the pool can follow and end its runs.

        Args:
            why: The reason, a sentence without a full stop; "" when ranks can be started again.
        """
        ...

    def failed(self, run_id: str, error: Exception) -> None:
        """The engine could not handle a message of a node.

        Args:
            run_id: The run that the message is about; "" for none.
            error: The exception.
        """
        ...

    def broken(self, why: str) -> None:
        """The engine has failed: no agent stays alive, or the cluster can't be reached."""
        ...


class NodeChannel(Protocol):
    """A link to an agent. Messages sent while it is interrupted are lost; the engine resends what matters."""

    node: str
    """The node's id, as in `NodeShare.node`."""

    def send(self, message: ToAgent, frames: Sequence[bytes] = ()) -> None:
        """Send a message, or do nothing if the link is closed."""
        ...

    def close(self) -> None:
        """Close the link."""
        ...


# ---------------------------------------------------------------- reports of several nodes


class PartEnd(msgspec.Struct, frozen=True):
    """How one node's part ended.

    Args:
        ended: Its final event.
        frames: The event's raw frames.
        ahead_s: How far the node's clock is ahead of this one, in seconds.
    """

    ended: RunEnded
    frames: Sequence[bytes]
    ahead_s: float = 0.0


def join_starts(starts: Sequence[RanksStarted]) -> RanksStarted:
    """Merge the nodes' start events, in the order of the parts."""
    known = [start.warm for start in starts if start.warm in _WARMTH]
    warm = min(known, key=_WARMTH.index) if known else starts[0].warm
    return RanksStarted(pids=tuple(pid for start in starts for pid in start.pids), warm=warm)


def join_releases(releases: Sequence[PayloadReleased]) -> PayloadReleased:
    """Merge the nodes' payload releases: the payload is kept if any node keeps it."""
    kept = any(release.kept for release in releases)
    reason = "" if kept else next((release.reason for release in releases if release.reason), "")
    return PayloadReleased(kept=kept, reason=reason)


def join_ends(parts: Sequence[PartEnd]) -> tuple[RunEnded, tuple[bytes, ...]]:
    """Merge the nodes' final events, in the order of the parts. Returns the run's final event and its frames.

    The root cause is searched over all nodes; failure times are corrected by the known clock offsets.
    """
    ends = [part.ended for part in parts]
    state = min((end.state for end in ends), key=_RANKING.index)
    failure: Failure | None = None
    others: tuple[Failure, ...] = ()
    frames: tuple[bytes, ...] = ()
    if state is RunState.FAILED:
        failure, others, frames = _blame(parts)
    elif state is RunState.SUCCEEDED:
        frames = tuple(frame for part in parts for frame in part.frames)
    elif state is RunState.TIMED_OUT:
        failure = next((end.failure for end in ends if end.state is state and end.failure is not None), None)
    return (
        RunEnded(
            state=state,
            failure=failure,
            reason=next((end.reason for end in ends if end.state is state), ""),
            limit=next((end.limit for end in ends if end.state is state), None),
            others=others,
            results=tuple(result for end in ends for result in end.results) if state is RunState.SUCCEEDED else (),
            stacks=tuple(stack for end in ends for stack in end.stacks),
            unstopped=tuple(rank for end in ends for rank in end.unstopped),
            starting_s=max(end.starting_s for end in ends),
            running_s=max(end.running_s for end in ends),
        ),
        frames,
    )


def _blame(parts: Sequence[PartEnd]) -> tuple[Failure | None, tuple[Failure, ...], tuple[bytes, ...]]:
    """Return the root cause, the other failures, and the root cause's packed exception if there is one."""
    failures: list[Failure] = []
    own: dict[int, tuple[Failure, Sequence[bytes]]] = {}
    for part in parts:
        head = part.ended.failure
        for failure in ((head,) if head is not None else ()) + part.ended.others:
            by_our_clock = msgspec.structs.replace(failure, at=failure.at - part.ahead_s)
            own[id(by_our_clock)] = (failure, part.frames if failure is head else ())
            failures.append(by_our_clock)
    blamed = find_root_cause(failures)
    if blamed is None:
        return None, (), ()
    failure, frames = own[id(blamed[0])]
    # only the root cause's exception is sent
    others = tuple(msgspec.structs.replace(own[id(other)][0], exception=None) for other in blamed[1])
    return failure, others, tuple(frames[:1]) if failure.exception is not None and failure.rank is not None else ()


class _Asked(msgspec.Struct):
    run_id: str
    silent: set[int]
    stacks: list[RankStack] = msgspec.field(default_factory=list[RankStack])


class JointStacks:
    """The pending requests for stacks, by number."""

    def __init__(self) -> None:
        self._asked: dict[int, _Asked] = {}

    def ask(self, request: int, run_id: str, parts: Iterable[int]) -> None:
        """Record a request to these parts of the run."""
        self._asked[request] = _Asked(run_id, set(parts))

    def take_part(self, request: int, part: int, stacks: tuple[RankStack, ...]) -> tuple[RankStack, ...] | None:
        """Take the answer of a part. Returns the stacks of all ranks, None while other parts have not answered."""
        if request not in self._asked:
            return None
        self._asked[request].stacks += stacks
        return self._without(request, part)

    def part_silent(self, run_id: str, part: int) -> list[tuple[int, tuple[RankStack, ...]]]:
        """A part will not answer any more. Returns the requests that this completes, with their stacks."""
        waits = [request for request, asked in self._asked.items() if asked.run_id == run_id and part in asked.silent]
        return [(request, stacks) for request in waits if (stacks := self._without(request, part)) is not None]

    def _without(self, request: int, part: int) -> tuple[RankStack, ...] | None:
        """Stop waiting for a part. Returns the stacks if it was the last one."""
        asked = self._asked[request]
        asked.silent.discard(part)
        if asked.silent:
            return None
        del self._asked[request]
        return tuple(sorted(asked.stacks, key=lambda stack: stack.rank))


def inventory_with(host: str, nodes: Sequence[Node], devices: Iterable[Device], problem: str | None) -> Inventory:
    """Return the total inventory of the nodes: their devices, and the sums of CPU slots and cores."""
    return Inventory(
        host=host,
        devices=tuple(devices),
        cpu_slots=sum(node.cpu_slots for node in nodes),
        cores=sum(node.cores for node in nodes),
        problem=problem,
        driver=next((node.driver for node in nodes if node.driver), ""),
        nodes=tuple(nodes),
    )


def merged_inventory(host: str, inventories: Mapping[str, Inventory], addresses: Mapping[str, str]) -> Inventory:
    """Merge the inventories that the nodes' agents have reported.

    Args:
        host: The name of the whole.
        inventories: Inventories by node id.
        addresses: By node id, the address at which other nodes reach it.
    """
    nodes = [
        Node(
            node=node,
            host=inventory.host,
            address=addresses.get(node, ""),
            cores=inventory.cores,
            cpu_slots=inventory.cpu_slots,
            cpu_slots_free=inventory.cpu_slots,
            driver=inventory.driver,
        )
        for node, inventory in inventories.items()
    ]
    # simulated devices have the same UUIDs on every node
    devices = (
        msgspec.structs.replace(device, node=node, uuid=f"{device.uuid}@{node}" if device.simulated else device.uuid)
        for node, inventory in inventories.items()
        for device in inventory.devices
    )
    problems = [f"{inventory.host}: {inventory.problem}" for inventory in inventories.values() if inventory.problem]
    return inventory_with(host, nodes, devices, "; ".join(problems) or None)
