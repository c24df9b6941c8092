"""Records of failures, and of a rank's stack, collective and memory use."""

from __future__ import annotations

from sgpu_magic.wire.attachments import PackedLayout
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.states import FailureKind


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
        queued: A device executes it: the rank goes on until it needs the result, wherever that is.
    """

    name: str
    seq: int
    pending: bool
    group: str = ""
    queued: bool = False


class RankStack(Record, frozen=True, kw_only=True):
    """Where one rank is.

    Args:
        rank: The rank.
        frames: Python stack of its main thread, innermost frame first; empty if unavailable.
        collective: Its entry in the flight recorder; None without one.
        problem: Why the stack is missing; "" if it is not.
        taken_at: Wall-clock time at which it was taken; 0 from earlier versions.
    """

    rank: int
    frames: tuple[StackFrame, ...] = ()
    collective: Collective | None = None
    problem: str = ""
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


class Failure(Record, frozen=True, kw_only=True):
    """Why one rank, or the run, failed.

    Args:
        kind: Class of the failure.
        message: One line or paragraph for the user.
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
        stack: Its last stack, innermost frame first; empty if unknown or contained in `traceback_text`.
        is_consequence: Probably caused by the failure of a peer.
        exception: Layout of the packed exception, whose bytes are a raw frame; None if it cannot be pickled.
        out_of_memory: An allocation failed. `memory` in the run's failures shows what held the memory.
        memory: The rank's memory at that moment; None if it was not collected.
    """

    kind: FailureKind
    message: str
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
    stack: tuple[StackFrame, ...] = ()
    is_consequence: bool = False
    exception: PackedLayout | None = None
    out_of_memory: bool = False
    memory: RankMemory | None = None
