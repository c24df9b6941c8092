"""Polls one pool, or all pools of the list: returns the state and runs of each, or why it can't be reached."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.client import ledger
from sgpu_magic.client.pools_file import LOCAL, PoolEntry, default_pool, pools_path, read_pools
from sgpu_magic.client.this_machine import find_pool
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError, PoolVersionError, SgpuError
from sgpu_magic.formatting import format_span
from sgpu_magic.panel.device_rows import MOST_DEVICES, Durations, panel_histories
from sgpu_magic.panel.past_runs import MonthUsage, RunFilesOfPool, SimulatedUse
from sgpu_magic.panel.pool_state import (
    RunDirectoryInfo,
    as_sentence,
    away_snapshot,
    pool_choices,
    pool_snapshot,
    rates_of,
    run_row,
)
from sgpu_magic.panel.schema import MAX_RUNS, PanelPool, PoolRuns, PoolState, PoolsUpdate, Remedy, RunRow
from sgpu_magic.wire.pool_status import HISTORY_STEP_S, DeviceHistory, PoolStatus, RunSummary, address_file

if TYPE_CHECKING:
    from sgpu_magic.client.pool import Pool
    from sgpu_magic.client.pools import Pools, PoolStatusReply

NEVER = "No pool is running. It starts with the first run."
GIVEN_BACK = "The pool is no longer running: it has shut down. The next run starts it again."
START, START_AGAIN, LOOK_AGAIN = "Start the pool", "Start it again", "Check again"

# a pool that takes longer is reported as lost until it answers
_PATIENCE_S = 5.0
# number of newest runs requested by each poll, in addition to active ones, which are always sent
_NEWEST = 30
# interval after which all runs are requested in any case
_WHOLE_EVERY_S = 120.0
# interval after which an unchanged ledger is read again: it does not record whether its active runs are still held
_LEDGER_EVERY_S = 5.0


class PollResult(msgspec.Struct, frozen=True):
    """The result of a poll.

    Args:
        snapshot: The pool.
        rows: Its runs by id, newest first.
    """

    snapshot: PanelPool
    rows: Mapping[str, RunRow]


class PoolPoller:
    """Polls a pool without ever starting it. Owned by one thread.

    Args:
        settings: Settings, for the local pool.
        entry: A remote pool; None for the local one.
    """

    def __init__(self, settings: Settings, entry: PoolEntry | None = None) -> None:
        self._settings = settings
        self._entry = entry
        self._list_changed = _list_changed()
        self._name = LOCAL if entry is None else entry.name
        self._rates = rates_of(settings, entry)
        self._usage = MonthUsage(settings)
        self._locations = RunFilesOfPool(settings.runs_path)
        self._simulated = SimulatedUse(settings.runs_path)
        self._pool: Pool | None = None
        self._link: object | None = None
        self._was_up = False
        self._runs: dict[str, RunSummary] = {}
        self._whole_at = float("-inf")
        self._histories: tuple[DeviceHistory, ...] = ()
        self._histories_at = float("-inf")
        self._ledger_at = float("-inf")
        self._ledger_changed: tuple[int, ...] = ()
        self._durations = Durations(())
        self._ended: frozenset[str] = frozenset()
        self._rows: dict[str, tuple[RunSummary, RunDirectoryInfo, RunRow]] = {}

    @property
    def is_outdated(self) -> bool:
        """The list of pools has changed, so this name may refer to another pool or to none."""
        return _list_changed() != self._list_changed

    def poll(self) -> PollResult:
        """Poll the pool, or find out why it can't be reached."""
        now = time.time()
        try:
            status = self._status()
        except PoolVersionError as error:
            self._read_ledger()
            remedy, words = ("start", "Restart it") if self._entry is None else ("retry", LOOK_AGAIN)
            return self._away("other-version", as_sentence(error.message), remedy, words, now)
        except PoolError as error:
            if self._entry is not None or find_pool(self._settings) is not None:
                self._read_ledger()
                return self._away("lost", as_sentence(error.message), "retry", LOOK_AGAIN, now)
            # it ended during the request
            status = None
        except (SgpuError, OSError) as error:
            return self._away("problem", as_sentence(str(error)), "retry", LOOK_AGAIN, now)
        if status is None:
            return self._without_pool(now)
        self._was_up = True
        rows = self._run_rows(now)
        snapshot = pool_snapshot(
            status,
            self._rates,
            now,
            durations=self._durations,
            use=self._simulated.use_of(status.runs, status.inventory.cores, now),
            histories=panel_histories(self._histories, self._runs.values(), now),
            usage=self._usage.line(now, status.budget) if self._entry is None else "",
            notice="" if self._pool is None else self._pool.notice,
        )
        return PollResult(snapshot, rows)

    def close(self) -> None:
        """Close the connection to the pool."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    # ------------------------------------------------------------ the pool answers

    def _status(self) -> PoolStatus | None:
        """Return the pool's status and update the known runs; None when no pool is running."""
        if self._pool is None:
            if self._entry is None and find_pool(self._settings) is None:
                return None
            # imported late: the client is heavy, and most servers never need it
            from sgpu_magic.client.pool import Pool

            self._pool = Pool(self._settings, None, self._entry)
        clock = time.monotonic()
        # a new service may have other runs than the one that died
        whole = self._pool.connected is not self._link or clock - self._whole_at > _WHOLE_EVERY_S
        # between two points a history stays the same, apart from its last value
        due = self._pool.connected is not self._link or clock - self._histories_at >= HISTORY_STEP_S
        history = MOST_DEVICES if due else 0
        status = self._pool.status(MAX_RUNS if whole else _NEWEST, start=False, timeout_s=_PATIENCE_S, history=history)
        if status is not None and due:
            self._histories, self._histories_at = status.history, clock
        if status is not None and not whole and self._is_short(status):
            whole = True
            status = self._pool.status(MAX_RUNS, start=False, timeout_s=_PATIENCE_S)
        if status is None:
            return None
        self._link = self._pool.connected
        if whole:
            self._whole_at = clock
        reported = {run.run_id: run for run in status.runs}
        # the reply's runs come first, as they are the newest
        self._runs = reported | ({} if whole else self._runs) | reported
        # the pool may use another name for itself
        return msgspec.structs.replace(status, pool=self._name)

    def _is_short(self, status: PoolStatus) -> bool:
        """Whether the newest runs do not cover everything that may have changed since the last poll."""
        reported = {run.run_id for run in status.runs}
        ended_unseen = any(not run.state.is_final and run.run_id not in reported for run in self._runs.values())
        gap = len(status.runs) >= _NEWEST and status.runs[_NEWEST - 1].run_id not in self._runs
        return ended_unseen or gap

    # ------------------------------------------------------------ the pool does not answer

    def _without_pool(self, now: float) -> PollResult:
        self._read_ledger()
        killed = address_file(self._settings.state_path).exists()
        if not killed:
            return self._away("none", GIVEN_BACK if self._was_up else NEVER, "start", START, now)
        if any(not run.state.is_final for run in self._runs.values()):
            span = format_span(self._settings.adopt_timeout_s)
            rest = f"Its runs continue for {span}; if it is started again by then, it takes them over."
        else:
            rest = "When it is started again, it keeps its record of runs; sgpu doctor looks for the reason."
        return self._away("lost", f"The pool ended unexpectedly. {rest}", "start", START_AGAIN, now)

    def _away(self, state: PoolState, sentence: str, remedy: Remedy, words: str, now: float) -> PollResult:
        usage = "" if state == "problem" or self._entry is not None else self._usage.line(now, None)
        return PollResult(away_snapshot(self._name, state, sentence, remedy, words, now, usage), self._run_rows(now))

    def _read_ledger(self) -> None:
        """Read the runs from the local pool's ledger, so that the list is not empty; skipped for a remote pool."""
        if self._entry is not None:
            return
        path = self._settings.state_path / "ledger.sqlite3"
        changed = tuple(_changed_at(f"{path}{ending}") for ending in ("", "-wal"))
        clock = time.monotonic()
        has_active = any(not run.state.is_final for run in self._runs.values())
        if changed == self._ledger_changed and not (has_active and clock - self._ledger_at > _LEDGER_EVERY_S):
            return
        self._ledger_changed, self._ledger_at = changed, clock
        self._whole_at = float("-inf")
        try:
            runs = ledger.recent_runs(self._settings, MAX_RUNS)
        except PoolError:
            # the next pool repairs it; the known runs are still valid
            return
        self._runs = {run.run_id: run for run in runs}

    # ------------------------------------------------------------ both

    def _run_rows(self, now: float) -> dict[str, RunRow]:
        """Return the rows, newest first; rows of unchanged runs are the same objects as before."""
        runs = sorted(self._runs.values(), key=lambda run: run.submitted_at, reverse=True)
        # active runs are listed however old they are
        runs = runs[:MAX_RUNS] + [run for run in runs[MAX_RUNS:] if not run.state.is_final]
        self._runs = {run.run_id: run for run in runs}
        ended = frozenset(run.run_id for run in runs if run.state.is_final)
        if ended != self._ended:
            self._ended, self._durations = ended, Durations(runs)
        self._locations.poll()
        rows: dict[str, tuple[RunSummary, RunDirectoryInfo, RunRow]] = {}
        for run in runs:
            location = self._locations.directory_of(run, now)
            known = self._rows.get(run.run_id)
            if known is None or known[0] != run or known[1] != location:
                known = (run, location, run_row(run, location))
            rows[run.run_id] = known
        self._rows = rows
        return {run_id: row for run_id, (_, _, row) in rows.items()}


