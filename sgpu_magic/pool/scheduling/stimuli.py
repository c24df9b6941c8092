"""The scheduler's input and output: stimuli and instructions. Data only."""

from __future__ import annotations

import msgspec

from sgpu_magic.pool.scheduling.end_reason import CostWarning, EndReason
from sgpu_magic.pool.scheduling.run import ScheduledRun
from sgpu_magic.wire.base import ErrorKind, FailureKind, RunLimit, RunState
from sgpu_magic.wire.devices import Inventory, Lease
from sgpu_magic.wire.events import RemainingRank


class _OfRun(msgspec.Struct, frozen=True):
    run_id: str


# ---------------------------------------------------------------- stimuli


class RunSubmitted(msgspec.Struct, frozen=True):
    """A client submitted this run. `RefuseRun` follows, now or at the first inventory, if it can't be placed."""

    run: ScheduledRun


class RunAdopted(msgspec.Struct, frozen=True):
    """An earlier service launched this run, and its ranks still hold the lease.

    Args:
        run: The run, in the state that the agent reports.
        lease: The lease that it holds.
        metered_at: When its meter started, on the clock of `Scheduler.handle`.
        freed: Whether its devices were given back, as after `LeaseFreed`.
        hourly: Their hourly price when the run was placed; None for the current price.
    """

    run: ScheduledRun
    lease: Lease
    metered_at: float
    freed: bool = False
    hourly: float | None = None


class InventoryChanged(msgspec.Struct, frozen=True):
    """The pool has a new inventory."""

    inventory: Inventory


class RunMoved(_OfRun, frozen=True):
    """The agent reports a run's new state. A final one does not free the lease: the ranks still exist.

    `STARTING` after `RUNNING` means that the group is restarted on the same lease.

    Args:
        reason: Why it ended; None without a known reason.
        unstopped: Ranks of its session that still run it after its end.
    """

    state: RunState
    reason: str | None = None
    unstopped: tuple[int, ...] = ()


class CancelRequested(_OfRun, frozen=True):
    """A client or the service wants the run stopped."""

    reason: str


class RanksReaped(_OfRun, frozen=True):
    """The ranks are gone and reaped: the lease is free. `state` is final; ignored if one was already reported."""

    state: RunState


class LeaseFreed(_OfRun, frozen=True):
    """No process of the run is left, but its final event has not arrived: the next run may have its devices."""


class LeaseRefused(_OfRun, frozen=True):
    """The engine could not lock `uuids`; they count as used outside the pool until the next inventory."""

    uuids: tuple[str, ...]
    why: str


class LeaseGranted(_OfRun, frozen=True):
    """The engine has the run's devices. `lease` replaces the proposed one."""

    lease: Lease


class RunRequeued(_OfRun, frozen=True):
    """A node of the run was lost and its other ranks are gone: it returns to the queue, without a lease.

    Args:
        why: The reason, a sentence without a full stop.
    """

    why: str


class RanksRemain(_OfRun, frozen=True):
    """These ranks were killed and have not ended; none if they have, or were replaced. They keep the lease.

    Args:
        ranks: The ranks.
    """

    ranks: tuple[RemainingRank, ...]


class SessionPaused(_OfRun, frozen=True):
    """Ranks of the session are being restarted: no cell may start in it.

    Args:
        ranks: The ranks; all if empty.
    """

    ranks: tuple[int, ...]


class SessionResumed(_OfRun, frozen=True):
    """No rank of the session is being restarted any more: cells may start in it."""


class TimePassed(msgspec.Struct, frozen=True):
    """The time of `next_deadline` has been reached."""


StimulusOfRun = (
    RunMoved
    | CancelRequested
    | RanksReaped
    | LeaseFreed
    | LeaseRefused
    | LeaseGranted
    | RunRequeued
    | RanksRemain
    | SessionPaused
    | SessionResumed
)
Stimulus = RunSubmitted | RunAdopted | InventoryChanged | TimePassed | StimulusOfRun

# ---------------------------------------------------------------- instructions


class LaunchRun(_OfRun, frozen=True):
    """Lock the lease's devices and start the ranks. Answer with `RunMoved`, `LeaseRefused` or `RanksReaped`.

    In a pool of many nodes the lease is a proposal: `LeaseGranted` replaces it. A lease without devices requests nodes
    from an autoscaler.

    The lease of a run in a session is the session's, or a part of it, whose devices are already locked.
    """

    lease: Lease


class MoveRun(_OfRun, frozen=True):
    """The run's state changed to `state`: record it and tell the client.

    Args:
        reason: Why; None without a reason.
    """

    state: RunState
    reason: EndReason | None = None


class PublishWarning(_OfRun, frozen=True):
    """Warn the run's followers."""

    warning: CostWarning


class StopRun(_OfRun, frozen=True):
    """Stop a launched run; `state` is its final state, `limit` the limit that it reached, if any."""

    state: RunState
    reason: EndReason
    limit: RunLimit | None = None


class RefuseRun(_OfRun, frozen=True):
    """The run is refused, and the scheduler has forgotten it."""

    error: ErrorKind
    reason: EndReason


class EndUnstartedRun(_OfRun, frozen=True):
    """A run without ranks is over, and the scheduler has forgotten it; its `MoveRun` came just before.

    Args:
        reason: Why it failed, or who cancelled it; None without a known reason.
        kind: The failure's kind.
    """

    state: RunState
    reason: EndReason | None
    kind: FailureKind = FailureKind.CAPACITY


Instruction = LaunchRun | MoveRun | PublishWarning | StopRun | RefuseRun | EndUnstartedRun
