"""The ledger of a pool whose sessions run many small cells: what is written down of those waits a moment.

A cell of a few milliseconds has no time for a commit of its own. Its events are on disk before anybody is told; its
row is made from them within `_WRITE_S`, all rows of that moment in one transaction. A service that is killed in
between leaves a run without a row: whoever takes it over, or submits it again, records it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from sgpu_magic.pool.ledger import FINAL, Ledger, RowChanges
from sgpu_magic.protocol.pool_status import RunSummary
from sgpu_magic.protocol.records import RunSpec
from sgpu_magic.protocol.states import RunState

_WRITE_S = 0.05


class LaterLedger(Ledger):
    """A ledger that writes runs in sessions a little later; it is asked and closed as any other.

    Args:
        path: As for `Ledger`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._loop = asyncio.get_running_loop()
        self._new: dict[str, tuple[RunSpec, RunState]] = {}
        self._changes: dict[str, RowChanges] = {}
        self._timer: asyncio.TimerHandle | None = None
        # runs whose rows may still change, and wait
        self._later: set[str] = set()

    def record(self, spec: RunSpec, state: RunState) -> None:
        if spec.in_session:
            self._new[spec.run_id] = (spec, state)
            self._later.add(spec.run_id)
            self._write_soon()
        else:
            super().record(spec, state)

    def _change(self, run_id: str, changes: RowChanges) -> None:
        if run_id in self._later:
            self._changes.setdefault(run_id, {}).update(changes)
            self._write_soon()
        else:
            super()._change(run_id, changes)

    def summary(self, run_id: str) -> RunSummary | None:
        self.write()
        return super().summary(run_id)

    def summaries(self, run_ids: Sequence[str]) -> list[RunSummary]:
        self.write()
        return super().summaries(run_ids)

    def find(self, prefix: str) -> list[str]:
        self.write()
        return super().find(prefix)

    def recent(self, limit: int) -> list[RunSummary]:
        self.write()
        return super().recent(limit)

    def unfinished(self) -> list[str]:
        self.write()
        return super().unfinished()

    def cell_times(self, session: str) -> list[tuple[float, float | None]]:
        self.write()
        return super().cell_times(session)

    def close(self) -> None:
        self.write()
        super().close()

    def has(self, run_id: str) -> bool:
        """Whether the run was recorded; the waiting rows wait on."""
        return run_id in self._later or super().has(run_id)

    def write(self) -> None:
        """Write down what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._new and not self._changes:
            return
        new, self._new = self._new, {}
        changes, self._changes = self._changes, {}
        with self._database.together():
            for spec, state in new.values():
                super().record(spec, state)
            for run_id, columns in changes.items():
                super()._change(run_id, columns)
                if columns.get("state") in FINAL:
                    self._later.discard(run_id)

    def _write_soon(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_WRITE_S, self.write)
