"""What a run's request means in this pool: a line of the queue and a layout, or why it can never be placed. Pure.

The ranks of a session are all on one node; a cell takes them, some of them, or with `--fresh` its devices.
"""

from __future__ import annotations

from collections.abc import Callable

from sgpu_magic.pool.scheduling.capacity import (
    CPU_LINE,
    SPREAD,
    STRATEGIES,
    STRICT_PACK,
    LineCount,
    QueueKey,
    ResourceRequest,
    Stock,
)
from sgpu_magic.pool.scheduling.end_reason import EndReason, SessionClosed
from sgpu_magic.pool.scheduling.placement_refusal import (
    LineMemory,
    NamedFreshRanks,
    NodeTooSmall,
    NoRanks,
    NoSuchRanks,
    NoSuchSession,
    NothingToPlace,
    NoTypeLargeEnough,
    NoTypeWithMemory,
    OneMachineOnly,
    OtherRankCount,
    PoolTooSmall,
    RefusalReason,
    SessionOnNodes,
    StrictPackOnNodes,
    TooFewLargeNodes,
    TooLittleMemory,
    TooManyFreshRanks,
    TooManyOnCpu,
    TypeMissing,
    UnevenNodes,
    UnknownStrategy,
)
from sgpu_magic.pool.scheduling.run import ScheduledRun
from sgpu_magic.wire.devices import ANY, CPU, Placement, memory_bytes
from sgpu_magic.wire.run import RunSpec


def resolve(
    placement: Placement, stock: Stock, choose: Callable[[list[ResourceRequest]], ResourceRequest]
) -> ResourceRequest | RefusalReason:
    """Return what the request takes in this pool, free or not; or why it can never be placed.

    Args:
        placement: The request.
        stock: What the pool has.
        choose: Chooses among the types with enough devices, for a request without a type.
    """
    ranks, asked = placement.ranks, placement.device_type
    if ranks < 1:
        return NoRanks(ranks)
    if problem := _misshapen(placement, stock):
        return problem
    if asked == ANY:
        return _resolve_any(placement, stock, choose)
    if asked == CPU:
        return _on_cpu(placement, stock, CPU)
    lines = stock.lines_of(asked)
    for line in lines:
        if _too_much(placement, stock, line) is None:
            return _request(placement, line)
    # real devices come first, so the message is about them if there are any
    if lines and (problem := _too_much(placement, stock, lines[0])):
        return problem
    if placement.stand_in and stock.inventory.cpu_slots > 0:
        return _on_cpu(placement, stock, asked, simulated=True)
    return _type_missing(placement, stock)


# ---------------------------------------------------------------- requests for sessions and their cells


def session_refusal(spec: RunSpec, session: ScheduledRun | None) -> EndReason | None:
    """Return why the session will never accept this cell; None when it will."""
    if session is None or not session.is_session:
        return NoSuchSession(spec.session)
    run_id, name = session.run_id, session.spec.name
    ranks, asked = session.spec.placement.ranks, spec.placement.ranks
    if not session.is_open:
        return SessionClosed(run_id, name, session.state.is_final, session.reason)
    if spec.fresh and spec.only:
        return NamedFreshRanks()
    if spec.fresh:
        return TooManyFreshRanks(run_id, name, ranks, asked) if asked > ranks else None
    if asked != ranks:
        return OtherRankCount(run_id, name, ranks, asked)
    missing = tuple(rank for rank in spec.only if not 0 <= rank < ranks)
    return NoSuchRanks(run_id, name, ranks, missing) if missing else None


def on_nodes(spec: RunSpec) -> SessionOnNodes | None:
    """Return why a pool of many nodes does not accept the session; None when it does."""
    nodes = spec.placement.nodes
    if nodes <= 1 and spec.placement.strategy != SPREAD:
        return None
    return SessionOnNodes(spec.run_id, spec.name, nodes if nodes > 1 else None)


def too_large(request: ResourceRequest, stock: Stock) -> NodeTooSmall:
    """Return why a session that would fit only on several nodes can't be placed."""
    sizes = stock.sizes(request.line, request.min_memory_bytes)
    node = max(sizes, key=sizes.__getitem__)
    return NodeTooSmall(request.ranks, request.line, stock.host(node), sizes[node], is_session=True)


# ---------------------------------------------------------------- internals


