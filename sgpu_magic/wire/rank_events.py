"""Events of ranks: output, displays, widget messages, failures with stacks and memory use, stalls, measurements."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from sgpu_magic.wire.attachments import PackedLayout
from sgpu_magic.wire.base import FailureKind, Record
from sgpu_magic.wire.option_text import TextWithOptions
from sgpu_magic.wire.tracking import MetricPoint

IDLE_GPU_PCT = 5.0
"""A GPU above this utilization counts as busy."""


# ---------------------------------------------------------------- failures, stacks, memory use


class StackFrame(Record, frozen=True):
    """One line of a Python stack. `file` is Python's file name; a notebook's cell is `<ipython-input-7-...>`."""

    file: str
    line: int
    function: str


class Collective(Record, frozen=True, kw_only=True):
    """One entry of torch's flight recorder.

    Args:
        name: Name, such as `all_reduce`.
        seq: Sequence number in the process group, from 1; the same on all ranks.
        pending: The rank has entered it and it is not complete.
        group: Name of the process group; "" for the default group.
        queued: It is queued on a device, so the rank continues until it needs the result.
    """

    name: str
    seq: int
    pending: bool
    group: str = ""
    queued: bool = False

    @property
    def label(self) -> str:
        """Such as `all_reduce #41 of group tensor`."""
        of_group = f" of group {self.group}" if self.group else ""
        return f"{self.name} #{self.seq}{of_group}"


class CollectiveTimeout(Record, frozen=True, kw_only=True):
    """A collective that did not complete in time, so that torch aborted the rank that waited in it.

    Args:
        collective: The collective; None if torch did not name it.
        seconds: The limit; None if it is unknown.
    """

    collective: Collective | None = None
    seconds: float | None = None


class RankStack(Record, frozen=True, kw_only=True):
    """Where one rank is.

    Args:
        rank: The rank.
        frames: Python stack of its main thread, innermost frame first; empty if unavailable.
        collective: Its entry in the flight recorder; None without one.
        problem: Why the stack is missing; None if it is not.
        taken_at: Wall-clock time at which it was taken.
    """

    rank: int
    frames: tuple[StackFrame, ...] = ()
    collective: Collective | None = None
    problem: str | None = None
    taken_at: float = 0.0


class TensorUse(Record, frozen=True, kw_only=True):
    """One tensor that held memory.

    Args:
        name: Where it is referenced: `model.layers.0.weight`, `batch (in train, line 14)`; "" if unknown.
        shape: Shape.
        dtype: Data type, such as `float32`.
        device: Device, such as `cuda:0`.
        size_bytes: Size of its storage.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    size_bytes: int


class RankMemory(Record, frozen=True, kw_only=True):
    """Use of a rank's device memory when an allocation failed. On CPU: the rank's own memory.

    Args:
        device: Device, such as `cuda:0` or `cpu`.
        used_bytes: Held by tensors; on CPU the rank's resident memory.
        reserved_bytes: Held by torch's allocator, including its cache; 0 on CPU.
        free_bytes: Free on the device, or on the machine.
        total_bytes: Total of the device, or of the machine.
        largest: The largest tensors, largest first; only for the rank whose allocation failed.
    """

    device: str
    used_bytes: int
    free_bytes: int
    total_bytes: int
    reserved_bytes: int = 0
    largest: tuple[TensorUse, ...] = ()


class Death(Record, frozen=True, kw_only=True):
    """How a rank's process ended if it did not report why.

    Args:
        what: What happened to it, without the rank: `was killed by SIGKILL: out of memory`.
        last_line: The last Python line that it executed; "" if unknown.
        line_age_s: Seconds from that line to its end; 0 if they were not more than a sampling interval.
        last_output: The last lines of its output.
    """

    what: str
    last_line: str = ""
    line_age_s: float = 0.0
    last_output: tuple[str, ...] = ()


