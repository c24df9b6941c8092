"""Usage and cost of a run, and the lines of a session's view, in words and as a record."""

from __future__ import annotations

import shlex
import time
from pathlib import Path, PurePath

from sgpu_magic.formatting import (
    count_of,
    format_bytes,
    format_gb,
    format_money,
    format_ranks,
    format_seconds,
    format_span,
    names_text,
)
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.format_run import returned_bytes, session_text, tracked_text
from sgpu_magic.views.run_notes import restart_command
from sgpu_magic.views.usage import RankUsage, RunUsage, UsageCurve, device_line, format_use, idle_sentence
from sgpu_magic.wire.base import RunKind, RunState
from sgpu_magic.wire.costs import HOUR_S, cost_of
from sgpu_magic.wire.devices import CPU
from sgpu_magic.wire.rank_events import IDLE_GPU_PCT

# shorter idle times are normal at the start of a run
_IDLE_S = 60.0
# pauses of a mostly busy GPU are normal: only a low mean is reported
_LOW_MEAN_PCT = 25.0
_DIGITS = {"%": 0, "W": 0, "°C": 0}
_IN_RECORD = ("utilization_pct", "own_utilization_pct", "power_w", "temperature_c", "cpu_cores")
# the smallest share of its session's cost that a cell shows
_LEAST_SHARE = 0.005
# the shortest device time that is shown without a price, in seconds
_LEAST_S = 36.0
# shorter device times are shown in seconds
_IN_HOURS_S = 360.0
_A_DAY_S = 20 * 3600.0


def busy_text(usage: RunUsage) -> str:
    """Return `GPUs busy 91 %`, "" when no GPU reports it."""
    busy = usage.busy_pct
    return "" if busy is None else f"{'GPU' if len(usage.ranks) == 1 else 'GPUs'} busy {busy:.0f} %"


def whole_text(usage: RankUsage) -> str:
    """Return `94 % · 18.2 GB`, mean utilization and peak memory; "" when nothing was reported."""
    if usage.latest is None:
        return ""
    return format_use(usage.latest.kind, usage.mean_utilization_pct, usage.mean("cpu_cores"), usage.peak_used_bytes)


def curve_text(curve: UsageCurve) -> str:
    """Return `GPU: 94 % on average, 98 % at most`."""
    mean, peak = curve.series.mean, curve.series.peak
    if mean is None or peak is None:
        return f"{curve.name}: not reported"
    return f"{curve.name}: {_value(mean, curve.unit)} on average, {_value(peak, curve.unit)} at most"


def measured_lines(usage: RankUsage) -> list[str]:
    """Return everything that was measured for a rank, one line each."""
    latest = usage.latest
    if latest is None:
        return []
    lines = [device_line(latest), *([latest.problem] if latest.problem else [])]
    for curve in usage.curves():
        line = curve_text(curve)
        if curve.name == "memory" and curve.top and curve.series.mean is not None:
            line += f", of {format_gb(curve.top * 1e9)}"
        lines.append(line)
    return lines


def idle_sentences(usage: RunUsage) -> list[str]:
    """Return sentences about idle GPUs of an ended run: `rank 3's GPU was under 5 % for 3 min 10 s`."""
    idle_s = {rank: _idle_s(each) for rank, each in sorted(usage.ranks.items()) if is_low(each)}
    idle_s = {rank: seconds for rank, seconds in idle_s.items() if seconds >= _IDLE_S}
    return [idle_sentence(idle_s, "was", "were") + (" or longer" if len(idle_s) > 1 else "")] if idle_s else []


def idle_lines(view: RunView) -> list[str]:
    """Return sentences about GPUs that are or were idle; none for a session, whose cells report them."""
    if view.session is not None:
        return []
    return idle_sentences(view.usage) if view.is_final else view.usage.idle_sentences


def is_low(usage: RankUsage) -> bool:
    """Whether its GPU's mean utilization is low."""
    mean = usage.mean_utilization_pct
    return mean is not None and mean < _LOW_MEAN_PCT


