"""A waiting run's position, and what it waits for. Facts only; `pool.format_queue` words them. Pure."""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from sgpu_magic.pool.scheduling.capacity import QueueKey, ResourceRequest
from sgpu_magic.wire.events import RemainingRank

# ---------------------------------------------------------------- what blocks devices


class HeldByRun(msgspec.Struct, frozen=True):
    """A run holds devices.

    Args:
        run_id: The run.
        count: How many of the requested devices or slots it holds.
        session: Its name, if it is a session; None for another run.
    """

    run_id: str
    count: int
    session: str | None = None


class Holders(msgspec.Struct, frozen=True):
    """The runs that hold a request's devices.

    Args:
        runs: The first of them.
        others: How many more there are.
    """

    runs: tuple[HeldByRun, ...] = ()
    others: int = 0


class UnfreedDevices(msgspec.Struct, frozen=True):
    """A run still holds devices because ranks of it were killed and have not ended.

    Args:
        run_id: The run.
        count: How many devices or slots it holds.
        line: What they are.
        ranks: The ranks that have not ended.
    """

    run_id: str
    count: int
    line: QueueKey
    ranks: tuple[RemainingRank, ...]


class SlotsRefused(msgspec.Struct, frozen=True):
    """The engine can't start more ranks on CPU slots.

    Args:
        why: The engine's reason.
    """

    why: str


class LockedDevices(msgspec.Struct, frozen=True):
    """The engine could not lock devices.

    Args:
        count: How many.
        why: The engine's reason for the first; None without one.
    """

    count: int
    why: str | None


class DevicesUnavailable(msgspec.Struct, frozen=True):
    """No run can have these devices.

    Args:
        count: How many.
        why: The reason for the first.
    """

    count: int
    why: str


class DevicesUsedOutside(msgspec.Struct, frozen=True):
    """Devices are used by processes outside the pool; runs with `--allow-busy` may take them.

    Args:
        count: How many.
        use: The use of the first.
    """

    count: int
    use: str


class TooFewDevices(msgspec.Struct, frozen=True):
    """The pool has had enough devices for the request, but does not now.

    Args:
        count: How many it has.
        line: What they are.
    """

    count: int
    line: QueueKey


class NoNodesAdded(msgspec.Struct, frozen=True):
    """The cluster did not add the nodes that it was asked for.

    Args:
        why: The engine's reason.
    """

    why: str


DeviceBlocker = (
    UnfreedDevices
    | SlotsRefused
    | LockedDevices
    | DevicesUnavailable
    | DevicesUsedOutside
    | TooFewDevices
    | NoNodesAdded
)
"""Why devices of the pool can't be granted, other than that runs use them."""

# ---------------------------------------------------------------- what a run waits for


class DevicesUnknown(msgspec.Struct, frozen=True):
    """The pool has no inventory yet."""


class OverQuota(msgspec.Struct, frozen=True):
    """The run waits for other runs of its user.

    Args:
        user: The user.
        quota: How many devices the user may have at once.
        kind: The device type that the quota is for; None for all together.
        in_use: How many the user has.
        run_ids: The first runs that have them.
        others: How many more of the user's runs have some.
        ranks: How many the run needs.
        line: What it needs.
    """

    user: str
    quota: int
    kind: str | None
    in_use: int
    run_ids: tuple[str, ...]
    others: int
    ranks: int
    line: QueueKey


class Shortage(msgspec.Struct, frozen=True):
    """Too few devices of a one-machine pool are free.

    Args:
        missing: How many more the run needs.
        line: What they are.
        holders: The runs that hold the others.
        blockers: Why others than those in use can't be granted.
        is_reserved: Whether freed devices are kept for the run.
    """

    missing: int
    line: QueueKey
    holders: Holders = Holders()
    blockers: tuple[DeviceBlocker, ...] = ()
    is_reserved: bool = False


class NodeFree(msgspec.Struct, frozen=True):
    """What is free on the node that has the most.

    Args:
        free: Free devices or slots.
        size: All of them.
        holders: The runs that hold the others; empty where the node is the only one and the run may take several.
    """

    free: int
    size: int
    holders: Holders = Holders()


