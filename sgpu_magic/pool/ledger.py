"""The ledger: every run this pool has had, in SQLite, so that it can be shown and picked up again later.

It is a record, never the way of a run: a ledger that can't be written does not fail a run, it says so in
`Ledger.problem`. The thread that opened it owns it; sqlite3 refuses any other.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sgpu_magic.pool.ledger_database import LedgerDatabase
from sgpu_magic.protocol.devices import Lease
from sgpu_magic.protocol.ids import check_id
from sgpu_magic.protocol.pool_status import RunSummary
from sgpu_magic.protocol.records import RunSpec
from sgpu_magic.protocol.states import RunKind, RunState

_COLUMNS = (
    "run_id, name, ranks, device_type, simulated, state, submitted_at, started_at, ended_at, failure, uuids, "
    "owner_pid, notebook, kind, session, kernel, user, metered_at, hourly, currency, gpu_s, cost, idle_s"
)
FINAL = tuple(state.value for state in RunState if state.is_final)
_PREFIX = re.compile(r"[0-9a-f]{1,8}")

RowChanges = dict[str, str | int | float]
"""New values by column; columns that are not in it stay."""


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
    """The ledger in the file `path`.

    Args:
        path: As for `LedgerDatabase`.

    Raises:
        PoolError: The file can't be made or opened.
    """

    def __init__(self, path: Path) -> None:
        self._database = LedgerDatabase(path)

    @property
    def problem(self) -> str:
        """What is wrong with its database, for a person; "" when nothing is."""
        return self._database.problem

    def record(self, spec: RunSpec, state: RunState) -> None:
        """Write a new run down.

        Raises:
            ValueError: Its id is none, or is in the ledger already.
        """
        try:
            self._database.run(
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
        except sqlite3.IntegrityError as error:
            raise ValueError(f"run {spec.run_id} is in the ledger already") from error

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
        changes: RowChanges = {}
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
        self._change(run_id, changes)

    def summary(self, run_id: str) -> RunSummary | None:
        """The run's row, None when the ledger does not have it.

        Raises:
            ValueError: `run_id` is no run id.
        """
        rows = self._database.run(f"SELECT {_COLUMNS} FROM runs WHERE run_id = ?", (check_id(run_id),))
        return _summary(rows[0]) if rows else None

    def summaries(self, run_ids: Sequence[str]) -> list[RunSummary]:
        """The rows of these runs, in this order, without those that the ledger does not have."""
        sql = f"SELECT {_COLUMNS} FROM runs WHERE run_id IN (SELECT value FROM json_each(?))"
        found = (_summary(row) for row in self._database.run(sql, (json.dumps([*run_ids]),)))
        by_id = {row.run_id: row for row in found}
        return [by_id[run_id] for run_id in run_ids if run_id in by_id]

    def find(self, prefix: str) -> list[str]:
        """The ids that begin with `prefix`, newest first.

        Raises:
            ValueError: `prefix` is not 1 to 8 hexadecimal digits.
        """
        if _PREFIX.fullmatch(prefix) is None:
            raise ValueError(f"{prefix[:40]!r} does not begin a run id: 1 to 8 hexadecimal digits do")
        # "g" sorts after every hexadecimal digit; a range uses the id's index where LIKE would not
        sql = "SELECT run_id FROM runs WHERE run_id >= ? AND run_id < ? ORDER BY seq DESC"
        return [row[0] for row in self._database.run(sql, (prefix, prefix + "g"))]

    def recent(self, limit: int) -> list[RunSummary]:
        """The runs submitted last, newest first."""
        rows = self._database.run(f"SELECT {_COLUMNS} FROM runs ORDER BY seq DESC LIMIT ?", (max(0, limit),))
        return [_summary(row) for row in rows]

    def unfinished(self) -> list[str]:
        """The runs that are in no final state, oldest first: after a start, those a dead service left."""
        marks = ", ".join("?" * len(FINAL))
        rows = self._database.run(f"SELECT run_id FROM runs WHERE state NOT IN ({marks}) ORDER BY seq", FINAL)
        return [row[0] for row in rows]

    def cells(self) -> list[str]:
        """The runs that ran in sessions, oldest first."""
        return [row[0] for row in self._database.run("SELECT run_id FROM runs WHERE session != '' ORDER BY seq")]

    def cell_times(self, session: str) -> list[tuple[float, float | None]]:
        """When each cell of a session began and ended, None for one that goes on; those that never began are left out.

        Raises:
            ValueError: `session` is no run id.
        """
        sql = "SELECT started_at, ended_at FROM runs WHERE session = ? AND session != '' AND started_at IS NOT NULL"
        return [(began, ended) for began, ended in self._database.run(sql, (check_id(session),))]

    def costs_since(self, since: float, currency: str) -> list[tuple[float, float]]:
        """When runs ended after `since` (seconds since the epoch), and what each cost, oldest first."""
        sql = (
            "SELECT ended_at, cost FROM runs WHERE cost IS NOT NULL AND ended_at > ? AND currency = ? ORDER BY ended_at"
        )
        return [(ended, cost) for ended, cost in self._database.run(sql, (since, currency))]

    def has(self, run_id: str) -> bool:
        """Whether the run was recorded.

        Raises:
            ValueError: `run_id` is no run id.
        """
        return bool(self._database.run("SELECT 1 FROM runs WHERE run_id = ?", (check_id(run_id),)))

    def close(self) -> None:
        """Write everything into the one file and close it."""
        self._database.close()

    def _change(self, run_id: str, changes: RowChanges) -> None:
        """Write new values of a row's columns."""
        if changes:
            columns = ", ".join(f"{column} = ?" for column in changes)
            self._database.run(f"UPDATE runs SET {columns} WHERE run_id = ?", (*changes.values(), run_id))


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