def usage_record(usage: RunUsage, most: int) -> dict[str, object]:
    """Return means and peaks as JSON: lists by rank, with units in the keys and null for values not reported.

    Args:
        usage: A run's usage.
        most: Maximum number of ranks, from the first.
    """
    ranks = [usage.ranks[rank] for rank in sorted(usage.ranks)[:most]]
    record: dict[str, object] = {"gpus_busy_pct": _rounded(usage.busy_pct), "ranks": [rank.rank for rank in ranks]}
    for field in _IN_RECORD:
        means = [_rounded(rank.mean(field)) for rank in ranks]
        if any(mean is not None for mean in means):
            record[f"mean_{field}"] = means
            curves = [rank.series.get(field) for rank in ranks]
            record[f"peak_{field}"] = [_rounded(curve.peak) if curve is not None else None for curve in curves]
    record["peak_bytes"] = [rank.peak_used_bytes for rank in ranks]
    own = [rank.peak_own_bytes for rank in ranks]
    return record | ({"peak_own_bytes": own} if any(count is not None for count in own) else {})


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _idle_s(usage: RankUsage) -> float:
    series = usage.series.get("utilization_pct")
    if series is None:
        return 0.0
    return series.step_s * sum(value is not None and value < IDLE_GPU_PCT for value in series.values)


def _value(value: float, unit: str) -> str:
    return f"{value:.{_DIGITS.get(unit, 1)}f} {unit}"


def log_files(view: RunView) -> str:
    """Return the files with everything that the ranks printed, "" when their place is unknown.

    The home directory is written as `~`: a saved notebook may go to others.
    """
    if not view.directory:
        return ""
    directory = PurePath(view.directory)
    which = view.rank_numbers[0] if len(view.rank_numbers) == 1 else "*"
    home = Path.home()
    if directory.is_relative_to(home):
        return f"~/{shlex.quote(str(directory.relative_to(home)))}/rank-{which}.log"
    return f"{shlex.quote(str(directory))}/rank-{which}.log"


def rank_label(rank: int, width: int) -> str:
    """Return `[3]`, which begins a rank's lines, padded to `rank_width`."""
    return f"[{rank}]".rjust(width)


def rank_width(view: RunView) -> int:
    """Return the width of the last rank's label."""
    return len(f"[{view.rank_numbers[-1]}]")


def cost_text(view: RunView, now: float | None = None) -> str:
    """Return what an active run has cost so far: `$0.37`, `$0.37 (simulated)`, `$0.05 of its session`.

    Args:
        view: The run.
        now: Time by the views' clock (`steady_time`); the present when left out.
    """
    if view.is_final or view.left or view.hourly is None:
        return ""
    if view.spec.session:
        return _share(view, now)
    seconds = view.times.metered_s(now)
    cost = None if seconds is None else cost_of(view.hourly, seconds)
    return "" if cost is None else format_money(cost, view.currency) + mark(view)


def billed_text(view: RunView) -> str:
    """Return what an ended run was billed: `$0.60 for 0.24 GPU h`, without a price `0.24 GPU h`."""
    ended = view.ended
    if ended is None:
        return ""
    if view.spec.session:
        return _share(view)
    if ended.gpu_s is None:
        return ""
    if ended.cost is None:
        return device_time(view, ended.gpu_s) + mark(view) if ended.gpu_s >= _LEAST_S else ""
    return f"{format_money(ended.cost, ended.currency)} for {device_time(view, ended.gpu_s)}{mark(view)}"


def device_time(view: RunView, seconds: float) -> str:
    """Return `0.24 GPU h`, `8 GPU s`, or `8 CPU s` for CPU slots; `seconds` is the sum over all devices."""
    device = "CPU" if view.lease is not None and view.lease.device_type == CPU else "GPU"
    return f"{seconds:.0f} {device} s" if seconds < _IN_HOURS_S else device_hours(seconds, device)


def device_hours(seconds: float, device: str = "GPU") -> str:
    """Return `0.24 GPU h`."""
    hours = seconds / HOUR_S
    return f"{hours:.{1 if hours >= 9.95 else 2}f} {device} h"


def mark(view: RunView) -> str:
    """Return ` (simulated)` for simulated devices, whose cost is not paid, else ""."""
    return " (simulated)" if view.lease is not None and view.lease.simulated else ""


def _share(view: RunView, now: float | None = None) -> str:
    """Return a run's share of its session's cost; the run itself costs nothing."""
    if view.hourly is None:
        return ""
    seconds = view.times.running_s(now)
    cost = view.hourly * seconds / HOUR_S
    return f"{format_money(cost, view.currency)} of its session{mark(view)}" if cost >= _LEAST_SHARE else ""


