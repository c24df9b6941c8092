"""A run's files, wherever its pool is: its directory here, or a mirror of the one on the pool's machine."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sgpu_magic.client import ledger
from sgpu_magic.client.find_run import check_prefix, find_directory, pool_of
from sgpu_magic.client.local_pool import find_pool
from sgpu_magic.client.mirror import Mirror, mirror_path
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pools_file import read_pools
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError, RunUnknown, UsageError
from sgpu_magic.wire.files import EVENTS, KEY, PAYLOAD, REQUIREMENTS
from sgpu_magic.wire.ids import check_id
from sgpu_magic.wire.pool_status import RunSummary
from sgpu_magic.wire.run import RUN_RECORD, UNDER_WAY, RunRecord

_LOG_NAME = re.compile(r"rank-(0|[1-9][0-9]{0,4})\.log")
# the directory of a run is there a moment before its row in the ledger
_NEW_S = 5.0
# what the pool has of a run is asked for so often at most
_ROW_EVERY_S = 1.0
_NEWEST = 300
# the pool puts a payload together when the run is over
_PAYLOAD_PATIENCE_S = 10.0
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class FilesOfRun:
    """One run's files.

    Args:
        run_id: The run.
        directory: Where they lie here.
        row: Returns what its pool's ledger says of it, None where that has nothing.
        is_over: Whether nothing comes to them any more, with what the ledger said.
        mirror: Brings them from another machine; None where they are on this one.
    """

    run_id: str
    directory: Path
    row: Callable[[], RunSummary | None]
    is_over: Callable[[RunSummary | None], bool]
    mirror: Mirror | None = None

    @property
    def ranks_with_logs(self) -> int:
        """How many ranks have logs.

        Raises:
            PoolError: The pool of another machine can't be asked.
        """
        if self.mirror is not None:
            names = [file.name for file in self.mirror.list().files]
        else:
            names = os.listdir(self.directory)
        matches = [_LOG_NAME.fullmatch(name) for name in names]
        return 1 + max((int(match[1]) for match in matches if match), default=-1)


@contextlib.contextmanager
def files_of(settings: Settings, text: str) -> Generator[FilesOfRun]:
    """Find a run's files: on this machine, else in the pools of others.

    Args:
        settings: Where runs of this machine lie.
        text: The first digits of its id.

    Raises:
        UsageError: No run, or more than one, has an id like that.
        PoolError: Its pool can't be asked.
    """
    here = _found_here(settings, text)
    if here is not None:
        yield here
        return
    with pool_of(settings, text, "whose files could be read") as pool:
        yield _elsewhere(settings, pool, check_prefix(text))


@contextlib.contextmanager
def recorded_directory(settings: Settings, text: str) -> Generator[Path]:
    """Yield a directory with what a replay of a run needs; from another machine it is brought first.

    Raises:
        UsageError: No run, or more than one, has an id like that.
        PoolError: Its pool can't be asked.
        OSError: It can't be written here.
    """
    with files_of(settings, text) as files:
        if files.mirror is not None:
            _bring_record(files.mirror)
        yield files.directory


# ---------------------------------------------------------------- within


def _found_here(settings: Settings, text: str) -> FilesOfRun | None:
    """A run with a directory here, None where it may be another pool's."""
    try:
        run_id = check_id(find_directory(settings, text))
    except UsageError:
        check_prefix(text)
        if not read_pools():
            raise
        return None
    directory = settings.runs_path / run_id
    return FilesOfRun(
        run_id,
        directory,
        lambda: ledger.find_run(settings, run_id),
        lambda row: _is_over(settings, directory, row),
    )


def _is_over(settings: Settings, directory: Path, row: RunSummary | None) -> bool:
    if row is not None:
        return row.state.is_final
    try:
        is_new = time.time() - directory.stat().st_mtime < _NEW_S
    except FileNotFoundError:
        return True
    return not is_new or find_pool(settings) is None


def _elsewhere(settings: Settings, pool: Pool, prefix: str) -> FilesOfRun:
    if pool.entry is None:
        # it was here, and says what became of it
        find_directory(settings, prefix)
        raise RunUnknown(f"no run has an id that begins with {prefix!r}.")
    rows = _Rows(pool, prefix)
    directory = mirror_path(settings, pool.name, rows.run_id)
    mirror = Mirror(directory, rows.run_id, pool.link)
    return FilesOfRun(
        rows.run_id,
        directory,
        rows.newest,
        # of a run that is too old to be listed nothing comes any more
        lambda row: row is None or row.state.is_final,
        mirror,
    )


class _Rows:
    """What another machine's pool says of a run, asked for now and then.

    Args:
        pool: The pool.
        prefix: The first digits of the run's id.

    Attributes:
        run_id: The run.
    """

    def __init__(self, pool: Pool, prefix: str) -> None:
        self._pool = pool
        self._asked_at = 0.0
        self._row: RunSummary | None = None
        self.run_id = prefix
        self.newest()
        if self._row is not None:
            self.run_id = self._row.run_id
        else:
            run, _ = pool.attach(prefix)
            self.run_id = run.run_id
            run.close()

    def newest(self) -> RunSummary | None:
        """The row, a second old at most; an older one while the pool can't be asked."""
        now = time.monotonic()
        if now - self._asked_at < _ROW_EVERY_S and (self._row is None or not self._row.state.is_final):
            return self._row
        self._asked_at = now
        try:
            status = self._pool.status(recent=_NEWEST, start=False)
        except PoolError:
            if self._row is None or self._pool.connected is None:
                raise
            return self._row
        rows: Sequence[RunSummary] = () if status is None else status.runs
        self._row = next((row for row in rows if row.run_id.startswith(self.run_id)), self._row)
        return self._row


def _bring_record(mirror: Mirror) -> None:
    """Bring what a replay reads; the variables of a run that has just ended are still being put together there."""
    until = time.monotonic() + _PAYLOAD_PATIENCE_S
    while True:
        listed = {file.name for file in mirror.list().files}
        if RUN_RECORD not in listed:
            break
        record = msgspec.json.decode(mirror.bring(RUN_RECORD).read_bytes(), type=RunRecord)
        # the record follows the payload it tells of, and an older one was perhaps brought beside that
        is_whole = PAYLOAD in listed if record.payload_kept else record.payload_note != UNDER_WAY
        if is_whole or time.monotonic() > until:
            break
        time.sleep(_PAUSE_S)
    for name in (KEY, EVENTS, REQUIREMENTS, PAYLOAD):
        if name in listed:
            mirror.bring(name)
