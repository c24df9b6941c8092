"""Keeps the state directory within its budget: runs' directories, orphaned payload files, logs.

`choose_removals` decides and removes nothing itself. `Retention` measures and removes in a thread, and asks in the
pool's own thread which runs are active.

The budget counts ended runs only, newest first; the first one that does not fit is removed, with all older ones:

    keep_days    runs that ended longer ago are removed
    keep_runs    at most this many are kept; cells in sessions, which can be hundreds, are counted separately
    keep_bytes   at most this much is kept, but always the newest run, even if it is larger
    unsent       runs that are not in MLflow yet are kept for keep_days regardless: they exist nowhere else
    always       active runs are kept, and runs in the first minutes after their end: their user may still look at them
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.files.atomic_file import write_whole
from sgpu_magic.files.disk_usage import remove_tree
from sgpu_magic.files.tracking_progress import is_unsent
from sgpu_magic.system.processes import write_log
from sgpu_magic.wire.base import is_valid_id, short

JUST_ENDED_S = 300.0
_DAY_S = 24 * 3600.0
# a file in `uploads` is needed for seconds after it was written, or while its run waits in the queue
_UPLOAD_STALE_S = 3600.0
_LOG_BYTES = 10_000_000
_LOG_TAIL_BYTES = 1_000_000
# delay after a run's end, so as not to compete with its result or with the next run's start
_DELAY_S = 10.0
_CELLS_DELAY_S = 300.0
_INTERVAL_S = 3600.0
# followed by a run's ID; no command accepts such a name as a run
_REMOVING = ".removing-"
_ZYGOTE = "zygote-"
_BLOCK_BYTES = 512
# a directory is measured again after this time, since changes deep inside it do not show in its own time
_MEASURED_S = 24 * 3600.0


class RunOnDisk(msgspec.Struct, frozen=True):
    """The directory of a run that has ended.

    Args:
        run_id: The run.
        ended_at: Wall-clock time of its end.
        bytes: Its size on disk.
        is_cell: Whether it ran in a session.
        unsent: Whether it is tracked and not yet completely in its MLflow store.
    """

    run_id: str
    ended_at: float
    bytes: int
    is_cell: bool = False
    unsent: bool = False


class Why(enum.StrEnum):
    """The setting that a run's directory exceeds."""

    AGE = "keep_days"
    COUNT = "keep_runs"
    BYTES = "keep_bytes"


def choose_removals(runs: Iterable[RunOnDisk], settings: Settings, now: float) -> list[tuple[str, Why]]:
    """Return the runs whose directories to remove and why, oldest first.

    Args:
        runs: All ended runs with a directory.
        settings: `keep_days`, `keep_runs` and `keep_bytes` are the budget.
        now: Wall-clock time.
    """
    removals: list[tuple[str, Why]] = []
    # keyed by whether the run is a cell in a session
    beyond: dict[bool, Why] = {}
    kept = {False: 0, True: 0}
    kept_bytes = 0
    for run in sorted(runs, key=lambda run: (-run.ended_at, run.run_id)):
        age = now - run.ended_at
        if run.is_cell not in beyond:
            if age > settings.keep_days * _DAY_S:
                beyond = {False: Why.AGE, True: Why.AGE} | beyond
            elif kept[run.is_cell] >= settings.keep_runs:
                beyond[run.is_cell] = Why.COUNT
            elif any(kept.values()) and kept_bytes + run.bytes > settings.keep_bytes:
                beyond = {False: Why.BYTES, True: Why.BYTES} | beyond
        kept_for_store = run.unsent and age <= settings.keep_days * _DAY_S
        if run.is_cell not in beyond or age < JUST_ENDED_S or kept_for_store:
            kept[run.is_cell] += 1
            kept_bytes += run.bytes
        else:
            removals.append((run.run_id, beyond[run.is_cell]))
    return removals[::-1]


