"""Records that messages are made of: devices, leases, specs, failures, payload references."""

from __future__ import annotations

import msgspec

from sgpu_magic.protocol.states import FailureKind


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of the records: immutable, defaults left out on the wire."""


class Device(Record, frozen=True, kw_only=True):
    """One GPU (or simulated GPU) of a node.

    Args:
        uuid: NVML's UUID, `SIM-a10-0` for a simulated one. The only key a device is known by.
        type: Canonical short type, lower case: `a10`, `h100`.
        name: NVML's full name.
        index: Position on its node in PCI bus order, for display.
        memory_bytes: Total memory; 0 when unknown.
        simulated: True when CPU processes stand in for it.
        used_bytes: Memory in use now; None when the driver does not tell.
        utilization_pct: 0 to 100; None when the driver does not tell.
        outside_use: Why it counts as in use outside the pool, "" when it does not.
    """

    uuid: str
    type: str
    name: str = ""
    index: int = 0
    memory_bytes: int = 0
    simulated: bool = False
    used_bytes: int | None = None
    utilization_pct: float | None = None
    outside_use: str = ""


class Inventory(Record, frozen=True, kw_only=True):
    """What a node really has. `problem` says why NVML could not tell, "" when it could or no driver exists."""

    host: str
    devices: tuple[Device, ...] = ()
    cpu_slots: int = 16
    cores: int = 1
    problem: str = ""


class Placement(Record, frozen=True, kw_only=True):
    """What a run asks for.

    Args:
        ranks: Number of ranks, at least 1.
        device_type: Canonical type, `cpu`, or `any` (the pool's choice: GPUs where there are, else CPU).
        allow_busy: Also take devices that others use.
        stand_in: Run on CPU where the pool lacks the type (`SGPU_STAND_IN=cpu`).
    """

    ranks: int
    device_type: str = "any"
    allow_busy: bool = False
    stand_in: bool = False


class Lease(Record, frozen=True, kw_only=True):
    """Devices granted to one run.

    Args:
        lease_id: Its id.
        device_type: The type granted, `cpu` for slots.
        uuids: The devices in rank order; empty for CPU slots.
        cpu_slots: CPU slots held (0 when devices are).
        simulated: CPU stands in for the type.
        note: What the user should know, such as oversubscription; "" when nothing.
    """

    lease_id: str
    device_type: str
    ranks: int
    uuids: tuple[str, ...] = ()
    cpu_slots: int = 0
    simulated: bool = False
    note: str = ""


class InlinePayload(Record, frozen=True, tag="inline", kw_only=True):
    """The packed bytes are the message's first raw frame."""


class SharedPayload(Record, frozen=True, tag="shared", kw_only=True):
    """The packed bytes lie in a memory file of a live process: `/proc/<pid>/fd/<fd>`."""

    pid: int
    fd: int
    size: int


class FilePayload(Record, frozen=True, tag="file", kw_only=True):
    """The packed bytes lie in a file on the node, used when memory is short."""

    path: str
    size: int


PayloadSource = InlinePayload | SharedPayload | FilePayload


class PackedLayout(Record, frozen=True, kw_only=True):
    """How one packed object lies in its bytes: `[pickle][buffer 0][buffer 1]...`.

    Args:
        pickle_size: Bytes of the pickle stream at offset 0.
        buffers: (offset, size) of each out-of-band buffer, 64-byte aligned, in pickle order.
        mac: HMAC-SHA256 under the run's key over the pickle stream and this table; checked before unpickling.
            Buffers are raw data that nothing unpickles, so they are not covered.
    """

    pickle_size: int
    buffers: tuple[tuple[int, int], ...]
    mac: bytes


class Payload(Record, frozen=True, kw_only=True):
    source: PayloadSource
    layout: PackedLayout


class OutputName(Record, frozen=True):
    """One name of `--out`: rank 0's value, or all ranks' as a list."""

    name: str
    all_ranks: bool = False


class CellSource(Record, frozen=True, kw_only=True):
    """The cell as the notebook has it.

    Args:
        body: The code under the magic's line.
        magic_line: The magic's own line, so that line numbers are the editor's.
        execution_count: The notebook's number of the cell, None from a script.
        linecache: (file name, source, execution count or None) of other cells whose functions travel along.
    """

    body: str
    magic_line: str = ""
    execution_count: int | None = None
    linecache: tuple[tuple[str, str, int | None], ...] = ()


class Interpreter(Record, frozen=True, kw_only=True):
    """The Python that ranks run in, and what its zygote is keyed by.

    Args:
        executable: The kernel's `sys.executable`.
        key: Digest over executable, site directories' mtimes and `variables`.
        variables: Environment the zygote starts with.
    """

    executable: str
    key: str
    variables: dict[str, str]


class RankContext(Record, frozen=True, kw_only=True):
    """Where a rank starts: the kernel's place. Held in memory only; never written anywhere.

    Args:
        cwd: Working directory.
        sys_path: The kernel's `sys.path`.
        umask: The kernel's umask.
        environ: The kernel's whole `os.environ` with `--env` applied.
        key: The run's HMAC key, 32 bytes.
    """

    cwd: str
    sys_path: tuple[str, ...]
    umask: int
    environ: dict[str, str]
    key: bytes


class Owner(Record, frozen=True, kw_only=True):
    """Who submitted a run.

    Args:
        pid: The kernel's process.
        host: Its machine.
        user: Whose it is.
        notebook: The notebook's file, "" where the front end does not tell.
        kernel: The id that a Jupyter server has given the kernel, "" where none has.
        cell: The cell's id in its notebook, "" where the front end does not tell.
    """

    pid: int
    host: str
    user: str
    notebook: str = ""
    kernel: str = ""
    cell: str = ""


class Shipped(Record, frozen=True, kw_only=True):
    """What was captured, for the line that tells the user.

    Args:
        names: Names sent.
        total_bytes: Pickle and buffers.
        seconds: Capture and pack.
        heavy: (name, bytes) of each name over 100 MB.
        notes: Further sentences, such as a notebook variable that hides `rank`.
    """

    names: tuple[str, ...] = ()
    total_bytes: int = 0
    seconds: float = 0.0
    heavy: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()


class RunSpec(Record, frozen=True, kw_only=True):
    """One submitted cell: everything about it that may be written down.

    Args:
        timeout_s: Longest running time in seconds.
        wait_s: Longest time in the queue in seconds; None waits for ever.
        grace_s: Seconds between TERM and KILL; None is the pool's default on a cancel and 0 after a failure.
        retries: How often the group is started again after a worker's or a node's failure.
        retry_any: Also after an error of the user's code.
        detach: Goes on when its notebook is gone.
        env_names: Names (never values) given by `--env`.
    """

    run_id: str
    name: str
    cell: CellSource
    placement: Placement
    outputs: tuple[OutputName, ...]
    owner: Owner
    timeout_s: float
    wait_s: float | None = None
    grace_s: float | None = None
    retries: int = 0
    retry_any: bool = False
    detach: bool = False
    env_names: tuple[str, ...] = ()
    shipped: Shipped = Shipped()
    submitted_at: float = 0.0


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


class RankResult(Record, frozen=True, kw_only=True):
    """What one rank returned.

    Args:
        rank: The rank.
        payload: Its packed `{"names": {...}, "value": ...}`; None when it returned nothing.
        value_repr: The last expression's text as IPython shows it, "" when there was none.
        value_problem: Why the last expression's value could not travel, "" when it did.
        seconds: The cell's time on the rank.
        lines: Lines the rank printed.
        output_bytes: Bytes it printed.
    """

    rank: int
    payload: Payload | None = None
    value_repr: str = ""
    value_problem: str = ""
    seconds: float = 0.0
    lines: int = 0
    output_bytes: int = 0


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
