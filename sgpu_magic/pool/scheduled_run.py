"""What the scheduler knows of one run, and how it words its times and its waiting. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sgpu_magic.pool.placement import Line, Room, Want
from sgpu_magic.protocol.ids import short
from sgpu_magic.protocol.records import Lease, RunSpec
from sgpu_magic.protocol.states import RunState

_RUNS_ON_METER = (RunState.STARTING, RunState.RUNNING)


@dataclass(frozen=True, slots=True)
class ScheduledRun:
    """What the scheduler knows of one run. Immutable; each stimulus replaces it.

    Args:
        spec: As submitted.
        submitted_at: The stimulus's `now`; the queue's time counts from here, across refused leases.
        state: Its state.
        want: What it takes in this pool; None until the pool's inventory is known.
        accepted: Too late to refuse it: from now on it can only end.
        lease: What it holds; None while it waits.
        begun: The agent has reported on it, so its lease can't be handed back any more.
        metered_at: When it reached STARTING, from where its time limit counts; None before.
        passed_at: When a later run first passed it in the queue; None when none has.
        stopping_as: The state it was told to stop as; None when it was not.
        told: The last position and reason given; None when it does not wait.
    """

    spec: RunSpec
    submitted_at: float
    state: RunState = RunState.QUEUED
    want: Want | None = None
    accepted: bool = False
    lease: Lease | None = None
    begun: bool = False
    metered_at: float | None = None
    passed_at: float | None = None
    stopping_as: RunState | None = None
    told: tuple[int, str] | None = None

    @property
    def run_id(self) -> str:
        return self.spec.run_id

    @property
    def queue_deadline(self) -> float | None:
        if self.want is None or self.lease is not None or self.spec.wait_s is None:
            return None
        return self.submitted_at + self.spec.wait_s

    @property
    def time_limit(self) -> float | None:
        if self.metered_at is None or self.state not in _RUNS_ON_METER:
            return None
        return self.metered_at + self.spec.timeout_s


def span(seconds: float) -> str:
    """`90 s`, `10 min`, `2 h`, `7 d`: a length of time for a person, exact."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:g} s"


def waits_for(run: ScheduledRun, want: Want, room: Room, keepers: Mapping[Line, str]) -> str:
    missing = room.missing(want)
    if missing == 0:
        return kept_for(keepers, run, want)
    what = room.amount(want, missing).replace(" ", " more ", 1)
    kept = ["freed ones are kept for it"] if keepers.get(want.line) == run.run_id else []
    return "; ".join([f"needs {what}", *room.not_the_pools(want), *kept])


def kept_for(keepers: Mapping[Line, str], run: ScheduledRun, want: Want) -> str:
    return f"what is free is kept for run {short(keepers.get(want.line, run.run_id))}, which has waited longer"