class Retention:
    """Cleans the state directory of one pool. Only disk operations run outside the loop's thread.

    Args:
        settings: The state directory and the budget.
        is_live: Returns whether a run is active or its directory is still needed; called in the loop's thread.
        cells: Returns the IDs of runs in sessions; called in the loop's thread.
        removed: Called in the loop's thread after a cleanup.
        delay_s: Seconds from `schedule` to the cleanup.
    """

    def __init__(
        self,
        settings: Settings,
        is_live: Callable[[str], bool],
        cells: Callable[[], Collection[str]] = tuple,
        *,
        removed: Callable[[], None] | None = None,
        delay_s: float = _DELAY_S,
    ) -> None:
        self._settings = settings
        self._is_live = is_live
        self._cells = cells
        self._removed = removed
        self._delay_s = delay_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._sweep: asyncio.Task[None] | None = None
        self._measurements = _Measurements()
        self._closing = threading.Event()
        # a single thread; the loop's default executor would start several over time
        self._thread = ThreadPoolExecutor(1, "sgpu-retention")

    def schedule(self, *, soon: bool = True) -> None:
        """Schedule one cleanup for all calls until then. Call it only once the pool knows which runs are active.

        Args:
            soon: Whether to clean up soon, else within some minutes, as after a cell in a session, since many more
                cells may follow at once.
        """
        self._schedule(self._delay_s if soon else _CELLS_DELAY_S)

    def close(self) -> None:
        """Stop. The next pool finishes an interrupted removal."""
        self._closing.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._sweep is not None:
            self._sweep.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _schedule(self, seconds: float) -> None:
        due = self._loop.time() + seconds
        if self._closing.is_set() or (self._timer is not None and self._timer.when() <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._begin)

    def _begin(self) -> None:
        self._timer = None
        if self._sweep is not None and not self._sweep.done():
            # one cleanup at a time
            self._schedule(self._delay_s)
        else:
            self._sweep = self._loop.create_task(self._check())
            self._sweep.add_done_callback(self._looked)

    def _looked(self, sweep: asyncio.Task[None]) -> None:
        if sweep.cancelled():
            return
        if (error := sweep.exception()) is not None:
            # log the error and go on: no run depends on cleanups
            write_log("", error)
        self._schedule(_INTERVAL_S)

    async def _check(self) -> None:
        settings = self._settings
        run_in_thread = functools.partial(self._loop.run_in_executor, self._thread)
        directories = await run_in_thread(_paths_in, settings.runs_path)
        uploads = await run_in_thread(_older, settings.state_path / "uploads", "", time.time() - _UPLOAD_STALE_S)
        # query this before measuring: the time of a run's last write is taken as its end
        ended = [path for path in directories if is_valid_id(path.name) and not self._is_live(path.name)]
        orphans = [path for path in uploads if not self._is_live(path.name.lstrip(".").partition(".")[0])]
        runs = await run_in_thread(self._measurements.measure, ended, frozenset(self._cells()))
        removals = choose_removals(runs, settings, time.time())
        await run_in_thread(self._remove, removals, orphans)
        if self._removed is not None:
            self._removed()

    def _remove(self, removals: Sequence[tuple[str, Why]], uploads: Sequence[Path]) -> None:
        runs = self._settings.runs_path
        for path in _paths_in(runs, _REMOVING):
            if not self._closing.is_set():
                remove_tree(path)
        for run_id, why in removals:
            if self._closing.is_set():
                return
            if remove_directory(runs, run_id):
                write_log(f"the directory of run {short(run_id)} was removed: it exceeds {why}\n")
        state = self._settings.state_path
        for log in (state / "pool.log", *_paths_in(state / "logs", _ZYGOTE)):
            cap_log(log, _LOG_BYTES)
        old_logs = _older(state / "logs", _ZYGOTE, time.time() - self._settings.keep_days * _DAY_S)
        for path in (*uploads, *old_logs):
            with contextlib.suppress(OSError):
                path.unlink()


def remove_directory(runs_path: Path, run_id: str) -> bool:
    """Remove a run's directory atomically. Returns False when it is already gone or can't be removed."""
    hidden = runs_path / f"{_REMOVING}{run_id}"
    try:
        os.rename(runs_path / run_id, hidden)
    except OSError:
        return False
    remove_tree(hidden)
    return True


def measure(directory: Path) -> tuple[int, float]:
    """Return a directory's size on disk in bytes, and when it or an entry directly in it last changed.

    Symbolic links are not followed. Each hard link of a file counts for an equal share of its size.
    """
    total, changed = 0, 0.0
    with contextlib.suppress(OSError):
        changed = os.lstat(directory).st_mtime
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(folder, name))
                if folder == os.fspath(directory):
                    changed = max(changed, status.st_mtime)
                shares = 1 if stat.S_ISDIR(status.st_mode) else status.st_nlink
                total += status.st_blocks * _BLOCK_BYTES // shares
    return total, changed


def cap_log(path: Path, most_bytes: int) -> None:
    """Truncate a log larger than `most_bytes`; its last part is saved beside it with the suffix `.old`.

    The log stays the same file, so a process can go on appending to it.
    """
    with contextlib.suppress(OSError), open(path, "rb+") as log:
        size = log.seek(0, os.SEEK_END)
        if size <= most_bytes:
            return
        log.seek(max(0, size - _LOG_TAIL_BYTES))
        write_whole(path.with_name(f"{path.name}.old"), log.read(_LOG_TAIL_BYTES))
        log.truncate(0)


class _Measured(msgspec.Struct, frozen=True):
    """A run's measurement.

    Args:
        run: The run as it was measured.
        changed_ns: When its directory had last changed.
        measured_at: Wall-clock time of the measurement.
    """

    run: RunOnDisk
    changed_ns: int
    measured_at: float

    def holds(self, changed_ns: int, now: float) -> bool:
        """Whether it is still valid: the run had ended a while before, and nothing is known to have changed."""
        return (
            changed_ns == self.changed_ns
            and not self.run.unsent
            and self.measured_at - self.run.ended_at >= JUST_ENDED_S
            and 0 <= now - self.measured_at < _MEASURED_S
        )


class _Measurements:
    """Measures ended runs. A directory whose run ended a while ago is measured again only when it has changed.

    A cleanup follows each run, so its cost must not grow with the runs that are kept. Used in the retention's thread.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Measured] = {}

    def measure(self, directories: Iterable[Path], cells: Collection[str]) -> list[RunOnDisk]:
        now = time.time()
        known: dict[str, _Measured] = {}
        for path in directories:
            try:
                changed_ns = os.lstat(path).st_mtime_ns
            except OSError:
                changed_ns = -1
            found = self._known.get(path.name)
            if found is None or not found.holds(changed_ns, now):
                size, at = measure(path)
                found = _Measured(RunOnDisk(path.name, at, size, unsent=is_unsent(path)), changed_ns, now)
            known[path.name] = found
        self._known = known
        return [msgspec.structs.replace(found.run, is_cell=name in cells) for name, found in known.items()]


def _older(folder: Path, prefix: str, before: float) -> list[Path]:
    """Return the entries of a folder with this prefix that last changed before that time."""
    found: list[Path] = []
    for path in _paths_in(folder, prefix):
        with contextlib.suppress(OSError):
            found += [path] if os.lstat(path).st_mtime < before else []
    return found


def _paths_in(folder: Path, prefix: str = "") -> list[Path]:
    return list(folder.glob(f"{prefix}*"))