class Availability(msgspec.Struct, frozen=True):
    """What a pool of many nodes has for a request.

    Args:
        free: Free devices or slots on all nodes.
        total: All of them.
        limit: The most that the cluster can have; at least `total`.
        large_enough: How many nodes have enough free for their part, for a request of several nodes; else None.
        largest: The node with the most free; None without any node.
    """

    free: int
    total: int
    limit: int
    large_enough: int | None = None
    largest: NodeFree | None = None


class NodeShortage(msgspec.Struct, frozen=True):
    """The request does not fit on the free devices of the pool's nodes.

    Args:
        request: The request.
        available: What the pool has for it.
        blockers: Why others than those in use can't be granted.
        is_reserved: Whether freed devices are kept for the run.
        reserved_host: The single node that is kept for it; None if none is.
        coming: The nodes that the cluster is adding, in the engine's words; None for none.
    """

    request: ResourceRequest
    available: Availability
    blockers: tuple[DeviceBlocker, ...] = ()
    is_reserved: bool = False
    reserved_host: str | None = None
    coming: str | None = None


class NodesRequested(msgspec.Struct, frozen=True):
    """The cluster was asked for nodes for the run.

    Args:
        request: The request.
        available: What the pool has for it.
        coming: The nodes that the cluster is adding, in the engine's words; None for none.
    """

    request: ResourceRequest
    available: Availability
    coming: str | None = None


class DevicesReserved(msgspec.Struct, frozen=True):
    """Enough is free, but kept for a run that has waited longer.

    Args:
        run_id: That run.
        request: The request in a pool of many nodes; None in a one-machine pool.
    """

    run_id: str
    request: ResourceRequest | None = None


class NodeReserved(msgspec.Struct, frozen=True):
    """Enough is free, but on a node that is kept for a run that has waited longer.

    Args:
        run_id: That run.
        request: The request.
    """

    run_id: str
    request: ResourceRequest


# ---------------------------------------------------------------- what a cell waits for


class SessionQueued(msgspec.Struct, frozen=True):
    """The cell's session has no devices yet.

    Args:
        reason: What the session waits for; None if that was not looked up.
    """

    reason: WaitReason | None = None


class SessionStarting(msgspec.Struct, frozen=True):
    """The ranks of the cell's session are starting."""


class SessionRestarting(msgspec.Struct, frozen=True):
    """Ranks of the cell's session are being restarted.

    Args:
        ranks: The ranks; all if empty.
        remaining: Ranks of the session that were killed and have not ended.
    """

    ranks: tuple[int, ...]
    remaining: tuple[RemainingRank, ...] = ()


class CellActivity(Enum):
    """What a cell in a session's ranks does while the next one waits."""

    RUNNING = auto()
    STOPPING = auto()
    """It was cancelled and has not ended."""
    ENDING = auto()
    """Its code has ended, and its ranks are not ready for the next cell."""


class SessionOccupied(msgspec.Struct, frozen=True):
    """Another cell has the session's ranks.

    Args:
        run_id: That cell.
        name: Its name, maybe empty.
        activity: What it does.
        unstopped: Ranks that still run it although it was interrupted.
        remaining: Ranks that were killed and have not ended.
    """

    run_id: str
    name: str
    activity: CellActivity
    unstopped: tuple[int, ...] = ()
    remaining: tuple[RemainingRank, ...] = ()


SessionObstacle = SessionQueued | SessionStarting | SessionRestarting | SessionOccupied
"""What keeps a cell of a session from starting."""

WaitReason = (
    DevicesUnknown
    | OverQuota
    | Shortage
    | NodeShortage
    | NodesRequested
    | DevicesReserved
    | NodeReserved
    | SessionObstacle
)
"""What a run waits for."""


class QueueStatus(msgspec.Struct, frozen=True):
    """Where a waiting run is in the queue.

    Args:
        position: Its position in its queue or session; 1 is next.
        reason: What it waits for.
        own_sessions: Sessions of the same process that hold devices which it could take.
    """

    position: int
    reason: WaitReason
    own_sessions: tuple[HeldByRun, ...] = ()