class NoPoller:
    """Replaces `PoolPoller` when the settings are invalid or there is no pool of that name.

    Args:
        pool: Its name.
        sentence: Why, and what to do.
        remedy: As in `PanelPool`.
    """

    def __init__(self, pool: str, sentence: str, remedy: Remedy = "") -> None:
        self._pool = pool
        self._sentence = sentence
        self._remedy: Remedy = remedy

    @property
    def is_outdated(self) -> bool:
        """Always True: the problem may have been fixed."""
        return True

    def poll(self) -> PollResult:
        words = LOOK_AGAIN if self._remedy else ""
        return PollResult(away_snapshot(self._pool, "problem", self._sentence, self._remedy, words, time.time()), {})

    def close(self) -> None:
        """Do nothing: there is no connection."""


Poller = PoolPoller | NoPoller


def poller_of(pool: str, read_settings: Callable[[], Settings]) -> Poller:
    """Return the object that polls a pool.

    Args:
        pool: Its name; "" for the one in the settings.
        read_settings: Reads the settings.
    """
    try:
        settings = read_settings()
        entries = read_pools()
    except SgpuError as error:
        return NoPoller(pool or LOCAL, as_sentence(error.message), "retry")
    name = pool or default_pool(settings.pool, entries)
    entry = next((each for each in entries if each.name == name), None)
    if entry is None and name != LOCAL:
        others = ", ".join(each.name for each in entries)
        have = f". You have: {LOCAL}, {others}. Choose one of them." if others else ": only the local one. Choose that."
        return NoPoller(name, f"There is no pool {name[:40]!r} here{have}")
    return PoolPoller(settings, entry)


