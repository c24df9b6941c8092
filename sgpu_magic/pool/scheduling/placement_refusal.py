"""Why a pool can never place a request. Facts only; `pool.format_refusal` words them. Pure."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from sgpu_magic.pool.scheduling.capacity import LineCount, PoolContents, QueueKey
from sgpu_magic.wire.base import ErrorKind

# ---------------------------------------------------------------- the shape of a request


class NoRanks(msgspec.Struct, frozen=True):
    """The request has no rank.

    Args:
        ranks: The number that was requested.
    """

    ranks: int


class UnknownStrategy(msgspec.Struct, frozen=True):
    """There is no such strategy.

    Args:
        strategy: The one that was requested.
    """

    strategy: str


class UnevenNodes(msgspec.Struct, frozen=True):
    """The ranks can't be spread evenly over the nodes.

    Args:
        ranks: Number of ranks.
        nodes: Number of nodes.
    """

    ranks: int
    nodes: int


class StrictPackOnNodes(msgspec.Struct, frozen=True):
    """The strategy takes one node, and the request asks for several.

    Args:
        nodes: Number of nodes.
    """

    nodes: int


class OneMachineOnly(msgspec.Struct, frozen=True):
    """The pool is one machine, and the request asks for several nodes.

    Args:
        nodes: Number of nodes.
    """

    nodes: int


# ---------------------------------------------------------------- what the pool has


class PoolTooSmall(msgspec.Struct, frozen=True):
    """The pool has fewer devices of the requested type.

    Args:
        ranks: The number that was requested.
        lines: What it has of the type.
        most: The most that the request could take.
        contents: All that it has.
    """

    ranks: int
    lines: tuple[LineCount, ...]
    most: int
    contents: PoolContents


class NodeTooSmall(msgspec.Struct, frozen=True):
    """No node has as many devices as one has to have.

    Args:
        ranks: The number that was requested.
        line: What was requested.
        host: The largest node.
        largest: How many it has.
        is_session: Whether a session needs them, whose ranks are all on one node.
    """

    ranks: int
    line: QueueKey
    host: str
    largest: int
    is_session: bool = False


class TooFewLargeNodes(msgspec.Struct, frozen=True):
    """Too few nodes have as many devices as each has to have.

    Args:
        nodes: The number of nodes that was requested.
        per_node: Devices on each.
        line: What was requested.
        large_enough: How many nodes have that many.
        host: The largest node.
        largest: How many it has.
    """

    nodes: int
    per_node: int
    line: QueueKey
    large_enough: int
    host: str
    largest: int


class TooLittleMemory(msgspec.Struct, frozen=True):
    """The pool has enough devices of the requested type, but too few with that much memory.

    Args:
        ranks: The number that was requested.
        line: What was requested.
        min_memory_bytes: The memory that was requested.
        enough: How many have it.
        sizes: The sizes that the devices have; 0 where unknown.
    """

    ranks: int
    line: QueueKey
    min_memory_bytes: int
    enough: int
    sizes: tuple[int, ...]


class LineMemory(msgspec.Struct, frozen=True):
    """The memory of the devices of one kind.

    Args:
        line: The kind.
        count: How many there are.
        sizes: The sizes that they have; 0 where unknown.
    """

    line: QueueKey
    count: int
    sizes: tuple[int, ...]


class NoTypeWithMemory(msgspec.Struct, frozen=True):
    """For a request of any type: no type has enough devices with that much memory.

    Args:
        ranks: The number that was requested.
        min_memory_bytes: The memory that was requested.
        lines: What the pool's devices have.
        contents: All that the pool has.
    """

    ranks: int
    min_memory_bytes: int
    lines: tuple[LineMemory, ...]
    contents: PoolContents


class NoTypeLargeEnough(msgspec.Struct, frozen=True):
    """For a request of any type: no type has enough devices.

    Args:
        ranks: The number that was requested.
        lines: What the pool has; at least one.
    """

    ranks: int
    lines: tuple[LineCount, ...]


class NothingToPlace(msgspec.Struct, frozen=True):
    """For a request of any type: the pool has neither devices nor CPU slots.

    Args:
        ranks: The number that was requested.
        contents: What the pool has.
    """

    ranks: int
    contents: PoolContents


class TooManyOnCpu(msgspec.Struct, frozen=True):
    """The request has far more CPU ranks than the machine has cores.

    Args:
        ranks: The number that was requested.
        most: The most that one run may have.
        cores: The machine's cores.
        slots: Its CPU slots.
    """

    ranks: int
    most: int
    cores: int
    slots: int


class TypeMissing(msgspec.Struct, frozen=True):
    """The pool has no device of the requested type.

    Args:
        device_type: The type.
        ranks: The number that was requested.
        contents: What the pool has.
        problem: Why its GPUs could not be read; None if they could.
        is_one_machine: Whether the pool is one machine, whose devices can be simulated.
    """

    device_type: str
    ranks: int
    contents: PoolContents
    problem: str | None
    is_one_machine: bool


# ---------------------------------------------------------------- costs and quotas


class NoPrice(msgspec.Struct, frozen=True):
    """The run's `--max-cost` can't be enforced, since its devices have no price.

    Args:
        max_cost: The limit.
        device_type: Their type.
        priced: The types that have a price.
    """

    max_cost: float
    device_type: str
    priced: tuple[str, ...]


class QuotaTooSmall(msgspec.Struct, frozen=True):
    """The request exceeds its user's quota by itself.

    Args:
        user: The user.
        quota: How many devices the user may have at once.
        kind: The device type that the quota is for; None for all together.
        ranks: The number that was requested.
    """

    user: str
    quota: int
    kind: str | None
    ranks: int


# ---------------------------------------------------------------- sessions


class NoSuchSession(msgspec.Struct, frozen=True):
    """The cell's session is unknown.

    Args:
        run_id: The session.
    """

    run_id: str


class NamedFreshRanks(msgspec.Struct, frozen=True):
    """The cell names ranks of the session, and asks for new ones."""


class TooManyFreshRanks(msgspec.Struct, frozen=True):
    """The cell asks for more new ranks than the session has devices.

    Args:
        run_id: The session.
        name: Its name, maybe empty.
        ranks: Number of its ranks.
        asked: The number that was requested.
    """

    run_id: str
    name: str
    ranks: int
    asked: int


class OtherRankCount(msgspec.Struct, frozen=True):
    """The cell asks for another number of ranks than the session has.

    Args:
        run_id: The session.
        name: Its name, maybe empty.
        ranks: Number of its ranks.
        asked: The number that was requested.
    """

    run_id: str
    name: str
    ranks: int
    asked: int


class NoSuchRanks(msgspec.Struct, frozen=True):
    """The cell names ranks that the session does not have.

    Args:
        run_id: The session.
        name: Its name, maybe empty.
        ranks: Number of its ranks.
        missing: The ranks that it does not have.
    """

    run_id: str
    name: str
    ranks: int
    missing: tuple[int, ...]


class SessionOnNodes(msgspec.Struct, frozen=True):
    """The session asks for several nodes, and its ranks are all on one.

    Args:
        run_id: The session.
        name: Its name, maybe empty.
        nodes: The number of nodes that was requested; None if the strategy asks for more than one.
    """

    run_id: str
    name: str
    nodes: int | None


RefusalReason = (
    NoRanks
    | UnknownStrategy
    | UnevenNodes
    | StrictPackOnNodes
    | OneMachineOnly
    | PoolTooSmall
    | NodeTooSmall
    | TooFewLargeNodes
    | TooLittleMemory
    | NoTypeWithMemory
    | NoTypeLargeEnough
    | NothingToPlace
    | TooManyOnCpu
    | TypeMissing
    | NoPrice
    | QuotaTooSmall
    | NoSuchSession
    | NamedFreshRanks
    | TooManyFreshRanks
    | OtherRankCount
    | NoSuchRanks
    | SessionOnNodes
)
"""Why a request can never be placed."""


class PlacementRefusal(NamedTuple):
    """A request that can't be placed, and the error that its user gets."""

    error: ErrorKind
    reason: RefusalReason
