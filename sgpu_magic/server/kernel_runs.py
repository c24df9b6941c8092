"""The runs that a kernel has submitted."""

from __future__ import annotations

import time

import msgspec

from sgpu_magic.client import ledger
from sgpu_magic.config import Settings
from sgpu_magic.files.run_directory import read_spec
from sgpu_magic.server.run_places import Elsewhere
from sgpu_magic.wire.pool_status import RunSummary
from sgpu_magic.wire.record import check_id
from sgpu_magic.wire.run import RunSpec
from sgpu_magic.wire.states import RunKind, RunState

RECENT_S = 3600.0
"""A page that was just loaded shows no runs that ended longer ago."""
_LOOKED_AT = 500


class OwnedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a kernel.

    Args:
        run_id: The run.
        cell: Its cell's id in the notebook, "" when the front end did not send one.
        state: The value of its `RunState`.
        final: It has ended.
        began: When it was submitted, seconds since the epoch.
        ended: When it ended; None while it runs, or when its end was not recorded.
        execution_count: Its cell's execution count.
        blocks: Its cell runs as long as the run does; False for a session, whose connecting cell has ended.
    """

    run_id: str
    cell: str
    state: str
    final: bool
    began: float
    ended: float | None
    execution_count: int | None
    blocks: bool


class OwnedRuns:
    """Finds a kernel's runs and caches their specs, which never change. Thread-safe.

    Args:
        settings: Settings, for the runs of this machine's pool.
        elsewhere: The runs in remote pools.
    """

    def __init__(self, settings: Settings, elsewhere: Elsewhere) -> None:
        self._settings = settings
        self._elsewhere = elsewhere
        # replaced as a whole, never changed
        self._specs: dict[str, RunSpec] = {}

    def of_kernel(self, kernel: str) -> list[OwnedRun]:
        """Return a kernel's runs that are active or ended within the last hour, newest last.

        Raises:
            PoolError: The pool's ledger can't be read.
        """
        now = time.time()
        recent = [run for run in ledger.recent_runs(self._settings, _LOOKED_AT) if _matters(run, now)]
        found = [(run, self._spec(run.run_id)) for run in reversed(recent)]
        self._specs = {run.run_id: spec for run, spec in found if spec is not None}
        here = [
            _owned(spec, run.state, run.ended_at)
            for run, spec in found
            if spec is not None and spec.owner.kernel == kernel
        ]
        # a run without a reported state is assumed to be running
        there = [
            _owned(sent.spec, sent.state or RunState.RUNNING, sent.ended_at)
            for sent in self._elsewhere.of_kernel(kernel)
            if sent.ended_at is None or now - sent.ended_at < RECENT_S
        ]
        return sorted([*here, *there], key=lambda run: run.began)

    def _spec(self, run_id: str) -> RunSpec | None:
        return self._specs.get(run_id) or read_spec(self._settings.runs_path / check_id(run_id))


def _matters(run: RunSummary, now: float) -> bool:
    if not run.state.is_final:
        return True
    # the end of a run whose pool was killed is not recorded
    return now - (run.ended_at or run.submitted_at) < RECENT_S


def _owned(spec: RunSpec, state: RunState, ended: float | None) -> OwnedRun:
    return OwnedRun(
        run_id=spec.run_id,
        cell=spec.owner.cell,
        state=str(state),
        final=state.is_final,
        began=spec.submitted_at,
        ended=ended,
        execution_count=spec.cell.execution_count,
        blocks=spec.kind is not RunKind.SESSION,
    )
