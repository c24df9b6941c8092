"""What a run's request means in this pool: a line of the queue and a layout, or why it can never be placed. Pure.

The ranks of a session are all on one node; a cell takes them, some of them, or with `--fresh` its devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sgpu_magic.pool.scheduling.capacity import (
    CPU_LINE,
    SPREAD,
    STRATEGIES,
    STRICT_PACK,
    QueueKey,
    ResourceRequest,
    Stock,
    amount,
)
from sgpu_magic.pool.scheduling.run import ScheduledRun, named
from sgpu_magic.wire.base import short
from sgpu_magic.wire.devices import ANY, CPU, Placement, memory_bytes, memory_text
from sgpu_magic.wire.run import RunSpec

_GB = 1e9


def resolve(
    placement: Placement, stock: Stock, choose: Callable[[list[ResourceRequest]], ResourceRequest]
) -> ResourceRequest | str:
    """Return what the request takes in this pool, free or not; or why it can never be placed.

    Args:
        placement: The request.
        stock: What the pool has.
        choose: Chooses among the types with enough devices, for a request without a type.
    """
    ranks, asked = placement.ranks, placement.device_type
    if ranks < 1:
        return f"{ranks} ranks were requested; a run has at least 1. Correct --gpus."
    if problem := _misshapen(placement, stock):
        return problem
    if asked == ANY:
        return _resolve_any(placement, stock, choose)
    if asked == CPU:
        return _on_cpu(placement, stock, CPU)
    lines = stock.lines_of(asked)
    for line in lines:
        if not (problem := _too_much(placement, stock, line)):
            return _want(placement, line)
    if lines:
        # real devices come first, so the message is about them if there are any
        return _too_much(placement, stock, lines[0]) or problem
    if placement.stand_in and stock.inventory.cpu_slots > 0:
        return _on_cpu(placement, stock, asked, simulated=True)
    return _lacking(placement, stock)


# ---------------------------------------------------------------- requests for sessions and their cells


def session_refusal(spec: RunSpec, session: ScheduledRun | None) -> str:
    """Return why the session will never accept this cell; "" when it will."""
    if session is None or not session.is_session:
        return f"there is no session {short(spec.session)} in this pool. Start one with %sgpu_connect."
    name, ranks, asked = named(session.spec), session.spec.placement.ranks, spec.placement.ranks
    if not session.is_open:
        has = "has ended" if session.state.is_final else "is ending"
        why = f": {session.reason}" if session.reason else ""
        return f"{name} {has}{why}. Start another with %sgpu_connect."
    if spec.fresh:
        if spec.only:
            return "--ranks names existing ranks, and --fresh starts new ones. Leave one of them out."
        if asked > ranks:
            return (
                f"{name} has {ranks} ranks, and the run asks for {asked} new ones on its devices. Use --gpus {ranks} "
                "or fewer, or end the session with %sgpu_disconnect and connect with more."
            )
        return ""
    if asked != ranks:
        return (
            f"{name} has {ranks} ranks, and the run asks for {asked}. Leave --gpus out, name some of them with "
            "--ranks, or start new processes with --fresh."
        )
    if strange := [rank for rank in spec.only if not 0 <= rank < ranks]:
        has = "rank 0" if ranks == 1 else f"ranks 0 to {ranks - 1}"
        return f"{name} has {has}, and the cell names {', '.join(map(str, strange))}. Correct --ranks."
    return ""


def on_nodes(spec: RunSpec) -> str:
    """Return why a pool of many nodes does not accept the session; "" when it does."""
    if spec.placement.nodes <= 1 and spec.placement.strategy != SPREAD:
        return ""
    asks = f"--nodes {spec.placement.nodes}" if spec.placement.nodes > 1 else "--placement spread"
    return (
        f"the ranks of {named(spec)} are all on one node, and {asks} asks for more. Leave it out, or run the cell "
        "without a session (%%distributed with the same options)."
    )


def too_large(want: ResourceRequest, stock: Stock) -> str:
    """Return why a session that would fit only on several nodes can't be placed."""
    sizes = stock.sizes(want.line, want.min_memory_bytes)
    node = max(sizes, key=sizes.__getitem__)
    return (
        f"a session's ranks are all on one node, and no node of this pool has {amount(want.ranks, want.line)}: the "
        f"largest, {stock.host(node)}, has {sizes[node]}. Connect with --gpus {sizes[node]} or fewer, run cells "
        "without a session to take several nodes, or choose another pool with --pool."
    )


