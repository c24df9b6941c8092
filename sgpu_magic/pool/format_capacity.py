"""Devices, quotas and sessions of a pool, by the names that its users know."""

from __future__ import annotations

from sgpu_magic.formatting import plural
from sgpu_magic.pool.scheduling.capacity import CPU_LINE, PoolContents, QueueKey
from sgpu_magic.wire.base import short
from sgpu_magic.wire.devices import type_label

_SIMULATED = " (simulated)"


def format_line(line: QueueKey) -> str:
    """Return a kind of device: `A10`, `H100 (simulated)`."""
    return type_label(line.device_type) + (_SIMULATED if line.simulated else "")


def format_amount(count: int, line: QueueKey) -> str:
    """Return a number of devices or ranks on CPU: `4 A10`, `1 CPU rank`."""
    if line == CPU_LINE:
        return f"{count} CPU {plural(count, 'rank')}"
    return f"{count} {format_line(line)}"


def format_contents(contents: PoolContents) -> str:
    """Return what a pool has: `4 A10, 8 H100 (simulated), up to 64 L4, 16 CPU ranks`."""
    parts: list[str] = []
    for one in contents.lines:
        words = str(one.count)
        if one.limit > one.count:
            words = f"{one.count} of up to {one.limit}" if one.count else f"up to {one.limit}"
        parts.append(f"{words} {format_line(one.line)}")
    if contents.cpu_slots > 0:
        parts.append(f"{contents.cpu_slots} CPU {plural(contents.cpu_slots, 'rank')}")
    return ", ".join(parts) or "nothing"


def format_quota(quota: int, kind: str | None) -> str:
    """Return a quota of one type or of all devices together: `4 A10`, `2 devices`."""
    return f"{quota} {plural(quota, 'device')}" if kind is None else format_amount(quota, QueueKey(kind))


def format_session(run_id: str, name: str) -> str:
    """Return `session` and its name, or its short ID if it has none."""
    return f"session {name or short(run_id)}"
