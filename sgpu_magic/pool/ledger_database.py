"""The ledger's SQLite file: created, or moved aside and replaced if it is damaged or has another schema."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from sgpu_magic.config import SET_IN_NOTEBOOK, private_dir
from sgpu_magic.errors import PoolError

SCHEMA_VERSION = 5
"""The schema's version, kept as the database's `user_version`. A change of the schema needs a new one."""

_SCHEMA = (
    """
    CREATE TABLE runs (
        seq INTEGER PRIMARY KEY,
        run_id TEXT NOT NULL UNIQUE,
        name TEXT NOT NULL,
        ranks INTEGER NOT NULL,
        device_type TEXT NOT NULL,
        simulated INTEGER NOT NULL DEFAULT 0,
        state TEXT NOT NULL,
        submitted_at REAL NOT NULL,
        started_at REAL,
        ended_at REAL,
        failure TEXT NOT NULL DEFAULT '',
        uuids TEXT NOT NULL DEFAULT '[]',
        owner_pid INTEGER NOT NULL DEFAULT 0,
        notebook TEXT NOT NULL DEFAULT '',
        kind TEXT NOT NULL DEFAULT 'cell',
        session TEXT NOT NULL DEFAULT '',
        kernel TEXT NOT NULL DEFAULT '',
        user TEXT NOT NULL DEFAULT '',
        metered_at REAL,
        hourly REAL,
        currency TEXT NOT NULL DEFAULT '',
        gpu_s REAL,
        cost REAL,
        idle_s REAL,
        -- `metered_at` on the machine's monotonic clock, valid until it reboots
        metered_clock REAL,
        -- when a session's `idle_s` was written, on that clock
        idle_clock REAL
    )
    """,
    # a session's cells are looked up at its end
    "CREATE INDEX cells_of_sessions ON runs (session) WHERE session != ''",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
T = TypeVar("T")
Statement = tuple[str, Sequence[str | int | float]]
"""An SQL statement and its values."""

_FILES = ("", "-wal", "-shm")
# `checkpoint` ignores a write-ahead log up to this size; SQLite truncates a larger one to it
_LOG_BYTES = 1 << 20
# each round checkpoints what was written during the previous one
_MOST_ROUNDS = 20


class _SetAside(Exception):
    """The file can't be used as the ledger; `suffix` is the ending under which it is kept."""

    def __init__(self, suffix: str, message: str) -> None:
        super().__init__(message)
        self.suffix = suffix


