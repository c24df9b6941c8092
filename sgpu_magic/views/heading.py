"""A run's first line: its name, which ranks, where, what was shipped and returned."""

from __future__ import annotations

from collections.abc import Iterable

from sgpu_magic.system.byte_sizes import format_bytes
from sgpu_magic.views.hosts import hosts_text
from sgpu_magic.views.surroundings import label_text
from sgpu_magic.views.units import TIMES, count_of, format_seconds
from sgpu_magic.views.view import RunView
from sgpu_magic.wire import ids
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.payloads import Payload
from sgpu_magic.wire.states import RunKind, RunState

AUTO = "auto"
"""Marks a plain cell that `%sgpu_auto` has sent."""


def header_line(view: RunView) -> str:
    """Return `train_digits · 4 ranks on local (cpu, gloo) · shipped model (45.1 MB in 38 ms)`."""
    where = (_where(view), "" if view.spec.in_session else hosts_text(view))
    parts = (mark_text(view), view.name, *where, attempt_text(view), shipped_text(view), label_text(view))
    return " · ".join(part for part in parts if part)


def mark_text(view: RunView) -> str:
    """Return `auto` for a cell that was sent by `%sgpu_auto`, else ""."""
    return AUTO if view.spec.auto else ""


def ranks_text(view: RunView) -> str:
    """Return `4 ranks`, `3 of 4 ranks`, `rank 2 of 4`."""
    taking_part = len(view.rank_numbers)
    if taking_part == view.ranks:
        return count_of(view.ranks, "rank")
    if taking_part == 1:
        return f"rank {view.rank_numbers[0]} of {view.ranks}"
    return f"{taking_part} of {view.ranks} ranks"


def session_text(view: RunView) -> str:
    """Return `session work`, "" for a run that uses no session's lease."""
    spec = view.spec
    return f"session {spec.session_name or ids.short(spec.session)}" if spec.session else ""


def place_words(view: RunView) -> list[str]:
    """Return which ranks and where, for the headers of the static HTML and the live view.

    A cell in a session names that; where the session is, its own view says.
    """
    if view.spec.in_session:
        return [ranks_text(view), session_text(view)]
    beside = f"beside {session_text(view)}" if view.spec.session else ""
    return [word for word in (device_words(view), view.pool, hosts_text(view), beside) if word]


def backend(lease: Lease) -> str:
    """Return the process group's backend: `nccl` on real GPUs, else `gloo`."""
    return "gloo" if lease.simulated or lease.device_type == "cpu" else "nccl"


def device_words(view: RunView) -> str:
    """Return `4 ranks · cpu, gloo` or `4 x A10, nccl`, and that they are simulated: the header's words."""
    lease = view.lease
    if lease is None:
        return ranks_text(view)
    if lease.device_type == "cpu":
        return f"{ranks_text(view)} · cpu, {backend(lease)}"
    simulated = " (simulated on cpu)" if lease.simulated else ""
    return f"{lease.ranks} {TIMES} {lease.device_type.upper()}{simulated}, {backend(lease)}"


def device_text(lease: Lease) -> str:
    """Return `cpu`, `4 x a10` or `4 x a10 (simulated on cpu)`."""
    if lease.device_type == "cpu":
        return "cpu"
    return f"{lease.ranks} x {lease.device_type}" + (" (simulated on cpu)" if lease.simulated else "")


def shipped_text(view: RunView) -> str:
    """Return `shipped model, loader, cfg (45.1 MB in 38 ms)`, "" when nothing was."""
    shipped = view.spec.shipped
    if not shipped.names:
        return ""
    cost = f"{format_bytes(shipped.total_bytes)} in {format_seconds(shipped.seconds)}"
    return f"shipped {names_text(shipped.names)} ({cost})"


def returned_text(view: RunView) -> str:
    """Return `returned history (1.2 kB)`, "" when nothing was asked for."""
    if view.state is not RunState.SUCCEEDED:
        return ""
    if view.spec.kind is RunKind.CALL:
        values = sum(result.payload is not None for result in view.results)
        return f"returned {count_of(values, 'value')} ({format_bytes(returned_bytes(view))})" if values else ""
    names = [name.name for name in view.spec.outputs]
    return f"returned {names_text(names)} ({format_bytes(returned_bytes(view))})" if names else ""


def returned_bytes(view: RunView) -> int:
    """Return the bytes of what was brought back: the first rank's, or every rank's when one name is asked of all."""
    everywhere = view.spec.kind is RunKind.CALL or any(name.all_ranks for name in view.spec.outputs)
    first = view.rank_numbers[0]
    payloads = [result.payload for result in view.results if everywhere or result.rank == first]
    return sum(_payload_bytes(payload) for payload in payloads if payload is not None)


def attempt_text(view: RunView) -> str:
    """Return `attempt 2 of 3`, "" for the first."""
    return f"attempt {view.attempt} of {view.attempts}" if view.attempt > 1 else ""


def names_text(names: Iterable[str], most: int = 8) -> str:
    """Return `model, loader, cfg`, of many the first and how many more."""
    listed = list(names)
    if len(listed) <= most:
        return ", ".join(listed)
    return f"{', '.join(listed[:most])} and {len(listed) - most} more"


def _where(view: RunView) -> str:
    ranks = ranks_text(view)
    if view.spec.in_session:
        return f"{ranks} in {session_text(view)}"
    beside = f", beside {session_text(view)}" if view.spec.session else ""
    if view.lease is None:
        return f"{ranks} on {view.pool}{beside}"
    device = device_text(view.lease)
    joint = f", {device}" if view.lease.simulated else f" ({device}"
    return f"{ranks} on {view.pool}{joint}, {backend(view.lease)}{'' if view.lease.simulated else ')'}{beside}"


def _payload_bytes(payload: Payload) -> int:
    return payload.layout.pickle_size + sum(size for _, size in payload.layout.buffers)
