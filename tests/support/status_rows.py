"""A pool's status and its rows of runs, as a pool sends them, for tests of what is made of them."""

from __future__ import annotations

import msgspec

from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.devices import Inventory
from sgpu_magic.wire.pool_status import PoolStatus, RunSummary

_RUN = RunSummary(
    run_id="7f3a0000",
    name="train",
    ranks=2,
    device_type="a10",
    simulated=False,
    state=RunState.RUNNING,
    submitted_at=0.0,
)
_STATUS = PoolStatus(
    request=1,
    pool="local",
    pid=1,
    package_version="0",
    started_at=0.0,
    inventory=Inventory(host="box"),
    cpu_slots_free=16,
    runs=(),
    clients=1,
)


def run_summary(**fields: object) -> RunSummary:
    """Return a run of two ranks on A10 that is running, changed by `fields`."""
    return msgspec.structs.replace(_RUN, **fields)


def pool_status(*runs: RunSummary, **fields: object) -> PoolStatus:
    """Return the status of the local pool with these runs and 16 free CPU slots, changed by `fields`."""
    return msgspec.structs.replace(_STATUS, runs=runs, **fields)
