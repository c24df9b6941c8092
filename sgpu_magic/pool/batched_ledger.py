"""The ledger of a pool whose sessions run many small cells: what is written down of those waits a moment.

A cell of a few milliseconds has no time for a commit of its own. Its events are on disk before anybody is told; its
row is made from them within `_WRITE_S`, all rows of that moment in one transaction. A service that is killed in
between leaves a run without a row: whoever takes it over, or submits it again, records it.

What a full disk does not take waits here too, and is told to who asks as if it were written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from sgpu_magic.pool.ledger import FINAL, Ledger, RowChanges, insertion, new_row, summary_of, update
from sgpu_magic.wire.pool_status import RunSummary
from sgpu_magic.wire.run import RunSpec
from sgpu_magic.wire.states import RunState

_WRITE_S = 0.05
# after a failure
_WRITE_AGAIN_S = 1.0
# what each cell changes in its session's row
_OF_EACH_CELL = {"idle_s", "idle_clock"}


class BatchedLedger(Ledger):
    """A ledger that writes runs in sessions a little later; it is asked and closed as any other.

    Args:
        path: As for `Ledger`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._loop = asyncio.get_running_loop()
        # rows, and changes of rows, that are not in the database
        self._new: dict[str, RowChanges] = {}
        self._changes: dict[str, RowChanges] = {}
        self._timer: asyncio.TimerHandle | None = None
        # runs in sessions whose rows may still change: they wait
        self._later: set[str] = set()

    def record(self, spec: RunSpec, state: RunState) -> None:
        row = new_row(spec, state)
        if spec.in_session:
            self._later.add(spec.run_id)
            self._new[spec.run_id] = row
            self._write_in(_WRITE_S)
        elif not self._insert(row):
            self._new[spec.run_id] = row
            self._write_in(_WRITE_AGAIN_S)

    def _change(self, run_id: str, changes: RowChanges) -> bool:
        waits = run_id in self._later or run_id in self._new or run_id in self._changes
        waits = waits or changes.keys() == _OF_EACH_CELL
        if not waits and super()._change(run_id, changes):
            return True
        self._changes.setdefault(run_id, {}).update(changes)
        self._write_in(_WRITE_S if waits else _WRITE_AGAIN_S)
        return False

    def summaries(self, run_ids: Sequence[str]) -> list[RunSummary]:
        self.write()
        found = {row.run_id: row for row in super().summaries(run_ids)} | self._unwritten()
        return [found[run_id] for run_id in run_ids if run_id in found]

    def find(self, prefix: str) -> list[str]:
        self.write()
        return [run_id for run_id in reversed(self._new) if run_id.startswith(prefix)] + super().find(prefix)

    def recent(self, limit: int) -> list[RunSummary]:
        self.write()
        return [*reversed(self._unwritten().values()), *super().recent(limit)][: max(0, limit)]

    def unfinished(self) -> list[str]:
        self.write()
        return super().unfinished()

    def cell_times(self, session: str) -> list[tuple[float, float | None]]:
        self.write()
        return super().cell_times(session)

    def close(self) -> None:
        self.write()
        if self._timer is not None:
            self._timer.cancel()
        super().close()

    def has(self, run_id: str) -> bool:
        """Whether the run was recorded; the waiting rows wait on."""
        return run_id in self._later or run_id in self._new or super().has(run_id)

    def write(self) -> None:
        """Write down what waits."""
        if not self._new and not self._changes:
            return
        statements = [insertion(row, or_not=True) for row in self._new.values()]
        statements += [update(run_id, changes) for run_id, changes in self._changes.items()]
        if not self._database.write(*statements):
            self._write_in(_WRITE_AGAIN_S)
            return
        self._later -= {run_id for run_id, changes in self._changes.items() if changes.get("state") in FINAL}
        self._new.clear()
        self._changes.clear()

    def _rows(self, sql: str, *values: str | int) -> list[RowChanges]:
        return [row | self._changes.get(row["run_id"], {}) for row in super()._rows(sql, *values)]

    def _unwritten(self) -> dict[str, RunSummary]:
        """Runs that are not in the database."""
        return {run_id: summary_of(row | self._changes.get(run_id, {})) for run_id, row in self._new.items()}

    def _write_in(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(seconds, self._write_due)

    def _write_due(self) -> None:
        self._timer = None
        self.write()
