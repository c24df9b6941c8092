"""What a waiting run waits for, in words: `needs 2 more A10; freed ones are reserved for it`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sgpu_magic.formatting import format_ranks
from sgpu_magic.pool.format_capacity import format_amount, format_quota, format_session
from sgpu_magic.pool.scheduling.capacity import SPREAD, ResourceRequest
from sgpu_magic.pool.scheduling.wait_reason import (
    Availability,
    CellActivity,
    DeviceBlocker,
    DevicesReserved,
    DevicesUnavailable,
    DevicesUnknown,
    DevicesUsedOutside,
    HeldByRun,
    Holders,
    LockedDevices,
    NodeReserved,
    NodeShortage,
    NodesRequested,
    NoNodesAdded,
    OverQuota,
    SessionOccupied,
    SessionQueued,
    SessionRestarting,
    SessionStarting,
    Shortage,
    SlotsRefused,
    TooFewDevices,
    UnfreedDevices,
    WaitReason,
)
from sgpu_magic.wire.base import short
from sgpu_magic.wire.events import RemainingRank

_GB = 1e9


def format_wait(reason: WaitReason) -> str:
    """Return what a run waits for, a sentence without a full stop."""
    match reason:
        case DevicesUnknown():
            return "the pool is still looking for its devices"
        case OverQuota():
            return _format_quota(reason)
        case Shortage():
            what = format_amount(reason.missing, reason.line).replace(" ", " more ", 1)
            reserved = ["freed ones are reserved for it"] if reason.is_reserved else []
            held = format_holders(reason.holders)
            return "; ".join([f"needs {what}", *held, *format_blockers(reason.blockers), *reserved])
        case NodeShortage():
            return _format_node_shortage(reason)
        case NodesRequested(request=request, available=available, coming=coming):
            added = [coming] if coming else []
            need = f"{_format_need(request)}, {_format_available(available, request)}"
            return "; ".join([need, "the cluster was asked for more nodes", *added])
        case DevicesReserved(run_id=run_id, request=request):
            need = "" if request is None else f"{_format_need(request)}: "
            return f"{need}the free ones are reserved for run {short(run_id)}, which has waited longer"
        case NodeReserved(run_id=run_id, request=request):
            reserved = f"enough are free, but on a node reserved for run {short(run_id)}, which has waited longer"
            return f"{_format_need(request)}: {reserved}"
        case SessionQueued(reason=why):
            return f"its session waits for devices: {'it is queued' if why is None else format_wait(why)}"
        case SessionStarting():
            return "its session's ranks are starting"
        case SessionRestarting(ranks=ranks, remaining=remaining):
            text = f"{format_restarting(ranks)} of its session {'is' if len(ranks) == 1 else 'are'} being restarted"
            return f"{text}; {format_remaining(remaining)}" if remaining else text
        case SessionOccupied():
            return _format_busy(reason)


def format_remaining(ranks: Sequence[RemainingRank]) -> str:
    """Return which ranks were killed and have not ended: `rank 2 (process 123) was killed and does not end`."""
    hosts = {rank.host for rank in ranks}
    of_process = [f"process {rank.pid}" + (f" on {rank.host}" if len(hosts) > 1 else "") for rank in ranks]
    listed = ", ".join(f"rank {rank.rank} ({process})" for rank, process in zip(ranks, of_process, strict=True))
    return f"{listed} {'was killed and does' if len(ranks) == 1 else 'were killed and do'} not end"


def format_restarting(ranks: Sequence[int]) -> str:
    """Return the ranks that are restarted: `rank 1`, `ranks 0, 2`, or `all ranks` for none."""
    return format_ranks(ranks) if ranks else "all ranks"


def format_blockers(blockers: Iterable[DeviceBlocker]) -> list[str]:
    """Return a part of a sentence for each reason why devices can't be granted."""
    return [_format_blocker(blocker) for blocker in blockers]


def format_holders(holders: Holders) -> list[str]:
    """Return which runs hold how many devices: `2 are held by run 7f3a`, `4 are held by session walk`."""
    parts = [f"{_are(held.count)} held by {_holder(held)}" for held in holders.runs]
    return [*parts, f"{holders.others} more runs hold others"] if holders.others else parts


def _holder(held: HeldByRun) -> str:
    return f"run {short(held.run_id)}" if held.session is None else format_session(held.run_id, held.session)


