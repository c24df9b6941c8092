"""Records of runs: what is submitted, where ranks start, what they return and are asked; the run directory's record."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from sgpu_magic.wire.attachments import PackedLayout, Payload
from sgpu_magic.wire.base import OfRun, Record, RunKind, RunState
from sgpu_magic.wire.devices import Lease, Placement

RANK_VARIABLES = frozenset(
    {
        "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "CROSS_RANK",
        "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_SIZE", "CROSS_SIZE",
        "MASTER_ADDR", "MASTER_PORT",
        "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
        "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES",
        "SGPU_RUN_ID", "SGPU_CHECKPOINT_DIR",
    }
)  # fmt: skip
"""Environment variables that each rank gets from the pool, whatever the notebook's environment has."""

RUN_RECORD = "run.json"
SETTINGS = "settings.json"
"""The file of a run's directory with `RankContext.settings`, if there are any."""

# value of `payload_note` while the payload is being written, or will be when the run has ended
UNDER_WAY = "not yet written"


class OutputName(Record, frozen=True):
    """One name of `--out`: rank 0's value, or a list of all ranks' values."""

    name: str
    all_ranks: bool = False


class CellSource(Record, frozen=True, kw_only=True):
    """A cell as written in the notebook.

    Args:
        body: The code below the magic's line.
        magic_line: The magic's own line, so that line numbers match the editor's.
        execution_count: The cell's execution count; None in a script.
        linecache: (file name, source, execution count or None) of other cells whose functions are sent with the run.
        future_flags: Compiler flags of `from __future__ import` in earlier cells, which also apply to this one.
        file: Path of the script whose text the body is; "" for a cell.
        arguments: The script's `sys.argv`.
        module: The script's name if it is started as a module, as by `python -m`; "" for a path.
    """

    body: str
    magic_line: str = ""
    execution_count: int | None = None
    linecache: tuple[tuple[str, str, int | None], ...] = ()
    future_flags: int = 0
    file: str = ""
    arguments: tuple[str, ...] = ()
    module: str = ""


class Interpreter(Record, frozen=True, kw_only=True):
    """The Python interpreter of a run's ranks, and the key of its zygote.

    Args:
        executable: The kernel's `sys.executable`.
        key: Digest of the executable, the site directories' mtimes and `variables`.
        variables: Environment variables that the zygote starts with.
    """

    executable: str
    key: str
    variables: dict[str, str]


class RankContext(Record, frozen=True, kw_only=True):
    """The kernel's context in which a rank starts. Held in memory only, never written to disk.

    Args:
        cwd: Working directory.
        sys_path: The kernel's `sys.path`.
        umask: The kernel's umask.
        environ: The kernel's whole `os.environ` with `--env` applied; if `is_remote`, only what is sent of it.
        key: The run's HMAC key, 32 bytes.
        installed: Entries of `sys_path` that belong to the kernel's Python installation.
        is_remote: The node cannot read the kernel's files: its directory and path do not exist there.
        cell: The cell to run, if the run's spec has it with secrets blanked; None if they are the same.
        maps_cuda: On ranks without a GPU, `cuda` is mapped to the CPU.
        cpu_stands_in: Ranks whose torch can't use the GPUs that they hold compute on the CPU; else they fail.
        lone_training: A rank that trains without the others reports it.
        settings: Process-wide settings of the kernel that differ from the defaults, as JSON
            (`sgpu_magic.system.process_settings`).
    """

    cwd: str
    sys_path: tuple[str, ...]
    umask: int
    environ: dict[str, str]
    key: bytes
    installed: tuple[str, ...] = ()
    is_remote: bool = msgspec.field(default=False, name="elsewhere")
    cell: CellSource | None = None
    maps_cuda: bool = False
    cpu_stands_in: bool = False
    lone_training: bool = True
    settings: dict[str, str] = {}


class PrivateRay(Record, frozen=True, kw_only=True):
    """One node's part of a run's private Ray cluster.

    Args:
        directory: Sockets and logs of Ray's processes. Created for the run with mode 0700 and a short path, because a
            socket's path is limited to 107 bytes. The agent removes it when the ranks are gone.
        disk_directory: For large data: spilled objects, and all objects if `/dev/shm` is small.
        address: Address at which the other nodes reach this one; the loopback address on a single node.
        gpus: Number of GPUs that Ray may assign on this node.
        cpus: Number of CPUs that Ray may assign on this node.
        simulated: The GPUs are simulated: Ray counts them, but code runs on the CPU.
        object_store_bytes: Maximum memory of Ray's object store on this node.
        objects_on_disk: `/dev/shm` is too small for the objects.
        dashboard: Start Ray's dashboard on the head node.
    """

    directory: str
    disk_directory: str
    address: str = "127.0.0.1"
    gpus: int = 0
    cpus: int = 1
    simulated: bool = False
    object_store_bytes: int = 0
    objects_on_disk: bool = False
    dashboard: bool = True


