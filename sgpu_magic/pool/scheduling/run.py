"""What the scheduler knows of one run, its meter, and how its times are worded. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from sgpu_magic.pool.scheduling.capacity import Want
from sgpu_magic.wire.costs import HOUR_S, billed_s, cost_of, device_count
from sgpu_magic.wire.devices import CPU, Lease
from sgpu_magic.wire.run import RunSpec
from sgpu_magic.wire.states import RunState

WARN_SHARE = 0.8
"""Of a cost limit or a budget: who uses more is told."""

_RUNS_ON_METER = (RunState.STARTING, RunState.RUNNING)


class Bill(msgspec.Struct, frozen=True):
    """What a run was billed.

    Args:
        gpu_s: Seconds of devices, of all together; None on CPU slots without a price.
        cost: Theirs; None without a price.
    """

    gpu_s: float | None = None
    cost: float | None = None


class Meter(msgspec.Struct, frozen=True):
    """For how long a run has its devices, and what that costs; seconds of the scheduler's clock.

    Args:
        lease: What it counts: what the run has, or had before it waited again; None before the first.
        hourly: What that costs in an hour, all together; None without a price, and of what runs in a session.
        since: From when it counts; None while it stands still.
        spent: What it cost before `since`.
        ran_s: The seconds that it counted before `since`.
    """

    lease: Lease | None = None
    hourly: float | None = None
    since: float | None = None
    spent: float = 0.0
    ran_s: float = 0.0

    def running_cost(self, now: float) -> float:
        """Return what it has cost since `since`, to the fraction of a second."""
        return 0.0 if self.since is None else (self.hourly or 0.0) * (now - self.since) / HOUR_S

    def billed_cost(self, now: float) -> float:
        """The same, with each second that has begun whole."""
        return 0.0 if self.since is None else cost_of(self.hourly, now - self.since) or 0.0

    def stopped(self, now: float) -> Meter:
        """Return it as it stands still."""
        if self.since is None:
            return self
        return replace(self, since=None, spent=self.spent + self.billed_cost(now), ran_s=self.ran_s + now - self.since)

    def bill(self, now: float) -> Bill | None:
        """Return what all of it comes to; None where it never began."""
        seconds = self.stopped(now).ran_s
        if self.lease is None or (self.since is None and not seconds):
            return None
        return bill(self.lease, self.hourly, seconds)


def bill(lease: Lease, hourly: float | None, seconds: float) -> Bill:
    """Return what a lease's time comes to.

    Args:
        lease: The run's.
        hourly: Price of all its devices for an hour, None without one.
        seconds: On the meter.
    """
    if lease.device_type == CPU and hourly is None:
        return Bill()
    return Bill(float(device_count(lease) * billed_s(seconds)), cost_of(hourly, seconds))


@dataclass(eq=False, slots=True)
class Run:
    """A run, as the scheduler has it. The service's `PoolRun` is the same object, and has more.

    Everybody may read it. `RunTable` alone changes it, but for `spec`.

    Args:
        spec: As submitted; `detach` may become true later.
        state: Its state.
        number: Its place in the order of submission; 0 before that.
        queued_at: When it came, or came back, into the queue; its time there counts from here, across refused leases.
        want: What it takes in this pool; None until the pool's inventory is known.
        accepted: Too late to refuse it: from now on it can only end.
        lease: What it holds; None while it waits.
        freed: The lease is given back, since no process of it is left; its last word is still to come.
        begun: The agent has reported on it, so its lease can't be handed back any more.
        meter: How long it has had its devices. Its time limit counts by it.
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
        orphaned: Of new processes in a session: no service knows the session any more, so they hold its devices.
        asked: Its lease has no devices yet: the engine asks the cluster for nodes.
        cost_told: It was told that its own cost limit is near.
        budget_told: It was told that the pool's budget is nearly used up.
    """

    spec: RunSpec
    state: RunState = RunState.QUEUED
    number: int = 0
    queued_at: float = 0.0
    want: Want | None = None
    accepted: bool = False
    lease: Lease | None = None
    freed: bool = False
    begun: bool = False
    meter: Meter = field(default_factory=Meter)
    passed_at: float | None = None
    overtaken_at: float | None = None
    stopping_as: RunState | None = None
    told: tuple[int, str] | None = None
    reason: str = ""
    unstopped: tuple[int, ...] = ()
    paused: str = ""
    quiet_since: float | None = None
    gone: bool = False
    orphaned: bool = False
    asked: bool = False
    cost_told: bool = False
    budget_told: bool = False

    @property
    def run_id(self) -> str:
        return self.spec.run_id

    @property
    def held_lease(self) -> Lease | None:
        """The devices that nobody else may have; none of a cell, for its session holds them."""
        return None if self.freed or (self.spec.session and not self.orphaned) else self.lease

    @property
    def queue_deadline(self) -> float | None:
        if (self.lease is not None and not self.asked) or self.spec.wait_s is None:
            return None
        if self.want is None and not self.spec.session:
            return None
        return self.queued_at + self.spec.wait_s

    @property
    def is_on_meter(self) -> bool:
        """It holds its devices for ranks and is not being stopped."""
        return self.meter.since is not None and self.state in _RUNS_ON_METER

    @property
    def time_limit(self) -> float | None:
        if self.meter.since is None or not self.is_on_meter:
            return None
        return self.meter.since + max(0.0, self.spec.timeout_s - self.meter.ran_s)

    @property
    def cost_limit(self) -> float | None:
        """When it has cost as much as it may; None while it costs nothing, or may cost anything."""
        meter = self.meter
        if meter.since is None or self.spec.max_cost is None or not meter.hourly or not self.is_on_meter:
            return None
        return meter.since + max(0.0, self.spec.max_cost - meter.spent) / meter.hourly * HOUR_S

    @property
    def cost_warning(self) -> float | None:
        """When most of that is used."""
        limit = self.cost_limit
        if limit is None or self.meter.since is None:
            return None
        return self.meter.since + WARN_SHARE * (limit - self.meter.since)


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
