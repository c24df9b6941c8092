"""Events: what happened to a run, in the past tense. Each event has a sequence number and is stored."""

from __future__ import annotations

from sgpu_magic.wire.base import OfRun, Record, RunLimit, RunState
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.rank_events import Failure, MetricsLogged, RankEvent, RankStack, RankUnfinished, RankWatched
from sgpu_magic.wire.run import RankResult, RunSpec
from sgpu_magic.wire.tracking import TrackedRun

WARNING = "warning: "
"""The beginning of a note that asks the user for something; other notes are information."""


def as_warning(sentence: str) -> str:
    """Return the sentence as a note that asks the user for something."""
    return f"{WARNING}{sentence}"


class Submitted(Record, frozen=True, tag="submitted", kw_only=True):
    """The first event of every run: what was submitted."""

    spec: RunSpec


class StateChanged(Record, frozen=True, tag="state", kw_only=True):
    """The run changed to `state`. `reason` says why, if that is useful."""

    state: RunState
    reason: str = ""


class OwnSession(Record, frozen=True):
    """A session of the process that submitted the run.

    Args:
        run_id: Its run id.
        name: Its name, maybe empty.
    """

    run_id: str
    name: str


class QueueMoved(Record, frozen=True, tag="queue", kw_only=True):
    """The run is queued.

    Args:
        position: Its position; 1 is next.
        reason: What it waits for.
        own_sessions: Sessions that hold devices which it could take.
    """

    position: int
    reason: str
    own_sessions: tuple[OwnSession, ...] = ()


class Placed(Record, frozen=True, tag="placed", kw_only=True):
    """Devices were granted.

    Args:
        lease: The lease.
        host: The host of the devices.
        labels: Display name of each device, in rank order.
        hourly: Hourly price of all devices together, in `currency`; None without a price. For a cell in a session, the
            price that the session pays.
        currency: Currency, such as `USD`.
    """

    lease: Lease
    host: str
    labels: tuple[str, ...] = ()
    hourly: float | None = None
    currency: str = ""


class RanksStarted(Record, frozen=True, tag="started", kw_only=True):
    """All ranks have joined the process group.

    Args:
        pids: The ranks' process ids, by local rank.
        warm: How they started: `standby`, `zygote`, `cold`, or `session` for a session's own ranks.
    """

    pids: tuple[int, ...]
    warm: str


class RemainingRank(Record, frozen=True, kw_only=True):
    """A rank that was killed and has not ended.

    Args:
        rank: The rank.
        pid: Its process id.
        host: Where it is.
    """

    rank: int
    pid: int
    host: str


class Noted(Record, frozen=True, tag="note", kw_only=True):
    """A sentence for the user.

    Args:
        text: The sentence.
        remaining: The ranks that it is about, if they were killed and have not ended. Their devices stay leased.
    """

    text: str
    remaining: tuple[RemainingRank, ...] = ()


class AttemptFailed(Record, frozen=True, tag="attempt-failed", kw_only=True):
    """The group of ranks failed and is started again.

    Args:
        attempt: Number of the failed attempt, from 1.
        attempts: Maximum number of attempts.
        failure: Its root cause.
    """

    attempt: int
    attempts: int
    failure: Failure


class Detached(Record, frozen=True, tag="detached", kw_only=True):
    """The run was detached: it continues after its notebook exits. `reason` says why."""

    reason: str = ""


class SessionMoved(Record, frozen=True, tag="session-moved", kw_only=True):
    """Event of a session: a cell started or ended in it, or its ranks changed.

    Args:
        cells: Number of cells so far, including running ones.
        running: Names of the running cells.
        dead: Ranks that are dead until `%sgpu_restart` replaces them.
    """

    cells: int
    running: tuple[str, ...] = ()
    dead: tuple[int, ...] = ()


class GroupRenewed(Record, frozen=True, tag="group-renewed", kw_only=True):
    """The ranks' process groups were reconnected after a cell broke them. Sent to the cell and the session.

    Args:
        reason: Why, such as `rank 1 failed while others were in a collective`.
        lost: A sentence about what torch could not preserve; None if every group, DDP and FSDP model still works.
        problem: Why they could not be reconnected; None if they were.
    """

    reason: str
    lost: str | None = None
    problem: str | None = None


