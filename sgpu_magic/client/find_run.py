"""Finds a run by the first digits of its id: its pool among several, and its files, local or remote."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.client import ledger
from sgpu_magic.client.mirror import Mirror, mirror_path
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pools import Pools
from sgpu_magic.client.pools_file import LOCAL, read_pools
from sgpu_magic.client.this_machine import find_pool
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError, RunUnknown, UsageError
from sgpu_magic.files.run_directory import links_below, list_below, open_below
from sgpu_magic.formatting import format_bytes, plural
from sgpu_magic.wire.base import check_id, is_valid_id, short
from sgpu_magic.wire.decoding import decode_json
from sgpu_magic.wire.files import EVENTS, KEY, PAYLOAD, PAYLOAD_PARTS, REQUIREMENTS, RunFiles
from sgpu_magic.wire.pool_status import RunSummary
from sgpu_magic.wire.run import RUN_RECORD, UNDER_WAY, RunRecord

# number of each pool's newest runs that are searched; older ones are requested by id
_NEWEST = 300
_MOST_LISTED = 8
_PREFIX = re.compile(r"[0-9a-f]{1,8}")
# a run's directory is created shortly before its row in the ledger
_NEW_S = 5.0
# shortest interval between requests for a run's row
_ROW_EVERY_S = 1.0
# the pool writes a payload when the run has ended
_PAYLOAD_PATIENCE_S = 10.0
_PAUSE_S = 0.1
_COPY_BYTES = 1 << 20


def pool_with(pools: Pools, settings: Settings, run: str, *, going_on: bool = False, start: bool = True) -> Pool:
    """Return the pool that has a run; the local pool if no other is listed. Waits at most 2 s for remote pools.

    Args:
        pools: The process's pools.
        settings: Settings, with the local pool's directories.
        run: The first digits of its id; "" means the newest active run, else the newest run.
        going_on: Consider only active runs.
        start: Search the local pool even if it is not running.

    Raises:
        RunUnknown: No pool that answers has the run, or several runs match.
        UsageError: The list of pools can't be read.
    """
    entries = pools.entries()
    if not entries and len(pools.made()) == 1:
        return pools.local
    with_local = start or find_pool(settings) is not None or pools.local.connected is not None
    answers = pools.asked(entries, local=with_local, recent=_NEWEST)
    known = [(answer.name, row) for answer in answers if answer.status is not None for row in answer.status.runs]
    rows = [(name, row) for name, row in known if not (going_on and row.state.is_final)]
    if not run:
        rows.sort(key=lambda found: (found[1].state.is_final, -found[1].submitted_at))
        return pools.of(rows[0][0]) if rows else pools.local
    matching = [(name, row) for name, row in rows if row.run_id.startswith(run)]
    # one pool may be listed under several names
    if len({row.run_id for _, row in matching}) == 1:
        return pools.of(matching[0][0])
    if matching:
        ids = [f"{row.run_id if len(run) >= 4 else short(row.run_id)} ({name})" for name, row in matching]
        raise RunUnknown(_ambiguous(run, ids))
    # query the pools whose list of runs was truncated, one after the other
    for answer in answers if not going_on else ():
        if answer.status is not None and len(answer.status.runs) >= _NEWEST:
            with contextlib.suppress(RunUnknown):
                pools.of(answer.name).attach(run)[0].close()
                return pools.of(answer.name)
    asked = [answer.name for answer in answers if not answer.problem] or [LOCAL]
    silent = ", ".join(answer.name for answer in answers if answer.problem)
    what = "active run" if going_on else "run"
    raise RunUnknown(
        f"no {what} has an id that begins with {run!r} in the {plural(len(asked), 'pool')} "
        f"{', '.join(asked)}. %sgpu_status and `sgpu runs` list them."
        + (f" Not asked, because it can't be reached: {silent}." if silent else "")
    )


@contextlib.contextmanager
def pool_of(settings: Settings, run: str, wish: str, *, going_on: bool = False) -> Generator[Pool]:
    """Yield the pool that has a run, and close it afterwards. Never starts a pool.

    Args:
        settings: The process's settings.
        run: The first digits of the run's id.
        wish: What the run is wanted for, as the end of a sentence in the error message.
        going_on: Consider only active runs.

    Raises:
        PoolError: No pool is running.
        RunUnknown: No pool that answers has such a run.
        UsageError: `run` can't be the beginning of an id.
    """
    prefix = check_prefix(run)
    with contextlib.closing(Pools(settings)) as pools:
        if not pools.entries() and find_pool(settings) is None:
            raise PoolError(f"no local pool is running, so there is no run {wish}.")
        yield pool_with(pools, settings, prefix, going_on=going_on, start=False)


def check_prefix(text: str, listed: str = ", as `sgpu runs` lists them", option: str = "") -> str:
    """Return `text` normalized as the beginning of a run id.

    Args:
        text: The digits as they were given.
        listed: Where the user finds them, for the error message.
        option: What they were given to, likewise; with `: ` at its end.

    Raises:
        UsageError: It can't be the beginning of an id.
    """
    prefix = text.strip().lower()
    if _PREFIX.fullmatch(prefix) is None:
        raise UsageError(f"{option}{text[:40]!r} is not a run's id: give its first digits (0-9, a-f){listed}.")
    return prefix


def find_directory(settings: Settings, text: str) -> str:
    """Return the id of the local run directory whose id begins with `text`.

    Raises:
        UsageError: No directory, or more than one, matches.
    """
    prefix = check_prefix(text)
    found = sorted(path.name for path in settings.runs_path.glob(f"{prefix}*") if is_valid_id(path.name))
    if not found:
        for run in ledger.recent_runs(settings, None):
            if run.run_id.startswith(prefix):
                raise UsageError(
                    f"the output and results of run {short(run.run_id)} are no longer kept; `sgpu runs --all` still "
                    f"lists it. Of ended runs the newest {settings.keep_runs:,} are kept, for {settings.keep_days:g} "
                    f"days and within {format_bytes(settings.keep_bytes)} (settings keep_runs, keep_days, keep_bytes)."
                )
        raise UsageError(
            f"no run on this machine has an id that begins with {prefix!r}. `sgpu runs --all` lists them; "
            f"their directories are in {settings.runs_path}."
        )
    if len(found) > 1:
        raise UsageError(_ambiguous(prefix, found))
    return found[0]


def _ambiguous(run: str, ids: Sequence[str]) -> str:
    listed = ", ".join(ids[:_MOST_LISTED]) + (", ..." if len(ids) > _MOST_LISTED else "")
    return f"{run!r} matches {len(ids)} runs: {listed}. Give more digits."


# ---------------------------------------------------------------- files of a run


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

    def is_over(self, row: RunSummary | None) -> bool:
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

    def row(self) -> RunSummary | None:
        """Return the run's row, at most 1 s old, or older while the pool can't be reached; None if it is not listed."""
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

    def is_over(self, row: RunSummary | None) -> bool:
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