# ---------------------------------------------------------------- internals


def _misshapen(placement: Placement, stock: Stock) -> str:
    """Return why no pool, or no one-machine pool, can lay out the ranks as requested; "" when it can."""
    ranks, nodes, strategy = placement.ranks, placement.nodes, placement.strategy
    if strategy not in STRATEGIES:
        return f"--placement {strategy[:40]!r} is not known. Use one of {', '.join(STRATEGIES)}."
    if nodes < 0 or nodes > ranks or (nodes and ranks % nodes):
        return (
            f"{ranks} ranks can't be spread evenly over --nodes {nodes}. Make --gpus a multiple of --nodes, or leave "
            "--nodes out."
        )
    if nodes > 1 and strategy == STRICT_PACK:
        return f"--placement strict_pack uses one node, and --nodes {nodes} asks for more. Leave one of them out."
    if nodes > 1 and not stock.many:
        return (
            f"this pool is one machine, and the run asks for {nodes} nodes. Leave --nodes out, or choose another pool "
            "with --pool."
        )
    return ""


def _too_much(placement: Placement, stock: Stock, line: QueueKey) -> str:
    """Return why the line could not hold the request even if nothing else ran; "" when it could."""
    ranks, memory = placement.ranks, placement.min_memory_bytes
    total = stock.total(line, memory)
    if stock.limit(line, memory) < ranks:
        if memory and stock.limit(line) >= ranks:
            return _too_small(placement, stock, line)
        alike = [line] if line == CPU_LINE else stock.lines_of(line.device_type)
        most = max(stock.limit(other, memory) for other in alike)
        return (
            f"this pool has {_has(stock, alike)}, and the run asks for {ranks}. Use --gpus {most} or fewer, another "
            f"--type, or another pool with --pool. It has: {stock.describe()}."
        )
    if not stock.many or stock.elastic(line) > total:
        # the size of the autoscaler's nodes is unknown
        return ""
    sizes = sorted(stock.sizes(line, memory).items(), key=lambda item: -item[1])
    node, largest = sizes[0]
    if (placement.strategy == STRICT_PACK or placement.nodes == 1) and largest < ranks:
        return (
            f"no node of this pool has {amount(ranks, line)}: the largest, {stock.host(node)}, has {largest}. Leave "
            f"--placement strict_pack and --nodes 1 out to take several nodes, use --gpus {largest} or fewer, or "
            "choose another pool with --pool."
        )
    if placement.nodes > 1:
        each = ranks // placement.nodes
        enough = sum(size >= each for _, size in sizes)
        if enough < placement.nodes:
            have = "node of this pool has" if enough == 1 else "nodes of this pool have"
            return (
                f"{enough} {have} {amount(each, line)} or more, and the run asks for {each} on each of "
                f"{placement.nodes} (--nodes). The largest node, {stock.host(node)}, has {largest}. Ask for other "
                "--gpus or --nodes, or choose another pool with --pool."
            )
    return ""


def _has(stock: Stock, lines: Sequence[QueueKey]) -> str:
    up_to = {line: "up to " if stock.elastic(line) > stock.total(line) else "" for line in lines}
    return " and ".join(f"{up_to[line]}{amount(stock.limit(line), line)}" for line in lines)


