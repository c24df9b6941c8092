"""Information from runs' files: where they are, what ranks on simulated devices use, and this month's usage."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.client import ledger
from sgpu_magic.client.ledger import Use, usage
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError
from sgpu_magic.files.run_directory import EventFile, read_spec
from sgpu_magic.formatting import format_money
from sgpu_magic.panel.device_rows import Use as DeviceUse
from sgpu_magic.panel.pool_state import RunDirectoryInfo
from sgpu_magic.panel.schema import RunParameter
from sgpu_magic.views.format_pool import HOLDING
from sgpu_magic.wire.base import is_valid_id
from sgpu_magic.wire.costs import HOUR_S, Prices
from sgpu_magic.wire.decoding import decode_json
from sgpu_magic.wire.files import TRACKING
from sgpu_magic.wire.pool_status import BudgetState, RunSummary
from sgpu_magic.wire.rank_events import RankSample, Sampled

# an MLflow page may appear this long after the run's end
_LATE_S = 60.0
_POLL_S = 5.0
# a comparison of more can't be read
_MOST_PARAMETERS = 20
_NOWHERE = RunDirectoryInfo()
# samples come every second, of long runs every 5 s
_SAMPLE_TIMEOUT_S = 15.0
# the most time to spend on reading logs in one call
_READ_S = 0.1
# smaller changes are not reported
_MEMORY_STEP_BYTES = 10_000_000
KEPT_S = 20.0
"""How long the sums are cached; they change slowly."""
# the largest share of time to spend on computing them
_SHARE = 0.01


class _Written(msgspec.Struct):
    url: str = ""


class RunFilesOfPool:
    """Reads runs' directories, each at most every 5 seconds. Owned by one thread.

    Args:
        runs_path: The directory that holds them.
        clock: Monotonic time in seconds.
    """

    def __init__(self, runs_path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._runs_path = runs_path
        self._clock = clock
        self._listed_at = 0
        self._here: frozenset[str] = frozenset()
        # what is known of each run, and when to read it again, as its MLflow page may still appear
        self._known: dict[str, tuple[RunDirectoryInfo, float]] = {}

    def poll(self) -> None:
        """Update the list of directories."""
        try:
            changed_at = os.stat(self._runs_path).st_mtime_ns
            if changed_at != self._listed_at:
                self._here = frozenset(filter(is_valid_id, os.listdir(self._runs_path)))
                self._known = {run_id: known for run_id, known in self._known.items() if run_id in self._here}
                self._listed_at = changed_at
        except OSError:
            self._here, self._listed_at = frozenset(), 0

    def directory_of(self, run: RunSummary, now: float) -> RunDirectoryInfo:
        """Return what is known of a run; `now` in seconds since the epoch."""
        run_id, clock = run.run_id, self._clock()
        if run_id not in self._here:
            return _NOWHERE
        location, due = self._known.get(run_id, (_NOWHERE, float("-inf")))
        if clock >= due:
            # parameters never change
            parameters = self._parameters(run_id) if location.parameters is None else location.parameters
            location = RunDirectoryInfo(here=True, tracked_url=self._url(run_id), parameters=parameters)
            is_late = run.state.is_final and now - (run.ended_at or run.submitted_at) > _LATE_S
            self._known[run_id] = location, float("inf") if is_late or location.tracked_url else clock + _POLL_S
        return location

    def _parameters(self, run_id: str) -> tuple[RunParameter, ...] | None:
        spec = read_spec(self._runs_path / run_id)
        if spec is None:
            return None
        return tuple(RunParameter(name=name, value=value) for name, value in spec.parameters[:_MOST_PARAMETERS])

    def _url(self, run_id: str) -> str:
        try:
            raw = (self._runs_path / run_id / TRACKING).read_bytes()
            url = decode_json(raw, type=_Written).url
        except (OSError, msgspec.DecodeError):
            return ""
        # allow only web links in a page
        return url if url.startswith(("http://", "https://")) else ""


class SimulatedUse:
    """Reads what ranks on simulated devices use from the event logs of their runs. Owned by one thread.

    Args:
        runs_path: The directory that holds the runs' directories.
    """

    def __init__(self, runs_path: Path) -> None:
        self._runs_path = runs_path
        self._logs: dict[str, _Samples] = {}

    def use_of(self, runs: Iterable[RunSummary], cores: int, now: float) -> DeviceUse:
        """Return the use of the simulated devices that runs hold, by UUID; without those that report none.

        Args:
            runs: The pool's runs.
            cores: CPU cores of the machine, which a run's ranks share.
            now: Wall-clock time, seconds since the epoch.
        """
        holding = [run for run in runs if run.simulated and run.uuids and not run.session and run.state in HOLDING]
        self._logs = {
            run.run_id: self._logs.get(run.run_id) or _Samples(self._runs_path / run.run_id) for run in holding
        }
        until = time.monotonic() + _READ_S
        use: dict[str, tuple[float | None, int | None]] = {}
        for run in holding:
            share = max(1.0, cores / run.ranks)
            for sample in self._logs[run.run_id].latest(now, until):
                if sample.rank < len(run.uuids):
                    use[run.uuids[sample.rank]] = _use_of(sample, share)
        return use


class _Samples:
    """The latest sample of each rank of one run."""

    def __init__(self, directory: Path) -> None:
        self._log = EventFile(directory)
        self._of: dict[int, tuple[float, RankSample]] = {}

    def latest(self, now: float, until: float) -> Iterator[RankSample]:
        """Yield the ranks' recent samples; reads until `until`, a monotonic time, and continues in the next call."""
        # a log that is missing or damaged reports no use
        with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            for event, _ in self._log.new_events():
                if isinstance(event.body, Sampled):
                    self._of |= {sample.rank: (event.at, sample) for sample in event.body.samples}
                if time.monotonic() >= until:
                    break
        for at, sample in self._of.values():
            if now - at <= _SAMPLE_TIMEOUT_S:
                yield sample


