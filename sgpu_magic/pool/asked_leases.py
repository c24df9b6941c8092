"""Leases that were asked of a cluster but have no devices yet, and what counts as taken after a refusal. Pure."""

from __future__ import annotations

from collections.abc import Collection

from sgpu_magic.pool.stock import CPU_LINE, Line, Stock
from sgpu_magic.wire.device_types import CPU
from sgpu_magic.wire.devices import Lease

ASKED = "asked of the cluster, which has to bring more nodes for it"


def is_asked(lease: Lease, stock: Stock) -> bool:
    """Whether the lease has no devices yet: the engine asked for nodes, and says when it has them."""
    return stock.many and not lease.shares and not lease.uuids


def elastic_key(line: Line) -> str:
    """Under which key a type is barred that the cluster does not bring."""
    return f"elastic {line.device_type}"


def refused_keys(lease: Lease, uuids: Collection[str], stock: Stock | None) -> set[str]:
    """What counts as in use outside after the engine refused a lease: at least something of the lease's own.

    Else the same lease would come again and again.
    """
    barred = set(uuids) & set(lease.uuids) or set(lease.uuids)
    if barred or stock is None:
        return barred or {CPU}
    if is_asked(lease, stock):
        return {elastic_key(CPU_LINE if lease.cpu_slots else Line(lease.device_type))}
    return {f"{CPU}@{share.node}" for share in lease.shares} or {CPU}
