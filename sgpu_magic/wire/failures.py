"""Records of failures, and of where ranks are and what they use: stacks, collectives, memory."""

from __future__ import annotations

from sgpu_magic.wire.attachments import PackedLayout
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.states import FailureKind


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


class Failure(Record, frozen=True, kw_only=True):
    """Why one rank, or the run, failed.

    Args:
        kind: The failure's class.
        message: One line or paragraph for a person.
        rank: The rank, None when no rank is meant.
        host: Where it ran.
        at: Wall-clock time, seconds since the epoch.
        type_name: Qualified exception type, "" when there was none.
        traceback_text: The rank's traceback, plain.
        traceback_ansi: The same as IPython colours it.
        line: The cell's line at which the rank was, None when unknown.
        where: What the rank was in, such as `all_reduce`; "" when unknown.
        exit_status: The process's exit code, negative for a signal.
        pid: The process that died; None when none did.
        stack: Where it was last, innermost first; empty when unknown or told by `traceback_text`.
        is_consequence: True when it looks like the effect of a peer's failure.
        exception: The packed exception's layout; its bytes are a raw frame. None when it can't be pickled.
        out_of_memory: An allocation failed; the run's `memory` tells what held it.
        memory: The rank's memory at that moment; None where nobody asked.
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