class Failure(Record, frozen=True, kw_only=True):
    """Why one rank, or the run, failed.

    Args:
        kind: Class of the failure.
        message: One line or paragraph for the user. Options in it are spelled as on a command line.
        text: The message with the options that it names as data; None if it names none.
        rank: The rank; None if the failure is not of one rank.
        host: Host where it ran.
        at: Wall-clock time, seconds since the epoch.
        type_name: Qualified exception type; "" without an exception.
        traceback_text: The rank's traceback, plain.
        traceback_ansi: The same in IPython's ANSI colours.
        line: Line of the cell that the rank was executing; None if unknown.
        where: Operation that the rank was in, such as `all_reduce`; "" if unknown.
        exit_status: Exit code of the process, negative for a signal.
        pid: Process that died; None if none did.
        death: How it died, if it did not report why; None for other failures.
        stack: Its last stack, innermost frame first; empty if unknown or contained in `traceback_text`.
        is_consequence: A collective raised it, as after the loss of a peer. It is the root cause only if no rank failed
            by itself.
        collective_timeout: The collective in which it waited too long, so that torch aborted it: other ranks have not
            reached it.
        after_stop: It followed the agent's order to stop the rank, as its `KeyboardInterrupt` does. It is the root
            cause only if no failure came before.
        exception: Layout of the packed exception, whose bytes are a raw frame; None if it cannot be pickled.
        out_of_memory: An allocation failed. `memory` in the run's failures shows what held the memory.
        memory: The rank's memory at that moment; None if it was not collected.
        missing_module: The module that a `ModuleNotFoundError` names; "" for other failures.
        missing_file: The path that a `FileNotFoundError` names, relative to the working directory if it is below that;
            "" for other failures.
    """

    kind: FailureKind
    message: str
    text: TextWithOptions | None = None
    rank: int | None = None
    host: str = ""
    at: float = 0.0
    type_name: str = ""
    traceback_text: str = ""
    traceback_ansi: str = ""
    line: int | None = None
    where: str = ""
    exit_status: int | None = None
    pid: int | None = None
    death: Death | None = None
    stack: tuple[StackFrame, ...] = ()
    is_consequence: bool = False
    after_stop: bool = False
    collective_timeout: CollectiveTimeout | None = None
    exception: PackedLayout | None = None
    out_of_memory: bool = False
    memory: RankMemory | None = None
    missing_module: str = ""
    missing_file: str = ""


# ---------------------------------------------------------------- measurements and widgets


class RankSample(Record, frozen=True, kw_only=True, array_like=True):
    """Measurements of one rank and its device in the last interval. None means unavailable.

    Encoded as an array, because a run has one for each rank and interval.

    Args:
        rank: The rank.
        kind: `gpu`, `mig` (a slice of one) or `cpu` (no device, or a simulated one).
        uuid: The device's UUID; "" on CPU and in all but the rank's first sample.
        utilization_pct: Utilization of the device, 0 to 100; None on a MIG slice and on CPU.
        own_utilization_pct: The part of it caused by this run's own processes.
        used_bytes: Memory in use on the device, by all processes.
        own_bytes: The part of it used by this run's own processes.
        total_bytes: Memory of the device; on CPU the memory that the rank may use. Only in the rank's first sample.
        power_w: Power draw in watts.
        temperature_c: Temperature in degrees Celsius.
        cpu_cores: Number of cores that the rank's processes kept busy, such as 2.5.
        rss_bytes: Resident memory of the rank's processes. Pages that they share with each other count once.
        problem: Why the device can no longer be read; None if it can.
        cores: The rank's share of its node's cores. Only in its first sample.
        line: Where a rank that has printed nothing is in its cell: `line 3: import torch`; "" when that is unknown.
        waits_in: The collective that it has waited in for some seconds; "" for none.
    """

    rank: int
    kind: str
    uuid: str = ""
    utilization_pct: float | None = None
    own_utilization_pct: float | None = None
    used_bytes: int | None = None
    own_bytes: int | None = None
    total_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    cpu_cores: float | None = None
    rss_bytes: int | None = None
    problem: str | None = None
    cores: int | None = None
    line: str = ""
    waits_in: str = ""

    def cpu_pct(self, cores: float) -> float | None:
        """Return the share of so many CPU cores that the rank's processes kept busy, 0 to 100; None if unknown."""
        return None if self.cpu_cores is None else min(100.0, 100.0 * self.cpu_cores / cores)


class CommMessage(Record, frozen=True, kw_only=True):
    """One Jupyter comm message. Its buffers are raw frames beside the record that carries it.

    Args:
        comm_id: Id of the comm in the rank.
        kind: `open`, `msg` or `close`.
        target: Name of the target if `kind` is `open`.
        data: JSON.
        metadata: JSON.
        buffers: Number of the raw frames that belong to it.
    """

    comm_id: str
    kind: str
    target: str = ""
    data: bytes = b"{}"
    metadata: bytes = b"{}"
    buffers: int = 0


def can_merge(older: Mapping[str, object], newer: Mapping[str, object], nothing: object) -> bool:
    """Whether an update of traits may replace an older one; traits that only the older one has are kept.

    Setting a trait and emptying it again stay separate messages, which plotly's figures rely on.

    Args:
        older: The traits' values.
        newer: The values of the later update.
        nothing: How these values represent `None`.
    """
    return all((older[name] == nothing) == (value == nothing) for name, value in newer.items() if name in older)