class LedgerDatabase:
    """The database in the file `path`. An operation that fails does nothing and sets `problem`.

    Args:
        path: The file; its directory becomes private.

    Attributes:
        problem: What is wrong with it, for a person, such as a damaged file that was moved aside or a full disk; ""
            when nothing is.

    Raises:
        PoolError: The file can't be created or opened.
    """

    def __init__(self, path: Path) -> None:
        self.problem = ""
        self._path = path
        self._unusable = f"the pool's ledger {path} can't be used: "
        private_dir(path.parent)
        self._connection = self._open()

    def rows(self, sql: str, values: Sequence[str | int | float] = ()) -> list[Any]:
        """Run a query. Returns its rows; no rows when the database can't be used."""
        return self._tried(lambda: self._connection.execute(sql, values).fetchall()) or []

    def write(self, *statements: Statement) -> bool:
        """Run statements in one transaction. Returns False, with nothing changed, when the database failed."""
        if not self._tried(lambda: self._write(statements)):
            return False
        if self.problem.startswith(self._unusable):
            self.problem = ""
        return True

    def checkpoint(self) -> None:
        """Checkpoint the write-ahead log into the database file if it is large. Blocks until the disk has it."""
        if os.path.exists(log := f"{self._path}-wal") and os.stat(log).st_size > _LOG_BYTES:
            self.rows("PRAGMA wal_checkpoint(TRUNCATE)")

    def checkpoint_in_background(self) -> None:
        """Checkpoint from a thread that may wait for the disk, while the owning thread writes.

        The write-ahead log shrinks with the next change.
        """
        if not os.path.exists(log := f"{self._path}-wal") or os.stat(log).st_size <= _LOG_BYTES:
            return
        # after an error the next call tries again
        with contextlib.suppress(sqlite3.Error):
            uri = f"file:{quote(str(self._path))}?mode=rw"
            with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
                for _ in range(_MOST_ROUNDS):
                    _, written, brought = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                    if written == brought:
                        break

    def _write(self, statements: Sequence[Statement]) -> bool:
        if len(statements) == 1:
            self._connection.execute(*statements[0])
            return True
        self._connection.execute("BEGIN")
        try:
            for sql, values in statements:
                self._connection.execute(sql, values)
            self._connection.execute("COMMIT")
        except sqlite3.Error:
            # on a full disk SQLite has already rolled back
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        return True

    def _tried(self, call: Callable[[], T]) -> T | None:
        for _ in range(2):
            try:
                return call()
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    self.problem = f"{self._unusable}{error}"
                    return None
                # damage that was not detected at startup: try again with a new, empty ledger
                with contextlib.suppress(sqlite3.Error):
                    self._connection.close()
                self._set_aside(_SetAside("damaged", f"is damaged ({error})"))
                self._connection = self._open()
        return None

    def close(self) -> None:
        """Close the database; SQLite checkpoints the write-ahead log."""
        self._connection.close()

    def _open(self) -> sqlite3.Connection:
        try:
            try:
                return _connect(self._path)
            except _SetAside as aside:
                self._set_aside(aside)
                return _connect(self._path)
        except (_SetAside, sqlite3.Error, OSError) as error:
            raise PoolError(
                f"the pool's ledger {self._path} can't be opened: {error}. Free space there, make it yours, "
                f"or set SGPU_STATE_DIR to a directory on a local disk that is {SET_IN_NOTEBOOK}."
            ) from error

    def _set_aside(self, why: _SetAside) -> None:
        number = 1
        while (target := self._path.with_name(f"{self._path.name}.{why.suffix}-{number}")).exists():
            number += 1
        for ending in _FILES:
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{self._path}{ending}", f"{target}{ending}")
        self.problem = f"the pool's ledger {why}, so it was moved to {target} and a new one was created"


def _connect(path: Path) -> sqlite3.Connection:
    existed = path.exists()
    # SQLite gives its -wal and -shm files the mode of the database, so only this file needs its mode set
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    path.chmod(0o600)
    # a cleanly closed database has no -wal file: only others are checked
    unclean = existed and Path(f"{path}-wal").exists()
    database = sqlite3.connect(path, timeout=0.2, isolation_level=None)
    try:
        # In WAL mode with NORMAL, a commit is one write into the page cache, about 0.05 ms: a run of 40 ms can
        # afford several. A killed process loses nothing; after a power failure the last rows may be lost, but the
        # file stays intact, unlike with OFF. Only checkpoints wait for the disk, so they are rare: about one in
        # 700 runs, and one at the end.
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA wal_autocheckpoint = 4000")
        database.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
        if unclean and (found := database.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise _SetAside("damaged", f"is damaged ({found})")
        _create_schema(database)
    except (sqlite3.DatabaseError, _SetAside) as error:
        database.close()
        if isinstance(error, sqlite3.DatabaseError) and _is_damage(error):
            raise _SetAside("damaged", f"is damaged ({error})") from error
        raise
    return database


def _create_schema(database: sqlite3.Connection) -> None:
    """Create the tables of a new database.

    Args:
        database: A connection in autocommit mode (`isolation_level=None`).

    Raises:
        _SetAside: The database has another version's schema.
    """
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version == SCHEMA_VERSION:
        return
    if version:
        raise _SetAside(
            f"schema-{version}",
            f"has schema {version} of another version of sgpu-magic, and this one uses schema {SCHEMA_VERSION}",
        )
    database.execute("BEGIN IMMEDIATE")
    try:
        for statement in _SCHEMA:
            database.execute(statement)
    except sqlite3.Error:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _is_damage(error: sqlite3.Error) -> bool:
    # the low byte of an extended code is the primary one; errors of the module itself have no code
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
