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
from sgpu_magic.pool.scheduling.end_reason import EndReason, SessionClosed
from sgpu_magic.pool.scheduling.run import ScheduledRun
from sgpu_magic.wire.base import short
from sgpu_magic.wire.devices import ANY, CPU, Placement, memory_bytes, memory_text
from sgpu_magic.wire.option_text import OptionName, Text, text_of
from sgpu_magic.wire.run import RunSpec

_GB = 1e9
_OTHER_POOL = text_of("choose another pool with ", OptionName("pool"))


def resolve(
    placement: Placement, stock: Stock, choose: Callable[[list[ResourceRequest]], ResourceRequest]
) -> ResourceRequest | Text:
    """Return what the request takes in this pool, free or not; or why it can never be placed.

    Args:
        placement: The request.
        stock: What the pool has.
        choose: Chooses among the types with enough devices, for a request without a type.
    """
    ranks, asked = placement.ranks, placement.device_type
    if ranks < 1:
        return text_of(f"{ranks} ranks were requested; a run has at least 1. Correct ", OptionName("gpus"), ".")
    if problem := _misshapen(placement, stock):
        return problem
    if asked == ANY:
        return _resolve_any(placement, stock, choose)
    if asked == CPU:
        return _on_cpu(placement, stock, CPU)
    lines = stock.lines_of(asked)
    for line in lines:
        if _too_much(placement, stock, line) is None:
            return _want(placement, line)
    # real devices come first, so the message is about them if there are any
    if lines and (problem := _too_much(placement, stock, lines[0])):
        return problem
    if placement.stand_in and stock.inventory.cpu_slots > 0:
        return _on_cpu(placement, stock, asked, simulated=True)
    return _lacking(placement, stock)


# ---------------------------------------------------------------- requests for sessions and their cells


def session_refusal(spec: RunSpec, session: ScheduledRun | None) -> EndReason | None:
    """Return why the session will never accept this cell; None when it will."""
    if session is None or not session.is_session:
        return f"there is no session {short(spec.session)} in this pool. Start one with %sgpu_connect."
    name, ranks, asked = _session_name(session.spec), session.spec.placement.ranks, spec.placement.ranks
    if not session.is_open:
        return SessionClosed(session.run_id, session.spec.name, session.state.is_final, session.reason)
    if spec.fresh:
        if spec.only:
            return text_of(
                OptionName("ranks"),
                " names existing ranks, and ",
                OptionName("fresh"),
                " starts new ones. Leave one of them out.",
            )
        if asked > ranks:
            return text_of(
                f"{name} has {ranks} ranks, and the run asks for {asked} new ones on its devices. Use ",
                OptionName("gpus", ranks),
                " or fewer, or end the session with %sgpu_disconnect and connect with more.",
            )
        return None
    if asked != ranks:
        return text_of(
            f"{name} has {ranks} ranks, and the run asks for {asked}. Leave ",
            OptionName("gpus"),
            " out, name some of them with ",
            OptionName("ranks"),
            ", or start new processes with ",
            OptionName("fresh"),
            ".",
        )
    if strange := [rank for rank in spec.only if not 0 <= rank < ranks]:
        has = "rank 0" if ranks == 1 else f"ranks 0 to {ranks - 1}"
        named_ranks = ", ".join(map(str, strange))
        return text_of(f"{name} has {has}, and the cell names {named_ranks}. Correct ", OptionName("ranks"), ".")
    return None


def on_nodes(spec: RunSpec) -> Text | None:
    """Return why a pool of many nodes does not accept the session; None when it does."""
    nodes = spec.placement.nodes
    if nodes <= 1 and spec.placement.strategy != SPREAD:
        return None
    return text_of(
        f"the ranks of {_session_name(spec)} are all on one node, and ",
        OptionName("nodes", nodes) if nodes > 1 else OptionName("placement", SPREAD),
        " asks for more. Leave it out, or run the cell without a session (%%distributed with the same options).",
    )


def too_large(want: ResourceRequest, stock: Stock) -> Text:
    """Return why a session that would fit only on several nodes can't be placed."""
    sizes = stock.sizes(want.line, want.min_memory_bytes)
    node = max(sizes, key=sizes.__getitem__)
    return text_of(
        f"a session's ranks are all on one node, and no node of this pool has {amount(want.ranks, want.line)}: the "
        f"largest, {stock.host(node)}, has {sizes[node]}. Connect with ",
        OptionName("gpus", sizes[node]),
        " or fewer, run cells without a session to take several nodes, or ",
        _OTHER_POOL,
        ".",
    )


