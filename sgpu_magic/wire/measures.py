"""Records of where ranks are and what they use: stacks, collectives, memory, samples."""

from __future__ import annotations

from sgpu_magic.wire.record import Record


class StackFrame(Record, frozen=True):
    """One line of a Python stack. `file` is as Python has it; a notebook's cell is `<ipython-input-7-...>`."""

    file: str
    line: int
    function: str


class Collective(Record, frozen=True, kw_only=True):
    """One entry of torch's flight recorder.

    Args:
        name: Such as `all_reduce`.
        seq: Its number in the process group, from 1; alike on all ranks.
        pending: The rank has entered it and it is not done.
        group: The process group's name, "" for the default one.
    """

    name: str
    seq: int
    pending: bool
    group: str = ""


class RankStack(Record, frozen=True, kw_only=True):
    """Where one rank is.

    Args:
        rank: The rank.
        frames: Its main thread's Python stack, innermost first; empty when it could not be had.
        collective: What the flight recorder has of it; None when it has nothing.
        problem: Why the stack is missing, "" when it is not.
    """

    rank: int
    frames: tuple[StackFrame, ...] = ()
    collective: Collective | None = None
    problem: str = ""


class TensorUse(Record, frozen=True, kw_only=True):
    """One tensor that held memory.

    Args:
        name: Where it hangs: `model.layers.0.weight`, `batch (in train, line 14)`; "" when that is not known.
        shape: Its shape.
        dtype: Such as `float32`.
        device: Such as `cuda:0`.
        size_bytes: Of its storage.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    size_bytes: int


class RankMemory(Record, frozen=True, kw_only=True):
    """What a rank's device memory was used for when an allocation failed. On CPU: the rank's own memory.

    Args:
        device: Such as `cuda:0` or `cpu`.
        used_bytes: Held by tensors; on CPU the rank's resident memory.
        reserved_bytes: Held by torch's allocator, with what it caches; 0 on CPU.
        free_bytes: Free on the device, or on the machine.
        total_bytes: The device's, or the machine's.
        largest: The largest tensors, largest first; only of the rank whose allocation failed.
    """

    device: str
    used_bytes: int
    free_bytes: int
    total_bytes: int
    reserved_bytes: int = 0
    largest: tuple[TensorUse, ...] = ()


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