class Owner(Record, frozen=True, kw_only=True):
    """Who submitted a run.

    Args:
        pid: Process id of the kernel.
        host: Host name of its machine.
        user: User name.
        notebook: The notebook's file; "" if the front end does not report it.
        kernel: Kernel id assigned by a Jupyter server; "" without one.
        cell: The cell's id in its notebook; "" if the front end does not report it.
        namespace: The PID namespace in which the kernel has its `pid`; 0 if unknown.
    """

    pid: int
    host: str
    user: str
    notebook: str = ""
    kernel: str = ""
    cell: str = ""
    namespace: int = 0

    @property
    def process(self) -> tuple[str, int, int]:
        """What identifies the process."""
        return self.host, self.namespace, self.pid


class Shipped(Record, frozen=True, kw_only=True):
    """What was captured, for the line shown to the user.

    Args:
        names: Names sent.
        total_bytes: Size of pickle and buffers.
        seconds: Time to capture and pack.
        sizes: (name, bytes) of each name whose size is known: an object with several names counts for the first.
        notes: Further sentences, such as why a pool was chosen; warnings begin with `events.WARNING`.
    """

    names: tuple[str, ...] = ()
    total_bytes: int = 0
    seconds: float = 0.0
    sizes: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()


class RunSpec(OfRun, frozen=True, kw_only=True):
    """One submitted cell: everything about it that may be written to disk.

    Args:
        timeout_s: Maximum running time in seconds.
        wait_s: Maximum time in the queue in seconds; None for no limit.
        grace_s: Seconds between TERM and KILL; None is the pool's default on a cancel and 0 after a failure.
        retries: How often the group is started again after a failure of a worker or node.
        retry_on_any: Also start it again after an error of the user's code.
        detach: The run continues after its notebook exits.
        env_names: Names (never values) given by `--env`.
        kind: Kind of the run.
        session: Run id of the session whose lease it uses; "" for its own lease.
        session_name: Name of that session, for display.
        fresh: Run in new processes on the session's lease, beside its ranks, instead of in the session's own ranks.
        only: Ranks of the session that take part, ascending; empty for all. `placement.ranks` stays the session's world
            size.
        reload: Reload edited local modules on the ranks first.
        auto: Sent by `%sgpu_auto`, not by a magic's line in the cell.
        idle_s: For a session: seconds without a cell after which it is ended; None for never.
        environment: Digest of its packages; "" if unknown.
        environment_label: As `label` in `Environment`.
        code: (path entry of the kernel, digest) of each code bundle sent with the run.
        variable_names: Names of the environment variables that ranks get in addition to the node's own; empty if the
            ranks have the kernel's whole environment. Values of `secret_names` are never written to disk.
        secret_names: The names among them that are secrets.
        parameters: Arguments and variables that are scalars, as text, for comparing runs.
        tracked: It becomes an MLflow run.
        max_cost: Cost limit in the currency of the settings: it is stopped before it costs more; None for no limit.
        profile: Record a torch profiler trace on each rank.
        replay_of: Run id of the run that it replays; "" for none.
        grouped: The final views show the lines rank by rank.
        blocks_owner: The process that submitted it waits for it and can end none of its sessions meanwhile.
        ray: Its code is the driver of a private Ray cluster on the lease's nodes, and runs on rank 0 only.
        elsewhere: Its ranks can't read the files of the machine that it was submitted from.
    """

    name: str
    cell: CellSource
    placement: Placement
    outputs: tuple[OutputName, ...]
    owner: Owner
    timeout_s: float
    wait_s: float | None = None
    grace_s: float | None = None
    retries: int = 0
    retry_on_any: bool = False
    detach: bool = False
    env_names: tuple[str, ...] = ()
    shipped: Shipped = Shipped()
    submitted_at: float = 0.0
    kind: RunKind = RunKind.CELL
    session: str = ""
    session_name: str = ""
    fresh: bool = False
    only: tuple[int, ...] = ()
    reload: bool = False
    auto: bool = False
    idle_s: float | None = None
    environment: str = ""
    environment_label: str = ""
    code: tuple[tuple[str, str], ...] = ()
    variable_names: tuple[str, ...] = ()
    secret_names: tuple[str, ...] = ()
    parameters: tuple[tuple[str, str], ...] = ()
    tracked: bool = False
    max_cost: float | None = None
    profile: bool = False
    replay_of: str = ""
    grouped: bool = False
    blocks_owner: bool = False
    ray: bool = False
    elsewhere: bool = False

    @property
    def rank_numbers(self) -> tuple[int, ...]:
        """The global ranks that take part, ascending."""
        return self.only or tuple(range(self.placement.ranks))

    @property
    def in_session(self) -> bool:
        """Whether it runs in ranks that stay afterwards."""
        return bool(self.session) and not self.fresh

    def with_notes(self, notes: Iterable[str]) -> RunSpec:
        """Return the spec with further notes for the run's view."""
        return replace(self, shipped=replace(self.shipped, notes=(*self.shipped.notes, *notes)))