# ---------------------------------------------------------------- internals


def _session_name(spec: RunSpec) -> str:
    return f"session {spec.name or short(spec.run_id)}"


def _misshapen(placement: Placement, stock: Stock) -> Text | None:
    """Return why no pool, or no one-machine pool, can lay out the ranks as requested; None when it can."""
    ranks, nodes, strategy = placement.ranks, placement.nodes, placement.strategy
    if strategy not in STRATEGIES:
        return text_of(OptionName("placement"), f" {strategy[:40]!r} is not known. Use one of {', '.join(STRATEGIES)}.")
    if nodes < 0 or nodes > ranks or (nodes and ranks % nodes):
        return text_of(
            f"{ranks} ranks can't be spread evenly over ",
            OptionName("nodes", nodes),
            ". Make ",
            OptionName("gpus"),
            " a multiple of ",
            OptionName("nodes"),
            ", or leave ",
            OptionName("nodes"),
            " out.",
        )
    if nodes > 1 and strategy == STRICT_PACK:
        return text_of(
            OptionName("placement", STRICT_PACK),
            " uses one node, and ",
            OptionName("nodes", nodes),
            " asks for more. Leave one of them out.",
        )
    if nodes > 1 and not stock.many:
        return text_of(
            f"this pool is one machine, and the run asks for {nodes} nodes. Leave ",
            OptionName("nodes"),
            " out, or ",
            _OTHER_POOL,
            ".",
        )
    return None


def _too_much(placement: Placement, stock: Stock, line: QueueKey) -> Text | None:
    """Return why the line could not hold the request even if nothing else ran; None when it could."""
    ranks, memory = placement.ranks, placement.min_memory_bytes
    total = stock.total(line, memory)
    if stock.limit(line, memory) < ranks:
        if memory and stock.limit(line) >= ranks:
            return _too_small(placement, stock, line)
        alike = [line] if line == CPU_LINE else stock.lines_of(line.device_type)
        most = max(stock.limit(other, memory) for other in alike)
        return text_of(
            f"this pool has {_has(stock, alike)}, and the run asks for {ranks}. Use ",
            OptionName("gpus", most),
            " or fewer, another ",
            OptionName("type"),
            ", or another pool with ",
            OptionName("pool"),
            f". It has: {stock.describe()}.",
        )
    if not stock.many or stock.elastic(line) > total:
        # the size of the autoscaler's nodes is unknown
        return None
    sizes = sorted(stock.sizes(line, memory).items(), key=lambda item: -item[1])
    node, largest = sizes[0]
    if (placement.strategy == STRICT_PACK or placement.nodes == 1) and largest < ranks:
        return text_of(
            f"no node of this pool has {amount(ranks, line)}: the largest, {stock.host(node)}, has {largest}. Leave ",
            OptionName("placement", STRICT_PACK),
            " and ",
            OptionName("nodes", 1),
            " out to take several nodes, use ",
            OptionName("gpus", largest),
            " or fewer, or ",
            _OTHER_POOL,
            ".",
        )
    if placement.nodes > 1:
        each = ranks // placement.nodes
        enough = sum(size >= each for _, size in sizes)
        if enough < placement.nodes:
            have = "node of this pool has" if enough == 1 else "nodes of this pool have"
            return text_of(
                f"{enough} {have} {amount(each, line)} or more, and the run asks for {each} on each of "
                f"{placement.nodes} (",
                OptionName("nodes"),
                f"). The largest node, {stock.host(node)}, has {largest}. Ask for other ",
                OptionName("gpus"),
                " or ",
                OptionName("nodes"),
                ", or ",
                _OTHER_POOL,
                ".",
            )
    return None


def _has(stock: Stock, lines: Sequence[QueueKey]) -> str:
    up_to = {line: "up to " if stock.elastic(line) > stock.total(line) else "" for line in lines}
    return " and ".join(f"{up_to[line]}{amount(stock.limit(line), line)}" for line in lines)


