"""Events: what happened, in the past tense. Every event of a run has a sequence number and is kept."""

from __future__ import annotations

from sgpu_magic.wire.comms import CommMessage
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.measures import RankSample, RankStack
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.records import Failure, RankResult, RunSpec
from sgpu_magic.wire.states import RunState
from sgpu_magic.wire.tracking import MetricPoint, TrackedRun

IDLE_GPU_PCT = 5.0
"""A GPU that is busier than this works."""


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


class OutputWritten(Record, frozen=True, tag="output", kw_only=True):
    """A rank wrote to its log.

    Args:
        rank: The rank.
        stream: `stdout` or `stderr`.
        text: The bytes from `start` to `end` as text, or only their tail when there were many.
        start: Offset in the rank's log at which this batch begins.
        end: Offset after it.
        skipped_bytes: Bytes of the batch left out before `text`; they are in the log.
        skipped_lines: Line ends among them.
    """

    rank: int
    stream: str
    text: str
    start: int
    end: int
    skipped_bytes: int = 0
    skipped_lines: int = 0


class DisplayPublished(Record, frozen=True, tag="display", kw_only=True):
    """A rank displayed something rich.

    Args:
        rank: The rank.
        bundle: The MIME bundle, JSON.
        metadata: Its metadata, JSON.
        display_id: For updates; "" when none.
        update: True when it replaces what `display_id` showed.
    """

    rank: int
    bundle: bytes
    metadata: bytes = b"{}"
    display_id: str = ""
    update: bool = False


class OutputCleared(Record, frozen=True, tag="clear", kw_only=True):
    """A rank called `clear_output`."""

    rank: int
    wait: bool = False


class CommsMoved(Record, frozen=True, tag="comms", kw_only=True):
    """A rank's widgets said something, in this order. Their buffers are raw frames."""

    rank: int
    messages: tuple[CommMessage, ...]


class RankFailed(Record, frozen=True, tag="rank-failed", kw_only=True):
    """A rank failed; the run's own failure follows when the root cause is known."""

    failure: Failure


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


class Stalled(Record, frozen=True, tag="stalled", kw_only=True):
    """No output, CPU or GPU has moved for `seconds` while ranks are in a collective; told again when it changed."""

    seconds: float
    stacks: tuple[RankStack, ...]


class Resumed(Record, frozen=True, tag="resumed", kw_only=True):
    """The run moves again after `Stalled`."""


class Sampled(Record, frozen=True, tag="sampled", kw_only=True):
    """What the ranks and their devices did in the last `seconds`."""

    seconds: float
    samples: tuple[RankSample, ...]


class DeviceIdle(Record, frozen=True, tag="device-idle", kw_only=True):
    """A rank's GPU has done nothing for a while.

    Args:
        rank: The rank.
        seconds: For how long by now.
        waits_in: What the rank does instead as far as its stack shows it (`the DataLoader`, `all_reduce`), "" if not.
    """

    rank: int
    seconds: float
    waits_in: str = ""


class DeviceBusy(Record, frozen=True, tag="device-busy", kw_only=True):
    """A rank's GPU works again after `DeviceIdle`, or the rank is done."""

    rank: int


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


class MetricsLogged(Record, frozen=True, tag="metrics", kw_only=True):
    """What a rank's own code told MLflow about the run. As in `MetricsReported`."""

    rank: int
    metrics: tuple[MetricPoint, ...] = ()
    params: tuple[tuple[str, str], ...] = ()
    tags: tuple[tuple[str, str], ...] = ()


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


EventBody = (
    Submitted
    | StateChanged
    | QueueMoved
    | Placed
    | RanksStarted
    | OutputWritten
    | DisplayPublished
    | OutputCleared
    | CommsMoved
    | RankFailed
    | Noted
    | AttemptFailed
    | Detached
    | Stalled
    | Resumed
    | Sampled
    | DeviceIdle
    | DeviceBusy
    | SessionMoved
    | GroupRenewed
    | RanksRestarted
    | EnvironmentMoved
    | Described
    | Tracked
    | MetricsLogged
    | PayloadReleased
    | RunEnded
)


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