def _misshapen(placement: Placement, stock: Stock) -> RefusalReason | None:
    """Return why no pool, or no one-machine pool, can lay out the ranks as requested; None when it can."""
    ranks, nodes, strategy = placement.ranks, placement.nodes, placement.strategy
    if strategy not in STRATEGIES:
        return UnknownStrategy(strategy)
    if nodes < 0 or nodes > ranks or (nodes and ranks % nodes):
        return UnevenNodes(ranks, nodes)
    if nodes > 1 and strategy == STRICT_PACK:
        return StrictPackOnNodes(nodes)
    return OneMachineOnly(nodes) if nodes > 1 and not stock.many else None


def _too_much(placement: Placement, stock: Stock, line: QueueKey) -> RefusalReason | None:
    """Return why the line could not hold the request even if nothing else ran; None when it could."""
    ranks, memory = placement.ranks, placement.min_memory_bytes
    total = stock.total(line, memory)
    if stock.limit(line, memory) < ranks:
        if memory and stock.limit(line) >= ranks:
            memories = {memory_bytes(device) for device in stock.line(line)}
            return TooLittleMemory(ranks, line, memory, total, tuple(sorted(memories)))
        alike = [line] if line == CPU_LINE else stock.lines_of(line.device_type)
        most = max(stock.limit(other, memory) for other in alike)
        lines = tuple(LineCount(other, stock.total(other), stock.limit(other)) for other in alike)
        return PoolTooSmall(ranks, lines, most, stock.contents())
    if not stock.many or stock.elastic(line) > total:
        # the size of the autoscaler's nodes is unknown
        return None
    sizes = sorted(stock.sizes(line, memory).items(), key=lambda item: -item[1])
    node, largest = sizes[0]
    if (placement.strategy == STRICT_PACK or placement.nodes == 1) and largest < ranks:
        return NodeTooSmall(ranks, line, stock.host(node), largest)
    if placement.nodes > 1:
        each = ranks // placement.nodes
        enough = sum(size >= each for _, size in sizes)
        if enough < placement.nodes:
            return TooFewLargeNodes(placement.nodes, each, line, enough, stock.host(node), largest)
    return None


def _resolve_any(
    placement: Placement, stock: Stock, choose: Callable[[list[ResourceRequest]], ResourceRequest]
) -> ResourceRequest | RefusalReason:
    ranks, memory = placement.ranks, placement.min_memory_bytes
    counts = {line: stock.limit(line) for line in stock.all_lines()}
    if enough := [line for line in counts if not _too_much(placement, stock, line)]:
        return choose([_request(placement, line) for line in enough])
    if memory:
        found = {line: sorted({memory_bytes(device) for device in stock.line(line)}) for line in stock.counts}
        lines = tuple(LineMemory(line, stock.counts[line], tuple(sizes)) for line, sizes in found.items())
        return NoTypeWithMemory(ranks, memory, lines, stock.contents())
    if counts:
        largest = max(counts, key=lambda line: counts[line])
        if counts[largest] >= ranks and (problem := _too_much(placement, stock, largest)):
            return problem
        return NoTypeLargeEnough(ranks, stock.contents().lines)
    if stock.limit(CPU_LINE) <= 0:
        return NothingToPlace(ranks, stock.contents())
    return _on_cpu(placement, stock, CPU)


def _request(
    placement: Placement, line: QueueKey, device_type: str | None = None, *, simulated: bool = False
) -> ResourceRequest:
    return ResourceRequest(
        line,
        placement.ranks,
        device_type or line.device_type,
        simulated or line.simulated,
        placement.allow_busy,
        placement.nodes,
        placement.strategy,
        0 if line == CPU_LINE else placement.min_memory_bytes,
    )


def _on_cpu(
    placement: Placement, stock: Stock, device_type: str, *, simulated: bool = False
) -> ResourceRequest | RefusalReason:
    if stock.limit(CPU_LINE) <= 0:
        return _type_missing(placement, stock)
    if stock.many:
        # each rank needs a node
        if problem := _too_much(placement, stock, CPU_LINE):
            return problem
    # on one machine ranks may share slots, with a note
    elif placement.ranks > stock.inventory.most_cpu_ranks:
        here = stock.inventory
        return TooManyOnCpu(placement.ranks, here.most_cpu_ranks, here.cores, here.cpu_slots)
    return _request(placement, CPU_LINE, device_type, simulated=simulated)


def _type_missing(placement: Placement, stock: Stock) -> TypeMissing:
    problem = stock.inventory.problem or None
    return TypeMissing(placement.device_type, placement.ranks, stock.contents(), problem, not stock.many)