# ---------------------------------------------------------------- events


class OfRank(Record, frozen=True, kw_only=True):
    """Base of the events that concern one rank."""

    rank: int


class OutputWritten(OfRank, frozen=True, tag="output", kw_only=True):
    """A rank wrote to its log.

    Args:
        rank: The rank.
        stream: `stdout` or `stderr`.
        text: The bytes from `start` to `end` as text, or only the tail of a large batch.
        start: Offset in the rank's log at which this batch begins.
        end: Offset after the batch.
        skipped_bytes: Number of bytes of the batch left out before `text`; they are in the log.
        skipped_lines: Number of line ends among them.
    """

    stream: str
    text: str
    start: int
    end: int
    skipped_bytes: int = 0
    skipped_lines: int = 0


class DisplayPublished(OfRank, frozen=True, tag="display", kw_only=True):
    """A rank displayed rich output.

    Args:
        rank: The rank.
        bundle: The MIME bundle, JSON.
        metadata: Its metadata, JSON.
        display_id: Id for updates; "" for none.
        update: The output replaces what `display_id` showed.
    """

    bundle: bytes
    metadata: bytes = b"{}"
    display_id: str = ""
    update: bool = False


class OutputCleared(OfRank, frozen=True, tag="clear", kw_only=True):
    """A rank called `clear_output`."""

    wait: bool = False


class CommsMoved(OfRank, frozen=True, tag="comms", kw_only=True):
    """Comm messages from a rank's widgets, in order. Their buffers are raw frames."""

    messages: tuple[CommMessage, ...]


class RankFailed(Record, frozen=True, tag="rank-failed", kw_only=True):
    """A rank failed. The run's own failure follows once the root cause is known."""

    failure: Failure


class Stalled(Record, frozen=True, tag="stalled", kw_only=True):
    """No output, CPU or GPU activity for `seconds` while ranks are in a collective. Sent again if the stacks change."""

    seconds: float
    stacks: tuple[RankStack, ...]


class Resumed(Record, frozen=True, tag="resumed", kw_only=True):
    """The run makes progress again after `Stalled`."""


class Sampled(Record, frozen=True, tag="sampled", kw_only=True):
    """Measurements of the ranks and their devices over the last `seconds`."""

    seconds: float
    samples: tuple[RankSample, ...]


class DeviceIdle(OfRank, frozen=True, tag="device-idle", kw_only=True):
    """A rank's GPU has been idle for a while.

    Args:
        rank: The rank.
        seconds: Idle time so far.
        waits_in: What the rank waits in according to its stack (`the DataLoader`, `all_reduce`); "" if unknown.
    """

    seconds: float
    waits_in: str = ""


class DeviceBusy(OfRank, frozen=True, tag="device-busy", kw_only=True):
    """A rank's GPU is busy again after `DeviceIdle`, or the rank has finished."""


class MetricsLogged(OfRank, frozen=True, tag="metrics", kw_only=True):
    """What a rank's code logged to MLflow. Fields as in `MetricsReported`."""

    metrics: tuple[MetricPoint, ...] = ()
    params: tuple[tuple[str, str], ...] = ()
    tags: tuple[tuple[str, str], ...] = ()


# ---------------------------------------------------------------- what ranks finish after their cell


class WorkKind(enum.StrEnum):
    """What a rank waits for before it exits, in the order in which Python finishes it."""

    TASK = "task"
    THREAD = "thread"
    PROCESS = "process"
    EXIT_FUNCTION = "exit function"
    OBJECT = "object"


class Unfinished(Record, frozen=True, kw_only=True):
    """Something that a rank's cell has started and that has not ended.

    Args:
        kind: What it is.
        name: The name of the thread, process or task, the function's qualified name, or the object's variable.
    """

    kind: WorkKind
    name: str


class RankUnfinished(OfRank, frozen=True, kw_only=True):
    """What one rank still finishes after its cell. `rank` is the rank."""

    work: tuple[Unfinished, ...] = ()


class RanksFinishing(Record, frozen=True, tag="finishing", kw_only=True):
    """The cell has ended on every rank, and these ranks finish what it has started. Sent again when that changes."""

    ranks: tuple[RankUnfinished, ...]


RankEvent = OutputWritten | DisplayPublished | OutputCleared | CommsMoved | RankFailed
RankWatched = Stalled | Resumed | Sampled | DeviceIdle | DeviceBusy | RanksFinishing
