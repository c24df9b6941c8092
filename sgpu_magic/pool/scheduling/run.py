"""The scheduler's data of one run, and its meter. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from sgpu_magic.pool.scheduling.capacity import ResourceRequest
from sgpu_magic.pool.scheduling.end_reason import EndReason
from sgpu_magic.wire.base import RunKind, RunLimit, RunState
from sgpu_magic.wire.costs import HOUR_S, billed_s, cost_of, device_count
from sgpu_magic.wire.devices import CPU, Lease
from sgpu_magic.wire.events import RemainingRank
from sgpu_magic.wire.run import RunSpec

WARN_SHARE = 0.8
"""The share of a cost limit or a budget at which users are warned."""

_RUNS_ON_METER = (RunState.STARTING, RunState.RUNNING)


class Bill(msgspec.Struct, frozen=True):
    """What a run is billed.

    Args:
        gpu_s: Device seconds of all its devices together; None on CPU slots without a price.
        cost: Their cost; None without a price.
    """

    gpu_s: float | None = None
    cost: float | None = None


class Meter(msgspec.Struct, frozen=True):
    """Measures how long a run has its devices, and what that costs, in seconds of the scheduler's clock.

    Args:
        lease: The metered lease, current or from before the run was requeued; None before the first.
        hourly: Price of the whole lease for an hour; None without a price, and for runs in a session.
        since: When it last started; None while it is stopped.
        spent: The cost before `since`.
        ran_s: The seconds measured before `since`.
    """

    lease: Lease | None = None
    hourly: float | None = None
    since: float | None = None
    spent: float = 0.0
    ran_s: float = 0.0

    def running_cost(self, now: float) -> float:
        """Return the cost since `since`, exact to fractions of a second."""
        return 0.0 if self.since is None else (self.hourly or 0.0) * (now - self.since) / HOUR_S

    def billed_cost(self, now: float) -> float:
        """Return the cost since `since`, with each started second counted as a whole one."""
        return 0.0 if self.since is None else cost_of(self.hourly, now - self.since) or 0.0

    def stopped_copy(self, now: float) -> Meter:
        """Return the stopped meter."""
        if self.since is None:
            return self
        return replace(self, since=None, spent=self.spent + self.billed_cost(now), ran_s=self.ran_s + now - self.since)

    def bill(self, now: float) -> Bill | None:
        """Return the bill for all measured time; None if the meter never started."""
        seconds = self.stopped_copy(now).ran_s
        if self.lease is None or (self.since is None and not seconds):
            return None
        return bill(self.lease, self.hourly, seconds)


def bill(lease: Lease, hourly: float | None, seconds: float) -> Bill:
    """Return the bill for a lease.

    Args:
        lease: The run's lease.
        hourly: Price of the whole lease for an hour, None without one.
        seconds: The metered seconds.
    """
    if lease.device_type == CPU and hourly is None:
        return Bill()
    return Bill(float(device_count(lease) * billed_s(seconds)), cost_of(hourly, seconds))


@dataclass(eq=False, slots=True)
class ScheduledRun:
    """The scheduler's view of a run. The service's `PoolRun` has one.

    Any part may read it. Only `RunTable` changes it, except for `spec`.

    Args:
        spec: As submitted; `detach` may become true later.
        state: Its state.
        number: Its place in the order of submission; 0 before that.
        queued_at: When it was queued or requeued; its waiting time counts from here, across refused leases.
        request: What it takes in this pool; None until the pool's inventory is known.
        accepted: Whether it was accepted: from then on it can only end, not be refused.
        lease: What it holds; None while it waits.
        freed: Whether the lease was given back because no process is left, while its final event is yet to come.
        begun: Whether the agent has reported on it, so that its lease can't be returned any more.
        meter: How long it has had its devices. Its time limit uses this time.
        passed_at: When a later run of its own user first passed it in the queue; None when none has.
        overtaken_at: When a later run of another user first got devices of its line while it was its user's first
            there; None when none has.
        stopping_as: The final state of a stop in progress; None otherwise.
        limit: The limit that ends it; None if none does.
        reason: Why it is ending or has ended; None otherwise, or without a known reason.
        unstopped: Ranks of its session that still run it after its end.
        remaining: Its ranks that were killed and have not ended.
        restarting: For a session, the ranks that are being restarted, all if empty: no cell may start. None otherwise.
        quiet_since: For a session, since when no cell has run in it; None before it is RUNNING. Counts only while
            no cell runs.
        have_ranks_exited: For a session, whether its ranks have exited while it still holds its lease for `--fresh`
            cells on it.
        orphaned: For a `--fresh` cell, whether its session is unknown to the service, so that the cell itself holds
            the devices.
        asked: Whether its lease has no devices yet, because the engine asks the cluster for nodes.
        cost_reported: Whether it was warned that its own cost limit is near.
        budget_reported: Whether it was warned that the pool's budget is nearly used up.
    """

    spec: RunSpec
    state: RunState = RunState.QUEUED
    number: int = 0
    queued_at: float = 0.0
    request: ResourceRequest | None = None
    accepted: bool = False
    lease: Lease | None = None
    freed: bool = False
    begun: bool = False
    meter: Meter = field(default_factory=Meter)
    passed_at: float | None = None
    overtaken_at: float | None = None
    stopping_as: RunState | None = None
    limit: RunLimit | None = None
    reason: EndReason | None = None
    unstopped: tuple[int, ...] = ()
    remaining: tuple[RemainingRank, ...] = ()
    restarting: tuple[int, ...] | None = None
    quiet_since: float | None = None
    have_ranks_exited: bool = False
    orphaned: bool = False
    asked: bool = False
    cost_reported: bool = False
    budget_reported: bool = False

    @property
    def run_id(self) -> str:
        return self.spec.run_id

    @property
    def is_session(self) -> bool:
        return self.spec.kind is RunKind.SESSION

    @property
    def is_open(self) -> bool:
        """Whether a session accepts cells."""
        return not (self.have_ranks_exited or self.state.is_final or self.state is RunState.CANCELLING)

    @property
    def held_lease(self) -> Lease | None:
        """The lease that it holds exclusively; None for a cell, since its session holds the devices."""
        return None if self.freed or (self.spec.session and not self.orphaned) else self.lease

    @property
    def queue_deadline(self) -> float | None:
        if (self.lease is not None and not self.asked) or self.spec.wait_s is None:
            return None
        return None if self.request is None and not self.spec.session else self.queued_at + self.spec.wait_s

    @property
    def is_on_meter(self) -> bool:
        """Whether its meter runs and it is not being stopped."""
        return self.meter.since is not None and self.state in _RUNS_ON_METER

    @property
    def time_limit(self) -> float | None:
        if self.meter.since is None or not self.is_on_meter:
            return None
        return self.meter.since + max(0.0, self.spec.timeout_s - self.meter.ran_s)

    @property
    def cost_limit(self) -> float | None:
        """When it reaches its cost limit; None while it costs nothing, or without a limit."""
        meter = self.meter
        if meter.since is None or self.spec.max_cost is None or not meter.hourly or not self.is_on_meter:
            return None
        return meter.since + max(0.0, self.spec.max_cost - meter.spent) / meter.hourly * HOUR_S

    @property
    def cost_warning(self) -> float | None:
        """When its followers are warned that the cost limit is near; None without a `cost_limit`."""
        if (limit := self.cost_limit) is None or self.meter.since is None:
            return None
        return self.meter.since + WARN_SHARE * (limit - self.meter.since)
