"""Events: what happened, in the past tense. Every event of a run has a sequence number and is kept."""

from __future__ import annotations

from sgpu_magic.protocol.records import Failure, Lease, RankResult, RankSample, RankStack, Record, RunSpec
from sgpu_magic.protocol.states import RunState

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
    """Devices were granted."""

    lease: Lease
    host: str
    labels: tuple[str, ...] = ()


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
        queued_s: Time in the queue.
        starting_s: From lease to all ranks in the group.
        running_s: From there to the last rank's end.
        total_s: From submission to now.
    """

    state: RunState
    failure: Failure | None = None
    reason: str = ""
    others: tuple[Failure, ...] = ()
    results: tuple[RankResult, ...] = ()
    stacks: tuple[RankStack, ...] = ()
    queued_s: float = 0.0
    starting_s: float = 0.0
    running_s: float = 0.0
    total_s: float = 0.0


EventBody = (
    Submitted
    | StateChanged
    | QueueMoved
    | Placed
    | RanksStarted
    | OutputWritten
    | DisplayPublished
    | OutputCleared
    | RankFailed
    | Noted
    | AttemptFailed
    | Detached
    | Stalled
    | Resumed
    | Sampled
    | DeviceIdle
    | DeviceBusy
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
    """

    run_id: str
    seq: int
    at: float
    body: EventBody
    number: int = 0
