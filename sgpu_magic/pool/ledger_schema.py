"""The schema of the ledger's database: its versions, and the way from one to the next."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

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
    (
        # `metered_at` on the monotonic clock of the machine's present life
        "ALTER TABLE runs ADD COLUMN metered_clock REAL",
    ),
    (
        # when a session's `idle_s` was written, on that clock
        "ALTER TABLE runs ADD COLUMN idle_clock REAL",
    ),
)


class NewerSchema(Exception):
    """A newer sgpu-magic has made the database, with schema `version`; this one knows the first `known`."""

    def __init__(self, version: int, known: int) -> None:
        super().__init__(f"has schema {version} of a newer sgpu-magic, and this one knows {known}")
        self.version = version


def migrate(database: sqlite3.Connection, migrations: Sequence[Sequence[str]]) -> None:
    """Bring the schema to version `len(migrations)`, each step whole or not at all.

    Args:
        database: A connection in autocommit mode (`isolation_level=None`).
        migrations: The statements of each step; `PRAGMA user_version` counts the steps taken.

    Raises:
        NewerSchema: More steps were taken than are known here.
    """
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > len(migrations):
        raise NewerSchema(version, len(migrations))
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
