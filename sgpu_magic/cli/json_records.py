"""The documents that commands print with `--json`.

Times are ISO 8601 in UTC (`2026-05-04T12:30:00.250000Z`), durations are seconds (names end in `_s`), sizes are bytes
(names end in `_bytes`), and amounts of money have their currency. What is unknown or does not apply is `null`. Texts
have no terminal escape sequences. A field is added without a new number of the schema; programs ignore fields that they
do not know. The number rises when a field is removed, renamed or gets another meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Literal

import msgspec

from sgpu_magic.wire.base import RunKind, RunState

SCHEMA: Literal[1] = 1

PoolReachability = Literal["up", "not running", "unreachable"]


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What every document has.

    Args:
        schema: Number of the schema.
    """

    schema: Literal[1] = SCHEMA


class Money(msgspec.Struct, frozen=True, kw_only=True):
    """An amount of money.

    Args:
        amount: The amount, in units of the currency.
        currency: The currency as the settings name it.
    """

    amount: float
    currency: str


class OmittedPool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool whose rows are missing in a list.

    Args:
        pool: The pool's name.
        problem: Why it could not be asked.
    """

    pool: str
    problem: str


# ---------------------------------------------------------------- runs


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run.

    Args:
        id: The run's id.
        pool: Name of its pool.
        name: The run's name.
        kind: What was submitted.
        state: The run's state.
        submitted_at: When it was submitted.
        started_at: When all its ranks had started.
        ended_at: When it ended.
        duration_s: Seconds since its ranks started, until its end or now.
        ranks: Number of ranks.
        gpus: Number of GPUs that it has or requests, 0 on CPU; null if the pool still chooses.
        type: Type of its devices; `any` if the pool still chooses.
        simulated: Whether its GPUs are simulated on CPU.
        devices: UUIDs of its devices, in rank order.
        notebook: Path of its notebook.
        session: Id of the session that it belongs to.
        user: The user who submitted it.
        queue_position: Its position in the queue, from 1.
        waiting_for: What it waits for.
        failure: Why it failed.
        cost: Its cost, until now if it is active.
    """

    id: str
    pool: str
    name: str | None
    kind: RunKind
    state: RunState
    submitted_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    duration_s: float | None
    ranks: int
    gpus: int | None
    type: str
    simulated: bool
    devices: tuple[str, ...]
    notebook: str | None
    session: str | None
    user: str | None
    queue_position: int | None
    waiting_for: str | None
    failure: str | None
    cost: Money | None


class RunList(Document, frozen=True, kw_only=True):
    """`sgpu runs`.

    Args:
        runs: The runs, newest first.
        omitted: Pools that could not be asked.
    """

    runs: tuple[RunRow, ...]
    omitted: tuple[OmittedPool, ...] = ()


class LogLine(Document, frozen=True, kw_only=True):
    """A line of `sgpu logs`.

    Args:
        run: Id of the run.
        rank: The rank that printed it.
        text: The line, without its end.
    """

    run: str
    rank: int
    text: str


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job of `sgpu run`.

    Args:
        id: The job's id.
        source: Path of the notebook or script.
        copy: Path of the executed copy.
        state: The job's state.
        exit_code: Exit code of `sgpu run`.
        started_at: When it started.
        ended_at: When it ended.
        duration_s: Seconds since it started, until its end or now.
        cells_done: Number of cells that have run.
        cells: Number of all cells.
        detached: Whether it runs without its terminal.
    """

    id: str
    source: str
    copy: str | None
    state: str
    exit_code: int | None
    started_at: datetime
    ended_at: datetime | None
    duration_s: float | None
    cells_done: int
    cells: int
    detached: bool


class JobList(Document, frozen=True, kw_only=True):
    """`sgpu jobs`.

    Args:
        jobs: The jobs, newest first.
    """

    jobs: tuple[JobRow, ...]


# ---------------------------------------------------------------- pools


class TypeCountRow(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of one type in a pool.

    Args:
        type: The type; `cpu` for CPU slots.
        free: Number of devices that are free.
        total: Number of devices, including those that an autoscaler can add.
    """

    type: str
    free: int
    total: int


