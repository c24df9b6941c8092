"""Runs as a pool keeps them: rows of a real ledger and directories, without a pool that answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from sgpu_magic.config import Settings, private_dir
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.lifecycle import PoolPresence
from sgpu_magic.wire.attachments import PackedLayout
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.devices import Lease, NodeShare, Placement
from sgpu_magic.wire.run import RUN_RECORD, CellSource, Owner, RunRecord, RunSpec


class KeptRuns:
    """The state directory of a pool.

    Args:
        settings: Gives the directories.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ledger = Ledger(settings.state_path / "ledger.sqlite3")
        self._presence: PoolPresence | None = None

    def announce(self) -> None:
        """Make this process the pool, so that runs which have not ended are active."""
        private_dir(self._settings.runtime_path)
        self._presence = PoolPresence(self._settings.runtime_path, self._settings.state_path)
        self._presence.announce()

    def add(
        self,
        run_id: str,
        state: RunState = RunState.SUCCEEDED,
        *,
        ranks: int = 2,
        started: bool = True,
        failure: str = "",
        files: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Add a run with the files of its directory, and return the directory."""
        spec = self._spec(run_id, ranks)
        self._ledger.record(spec, RunState.QUEUED)
        self._ledger.update(
            run_id,
            state=state,
            started_at=2.0 if started else None,
            ended_at=3.0 if state.is_final else None,
            failure=failure or None,
        )
        self._ledger.write()
        directory = self._settings.runs_path / run_id
        directory.mkdir(parents=True)
        for name, data in (files or {}).items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return directory

    def write_record(self, run_id: str, cwd: str, shares: tuple[NodeShare, ...] = (), ranks: int = 2) -> None:
        """Write the record of a run's start."""
        record = RunRecord(
            spec=self._spec(run_id, ranks),
            executable="python",
            cwd=cwd,
            lease=Lease(lease_id="00000001", device_type="cpu", ranks=ranks, cpu_slots=ranks, shares=shares),
            payload_layout=PackedLayout(pickle_size=0, buffers=(), mac=b""),
            payload_kept=False,
            payload_note="",
            state=RunState.RUNNING,
        )
        (self._settings.runs_path / run_id / RUN_RECORD).write_bytes(msgspec.json.encode(record))

    def close(self) -> None:
        self._ledger.close()
        if self._presence is not None:
            self._presence.withdraw()

    @staticmethod
    def _spec(run_id: str, ranks: int) -> RunSpec:
        return RunSpec(
            run_id=run_id,
            name="cell",
            cell=CellSource(body="1 + 1"),
            placement=Placement(ranks=ranks),
            outputs=(),
            owner=Owner(pid=4711, host="here", user="me"),
            timeout_s=60.0,
            submitted_at=1.0,
        )
