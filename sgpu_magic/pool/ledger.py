"""The ledger: every run this pool has had, in SQLite, so that it can be shown and picked up again later.

It is a record, never the way of a run: a ledger that can't be written does not fail a run, it says so in
`Ledger.problem`. The thread that opened it owns it; sqlite3 refuses any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sgpu_magic.config import private_dir
from sgpu_magic.errors import PoolError
from sgpu_magic.protocol.devices import Lease
from sgpu_magic.protocol.ids import check_id
from sgpu_magic.protocol.messages import RunSummary
from sgpu_magic.protocol.records import RunSpec
from sgpu_magic.protocol.states import RunKind, RunState

# Version n of the schema is what the first n migrations make. Never change one that was released: add one.
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
        # runs of before have no meter: NULL
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
)

_COLUMNS = (
    "run_id, name, ranks, device_type, simulated, state, submitted_at, started_at, ended_at, failure, uuids, "
    "owner_pid, notebook, kind, session, kernel, user, metered_at, hourly, currency, gpu_s, cost, idle_s"
)
_FINAL = tuple(state.value for state in RunState if state.is_final)
_PREFIX = re.compile(r"[0-9a-f]{1,8}")
_FILES = ("", "-wal", "-shm")


@dataclass(frozen=True, slots=True)
class Metered:
    """What is new of a run's meter; None is what stays. As in `RunSummary`."""

    metered_at: float | None = None
    hourly: float | None = None
    currency: str | None = None
    gpu_s: float | None = None
    cost: float | None = None
    idle_s: float | None = None