def _too_small(placement: Placement, stock: Stock, line: QueueKey) -> str:
    need = f"{placement.min_memory_bytes / _GB:g} GB"
    sizes = sorted({memory_bytes(device) for device in stock.line(line)})
    have = " or ".join(memory_text(size) if size else "an unknown amount" for size in sizes)
    enough = stock.total(line, placement.min_memory_bytes)
    count = (
        f"{enough} {line} of this pool {'has' if enough == 1 else 'have'}" if enough else f"no {line} of this pool has"
    )
    return (
        f"{count} {need} of memory (--min-memory), and the run asks for {placement.ranks}: they have {have}. Ask for "
        "less memory, fewer with --gpus, or leave --type out so that the pool chooses."
    )


def _resolve_any(
    placement: Placement, stock: Stock, choose: Callable[[list[ResourceRequest]], ResourceRequest]
) -> ResourceRequest | str:
    counts = {line: stock.limit(line) for line in stock.all_lines()}
    if enough := [line for line in counts if not _too_much(placement, stock, line)]:
        return choose([_want(placement, line) for line in enough])
    if placement.min_memory_bytes:
        return _none_with_memory(placement, stock)
    if counts:
        largest = max(counts, key=lambda line: counts[line])
        if counts[largest] >= placement.ranks:
            return _too_much(placement, stock, largest)
        has = " and ".join(f"{count} {line}" for line, count in counts.items())
        return (
            f"this pool has {has}, and the run asks for {placement.ranks}. Use --gpus {counts[largest]} or fewer, run "
            "on CPU with --type cpu, or choose another pool with --pool."
        )
    if stock.limit(CPU_LINE) <= 0:
        return (
            f"this pool can't place {placement.ranks} ranks. It has: {stock.describe()}. "
            "Ask for fewer with --gpus or choose another pool with --pool."
        )
    return _on_cpu(placement, stock, CPU)


def _none_with_memory(placement: Placement, stock: Stock) -> str:
    has = ", ".join(
        f"{stock.counts[line]} {line} with "
        + " or ".join(memory_text(size) for size in sorted({memory_bytes(one) for one in stock.line(line)}))
        for line in stock.counts
    )
    return (
        f"this pool can't place {placement.ranks} ranks on devices of one type with "
        f"{placement.min_memory_bytes / _GB:g} GB of memory (--min-memory). It has: {has or stock.describe()}. Ask "
        "for less memory, fewer with --gpus, or choose another pool with --pool."
    )


def _want(placement: Placement, line: QueueKey, device_type: str = "", *, simulated: bool = False) -> ResourceRequest:
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


def _on_cpu(placement: Placement, stock: Stock, device_type: str, *, simulated: bool = False) -> ResourceRequest | str:
    if stock.limit(CPU_LINE) <= 0:
        return _lacking(placement, stock)
    # on one machine ranks may share slots, with a note; with many nodes each rank needs a node
    if stock.many and (problem := _too_much(placement, stock, CPU_LINE)):
        return problem
    return _want(placement, CPU_LINE, device_type, simulated=simulated)


def _lacking(placement: Placement, stock: Stock) -> str:
    asked, inventory = placement.device_type, stock.inventory
    problem = f" Its GPUs could not be read: {inventory.problem.rstrip('.')}." if inventory.problem else ""
    ways = ["leave --type out to use what is there", "choose another pool with --pool"]
    if asked != CPU:
        if inventory.cpu_slots > 0:
            ways.insert(0, "run the ranks on CPU instead with SGPU_STAND_IN=cpu")
        if not stock.many:
            simulate = f"SGPU_SIMULATE={asked}:{max(8, placement.ranks)}"
            ways.insert(-1, f"simulate devices on this machine's pool with {simulate}")
    ways[-1] = f"or {ways[-1]}"
    ways[0] = ways[0][0].upper() + ways[0][1:]
    set_so = " `%env NAME=VALUE` sets a variable in a notebook." if asked != CPU else ""
    return f"this pool has no {asked}. It has: {stock.describe()}.{problem} {', '.join(ways)}.{set_so}"