class RankResult(Record, frozen=True, kw_only=True):
    """What one rank returned.

    Args:
        rank: The rank.
        payload: Its packed `{"names": {...}, "value": ...}`; None if it returned nothing.
        value_repr: The last expression's text as IPython shows it; "" without one.
        value_displayed: Whether the value has rich forms, such as a table, which are among the rank's displays.
        value_problem: Why the last expression's value could not be sent; None if it was.
        seconds: The cell's duration on the rank.
        lines: Number of lines that the rank printed.
        output_bytes: Number of bytes that it printed.
    """

    rank: int
    payload: Payload | None = None
    value_repr: str = ""
    value_displayed: bool = False
    value_problem: str | None = None
    seconds: float = 0.0
    lines: int = 0
    output_bytes: int = 0


# ---------------------------------------------------------------- questions to idle ranks


class RankQuestion(Record, frozen=True, kw_only=True):
    """A question to an idle rank.

    Args:
        rank: The rank.
        what: `complete` (names at `cursor` in `code`), `inspect` (the object there), `names` (names that its cells
            have set) or `variables` (those names with types and sizes).
        code: The code.
        cursor: Position in `code`, in characters.
        detail: 0, or 1 to include the source, as in Jupyter's `inspect_request`.
        patterns: For `variables`: names, or patterns such as `loss*`; empty for all that begin with no underscore.
    """

    rank: int
    what: str
    code: str = ""
    cursor: int = 0
    detail: int = 0
    patterns: tuple[str, ...] = ()


class Match(Record, frozen=True):
    """One completion: its text and type (`function`, `module`, "" if unknown)."""

    text: str
    type: str = ""


class Variable(Record, frozen=True, kw_only=True):
    """A variable of a rank, as its type and library store it. Names and texts are cut where they are long.

    Args:
        name: Its name.
        type: Its class's name without the module.
        shape: Of a tensor, an array or a table; None for other values. A DTensor's is that of the whole tensor.
        length: Number of items, characters or bytes of a builtin container; None for other values.
        dtype: `float32`; "" if it has none, `mixed` for a module with several.
        device: `cuda:0`; "" if it has none, `mixed` for a module on several.
        size_bytes: Bytes of its elements on this rank; None if unknown, as for lists and for tensors on `meta`.
    """

    name: str
    type: str
    shape: tuple[int, ...] | None = None
    length: int | None = None
    dtype: str = ""
    device: str = ""
    size_bytes: int | None = None


class RankAnswer(Record, frozen=True, kw_only=True):
    """A rank's answer to `RankQuestion`.

    Args:
        problem: Why there is no answer, such as that the rank is busy; None if there is one.
        busy: Whether there is none because a cell runs or ranks are being started.
        matches: For `complete`: the completions.
        start: Start in `code` of the text that the matches replace, in characters.
        end: End of that text.
        bundle: For `inspect`: a MIME bundle as JSON; empty if there is no such object.
        names: For `names`: names in its namespace that were not there when the rank started.
        variables: For `variables`: those that were asked for, sorted by name.
        left_out: Number of further ones, for which the answer has no room.
    """

    problem: str | None = None
    busy: bool = False
    matches: tuple[Match, ...] = ()
    start: int = 0
    end: int = 0
    bundle: bytes = b""
    names: tuple[str, ...] = ()
    variables: tuple[Variable, ...] = ()
    left_out: int = 0


# ---------------------------------------------------------------- records in a run's directory


class RunRecord(Record, frozen=True, kw_only=True):
    """Contents of `run.json`. Never contains secrets: a replay takes them from where it runs.

    Args:
        executable: The Python executable of its ranks.
        cwd: Working directory of its ranks.
        payload_layout: Layout of the payload.
        payload_kept: Whether it is in the same directory: `payload.bin`, or its parts in `payload/`.
        payload_note: Why it is not, or that it is still being written.
        state: The run's state when this file was written.
        sys_path: The notebook's `sys.path`.
        installed: Entries of `sys_path` that belong to its Python installation.
        host: Host name of its ranks.
        version: Version of sgpu-magic.
    """

    spec: RunSpec
    executable: str
    cwd: str
    lease: Lease
    payload_layout: PackedLayout
    payload_kept: bool
    payload_note: str
    state: RunState
    sys_path: tuple[str, ...] = ()
    installed: tuple[str, ...] = ()
    host: str = ""
    version: str = ""