def _too_small(placement: Placement, stock: Stock, line: QueueKey) -> Text:
    need = f"{placement.min_memory_bytes / _GB:g} GB"
    sizes = sorted({memory_bytes(device) for device in stock.line(line)})
    have = " or ".join(memory_text(size) if size else "an unknown amount" for size in sizes)
    enough = stock.total(line, placement.min_memory_bytes)
    count = (
        f"{enough} {line} of this pool {'has' if enough == 1 else 'have'}" if enough else f"no {line} of this pool has"
    )
    return text_of(
        f"{count} {need} of memory (",
        OptionName("min-memory"),
        f"), and the run asks for {placement.ranks}: they have {have}. Ask for less memory, fewer with ",
        OptionName("gpus"),
        ", or leave ",
        OptionName("type"),
        " out so that the pool chooses.",
    )


def _resolve_any(
    placement: Placement, stock: Stock, choose: Callable[[list[ResourceRequest]], ResourceRequest]
) -> ResourceRequest | Text:
    counts = {line: stock.limit(line) for line in stock.all_lines()}
    if enough := [line for line in counts if not _too_much(placement, stock, line)]:
        return choose([_want(placement, line) for line in enough])
    if placement.min_memory_bytes:
        return _none_with_memory(placement, stock)
    if counts:
        largest = max(counts, key=lambda line: counts[line])
        if counts[largest] >= placement.ranks and (problem := _too_much(placement, stock, largest)):
            return problem
        has = " and ".join(f"{count} {line}" for line, count in counts.items())
        return text_of(
            f"this pool has {has}, and the run asks for {placement.ranks}. Use ",
            OptionName("gpus", counts[largest]),
            " or fewer, run on CPU with ",
            OptionName("type", CPU),
            ", or ",
            _OTHER_POOL,
            ".",
        )
    if stock.limit(CPU_LINE) <= 0:
        return text_of(
            f"this pool can't place {placement.ranks} ranks. It has: {stock.describe()}. Ask for fewer with ",
            OptionName("gpus"),
            " or ",
            _OTHER_POOL,
            ".",
        )
    return _on_cpu(placement, stock, CPU)


def _none_with_memory(placement: Placement, stock: Stock) -> Text:
    has = ", ".join(
        f"{stock.counts[line]} {line} with "
        + " or ".join(memory_text(size) for size in sorted({memory_bytes(one) for one in stock.line(line)}))
        for line in stock.counts
    )
    return text_of(
        f"this pool can't place {placement.ranks} ranks on devices of one type with "
        f"{placement.min_memory_bytes / _GB:g} GB of memory (",
        OptionName("min-memory"),
        f"). It has: {has or stock.describe()}. Ask for less memory, fewer with ",
        OptionName("gpus"),
        ", or ",
        _OTHER_POOL,
        ".",
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


def _on_cpu(placement: Placement, stock: Stock, device_type: str, *, simulated: bool = False) -> ResourceRequest | Text:
    if stock.limit(CPU_LINE) <= 0:
        return _lacking(placement, stock)
    # on one machine ranks may share slots, with a note; with many nodes each rank needs a node
    if stock.many and (problem := _too_much(placement, stock, CPU_LINE)):
        return problem
    return _want(placement, CPU_LINE, device_type, simulated=simulated)


def _lacking(placement: Placement, stock: Stock) -> Text:
    asked, inventory = placement.device_type, stock.inventory
    problem = f" Its GPUs could not be read: {inventory.problem.rstrip('.')}." if inventory.problem else ""
    has = f"this pool has no {asked}. It has: {stock.describe()}.{problem} "
    begin = "Leave "
    if asked != CPU and inventory.cpu_slots > 0:
        begin = "Run the ranks on CPU instead with SGPU_STAND_IN=cpu, leave "
    ways: list[Text | OptionName] = [begin, OptionName("type"), " out to use what is there, "]
    if asked != CPU and not stock.many:
        simulate = f"SGPU_SIMULATE={asked}:{max(8, placement.ranks)}"
        ways.append(f"simulate devices on this machine's pool with {simulate}, ")
    ways += ["or ", _OTHER_POOL, "."]
    if asked != CPU:
        ways.append(" `%env NAME=VALUE` sets a variable in a notebook.")
    return text_of(has, *ways)
