"""What the scheduler knows of one run, and how it words its times. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from sgpu_magic.pool.scheduling.placement_request import Want
from sgpu_magic.wire.costs import HOUR_S
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.run import RunSpec
from sgpu_magic.wire.states import RunState

WARN_SHARE = 0.8
"""Of a cost limit or a budget: who uses more is told."""

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
        freed: The lease is given back, since no process of it is left; its last word is still to come.
        begun: The agent has reported on it, so its lease can't be handed back any more.
        metered_at: When it reached STARTING, from where its time limit counts; None before.
        passed_at: When a later run of its own user first passed it in the queue; None when none has.
        overtaken_at: When a later run of another user first got devices of its line while it was its user's first
            there; None when none has.
        stopping_as: The state it was told to stop as; None when it was not.
        told: The last position and reason given; None when it does not wait.
        reason: Why it ends or has ended, "" when it does not, or nobody said.
        unstopped: Ranks of its session that still run it after its end.
        paused: Of a session: why no cell may begin in it now, "" when one may.
        quiet_since: Of a session: since when nothing has run in it; None before it is RUNNING. Counts only while
            no cell runs.
        gone: Of a session: its ranks are gone, and it holds its lease for new processes that are still on it.
        hourly: What its devices cost in an hour, all together; None without a price, and of what runs in a session.
        asked: Its lease has no devices yet: the engine asks the cluster for nodes.
        spent: What it cost before its node was lost and it waited again; counts for its own limit.
        ran_s: The seconds on the meter until then; they count for its time limit.
        cost_told: It was told that its own cost limit is near.
        budget_told: It was told that the pool's budget is nearly used up.
    """

    spec: RunSpec
    submitted_at: float
    state: RunState = RunState.QUEUED
    want: Want | None = None
    accepted: bool = False
    lease: Lease | None = None
    freed: bool = False
    begun: bool = False
    metered_at: float | None = None
    passed_at: float | None = None
    overtaken_at: float | None = None
    stopping_as: RunState | None = None
    told: tuple[int, str] | None = None
    reason: str = ""
    unstopped: tuple[int, ...] = ()
    paused: str = ""
    quiet_since: float | None = None
    gone: bool = False
    hourly: float | None = None
    asked: bool = False
    spent: float = 0.0
    ran_s: float = 0.0
    cost_told: bool = False
    budget_told: bool = False

    @property
    def run_id(self) -> str:
        return self.spec.run_id

    @property
    def held_lease(self) -> Lease | None:
        """The devices that nobody else may have."""
        return None if self.freed else self.lease

    @property
    def queue_deadline(self) -> float | None:
        if (self.lease is not None and not self.asked) or self.spec.wait_s is None:
            return None
        if self.want is None and not self.spec.session:
            return None
        return self.submitted_at + self.spec.wait_s

    @property
    def time_limit(self) -> float | None:
        if self.metered_at is None or self.state not in _RUNS_ON_METER:
            return None
        return self.metered_at + max(0.0, self.spec.timeout_s - self.ran_s)

    @property
    def is_on_meter(self) -> bool:
        """It holds its devices for ranks and is not being stopped."""
        return self.metered_at is not None and self.state in _RUNS_ON_METER

    @property
    def cost_limit(self) -> float | None:
        """When it has cost as much as it may; None while it costs nothing, or may cost anything."""
        if self.metered_at is None or self.spec.max_cost is None or not self.hourly or not self.is_on_meter:
            return None
        return self.metered_at + max(0.0, self.spec.max_cost - self.spent) / self.hourly * HOUR_S

    @property
    def cost_warning(self) -> float | None:
        """When most of that is used."""
        limit = self.cost_limit
        if limit is None or self.metered_at is None:
            return None
        return self.metered_at + WARN_SHARE * (limit - self.metered_at)

    def cost(self, now: float) -> float | None:
        """Return what it has cost, to the fraction of a second; None where it costs nothing."""
        if self.metered_at is None or self.hourly is None:
            return None
        return self.hourly * (now - self.metered_at) / HOUR_S


def rough(seconds: float) -> str:
    """`40 s`, `12 min`, `5 h 10 min`, `2 d 3 h`: a length of time for a person, two units at most."""
    whole = max(0, round(seconds))
    if whole < 100:
        return f"{whole} s"
    days, hours, minutes = whole // 86400, whole % 86400 // 3600, whole % 3600 // 60
    if days:
        return f"{days} d {hours} h" if hours else f"{days} d"
    if hours:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{minutes} min"


def span(seconds: float) -> str:
    """`90 s`, `10 min`, `2 h`, `7 d`: a length of time for a person, exact."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:g} s"