class RanksRestarted(Record, frozen=True, tag="ranks-restarted", kw_only=True):
    """Event of a session: these ranks are new processes.

    Args:
        ranks: The replaced ranks.
        pids: Their new process ids.
        lost: A sentence about what was lost with the old processes.
    """

    ranks: tuple[int, ...]
    pids: tuple[int, ...]
    lost: str | None = None


class EnvironmentMoved(Record, frozen=True, tag="environment", kw_only=True):
    """Progress of preparing the run's packages on its node, sent from time to time and once with `ready`.

    Args:
        host: Host name of the node.
        step: Current step, such as `downloading` or `installing`; "" once it is ready.
        done: Number of packages that are ready.
        packages: Total number of packages.
        seconds: Elapsed seconds.
        ready: The environment is ready.
        built: The environment had to be built; false if it already existed.
    """

    host: str
    step: str = ""
    done: int = 0
    packages: int = 0
    seconds: float = 0.0
    ready: bool = False
    built: bool = False


class Described(Record, frozen=True, tag="described", kw_only=True):
    """Tags that were found after the run was submitted: (name, value), such as its git commit."""

    tags: tuple[tuple[str, str], ...]


class Tracked(Record, frozen=True, tag="tracked", kw_only=True):
    """The run is tracked as an MLflow run."""

    tracked: TrackedRun


class PayloadReleased(Record, frozen=True, tag="payload-released", kw_only=True):
    """The pool no longer reads the payload's memory file. `kept` says whether the run's directory has a copy."""

    kept: bool
    reason: str = ""


class RunEnded(Record, frozen=True, tag="ended", kw_only=True):
    """The last event of a run, except for `PayloadReleased`.

    Args:
        state: The final state.
        failure: The root cause; None if the run succeeded or was cancelled.
        reason: Who or what cancelled it; "" otherwise.
        limit: The limit that ended it, if it is `TIMED_OUT` and the service knows which.
        others: Failures of further ranks, in order of time.
        results: Results by rank; empty unless the run succeeded.
        stacks: Where the ranks were when the run timed out, or was cancelled after a silence; empty otherwise.
        unstopped: Ranks of a session that were asked to stop the cell but still run it.
        cut_off: What ranks had not finished when their time was over (the setting `finish_timeout_s`).
        finish_s: The time that the ranks had to finish it; 0 if nothing was cut off.
        queued_s: Seconds in the queue.
        starting_s: Seconds from the lease until all ranks were in the group.
        running_s: Seconds from then until the last rank ended.
        total_s: Seconds from submission to this event.
        gpu_s: Billed device-seconds of all devices together. None if nothing is billed, as on CPU slots without a price
            and for cells in a session, which the session pays for.
        cost: Cost of `gpu_s` in `currency`; None without a price.
        currency: Currency, such as `USD`.
    """

    state: RunState
    failure: Failure | None = None
    reason: str = ""
    limit: RunLimit | None = None
    others: tuple[Failure, ...] = ()
    results: tuple[RankResult, ...] = ()
    stacks: tuple[RankStack, ...] = ()
    unstopped: tuple[int, ...] = ()
    cut_off: tuple[RankUnfinished, ...] = ()
    finish_s: float = 0.0
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
RunUpdate = Noted | AttemptFailed | Detached
EndEvent = PayloadReleased | RunEnded
EventBody = RunMoved | RankEvent | RunUpdate | RankWatched | SessionEvent | RunLearned | MetricsLogged | EndEvent


class Event(OfRun, frozen=True, tag="event", kw_only=True):
    """One event, as the pool service stores and sends it. Raw frames may follow: exceptions and inline results.

    Args:
        run_id: The run.
        seq: Sequence number: 1, 2, 3 ... without gaps.
        at: Wall-clock time, seconds since the epoch.
        number: The agent's own number for the event; 0 for an event of the pool service.
        part: Index of the agent's node among the run's nodes.
        joined: (part, number) of the events of other nodes that this one also represents.
    """

    seq: int
    at: float
    body: EventBody
    number: int = 0
    part: int = 0
    joined: tuple[tuple[int, int], ...] = ()
