"""`%sgpu_status`: devices, queue, running and recent runs, as text and as HTML tables."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from html import escape

from sgpu_magic.protocol import ids
from sgpu_magic.protocol.messages import PoolStatus, RunSummary
from sgpu_magic.protocol.records import Device
from sgpu_magic.protocol.states import RunState
from sgpu_magic.render import ansi
from sgpu_magic.render.html_style import BAD, LINE, PANEL, SANS, SOFT, WARN
from sgpu_magic.render.units import TIMES, count_of, format_clock, format_seconds

# only then is it worth a line
_SOON_S = 900.0
_HOLDING = (RunState.PREPARING, RunState.STARTING, RunState.RUNNING, RunState.CANCELLING)
_MAX_FAILURE = 100

Row = tuple[str, ...]


def status_text(status: PoolStatus, now: float | None = None, notice: str = "") -> str:
    """Return the pool as text.

    Args:
        status: What the pool said.
        now: Wall-clock time, seconds since the epoch; the present when left out.
        notice: What the pool wants to be known, "" when nothing.
    """
    now = time.time() if now is None else now
    lines = [
        _headline(status),
        *_waiting(status),
        *_idle(status, now),
        *_remarks(status),
        *([notice] if notice else []),
    ]
    devices, runs = _device_rows(status), _run_rows(status, now)
    if devices:
        lines += ["", *_aligned([("device", "use", "memory", "run"), *devices], right=(1, 2))]
    if runs:
        lines += ["", *_aligned([("run", "name", "ranks", "state", "for", ""), *runs], right=(4,))]
    else:
        lines.append("no runs yet")
    return "\n".join(lines)


def status_html(status: PoolStatus, now: float | None = None, notice: str = "") -> str:
    """Return the pool as tables with inline style; arguments as for `status_text`."""
    name, _, rest = _headline(status).partition(" · ")
    parts = [
        f'<div style="padding:6px 12px;background:{PANEL};border-bottom:1px solid {LINE}">'
        f'<b style="font-weight:600">{_safe(name)}</b> <span style="{SOFT}">{_safe(rest)}</span></div>'
    ]
    now = time.time() if now is None else now
    quiet, loud = [*_waiting(status), *_idle(status, now)], [*_remarks(status), *([notice] if notice else [])]
    parts += [f'<div style="padding:3px 12px">{_safe(line)}</div>' for line in quiet]
    parts += [f'<div style="padding:3px 12px;color:{WARN}">{_safe(line)}</div>' for line in loud]
    devices, runs = _device_rows(status), _run_rows(status, now)
    if devices:
        parts.append(_table(("device", "use", "memory", "run"), devices, right=(1, 2)))
    if runs:
        parts.append(_table(("run", "name", "ranks", "state", "for", ""), runs, right=(4,)))
    else:
        parts.append(f'<div style="padding:3px 12px;{SOFT}">no runs yet</div>')
    return (
        f'<div style="display:inline-block;min-width:420px;max-width:100%;border:1px solid {LINE};'
        f'border-radius:6px;overflow:auto;{SANS};font-size:13px;line-height:1.45">{"".join(parts)}</div>'
    )


def _headline(status: PoolStatus) -> str:
    inventory = status.inventory
    parts = [status.pool]
    types = Counter((device.type, device.simulated) for device in inventory.devices)
    if types:
        parts.append(
            ", ".join(
                f"{count} {kind.upper()}" + (" (simulated on cpu)" if simulated else "")
                for (kind, simulated), count in types.items()
            )
        )
    slots = count_of(inventory.cpu_slots, "cpu slot")
    free = "" if status.cpu_slots_free == inventory.cpu_slots else f" ({status.cpu_slots_free} free)"
    parts.append(slots + free)
    if not any(not device.simulated for device in inventory.devices):
        parts.append("no GPU on this machine")
    parts.append(inventory.host)
    return " · ".join(part for part in parts if part)


def _waiting(status: PoolStatus) -> list[str]:
    queued = [run for run in status.runs if run.state is RunState.QUEUED]
    queued.sort(key=lambda run: (run.position is None, run.position or 0))
    lines: list[str] = []
    for run in queued:
        parts = [f"waiting: {run.name or 'cell'}", count_of(run.ranks, "rank"), run.waiting_for]
        parts.append(f"position {run.position}" if run.position else "")
        lines.append(", ".join(part for part in parts if part))
    return lines


def _remarks(status: PoolStatus) -> list[str]:
    return [problem for problem in (status.inventory.problem, status.problem) if problem]


def _idle(status: PoolStatus, now: float) -> list[str]:
    if status.idle_ends_at is None or status.idle_ends_at - now > _SOON_S:
        return []
    return [f"idle: gives its processes back in {_rough(status.idle_ends_at - now)}"]


def _rough(seconds: float) -> str:
    """Return whole minutes where there are some: nobody waits for the second."""
    return f"{round(seconds / 60)} min" if seconds >= 90 else format_seconds(max(seconds, 0.0))


def _device_rows(status: PoolStatus) -> list[Row]:
    holders = {uuid: (run, rank) for run in status.runs if run.state in _HOLDING for rank, uuid in enumerate(run.uuids)}
    rows: list[Row] = []
    for device in status.inventory.devices:
        holder = holders.get(device.uuid)
        if holder is not None:
            run, rank = holder
            what = f"{ids.short(run.run_id)} {run.name}  rank {rank}"
        else:
            what = f"in use outside the pool: {device.outside_use}" if device.outside_use else "free"
        label = f"{device.type.upper()} · {device.index}"
        if device.simulated:
            label += " (simulated on cpu)"
        rows.append((label, _use(device), _memory(device), what))
    return rows


def _use(device: Device) -> str:
    return "-" if device.utilization_pct is None else f"{device.utilization_pct:.0f} %"


def _memory(device: Device) -> str:
    if not device.memory_bytes:
        return "-"
    total = f"{device.memory_bytes / 1e9:.0f} GB"
    return total if device.used_bytes is None else f"{device.used_bytes / 1e9:.1f}/{total}"


def _run_rows(status: PoolStatus, now: float) -> list[Row]:
    return [_run_row(run, now) for run in status.runs]


def _run_row(run: RunSummary, now: float) -> Row:
    if run.device_type in ("cpu", "any"):
        ranks = f"{run.ranks} {TIMES} {run.device_type}" if run.device_type == "cpu" else f"{run.ranks}"
    else:
        ranks = f"{run.ranks} {TIMES} {run.device_type.upper()}" + (" (simulated on cpu)" if run.simulated else "")
    since = run.started_at if run.started_at is not None else run.submitted_at
    duration = format_clock(now - since) if run.ended_at is None else format_seconds(run.ended_at - since)
    failure = run.failure.strip().split("\n", 1)[0]
    if len(failure) > _MAX_FAILURE:
        failure = failure[:_MAX_FAILURE] + " ..."
    return ids.short(run.run_id), run.name, ranks, str(run.state), duration, failure


def _aligned(rows: Sequence[Row], right: tuple[int, ...]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "   ".join(
            ansi.plain(cell).rjust(widths[column]) if column in right else ansi.plain(cell).ljust(widths[column])
            for column, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]


def _table(heads: Row, rows: Sequence[Row], right: tuple[int, ...]) -> str:
    def cells(row: Row, tag: str, style: str) -> str:
        drawn = ""
        for column, cell in enumerate(row):
            align = "right" if column in right else "left"
            colour = f";color:{BAD}" if cell in ("failed", "timed out") else ""
            drawn += (
                f'<{tag} style="text-align:{align};padding:2px 12px;white-space:nowrap;'
                f'font-variant-numeric:tabular-nums{style}{colour}">{_safe(cell)}</{tag}>'
            )
        return f"<tr>{drawn}</tr>"

    head = cells(heads, "th", f";font-weight:400;{SOFT}")
    body = "".join(cells(row, "td", "") for row in rows)
    return (
        f'<table style="border-collapse:collapse;table-layout:auto;width:auto;margin:0;border:0;'
        f"border-top:1px solid {LINE};"
        f'font-size:12.5px"><thead>{head}</thead><tbody>{body}</tbody></table>'
    )


def _safe(text: str) -> str:
    return escape(ansi.plain(text))