class Ledger:
    """The ledger in the file `path`; made, brought to the newest schema, or begun anew as needed.

    Args:
        path: The database's file; its directory becomes private.

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
        self._database = self._open()

    def record(self, spec: RunSpec, state: RunState) -> None:
        """Write a new run down.

        Raises:
            ValueError: Its id is none, or is in the ledger already.
        """
        self._write(
            "INSERT INTO runs (run_id, name, ranks, device_type, state, submitted_at, owner_pid, notebook, kind, "
            "session, kernel, user) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                check_id(spec.run_id),
                spec.name,
                spec.placement.ranks,
                spec.placement.device_type,
                state.value,
                spec.submitted_at,
                spec.owner.pid,
                spec.owner.notebook,
                spec.kind.value,
                spec.session,
                spec.owner.kernel,
                spec.owner.user,
            ),
        )

    def update(
        self,
        run_id: str,
        *,
        state: RunState | None = None,
        lease: Lease | None = None,
        started_at: float | None = None,
        ended_at: float | None = None,
        failure: str | None = None,
        meter: Metered | None = None,
    ) -> None:
        """Write down what is given; what is left out stays. A run that is not in the ledger changes nothing.

        Args:
            started_at: Wall-clock time, seconds since the epoch.
            ended_at: The same.
            failure: One line for a person.
            meter: What is new of its meter.

        Raises:
            ValueError: `run_id` is no run id.
        """
        check_id(run_id)
        changes: dict[str, str | int | float] = {}
        if state is not None:
            changes["state"] = state.value
        if lease is not None:
            changes["device_type"] = lease.device_type
            changes["simulated"] = int(lease.simulated)
            changes["uuids"] = json.dumps(lease.uuids)
        if started_at is not None:
            changes["started_at"] = started_at
        if ended_at is not None:
            changes["ended_at"] = ended_at
        if failure is not None:
            changes["failure"] = failure
        if meter is not None:
            changes |= {name: value for name, value in asdict(meter).items() if value is not None}
        if changes:
            columns = ", ".join(f"{column} = ?" for column in changes)
            self._write(f"UPDATE runs SET {columns} WHERE run_id = ?", (*changes.values(), run_id))

    def summary(self, run_id: str) -> RunSummary | None:
        """The run's row, None when the ledger does not have it.

        Raises:
            ValueError: `run_id` is no run id.
        """
        rows = self._read(f"SELECT {_COLUMNS} FROM runs WHERE run_id = ?", (check_id(run_id),))
        return _summary(rows[0]) if rows else None

    def find(self, prefix: str) -> list[str]:
        """The ids that begin with `prefix`, newest first.

        Raises:
            ValueError: `prefix` is not 1 to 8 hexadecimal digits.
        """
        if _PREFIX.fullmatch(prefix) is None:
            raise ValueError(f"{prefix[:40]!r} does not begin a run id: 1 to 8 hexadecimal digits do")
        # "g" sorts after every hexadecimal digit; a range uses the id's index where LIKE would not
        sql = "SELECT run_id FROM runs WHERE run_id >= ? AND run_id < ? ORDER BY seq DESC"
        return [row[0] for row in self._read(sql, (prefix, prefix + "g"))]

    def recent(self, limit: int) -> list[RunSummary]:
        """The runs submitted last, newest first."""
        rows = self._read(f"SELECT {_COLUMNS} FROM runs ORDER BY seq DESC LIMIT ?", (max(0, limit),))
        return [_summary(row) for row in rows]

    def unfinished(self) -> list[str]:
        """The runs that are in no final state, oldest first: after a start, those a dead service left."""
        marks = ", ".join("?" * len(_FINAL))
        rows = self._read(f"SELECT run_id FROM runs WHERE state NOT IN ({marks}) ORDER BY seq", _FINAL)
        return [row[0] for row in rows]

    def cells(self) -> list[str]:
        """The runs that ran in sessions, oldest first."""
        return [row[0] for row in self._read("SELECT run_id FROM runs WHERE session != '' ORDER BY seq", ())]

    def cell_times(self, session: str) -> list[tuple[float, float | None]]:
        """When each cell of a session began and ended, None for one that goes on; those that never began are left out.

        Raises:
            ValueError: `session` is no run id.
        """
        sql = "SELECT started_at, ended_at FROM runs WHERE session = ? AND session != '' AND started_at IS NOT NULL"
        return [(began, ended) for began, ended in self._read(sql, (check_id(session),))]

    def costs_since(self, since: float, currency: str) -> list[tuple[float, float]]:
        """When runs ended after `since` (seconds since the epoch), and what each cost, oldest first."""
        sql = (
            "SELECT ended_at, cost FROM runs WHERE cost IS NOT NULL AND ended_at > ? AND currency = ? ORDER BY ended_at"
        )
        return [(ended, cost) for ended, cost in self._read(sql, (since, currency))]

    @contextlib.contextmanager
    def together(self) -> Generator[None]:
        """Write what is written within in one transaction: one commit for all of it."""
        self._write("BEGIN", ())
        try:
            yield
        finally:
            # a database that was found damaged meanwhile is another one now
            if self._database.in_transaction:
                self._write("COMMIT", ())

    def has(self, run_id: str) -> bool:
        """Whether the run was recorded.

        Raises:
            ValueError: `run_id` is no run id.
        """
        return bool(self._read("SELECT 1 FROM runs WHERE run_id = ?", (check_id(run_id),)))

    def close(self) -> None:
        """Write everything into the one file and close it."""
        self._database.close()

    # ------------------------------------------------------------ opening, damage, failed writes

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

    def _write(self, sql: str, values: Sequence[str | int | float]) -> None:
        self._run(sql, values)

    def _read(self, sql: str, values: Sequence[str | int | float]) -> list[Any]:
        return self._run(sql, values)

    def _run(self, sql: str, values: Sequence[str | int | float]) -> list[Any]:
        for _ in range(2):
            try:
                return self._database.execute(sql, values).fetchall()
            except sqlite3.IntegrityError as error:
                raise ValueError(f"run {values[0]} is in the ledger already") from error
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    self.problem = f"the pool's ledger {self._path} can't be used: {error}"
                    return []
                # damage that the start did not see: the next round asks the new, empty ledger
                with contextlib.suppress(sqlite3.Error):
                    self._database.close()
                self._set_aside(_SetAside("damaged", f"is damaged ({error})"))
                self._database = self._open()
        return []


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
    except _SetAside:
        database.close()
        raise
    return database


def migrate(database: sqlite3.Connection, migrations: Sequence[Sequence[str]]) -> None:
    """Bring the schema to version `len(migrations)`, each step whole or not at all.

    Args:
        database: A connection in autocommit mode (`isolation_level=None`).
        migrations: The statements of each step; `PRAGMA user_version` counts the steps taken.
    """
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > len(migrations):
        raise _SetAside(
            f"schema-{version}",
            f"has schema {version} of a newer sgpu-magic, and this one knows {len(migrations)}",
        )
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


def _is_damage(error: sqlite3.Error) -> bool:
    # extended codes keep the primary one in the low byte; an error of the module itself has none
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _summary(row: Sequence[Any]) -> RunSummary:
    return RunSummary(
        run_id=row[0],
        name=row[1],
        ranks=row[2],
        device_type=row[3],
        simulated=bool(row[4]),
        state=RunState(row[5]),
        submitted_at=row[6],
        started_at=row[7],
        ended_at=row[8],
        failure=row[9],
        uuids=tuple(json.loads(row[10])),
        owner_pid=row[11],
        notebook=row[12],
        kind=RunKind(row[13]),
        session=row[14],
        kernel=row[15],
        user=row[16],
        metered_at=row[17],
        hourly=row[18],
        currency=row[19],
        gpu_s=row[20],
        cost=row[21],
        idle_s=row[22],
    )
