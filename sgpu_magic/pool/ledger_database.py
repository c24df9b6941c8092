"""The ledger's SQLite file: created, migrated to the newest schema, or moved aside and replaced."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from sgpu_magic.config import SET_IN_NOTEBOOK, private_dir
from sgpu_magic.errors import PoolError

# Version n of the schema is the result of the first n migrations. Never change a released one: add another.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
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
            notebook TEXT NOT NULL DEFAULT ''
        )
        """,
    ),
    (
        "ALTER TABLE runs ADD COLUMN kind TEXT NOT NULL DEFAULT 'cell'",
        "ALTER TABLE runs ADD COLUMN session TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE runs ADD COLUMN kernel TEXT NOT NULL DEFAULT ''",
    ),
    (
        # NULL for earlier runs, which have no meter
        "ALTER TABLE runs ADD COLUMN user TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE runs ADD COLUMN metered_at REAL",
        "ALTER TABLE runs ADD COLUMN hourly REAL",
        "ALTER TABLE runs ADD COLUMN currency TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE runs ADD COLUMN gpu_s REAL",
        "ALTER TABLE runs ADD COLUMN cost REAL",
        "ALTER TABLE runs ADD COLUMN idle_s REAL",
        # a session's cells are looked up at its end
        "CREATE INDEX cells_of_sessions ON runs (session) WHERE session != ''",
    ),
    # `metered_at` on the machine's monotonic clock, valid until it reboots
    ("ALTER TABLE runs ADD COLUMN metered_clock REAL",),
    # when a session's `idle_s` was written, on that clock
    ("ALTER TABLE runs ADD COLUMN idle_clock REAL",),
)
T = TypeVar("T")
Statement = tuple[str, Sequence[str | int | float]]
"""An SQL statement and its values."""

_FILES = ("", "-wal", "-shm")
# suffix of a ledger with a newer schema that an older version has moved aside
_NEWER = re.compile(r"\.schema-(?P<version>[0-9]+)-[0-9]+")
# `checkpoint` leaves a write-ahead log up to this size alone; SQLite truncates a larger one to it
_LOG_BYTES = 1 << 20
# each round checkpoints what was written during the previous one
_MOST_ROUNDS = 20


class _SetAside(Exception):
    """The file can't be used as the ledger; `suffix` is the ending under which it is kept."""

    def __init__(self, suffix: str, message: str) -> None:
        super().__init__(message)
        self.suffix = suffix


def migrate(database: sqlite3.Connection, migrations: Sequence[Sequence[str]]) -> None:
    """Migrate the schema to version `len(migrations)`, with one transaction for each step.

    Args:
        database: A connection in autocommit mode (`isolation_level=None`).
        migrations: The statements of each step; `PRAGMA user_version` counts the applied steps.

    Raises:
        _SetAside: A newer sgpu-magic created the database, with more steps than are known here.
    """
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > len(migrations):
        newer = f"has schema {version} of a newer sgpu-magic, and this one supports up to {len(migrations)}"
        raise _SetAside(f"schema-{version}", newer)
    for number, statements in enumerate(migrations[version:], version + 1):
        database.execute("BEGIN IMMEDIATE")
        try:
            for statement in statements:
                database.execute(statement)
            database.execute(f"PRAGMA user_version = {number}")
        except sqlite3.Error:
            database.execute("ROLLBACK")
            raise
        database.execute("COMMIT")


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
        if not self._tried(lambda: self._written(statements)):
            return False
        if self.problem.startswith(self._unusable):
            self.problem = ""
        return True

    def checkpoint(self) -> None:
        """Checkpoint the write-ahead log into the database file if it is large. Blocks until the disk has it."""
        if os.path.exists(log := f"{self._path}-wal") and os.stat(log).st_size > _LOG_BYTES:
            self.rows("PRAGMA wal_checkpoint(TRUNCATE)")

    def checkpoint_beside(self) -> None:
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

    def _written(self, statements: Sequence[Statement]) -> bool:
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
                for aside in self._usable_again():
                    # closing it cleanly removes its log
                    _connect(self._path).close()
                    _take_back(aside, self._path)
                return _connect(self._path)
            except _SetAside as aside:
                self._set_aside(aside)
                return _connect(self._path)
        except (_SetAside, sqlite3.Error, OSError) as error:
            raise PoolError(
                f"the pool's ledger {self._path} can't be opened: {error}. Free space there, make it yours, "
                f"or set SGPU_STATE_DIR to a directory on a local disk that is {SET_IN_NOTEBOOK}."
            ) from error

    def _usable_again(self) -> list[Path]:
        """Return the ledgers that an older version has moved aside and this one supports, the last one first."""
        found: list[tuple[int, Path]] = []
        for path in self._path.parent.glob(f"{self._path.name}.schema-*"):
            match = _NEWER.fullmatch(path.name.removeprefix(self._path.name))
            if match is not None and int(match["version"]) <= len(MIGRATIONS):
                found.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(found, reverse=True)]

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
        migrate(database, MIGRATIONS)
    except (sqlite3.DatabaseError, _SetAside) as error:
        database.close()
        if isinstance(error, sqlite3.DatabaseError) and _is_damage(error):
            raise _SetAside("damaged", f"is damaged ({error})") from error
        raise
    return database


def _take_back(earlier: Path, later: Path) -> None:
    """Put an earlier ledger, with the rows of the later one after its own, in the place of the later one.

    If it can't be read, both stay as they are.
    """
    with contextlib.suppress(sqlite3.Error, OSError, _SetAside):
        with contextlib.closing(_connect(earlier)) as database:
            names = ", ".join(row[1] for row in database.execute("PRAGMA table_info(runs)") if row[1] != "seq")
            database.execute("ATTACH ? AS later", (str(later),))
            database.execute("BEGIN IMMEDIATE")
            database.execute(f"INSERT OR IGNORE INTO runs ({names}) SELECT {names} FROM later.runs ORDER BY seq")
            database.execute("COMMIT")
            database.execute("DETACH later")
        os.replace(earlier, later)


def _is_damage(error: sqlite3.Error) -> bool:
    # the low byte of an extended code is the primary one; errors of the module itself have no code
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
