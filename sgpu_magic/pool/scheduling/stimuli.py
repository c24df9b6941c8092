"""What the scheduler hears and what it says: stimuli and instructions. Data only."""

from __future__ import annotations

import msgspec

from sgpu_magic.pool.scheduling.run import Run
from sgpu_magic.wire.devices import Inventory, Lease
from sgpu_magic.wire.states import FailureKind, RunState

# ---------------------------------------------------------------- stimuli


class RunSubmitted(msgspec.Struct, frozen=True):
    """A client wants this run; the answer, or the first inventory's, has a `RefuseRun` if it can't be."""

    run: Run
    now: float


class RunAdopted(msgspec.Struct, frozen=True):
    """An earlier service launched this run, and its ranks still hold the lease.

    Args:
        run: In the state in which the agent has it.
        metered_at: When it was launched, on the clock of `now`.
        freed: Its devices were given back: as after `LeaseFreed`.
        hourly: What they cost in an hour when the run was placed; None for what they cost now.
    """

    run: Run
    lease: Lease
    metered_at: float
    now: float
    freed: bool = False
    hourly: float | None = None


class InventoryChanged(msgspec.Struct, frozen=True):
    """The node was looked at, and has this now."""

    inventory: Inventory
    now: float


class RunMoved(msgspec.Struct, frozen=True):
    """The agent reports a run's new state. A final one does not free the lease: the ranks still exist.

    `STARTING` after `RUNNING` is a group that is started again on the same lease.

    Args:
        reason: Why it ended, "" when that is not worth a word.
        unstopped: Ranks of its session that still run it after its end.
    """

    run_id: str
    state: RunState
    now: float
    reason: str = ""
    unstopped: tuple[int, ...] = ()


class CancelRequested(msgspec.Struct, frozen=True):
    """Somebody wants the run stopped."""

    run_id: str
    reason: str
    now: float


class RunOver(msgspec.Struct, frozen=True):
    """The ranks are gone and reaped: the lease is free. `state` is final; ignored where one was reported."""

    run_id: str
    state: RunState
    now: float


class LeaseFreed(msgspec.Struct, frozen=True):
    """No process of the run is left, and its last word is still on its way: the next run may have its devices."""

    run_id: str
    now: float


class LeaseRefused(msgspec.Struct, frozen=True):
    """The engine could not take the locks of `uuids`; they count as used outside until the next inventory."""

    run_id: str
    uuids: tuple[str, ...]
    why: str
    now: float


class LeaseGranted(msgspec.Struct, frozen=True):
    """The engine has the run's devices. `lease` takes the place of the one that was proposed."""

    run_id: str
    lease: Lease
    now: float


class RunRequeued(msgspec.Struct, frozen=True):
    """A node of the run was lost, and nothing is left of it elsewhere: it goes back to the queue, without a lease.

    Args:
        why: A sentence, without a full stop.
    """

    run_id: str
    why: str
    now: float


class SessionPaused(msgspec.Struct, frozen=True):
    """No cell shall begin in the session for now. `reason` is what a cell that waits is told; "" lets them go on."""

    run_id: str
    reason: str
    now: float


class TimePassed(msgspec.Struct, frozen=True):
    """The time of `next_deadline` has come."""

    now: float


StimulusOfRun = (
    RunMoved | CancelRequested | RunOver | LeaseFreed | LeaseRefused | LeaseGranted | RunRequeued | SessionPaused
)
Stimulus = RunSubmitted | RunAdopted | InventoryChanged | TimePassed | StimulusOfRun

# ---------------------------------------------------------------- instructions


class LaunchRun(msgspec.Struct, frozen=True):
    """Take the lease's locks and start the ranks. Answer with `RunMoved`, `LeaseRefused` or `RunOver`.

    In a pool of many nodes the lease is a proposal: `LeaseGranted` tells of another. One without devices asks for nodes
    that an autoscaler has to bring.

    The lease of a run in a session is the session's, or a part of it: its locks are taken already.
    """

    run_id: str
    lease: Lease


class MoveRun(msgspec.Struct, frozen=True):
    """The run's state is `state` from now on: tell the client, write it down."""

    run_id: str
    state: RunState
    reason: str = ""


class TellQueue(msgspec.Struct, frozen=True):
    """The run waits at `position` (1 is next) of its line or session; given only when something changed.

    Where very many wait, some are told later: `Scheduler.waiting` has it as it is.
    """

    run_id: str
    position: int
    reason: str


class Remark(msgspec.Struct, frozen=True):
    """Tell who follows the run this sentence."""

    run_id: str
    text: str


class StopRun(msgspec.Struct, frozen=True):
    """Take the stop path with a launched run; `state` is what it ends as."""

    run_id: str
    state: RunState
    reason: str


class RefuseRun(msgspec.Struct, frozen=True):
    """The run is not accepted and forgotten here. `error` names the class in `errors`."""

    run_id: str
    error: str
    message: str


class EndRun(msgspec.Struct, frozen=True):
    """A run that has no ranks is over and forgotten here; its `MoveRun` came just before.

    Args:
        reason: A failure's message, or who cancelled it.
        kind: A failure's kind.
    """

    run_id: str
    state: RunState
    reason: str
    kind: FailureKind = FailureKind.CAPACITY


Instruction = LaunchRun | MoveRun | TellQueue | Remark | StopRun | RefuseRun | EndRun
