"""Events of ranks: output, displays, what their widgets say, failures, stalls, measures. Part of `events`."""

from __future__ import annotations

from collections.abc import Mapping

from sgpu_magic.wire.failures import Failure, RankStack
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.tracking import MetricPoint

IDLE_GPU_PCT = 5.0
"""A GPU that is busier than this works."""


class RankSample(Record, frozen=True, kw_only=True, array_like=True):
    """What one rank and its device did in the last interval. None is what nobody tells.

    An array on the wire: there is one for each rank and interval of a run's whole life.

    Args:
        rank: The rank.
        kind: `gpu`, `mig` (a slice of one) or `cpu` (no device, or a simulated one).
        uuid: The device's, "" on CPU and in all but the rank's first sample.
        utilization_pct: How busy the device was, 0 to 100; None on a MIG slice and on CPU.
        own_utilization_pct: The part of it that is this run's own processes.
        used_bytes: Memory in use on the device, by everybody.
        own_bytes: The part of it that is this run's own processes.
        total_bytes: The device's memory; on CPU the memory that the rank may use. Only in the rank's first sample.
        power_w: Watts drawn.
        temperature_c: Degrees Celsius.
        cpu_cores: Cores that the rank's processes kept busy: 2.5 are two and a half.
        rss_bytes: Resident memory of the rank's processes. Pages that they share with others count in full.
        problem: Why the device can't be read any more, "" when it can.
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
    problem: str = ""


class CommMessage(Record, frozen=True, kw_only=True):
    """One comm message. Its buffers are raw frames beside the record that carries it.

    Args:
        comm_id: The comm, as the rank knows it.
        kind: `open`, `msg` or `close`.
        target: The target's name where `kind` is `open`.
        data: JSON.
        metadata: JSON.
        buffers: How many of the raw frames belong to it.
    """

    comm_id: str
    kind: str
    target: str = ""
    data: bytes = b"{}"
    metadata: bytes = b"{}"
    buffers: int = 0


def can_merge(older: Mapping[str, object], newer: Mapping[str, object], nothing: object) -> bool:
    """Whether an update of traits may take an older one's place, the rest of which stays.

    A trait that is emptied again after it was set is a message of its own, as plotly's figures send them.

    Args:
        older: The traits' values.
        newer: The same, later.
        nothing: How `None` is written there.
    """
    return all((older[name] == nothing) == (value == nothing) for name, value in newer.items() if name in older)


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


class MetricsLogged(Record, frozen=True, tag="metrics", kw_only=True):
    """What a rank's own code told MLflow about the run. As in `MetricsReported`."""

    rank: int
    metrics: tuple[MetricPoint, ...] = ()
    params: tuple[tuple[str, str], ...] = ()
    tags: tuple[tuple[str, str], ...] = ()


RankSaid = OutputWritten | DisplayPublished | OutputCleared | CommsMoved | RankFailed
RankWatched = Stalled | Resumed | Sampled | DeviceIdle | DeviceBusy
