"""Records of runs: what is submitted, where it starts, what it returns, and what its directory keeps of it."""

from __future__ import annotations

from sgpu_magic.wire.attachments import PackedLayout, Payload
from sgpu_magic.wire.devices import Lease, Placement
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.states import RunKind, RunState


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
        future_flags: Compiler flags of the `from __future__ import` of earlier cells, which hold in this one too.
    """

    body: str
    magic_line: str = ""
    execution_count: int | None = None
    linecache: tuple[tuple[str, str, int | None], ...] = ()
    future_flags: int = 0


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
        environ: The kernel's whole `os.environ` with `--env` applied; what travels of it where `elsewhere`.
        key: The run's HMAC key, 32 bytes.
        installed: Those of `sys_path` that belong to the kernel's Python installation.
        elsewhere: The node does not see the kernel's files: its directory and path are not there.
        cell: The cell as it is to be run, where the run's spec has secrets in it blanked; None where that is the same.
        widgets: The kernel knows `CommsMoved`: one of an earlier version does not.
    """

    cwd: str
    sys_path: tuple[str, ...]
    umask: int
    environ: dict[str, str]
    key: bytes
    installed: tuple[str, ...] = ()
    elsewhere: bool = False
    cell: CellSource | None = None
    widgets: bool = False


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
        kind: What it is.
        session: The session run whose lease it uses, "" for a lease of its own.
        session_name: That session's name, for whoever reads.
        fresh: In new processes on the session's lease, beside its ranks; else in the session's own ranks.
        only: The ranks of the session that take part, ascending; empty means all. `placement.ranks` stays the
            session's world size.
        reload: Load edited local modules anew on the ranks first.
        auto: Sent by `%sgpu_auto`, not by a magic's line in the cell.
        idle_s: A session is ended after so many seconds without a cell; None never is.
        environment: Digest of its packages; "" when it is not known.
        environment_label: For people: "" is the notebook's own packages, else a base or saved one's or a file's name.
        code: Digests of the code bundles that travel along, by the kernel's path entry.
        variable_names: Names of the environment variables that the ranks get beside the node's own; empty where the
            ranks have the kernel's whole environment. Values of `secret_names` are never written down.
        secret_names: Those that are secrets.
        parameters: Arguments and variables that are scalars, as text, for whoever compares runs.
        tracked: It becomes an MLflow run.
        max_cost: It is stopped before it costs more, in the currency of the settings; None is no limit.
        profile: Each rank keeps a trace of torch's profiler.
        replay_of: The run that it is a replay of, "" for none.
        ray: Its code is the driver of a Ray cluster of its own on the lease's nodes, and runs in rank 0 alone.
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
    ray: bool = False

    @property
    def rank_numbers(self) -> tuple[int, ...]:
        """The global ranks that take part, ascending."""
        return self.only or tuple(range(self.placement.ranks))

    @property
    def in_session(self) -> bool:
        """It runs in ranks that stay afterwards."""
        return bool(self.session) and not self.fresh


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


# ---------------------------------------------------------------- what a run's directory says of it

RUN_RECORD = "run.json"
# the note of a payload that is still being kept, or will be when the run is over
UNDER_WAY = "not yet written"


class RunRecord(Record, frozen=True, kw_only=True):
    """The file's content. Never anything secret: a replay takes secrets from where it runs.

    Args:
        executable: The Python that its ranks ran in.
        cwd: Where they started.
        payload_layout: How `payload.bin` is laid out.
        payload_kept: Whether the payload's bytes lie beside this file.
        payload_note: Why not, or what is still under way.
        state: The run's state when this was written.
        sys_path: The notebook's `sys.path`.
        installed: Those of its entries that belong to its Python installation.
        host: The machine of its ranks.
        version: sgpu-magic's.
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
