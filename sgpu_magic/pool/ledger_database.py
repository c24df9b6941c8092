"""The ledger's SQLite file: made, brought to the newest schema, or set aside and begun anew as needed."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from sgpu_magic.config import private_dir
from sgpu_magic.errors import PoolError
from sgpu_magic.pool.ledger_schema import MIGRATIONS, NewerSchema, migrate

_FILES = ("", "-wal", "-shm")


class LedgerDatabase:
    """The database in the file `path`. What it can't do it says in `problem`, and does nothing.

    Args:
        path: The file; its directory becomes private.

    Attributes:
        problem: What is wrong with it, for a person: a damaged file that was moved aside, a full disk; ""
            when nothing is.

    Raises:
        PoolError: The file can't be made or opened.
    """

    def __init__(self, path: Path) -> None:
        self.problem = ""
        self._path = path
        private_dir(path.parent)
        self._connection = self._open()

    def run(self, sql: str, values: Sequence[str | int | float] = ()) -> list[Any]:
        """Run one statement. Returns its rows, none when the database can't be used.

        Raises:
            sqlite3.IntegrityError: A row like this is there already.
        """
        for _ in range(2):
            try:
                return self._connection.execute(sql, values).fetchall()
            except sqlite3.IntegrityError:
                raise
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    self.problem = f"the pool's ledger {self._path} can't be used: {error}"
                    return []
                # damage that the start did not see: the next round asks the new, empty ledger
                with contextlib.suppress(sqlite3.Error):
                    self._connection.close()
                self._set_aside(_SetAside("damaged", f"is damaged ({error})"))
                self._connection = self._open()
        return []

    @contextlib.contextmanager
    def together(self) -> Generator[None]:
        """Run what is run within in one transaction: one commit for all of it."""
        self.run("BEGIN")
        try:
            yield
        finally:
            # a database that was found damaged meanwhile is another one now
            if self._connection.in_transaction:
                self.run("COMMIT")

    def close(self) -> None:
        """Write everything into the one file and close it."""
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
                "or set SGPU_STATE_DIR to a directory on a local disk that is."
            ) from error

    def _set_aside(self, why: _SetAside) -> None:
        number = 1
        while (target := self._path.with_name(f"{self._path.name}.{why.suffix}-{number}")).exists():
            number += 1
        for ending in _FILES:
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{self._path}{ending}", f"{target}{ending}")
        self.problem = f"the pool's ledger {why}, so it was moved to {target} and a new one begun"


class _SetAside(Exception):
    """The file can't be this version's ledger; `suffix` names what it is kept as."""

    def __init__(self, suffix: str, message: str) -> None:
        super().__init__(message)
        self.suffix = suffix


def _connect(path: Path) -> sqlite3.Connection:
    existed = path.exists()
    # SQLite gives its -wal and -shm files the database's mode, so only this one has to be made by hand
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    path.chmod(0o600)
    # a database that was closed well has no -wal file: only one that was not is read through
    unclean = existed and Path(f"{path}-wal").exists()
    database = sqlite3.connect(path, timeout=0.2, isolation_level=None)
    try:
        # In WAL with NORMAL a commit is one write into the page cache, about 0.05 ms: a run of 40 ms can pay
        # for several. A killed process loses nothing; a machine that loses power may lose the last rows,
        # never the file's soundness, which OFF would risk. The disk is waited for only at a checkpoint, so
        # these are made rare: one in some 700 runs, and one at the end.
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA wal_autocheckpoint = 4000")
        if unclean and (found := database.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise _SetAside("damaged", f"is damaged ({found})")
        migrate(database, MIGRATIONS)
    except sqlite3.DatabaseError as error:
        database.close()
        if _is_damage(error):
            raise _SetAside("damaged", f"is damaged ({error})") from error
        raise
    except NewerSchema as error:
        database.close()
        raise _SetAside(f"schema-{error.version}", str(error)) from error
    except _SetAside:
        database.close()
        raise
    return database


def _is_damage(error: sqlite3.Error) -> bool:
    # extended codes keep the primary one in the low byte; an error of the module itself has none
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