class ListPoller:
    """Polls all pools of the list in parallel. Owned by one thread, except for `update`.

    Args:
        read_settings: Reads the settings.
    """

    is_outdated = False

    def __init__(self, read_settings: Callable[[], Settings]) -> None:
        self._read_settings = read_settings
        self._pools: Pools | None = None
        self._answers: Sequence[PoolStatusReply] = ()
        self._locations: RunFilesOfPool | None = None
        # replaced as a whole, never changed
        self._runs: Mapping[str, tuple[RunRow, ...]] = {}

    def poll(self) -> PoolsUpdate:
        """Poll the pools and return their states and runs, as `update` does."""
        # problems of the list or the settings are reported by the chosen pool's state
        with contextlib.suppress(SgpuError):
            if read_pools():
                # imported late: the client is heavy, and most servers never need it
                from sgpu_magic.client.pools import Pools

                settings = self._read_settings()
                self._pools = self._pools or Pools(settings)
                self._answers = self._pools.ask_status(self._pools.entries(), local=False, recent=_NEWEST)
                self._runs = self._read_runs(settings)
        return self.update()

    def update(self) -> PoolsUpdate:
        """Return the pools that the files list now, with the last known state of each. Thread-safe."""
        settings, entries = Settings(), ()
        with contextlib.suppress(SgpuError):
            entries = read_pools()
        with contextlib.suppress(SgpuError):
            settings = self._read_settings()
        known = self._runs
        names = (LOCAL, *(entry.name for entry in entries)) if entries else ()
        runs = tuple(PoolRuns(pool=name, runs=known[name]) for name in names if known.get(name))
        return PoolsUpdate(pools=pool_choices(settings, entries, self._answers), runs=runs)

    def close(self) -> None:
        """Close the connections to the pools."""
        if self._pools is not None:
            self._pools.close()
        self._pools = None

    def _read_runs(self, settings: Settings) -> dict[str, tuple[RunRow, ...]]:
        """Return the runs of each pool; those of a pool that does not answer stay as they were."""
        self._locations = self._locations or RunFilesOfPool(settings.runs_path)
        self._locations.poll()
        found = {answer.name: answer.status.runs for answer in self._answers if answer.status is not None}
        # a pool that can't read its ledger is reported by its own state
        with contextlib.suppress(PoolError):
            found[LOCAL] = tuple(ledger.recent_runs(settings, _NEWEST))
        now, locations = time.time(), self._locations
        rows = {
            name: tuple(run_row(run, locations.directory_of(run, now)) for run in runs) for name, runs in found.items()
        }
        return {**self._runs, **rows}


def _list_changed() -> int:
    return _changed_at(str(pools_path()))


def _changed_at(path: str) -> int:
    try:
        found = os.stat(path)
    except OSError:
        return 0
    return found.st_mtime_ns ^ found.st_size
