"""Events: what happened to a run, in the past tense. Every event of a run has a sequence number and is kept."""

from __future__ import annotations

from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.failures import Failure, RankStack
from sgpu_magic.wire.rank_events import MetricsLogged, RankSaid, RankWatched
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.run import RankResult, RunSpec
from sgpu_magic.wire.states import RunState
from sgpu_magic.wire.tracking import TrackedRun


class Submitted(Record, frozen=True, tag="submitted", kw_only=True):
    """The first event of every run: what was submitted."""

    spec: RunSpec


class StateChanged(Record, frozen=True, tag="state", kw_only=True):
    """The run moved to `state`; `reason` says why when it is worth a word."""

    state: RunState
    reason: str = ""


class QueueMoved(Record, frozen=True, tag="queue", kw_only=True):
    """The run waits: its position (1 is next) and what it waits for."""

    position: int
    reason: str


class Placed(Record, frozen=True, tag="placed", kw_only=True):
    """Devices were granted.

    Args:
        lease: Which.
        host: Their node.
        labels: Of each, in rank order.
        hourly: What all of them cost in an hour, in `currency`; None without a price. In a session it is the session
            that pays.
        currency: Such as `USD`.
    """

    lease: Lease
    host: str
    labels: tuple[str, ...] = ()
    hourly: float | None = None
    currency: str = ""


class RanksStarted(Record, frozen=True, tag="started", kw_only=True):
    """All ranks are in the process group. `pids` by local rank; `warm` says how: standby, zygote or cold."""

    pids: tuple[int, ...]
    warm: str


class Noted(Record, frozen=True, tag="note", kw_only=True):
    """A sentence for the user."""

    text: str


class AttemptFailed(Record, frozen=True, tag="attempt-failed", kw_only=True):
    """The group failed and is started again.

    Args:
        attempt: The one that failed, from 1.
        attempts: How many there may be.
        failure: Its root cause.
    """

    attempt: int
    attempts: int
    failure: Failure


class Detached(Record, frozen=True, tag="detached", kw_only=True):
    """The run goes on whatever becomes of its notebook. `reason` is who wanted it."""

    reason: str = ""


class SessionMoved(Record, frozen=True, tag="session-moved", kw_only=True):
    """A session's own event: a cell began or ended in it, or its ranks changed.

    Args:
        cells: Cells that have run in it so far, those under way included.
        running: The names of those under way.
        dead: Ranks that are dead and wait for `%sgpu_restart`.
    """

    cells: int
    running: tuple[str, ...] = ()
    dead: tuple[int, ...] = ()


class GroupRenewed(Record, frozen=True, tag="group-renewed", kw_only=True):
    """The ranks' process groups were connected anew after a cell that broke them; told to the cell and the session.

    Args:
        reason: Why, such as `rank 1 failed while others were in a collective`.
        lost: What torch did not allow to keep, a sentence; "" when every group, DDP and FSDP model goes on.
    """

    reason: str
    lost: str = ""


class RanksRestarted(Record, frozen=True, tag="ranks-restarted", kw_only=True):
    """A session's own event: these ranks are new processes.

    Args:
        ranks: Which.
        pids: Theirs.
        lost: What went with the old ones, a sentence.
    """

    ranks: tuple[int, ...]
    pids: tuple[int, ...]
    lost: str = ""


class EnvironmentMoved(Record, frozen=True, tag="environment", kw_only=True):
    """The run's packages are being made ready on its node; told from time to time, and once with `ready`.

    Args:
        host: The node.
        step: What is done now, such as `downloading` or `installing`; "" once it is ready.
        done: Packages that are there.
        packages: Packages in all.
        seconds: So far.
        ready: The environment is there.
        built: It had to be built; else it was there already.
    """

    host: str
    step: str = ""
    done: int = 0
    packages: int = 0
    seconds: float = 0.0
    ready: bool = False
    built: bool = False


class Described(Record, frozen=True, tag="described", kw_only=True):
    """What was found out about the run after it was submitted: (name, value), such as its git commit."""

    tags: tuple[tuple[str, str], ...]


class Tracked(Record, frozen=True, tag="tracked", kw_only=True):
    """The run is in MLflow."""

    tracked: TrackedRun


class PayloadReleased(Record, frozen=True, tag="payload-released", kw_only=True):
    """The pool no longer reads the payload's memory file; `kept` says whether it lies in the run's directory."""

    kept: bool
    reason: str = ""


class RunEnded(Record, frozen=True, tag="ended", kw_only=True):
    """The last word of a run, except for `PayloadReleased`.

    Args:
        state: A final state.
        failure: The root cause; None when it succeeded or was cancelled.
        reason: Who or what cancelled it, "" otherwise.
        others: Further ranks' failures, in order of time.
        results: By rank; empty unless it succeeded.
        stacks: Where the ranks were when its time was over; empty otherwise.
        unstopped: Ranks of a session that did not end the cell when they were asked to; they still run it.
        queued_s: Time in the queue.
        starting_s: From lease to all ranks in the group.
        running_s: From there to the last rank's end.
        total_s: From submission to now.
        gpu_s: Seconds of devices that were billed, of all together; None where none were, as on CPU slots without a
            price and in a session, which pays for its cells.
        cost: Theirs, in `currency`; None without a price.
        currency: Such as `USD`.
    """

    state: RunState
    failure: Failure | None = None
    reason: str = ""
    others: tuple[Failure, ...] = ()
    results: tuple[RankResult, ...] = ()
    stacks: tuple[RankStack, ...] = ()
    unstopped: tuple[int, ...] = ()
    queued_s: float = 0.0
    starting_s: float = 0.0
    running_s: float = 0.0
    total_s: float = 0.0
    gpu_s: float | None = None
    cost: float | None = None
    currency: str = ""


RunMoved = Submitted | StateChanged | QueueMoved | Placed | RanksStarted
SessionEvent = SessionMoved | GroupRenewed | RanksRestarted
RunLearned = EnvironmentMoved | Described | Tracked
RunTold = Noted | AttemptFailed | Detached
EndEvent = PayloadReleased | RunEnded
EventBody = RunMoved | RankSaid | RunTold | RankWatched | SessionEvent | RunLearned | MetricsLogged | EndEvent


class Event(Record, frozen=True, tag="event", kw_only=True):
    """One event as the pool keeps and sends it. Raw frames may follow: exceptions and inline results.

    Args:
        run_id: The run.
        seq: 1, 2, 3 ... without gaps.
        at: Wall-clock time, seconds since the epoch.
        number: The agent's own number of it; 0 for an event of the pool service.
        part: The index of the agent's node among those of the run.
        joined: (part, number) of the events of other nodes that this one stands for too.
    """

    run_id: str
    seq: int
    at: float
    body: EventBody
    number: int = 0
    part: int = 0
    joined: tuple[tuple[int, int], ...] = ()
