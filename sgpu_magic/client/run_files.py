"""A run's files, read from its directory on this machine or through its pool."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.client import ledger
from sgpu_magic.client.find_run import NEWEST_RUNS, check_prefix, find_directory, pool_of
from sgpu_magic.client.mirror import Mirror, mirror_path
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pools_file import read_pools
from sgpu_magic.client.this_machine import find_pool
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError, RunUnknown, UsageError
from sgpu_magic.files.run_directory import links_below, list_below, open_below
from sgpu_magic.wire.base import check_id
from sgpu_magic.wire.decoding import decode_json
from sgpu_magic.wire.files import EVENTS, KEY, PAYLOAD, PAYLOAD_PARTS, REQUIREMENTS, RunFiles
from sgpu_magic.wire.pool_status import RunSummary
from sgpu_magic.wire.run import RUN_RECORD, UNDER_WAY, RunRecord

# a run's directory is created shortly before its row in the ledger
_NEW_S = 5.0
# a run's row is requested again when it is older
_ROW_AGE_S = 1.0
# the pool writes a payload when the run has ended
_PAYLOAD_PATIENCE_S = 10.0
_PAUSE_S = 0.1
_COPY_BYTES = 1 << 20


class LocalRunFiles:
    """The files of a local run; same methods as `RemoteRunFiles`.

    Args:
        settings: Settings, with the directory of runs.
        run_id: The run's id.
    """

    def __init__(self, settings: Settings, run_id: str) -> None:
        self.run_id = run_id
        self.directory = settings.runs_path / run_id
        self._settings = settings

    def row(self) -> RunSummary | None:
        return ledger.find_run(self._settings, self.run_id)

    def has_ended(self, row: RunSummary | None) -> bool:
        if row is not None:
            return row.state.is_final
        try:
            is_new = time.time() - self.directory.stat().st_mtime < _NEW_S
        except FileNotFoundError:
            return True
        return not is_new or find_pool(self._settings) is None

    def list(self, under: str = "") -> RunFiles:
        files, more = list_below(self.directory, under)
        return RunFiles(request=0, files=tuple(files), more=more, links=links_below(self.directory, under))

    def bring(self, name: str) -> Path:
        return self.directory / name

    def follow(self, name: str) -> None:
        """Do nothing: the file is local."""

    def copy_into(self, name: str, target: int, begin: int) -> None:
        source = open_below(self.directory, name)
        try:
            at, size = begin, os.fstat(source).st_size
            while at < size and (data := os.pread(source, min(_COPY_BYTES, size - at), at)):
                at += os.pwrite(target, data, at)
        finally:
            os.close(source)


class RemoteRunFiles(Mirror):
    """The files of a run in a remote pool.

    Args:
        settings: Settings, with the directory of mirrors.
        pool: The pool.
        prefix: The first digits of the run's id.
    """

    def __init__(self, settings: Settings, pool: Pool, prefix: str) -> None:
        self._pool = pool
        self._asked_at = 0.0
        self._row: RunSummary | None = None
        self.run_id = prefix
        if (found := self.row()) is None:
            # the run is too old to be listed
            found, _ = pool.attach(prefix)
            found.close()
        super().__init__(mirror_path(settings, pool.name, found.run_id), found.run_id, pool.link)

    def row(self, max_age_s: float = _ROW_AGE_S) -> RunSummary | None:
        """Return the run's row; None if it is not listed.

        Args:
            max_age_s: An older row is requested again; it is returned if the pool can't be reached.
        """
        now = time.monotonic()
        if now - self._asked_at < max_age_s and (self._row is None or not self._row.state.is_final):
            return self._row
        self._asked_at = now
        try:
            status = self._pool.status(recent=NEWEST_RUNS, start=False)
        except PoolError:
            if self._row is None or self._pool.connected is None:
                raise
            return self._row
        rows: Sequence[RunSummary] = () if status is None else status.runs
        self._row = next((row for row in rows if row.run_id.startswith(self.run_id)), self._row)
        return self._row

    def has_ended(self, row: RunSummary | None) -> bool:
        """Whether the files are complete. A run that is too old to be listed counts as ended."""
        return row is None or row.state.is_final


FilesOfRun = LocalRunFiles | RemoteRunFiles


@contextlib.contextmanager
def files_of(settings: Settings, text: str) -> Generator[FilesOfRun]:
    """Yield a run's files: on this machine, else in a remote pool.

    Args:
        settings: Settings, with the directory of runs.
        text: The first digits of the run's id.

    Raises:
        UsageError: No run, or more than one, matches.
        PoolError: Its pool can't be asked.
    """
    prefix = check_prefix(text)
    try:
        here = LocalRunFiles(settings, check_id(find_directory(settings, prefix)))
    except UsageError:
        if not read_pools():
            raise
    else:
        yield here
        return
    with pool_of(settings, prefix, "whose files could be read") as pool:
        if pool.entry is None:
            # raises the error that explains why the local run has no directory
            find_directory(settings, prefix)
            raise RunUnknown(f"no run has an id that begins with {prefix!r}.")
        yield RemoteRunFiles(settings, pool, prefix)


@contextlib.contextmanager
def recorded_directory(settings: Settings, text: str) -> Generator[Path]:
    """Yield a directory with the files that a replay of a run needs; those of a remote run are fetched first.

    Raises:
        UsageError: No run, or more than one, matches.
        PoolError: Its pool can't be asked.
        OSError: The files can't be written.
    """
    with files_of(settings, text) as files:
        if isinstance(files, RemoteRunFiles):
            _bring_record(files)
        yield files.directory


def _bring_record(mirror: Mirror) -> None:
    """Fetch what a replay reads; wait for the payload of a run that has just ended, which is still being written."""
    until = time.monotonic() + _PAYLOAD_PATIENCE_S
    parts = set[str]()
    while True:
        listed = {file.name for file in mirror.list().files}
        if RUN_RECORD not in listed:
            break
        try:
            record = decode_json(mirror.bring(RUN_RECORD).read_bytes(), type=RunRecord)
        except msgspec.DecodeError:
            # the record is damaged, but the run's other files are complete
            break
        # the record is written after its payload; an older record may have been fetched just before
        parts = {name for name in listed if name == PAYLOAD or name.startswith(f"{PAYLOAD_PARTS}/")}
        is_whole = parts if record.payload_kept else record.payload_note != UNDER_WAY
        if is_whole or time.monotonic() > until:
            break
        time.sleep(_PAUSE_S)
    for name in listed & {KEY, EVENTS, REQUIREMENTS, *parts}:
        mirror.bring(name)