def session_meta(view: RunView, now: float | None = None) -> list[str]:
    """Return further words for a session's header.

    Args:
        view: The session's view.
        now: Time of day in seconds since the epoch; the present when left out.
    """
    session = view.session
    if session is None:
        return []
    cells = count_of(session.cells, "cell") if session.cells or view.ended is not None else ""
    if view.ended is not None:
        # the view shows a failure elsewhere
        badly = view.state not in (RunState.CANCELLED, RunState.SUCCEEDED)
        why = "" if badly else view.ended.reason or view.reason
        words = [cells, _gpu_hours(view), _cost(view), busy_text(view.usage), why]
    else:
        idle_s = view.spec.idle_s
        end = f"ends after {format_seconds(idle_s)} without a cell" if idle_s is not None else ""
        words = [cells, idle_since(session.idle_at, now), end]
    return [word for word in words if word]


def standing_warnings(view: RunView) -> list[str]:
    """Return current problems: an unreachable pool, dead ranks and how to restart them."""
    return [*silence_lines(view), *dead_rank_lines(view)]


def silence_lines(view: RunView) -> list[str]:
    """Return that the pool can't be reached, which needs no action."""
    return [view.silence] if view.silence and not view.is_final else []


def dead_rank_lines(view: RunView) -> list[str]:
    """Return which ranks of a session are dead and how to restart them."""
    dead = view.session.dead if view.session is not None else ()
    if view.is_final or not dead:
        return []
    verb, them = ("is", "it") if len(dead) == 1 else ("are", "them")
    line = f"{format_ranks(dead)} {verb} dead; {restart_command(dead)} replaces {them}"
    return [f"{line}, and the others keep their state"]


def session_summary(view: RunView) -> str:
    """Return a session's last line: how long it lasted, its number of cells, its usage, and why it ended."""
    lasted = f"{view.name} ended after {format_span(view.times.running_s())}"
    return " · ".join(filter(None, [lasted, *session_meta(view), tracked_text(view), f"run {view.short_id}"]))


def _gpu_hours(view: RunView) -> str:
    """Return `0.82 GPU h`, the time for which the session held its GPUs, summed over them; "" on CPU slots."""
    lease = view.lease
    if lease is None or lease.device_type == "cpu":
        return ""
    return device_hours(view.times.held_s() * lease.ranks) + mark(view)


def _cost(view: RunView) -> str:
    if view.ended is None or view.ended.cost is None:
        return ""
    return format_money(view.ended.cost, view.ended.currency) + ("" if _gpu_hours(view) else mark(view))


def idle_since(at: float | None, now: float | None = None) -> str:
    """Return `idle since 14:05`, with the date after 20 hours; "" for None."""
    if at is None:
        return ""
    now = time.time() if now is None else now
    form = "%H:%M" if now - at < _A_DAY_S else "%b %d, %H:%M"
    return f"idle since {time.strftime(form, time.localtime(at))}"


def is_quiet(view: RunView) -> bool:
    """Whether the view is a single line: a push or a pull that has not failed."""
    badly = view.is_final and view.state is not RunState.SUCCEEDED
    return view.spec.kind in (RunKind.PUSH, RunKind.PULL) and not badly and not view.left


def quiet_line(view: RunView) -> str:
    """Return `pushed cfg, loader (1.2 MB) to 4 ranks of session work`, `pulled history (1.2 kB) from rank 0 ...`."""
    succeeded = view.state is RunState.SUCCEEDED
    if view.spec.kind is RunKind.PUSH:
        shipped = view.spec.shipped
        what = f"{names_text(shipped.names)} ({format_bytes(shipped.total_bytes)})"
        line = f"{'pushed' if succeeded else 'pushing'} {what} to {_ranks(view)} of {session_text(view)}"
    else:
        size = f" ({format_bytes(returned_bytes(view))})" if succeeded else ""
        line = f"{'pulled' if succeeded else 'pulling'} {_origins(view)} of {session_text(view)}{size}"
    return " · ".join(filter(None, [line, "" if succeeded else view.waiting_for, *view.notes]))


def _ranks(view: RunView) -> str:
    return format_ranks(view.rank_numbers) if view.spec.only else count_of(view.ranks, "rank")


def _origins(view: RunView) -> str:
    """Return `history from rank 0 and loss from 4 ranks`."""
    origins: dict[str, list[str]] = {}
    for output in view.spec.outputs:
        of = _ranks(view) if output.all_ranks else format_ranks(view.rank_numbers[:1])
        origins.setdefault(of, []).append(output.name)
    return " and ".join(f"{names_text(names)} from {of}" for of, names in origins.items())