def format_run_title(run_id: str, name: str) -> str:
    """Return a run's short ID, with its name if it has one: `7f3a (train)`."""
    return f"{short(run_id)} ({name})" if name else short(run_id)


# ---------------------------------------------------------------- one reason


def _format_quota(excess: OverQuota) -> str:
    runs = [f"run {short(run_id)}" for run_id in excess.run_ids]
    if excess.others:
        runs.append(f"{excess.others} more")
    quota = format_quota(excess.quota, excess.kind)
    return (
        f"user {excess.user} may have {quota} at once (the pool's setting user_quotas): "
        f"{_are(excess.in_use)} in use by {', '.join(runs)}, and it needs {format_amount(excess.ranks, excess.line)}"
    )


def _format_blocker(blocker: DeviceBlocker) -> str:
    match blocker:
        case UnfreedDevices(run_id=run_id, count=count, line=line, ranks=ranks):
            return f"run {short(run_id)} still holds {format_amount(count, line)}: {format_remaining(ranks)}"
        case SlotsRefused(why=why):
            return f"the engine refuses more: {why}"
        case LockedDevices(count=count, why=why):
            return f"{_are(count)} in use outside the pool{'' if why is None else f' ({why})'}"
        case DevicesUnavailable(count=count, why=why):
            return f"{_are(count)} unavailable ({why.rstrip('.')})"
        case DevicesUsedOutside(count=count, use=use):
            takes = f"the option allow-busy takes {'it' if count == 1 else 'them'}"
            return f"{_are(count)} in use outside the pool ({use}; {takes})"
        case TooFewDevices(count=count, line=line):
            return f"the pool has only {format_amount(count, line)} now"
        case NoNodesAdded(why=why):
            return f"the cluster added no more: {why}"


def _format_busy(busy: SessionOccupied) -> str:
    run = short(busy.run_id)
    if busy.remaining:
        return f"{format_remaining(busy.remaining)}; it still runs {run}"
    if ranks := busy.unstopped:
        is_one = len(ranks) == 1
        listed = ", ".join(map(str, ranks))
        still = f"rank {listed} still runs" if is_one else f"ranks {listed} still run"
        restart = f"%sgpu_restart --rank {','.join(map(str, ranks))}"
        kills = f"interrupt again within 5 s, or {restart}, kills {'it' if is_one else 'them'}"
        return f"{still} {run}, which was interrupted: {kills}"
    title = format_run_title(busy.run_id, busy.name)
    match busy.activity:
        case CellActivity.STOPPING:
            return f"run {title} is being stopped in its session"
        case CellActivity.ENDING:
            return f"run {title} is ending in its session"
        case CellActivity.RUNNING:
            return f"run {title} is still running in its session"


# ---------------------------------------------------------------- many nodes


def _format_node_shortage(shortage: NodeShortage) -> str:
    parts = [f"{_format_need(shortage.request)}; {_format_available(shortage.available, shortage.request)}"]
    parts += format_blockers(shortage.blockers)
    if shortage.is_reserved and shortage.reserved_host is None:
        parts.append("freed ones are reserved for it")
    elif shortage.is_reserved:
        parts.append(f"node {shortage.reserved_host} is reserved for it")
    return "; ".join([*parts, shortage.coming] if shortage.coming else parts)


def _format_need(request: ResourceRequest) -> str:
    """Return a request in words: `needs 8 H100 on one node`."""
    what = format_amount(request.ranks, request.line)
    if request.min_memory_bytes:
        what += f" with {request.min_memory_bytes / _GB:g} GB"
    if request.on_one_node:
        return f"needs {what} on one node"
    if request.nodes:
        return f"needs {format_amount(request.per_node, request.line)} on each of {request.nodes} nodes"
    return f"needs {what}" + (" (spread)" if request.strategy == SPREAD else "")


def _format_available(available: Availability, request: ResourceRequest) -> str:
    """Return what is free: `12 are free of 64, the largest node has 4 free of 8 (4 are held by run 7f3a)`."""
    total, limit = available.total, available.limit
    of = f"{total} there now, {limit} at most" if limit > total else f"{total}"
    text = f"{_are(available.free)} free of {of}"
    if (enough := available.large_enough) is not None:
        text += f", {enough} {'node has' if enough == 1 else 'nodes have'} {request.per_node} or more free"
    if (node := available.largest) is None:
        return text
    held = format_holders(node.holders)
    by = f" ({', '.join(held)})" if held else ""
    return f"{text}, the largest node has {node.free} free of {node.size}{by}"


def _are(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'}"