class PoolRow(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of `sgpu pool list`.

    Args:
        name: The pool's name.
        kind: `local`, `reserved` or `on demand`.
        address: Its address; null for the local pool.
        state: Whether it answers.
        problem: Why it can't be reached.
        types: Its devices by type.
    """

    name: str
    kind: str
    address: str | None
    state: PoolReachability
    problem: str | None
    types: tuple[TypeCountRow, ...]


class PoolList(Document, frozen=True, kw_only=True):
    """`sgpu pool list`.

    Args:
        pools: The local pool, then those of the list.
        hosts: Hosts of the user's ssh configuration that are no pool yet.
    """

    pools: tuple[PoolRow, ...]
    hosts: tuple[str, ...] = ()


class TypeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A type of devices in one pool.

    Args:
        pool: Name of the pool.
        kind: `local`, `reserved` or `on demand`.
        type: The type; `cpu` for CPU slots.
        memory_bytes: The sizes of memory that occur, ascending; empty for CPU slots.
        interconnects: How the devices are connected, null for those of which it is unknown; empty for CPU slots.
        free: Number of devices that are free.
        total: Number of devices, including those that an autoscaler can add.
        existing: Number of devices that exist now.
        nodes: Number of nodes that have the type.
        largest_node: Most devices of the type on one node.
        hourly_price: Price of one device per hour.
        simulated: Whether devices of the type are simulated on CPU.
    """

    pool: str
    kind: str
    type: str
    memory_bytes: tuple[int, ...]
    interconnects: tuple[str | None, ...]
    free: int
    total: int
    existing: int
    nodes: int
    largest_node: int
    hourly_price: Money | None
    simulated: bool


class TypeList(Document, frozen=True, kw_only=True):
    """`sgpu types`.

    Args:
        types: The types, by pool.
        omitted: Pools that could not be asked.
    """

    types: tuple[TypeRow, ...]
    omitted: tuple[OmittedPool, ...]


class DeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of a pool.

    Args:
        uuid: NVML's UUID, or the id of a simulated GPU.
        type: Its type.
        name: Its full name.
        index: Its number on its node, as in nvidia-smi.
        node: Id of its node; null in a pool of one machine.
        memory_bytes: Its memory.
        used_bytes: Memory in use.
        utilization_pct: Utilization, 0 to 100.
        simulated: Whether it is simulated on CPU.
        free: Whether a run can have it now.
        run: Id of the run or session that has it.
        outside_use: Why it counts as in use outside of the pool.
        unavailable: Why no run can have it.
    """

    uuid: str
    type: str
    name: str | None
    index: int
    node: str | None
    memory_bytes: int | None
    used_bytes: int | None
    utilization_pct: float | None
    simulated: bool
    free: bool
    run: str | None
    outside_use: str | None
    unavailable: str | None


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A node of a pool.

    Args:
        id: The node's id.
        host: Its host name.
        cores: Number of CPU cores.
        cpu_slots: Number of CPU ranks that fit at once.
    """

    id: str
    host: str
    cores: int
    cpu_slots: int


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's budget.

    Args:
        limit: The budget.
        spent: What was spent in the period.
        period_s: Length of the period in seconds, until now.
    """

    limit: Money
    spent: Money
    period_s: float


class PoolDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool reports of itself.

    Args:
        pid: Process id of its service.
        version: Its version of sgpu-magic.
        host: Host name of its machine, or name of its cluster.
        started_at: When the service started.
        idle_ends_at: When the idle pool ends by itself.
        clients: Number of connected clients, this command included.
        problems: What is wrong with the pool or its GPUs' driver.
        cpu_slots: Number of CPU ranks that fit at once.
        cpu_slots_free: Number of CPU slots that are free.
        devices: Its GPUs.
        nodes: Its nodes; empty in a pool of one machine.
        budget: Its budget.
        runs: Active and queued runs, and the newest ended ones; newest first.
    """

    pid: int
    version: str
    host: str
    started_at: datetime
    idle_ends_at: datetime | None
    clients: int
    problems: tuple[str, ...]
    cpu_slots: int
    cpu_slots_free: int
    devices: tuple[DeviceRow, ...]
    nodes: tuple[NodeRow, ...]
    budget: Budget | None
    runs: tuple[RunRow, ...]


class PoolStatusRow(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of `sgpu status`.

    Args:
        name: The pool's name.
        kind: `local`, `reserved` or `on demand`.
        address: Its address; null for the local pool.
        state: Whether it answers.
        problem: Why it can't be reached.
        details: What it reports; null if it is not up.
    """

    name: str
    kind: str
    address: str | None
    state: PoolReachability
    problem: str | None
    details: PoolDetails | None


class Status(Document, frozen=True, kw_only=True):
    """`sgpu status`, and `sgpu pool status`.

    Args:
        pools: The local pool, then those of the list.
    """

    pools: tuple[PoolStatusRow, ...]


# ---------------------------------------------------------------- environments, usage, findings


class BaseEnvironmentRow(msgspec.Struct, frozen=True, kw_only=True):
    """A base environment.

    Args:
        name: Name for `--env-version`.
        title: Its title.
        python: Its minor version of Python.
        packages: Number of its public packages.
    """

    name: str
    title: str
    python: str
    packages: int


class SavedEnvironmentRow(msgspec.Struct, frozen=True, kw_only=True):
    """A saved environment.

    Args:
        name: Its name.
        python: Its version of Python; null if it can't be read.
        packages: Number of its packages; null if it can't be read.
    """

    name: str
    python: str | None
    packages: int | None


class BuiltEnvironmentRow(msgspec.Struct, frozen=True, kw_only=True):
    """An environment that was built on this machine.

    Args:
        id: Its digest.
        packages: Number of its packages; null if it can't be read.
        size_bytes: Its size on disk; null if it was not measured.
        last_used_at: When a run used it last.
    """

    id: str
    packages: int | None
    size_bytes: int | None
    last_used_at: datetime


class EnvironmentList(Document, frozen=True, kw_only=True):
    """`sgpu env list`.

    Args:
        base: Base environments.
        saved: Environments that `%sgpu_env save` has saved.
        built: Environments on this machine, the one used last first.
        directory: Where they are.
        budget_bytes: Size that they may have together.
    """

    base: tuple[BaseEnvironmentRow, ...]
    saved: tuple[SavedEnvironmentRow, ...]
    built: tuple[BuiltEnvironmentRow, ...]
    directory: str
    budget_bytes: int


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of a group of runs.

    Args:
        name: Name of the group.
        runs: Number of runs.
        gpu_s: GPU-seconds.
        slot_s: Seconds of CPU slots that have a price.
        idle_s: GPU-seconds of sessions in which no cell ran; included in `gpu_s`.
        simulated_s: GPU-seconds of simulated GPUs; included in `gpu_s`.
        cost: Cost, one amount per currency.
        idle_cost: The part of `cost` for idle time.
        simulated_cost: The part of `cost` for simulated GPUs, which is not charged.
        reserved_cost: Cost of the same time at the reserved prices.
    """

    name: str
    runs: int
    gpu_s: float
    slot_s: float
    idle_s: float
    simulated_s: float
    cost: tuple[Money, ...]
    idle_cost: tuple[Money, ...]
    simulated_cost: tuple[Money, ...]
    reserved_cost: Money | None


class UsageReport(Document, frozen=True, kw_only=True):
    """`sgpu usage`.

    Args:
        since: Start of the period.
        until: Its end.
        by: What runs are grouped by.
        groups: The groups.
        total: All runs.
        omitted: Pools that could not be asked.
    """

    since: datetime
    until: datetime
    by: str
    groups: tuple[UsageRow, ...]
    total: UsageRow
    omitted: tuple[OmittedPool, ...]


class FindingRow(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check.

    Args:
        level: `ok`, `warning` or `problem`.
        name: What was checked.
        text: The result, or what is wrong.
        remedy: What to do about it.
    """

    level: str
    name: str
    text: str
    remedy: str | None


class DoctorReport(Document, frozen=True, kw_only=True):
    """`sgpu doctor`.

    Args:
        findings: The results of all checks.
        problems: Number of problems; the exit code is 1 if there is one.
        warnings: Number of warnings.
    """

    findings: tuple[FindingRow, ...]
    problems: int
    warnings: int


DOCUMENTS: Mapping[str, type[Document]] = {
    "sgpu runs": RunList,
    "sgpu logs": LogLine,
    "sgpu jobs": JobList,
    "sgpu status": Status,
    "sgpu pool status": Status,
    "sgpu pool list": PoolList,
    "sgpu types": TypeList,
    "sgpu env list": EnvironmentList,
    "sgpu usage": UsageReport,
    "sgpu doctor": DoctorReport,
}
"""The document of each command; `sgpu logs` prints one per line."""


def encode(document: Document) -> str:
    """Return a document as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def encode_line(document: Document) -> str:
    """Return a document as JSON in one line."""
    return msgspec.json.encode(document).decode()