def _use_of(sample: RankSample, cores: float) -> tuple[float | None, int | None]:
    """Return a rank's share of its CPU cores in percent, and its memory in bytes."""
    share = sample.cpu_pct(cores)
    pct = None if share is None else float(round(share))
    held = sample.rss_bytes
    return pct, None if held is None else round(held / _MEMORY_STEP_BYTES) * _MEMORY_STEP_BYTES


class MonthUsage:
    """This month's usage from the ledger's file, also while a pool uses it. Owned by one thread.

    Args:
        settings: Settings, for the ledger.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._kept_until = float("-inf")
        self._sums: Use | None = None

    def line(self, now: float, budget: BudgetState | None) -> str:
        """Return this month's usage as a line, "" when there is nothing to show.

        Args:
            now: Wall-clock time, seconds since the epoch.
            budget: The pool's budget, None without one.
        """
        began = time.monotonic()
        if began >= self._kept_until:
            since = month_began(now)
            try:
                self._sums = month_sums(ledger.runs_since(self._settings, since), since, now)
            except PoolError:
                # requests for the runs report the error
                self._sums = None
            self._kept_until = began + max(KEPT_S, (time.monotonic() - began) / _SHARE)
        return "" if self._sums is None else month_line(self._sums, budget)


def month_began(now: float) -> float:
    """Return when the calendar month of `now` began; both in seconds since the epoch."""
    local = time.localtime(now)
    return time.mktime((local.tm_year, local.tm_mon, 1, 0, 0, 0, 0, 0, -1))


def month_sums(rows: Sequence[RunSummary], since: float, now: float) -> Use:
    """Return the usage of runs that ended since then or are active."""
    return usage(rows, since, now, "user", Prices(), "").total


def month_line(used: Use, budget: BudgetState | None) -> str:
    """Return the usage as a line, "" when nothing was used and there is no budget."""
    parts: list[str] = []
    if used.gpu_s:
        marked = ""
        if used.simulated_s:
            is_all = used.simulated_s >= used.gpu_s - 0.5
            marked = " (simulated)" if is_all else f", {_hours(used.simulated_s)} simulated"
        parts.append(f"{_hours(used.gpu_s)} GPU h{marked}")
    cost = " + ".join(round_money(amount, currency) for currency, amount in sorted(used.cost.items()))
    if budget is not None:
        spent, limit = (round_money(amount, budget.currency) for amount in (budget.spent, budget.limit))
        if spent == (cost or round_money(0.0, budget.currency)):
            parts.append(f"{spent} of {limit}")
        else:
            # the budget's period differs from the month
            parts += [*([cost] if cost else []), f"budget {spent} of {limit} in {budget.days:g} d"]
    elif cost:
        parts.append(cost)
    return f"This month {' · '.join(parts)}" if parts else ""


def _hours(seconds: float) -> str:
    hours = seconds / HOUR_S
    return f"{hours:,.{2 if hours < 0.995 else 1}f}"


def round_money(amount: float, currency: str) -> str:
    """Return `$118`, `$0.37`: cents are dropped from 99.5 on and when they are zero."""
    if amount >= 99.5:
        amount = float(round(amount))
    text = format_money(amount, currency)
    return text.replace(".00", "", 1) if amount >= 1 and amount == round(amount) else text
