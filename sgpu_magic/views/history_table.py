"""The use of devices in the last ten minutes, as rows with a curve: block characters in text, SVG in HTML."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath

from sgpu_magic.views.format_pool import device_name, format_simulated
from sgpu_magic.views.html_style import ACCENT, Markup, sparkline
from sgpu_magic.views.units import Row
from sgpu_magic.wire.base import short
from sgpu_magic.wire.devices import Device, memory_text, type_label, used_bytes_of
from sgpu_magic.wire.pool_status import HISTORY_POINTS, HISTORY_STEP_S, DeviceHistory, PoolStatus, RunSummary

MOST_CURVES = 16
"""The most devices with a curve each; of more, each type has one."""
HISTORY_HEADS: Row = ("device", "use in 10 minutes", "average", "memory now")
HISTORY_RIGHT = (2, 3)
CURVE_CHARS = 20
MAX_NAMED_RUNS = 3
"""The most runs that a curve's title names."""

_BLOCKS = "▁▂▃▄▅▆▇█"
_GAP = " "
_GB = 1e9
_SPAN_S = HISTORY_POINTS * HISTORY_STEP_S
# number of newest points that may have the current value: the last one may not have been measured yet
_CURRENT_POINTS = 2


def history_rows(status: PoolStatus, now: float, *, html: bool) -> list[Row]:
    """Return a row for each device or type whose use in the last ten minutes is known.

    Args:
        status: The pool's status.
        now: Wall-clock time, seconds since the epoch.
        html: Draw the curves as SVG.
    """
    devices = {device.uuid: device for device in status.inventory.devices}
    runs = recent_runs(status.runs, now)
    rows: list[Row] = []
    for history in status.history:
        average, memory = average_of(history), format_memory(history, devices.get(history.uuid))
        if average is None:
            continue
        device = devices.get(history.uuid)
        name = f"{type_label(history.type)}, mean" if device is None else device_name(device)
        name += format_simulated(status, history.simulated)
        words = f"10 minutes: use {average} % on average" + (f", memory {memory} now" if memory else "")
        held_by = ", ".join(runs.get(history.uuid, ())[:MAX_NAMED_RUNS])
        curve = curve_text(history.utilization_pct)
        if html:
            title = words + (f"; held by {held_by}" if held_by else "")
            curve = Markup(sparkline(whole_span(history.utilization_pct), 100.0, title, ACCENT))
        rows.append((name, curve, f"{average} %", memory))
    return rows


def curve_text(values: Sequence[int | None]) -> str:
    """Return percentages as 20 block characters for ten minutes; spaces where nothing was measured."""
    points = whole_span(values)
    width = HISTORY_POINTS // CURVE_CHARS
    return "".join(_block(points[at : at + width]) for at in range(0, HISTORY_POINTS, width))


def whole_span(values: Sequence[int | None]) -> list[int | None]:
    """Return the values of ten minutes, None before the first."""
    missing = itertools.repeat(None, HISTORY_POINTS - len(values))
    return [*missing, *values][-HISTORY_POINTS:]


def average_of(history: DeviceHistory) -> int | None:
    """Return the mean use where it was measured, in percent; None if it never was."""
    known = [value for value in history.utilization_pct if value is not None]
    return round(sum(known) / len(known)) if known else None


def format_memory(history: DeviceHistory, device: Device | None) -> str:
    """Return the memory in use now: `12 of 24 GB`, `50 %` if the bytes are unknown, "" if it was not measured."""
    newest = [value for value in history.memory_pct[-_CURRENT_POINTS:] if value is not None]
    if not newest:
        return ""
    if device is None or not device.used_bytes or not device.memory_bytes:
        return f"{newest[-1]} %"
    used = used_bytes_of(device.used_bytes, device.memory_bytes) / _GB
    return f"{used:.0f} of {memory_text(device.memory_bytes)}"


def recent_runs(runs: Iterable[RunSummary], now: float) -> Mapping[str, tuple[str, ...]]:
    """Return the runs that held each device in the last ten minutes, newest first: `7f3a train.ipynb`.

    Cells in a session are left out, as the session holds the devices.

    Args:
        runs: The pool's runs.
        now: Wall-clock time, seconds since the epoch.
    """
    found: dict[str, tuple[str, ...]] = {}
    recent = [run for run in runs if not run.session and (run.ended_at is None or now - run.ended_at <= _SPAN_S)]
    for run in sorted(recent, key=lambda run: run.submitted_at, reverse=True):
        words = f"{short(run.run_id)} {PurePath(run.notebook).name}".strip()
        for uuid in run.uuids:
            found[uuid] = (*found.get(uuid, ()), words)
    return found


def _block(values: Iterable[int | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return _GAP
    share = sum(known) / len(known) / 100.0
    return _BLOCKS[min(int(share * len(_BLOCKS)), len(_BLOCKS) - 1)]
