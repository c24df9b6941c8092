"""How a client finds a pool, how the two greet each other, and what the pool says of itself."""

from __future__ import annotations

from pathlib import Path

from sgpu_magic.wire.devices import Inventory
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.states import RunKind, RunState

PROTOCOL_VERSION = 4
OLDEST_PROTOCOL_VERSION = 3

# ---------------------------------------------------------------- where a local pool is found

# sun_path of a Unix socket's address ends at 108 bytes
MAX_SOCKET_PATH_BYTES = 107


class PoolAddress(Record, frozen=True, kw_only=True):
    """`pool.json`. `process_start` tells the pool's process from another that got its pid."""

    pid: int
    process_start: int
    protocol_version: int
    package_version: str
    started_at: float


def socket_file(runtime: Path) -> Path:
    return runtime / "pool.sock"


def lock_file(runtime: Path) -> Path:
    return runtime / "pool.lock"


def agent_socket_file(runtime: Path) -> Path:
    return runtime / "node.sock"


def address_file(runtime: Path) -> Path:
    return runtime / "pool.json"


def process_start(pid: int) -> int:
    """The process's start in clock ticks since boot, 0 where the system does not tell or it has ended.

    A zombie has ended: in a container nobody may reap what a killed pool leaves.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0


# ---------------------------------------------------------------- the greeting


class Hello(Record, frozen=True, tag="hello", kw_only=True):
    """The first message of a client. Stable across versions.

    Args:
        pid: Its process, on `host`.
        host: Its machine's name.
        user: Whose it is there. A remote pool goes by the client's key instead.
        instance: The same in each connection that this link makes anew, "" where it makes none.
    """

    protocol_version: int
    package_version: str
    pid: int
    host: str = ""
    user: str = ""
    instance: str = ""


class Welcome(Record, frozen=True, tag="welcome", kw_only=True):
    """The answer to `Hello`. Stable across versions.

    Args:
        sees_client: Its nodes see the files of this client's machine and run its Python; else packages, code and
            variables have to travel.
        same_host: The service is on the client's machine: run directories and memory files are read there by their
            paths; else everything goes over the link.
        near: The ranks are on the client's machine too: a payload is read where it lies. Else it goes into the pool's
            store.
        user: Who the client is to the pool.
        service: Another one for each life of the pool's process.
        pool: The pool's own name.
        settings: (name, value) of a local pool's settings that it has read when it started.
    """

    protocol_version: int
    package_version: str
    pid: int
    oldest_protocol_version: int = OLDEST_PROTOCOL_VERSION
    busy: bool = False
    sees_client: bool = True
    same_host: bool = True
    near: bool = True
    user: str = ""
    service: str = ""
    pool: str = "local"
    settings: tuple[tuple[str, str], ...] = ()


# ---------------------------------------------------------------- devices, runs, budget


class RunSummary(Record, frozen=True, kw_only=True):
    """One row of the ledger.

    Args:
        metered_at: When its meter began, seconds since the epoch; None before, and for what a session pays for.
        hourly: What all its devices cost in an hour, None without a price.
        currency: Of `hourly` and `cost`.
        gpu_s: Seconds of devices that were billed; None while it goes on, and where none were.
        cost: Theirs; None while it goes on, and without a price.
        idle_s: Of a session that has ended: for how long no cell ran in it.
        idle_ends_at: Of a session in which nothing runs: wall-clock time at which it ends by itself; None else.
    """

    run_id: str
    name: str
    ranks: int
    device_type: str
    simulated: bool
    state: RunState
    submitted_at: float
    started_at: float | None = None
    ended_at: float | None = None
    position: int | None = None
    waiting_for: str = ""
    failure: str = ""
    uuids: tuple[str, ...] = ()
    owner_pid: int = 0
    notebook: str = ""
    kind: RunKind = RunKind.CELL
    session: str = ""
    kernel: str = ""
    user: str = ""
    metered_at: float | None = None
    hourly: float | None = None
    currency: str = ""
    gpu_s: float | None = None
    cost: float | None = None
    idle_s: float | None = None
    idle_ends_at: float | None = None


class BudgetState(Record, frozen=True, kw_only=True):
    """A pool's budget and what is used of it.

    Args:
        limit: In `currency`.
        days: How far back spending counts.
        spent: In that time, with what runs that go on have cost so far.
    """

    limit: float
    days: float
    spent: float
    currency: str


class AskStatus(Record, frozen=True, tag="ask-status", kw_only=True):
    """Answered by `PoolStatus`. `recent` is how many of the runs that are over it lists."""

    request: int
    recent: int = 20


class PoolStatus(Record, frozen=True, tag="status", kw_only=True):
    """What `%sgpu_status` and `sgpu pool status` show.

    Args:
        problem: The ledger's, "" when it has none.
        idle_ends_at: Wall-clock time at which the idle pool gives its processes back; None while it is in use.
        budget: None without one.
    """

    request: int
    pool: str
    pid: int
    package_version: str
    started_at: float
    inventory: Inventory
    cpu_slots_free: int
    runs: tuple[RunSummary, ...]
    clients: int
    problem: str = ""
    idle_ends_at: float | None = None
    budget: BudgetState | None = None
