"""How a client finds and greets a pool, and the pool's status."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from sgpu_magic.wire.base import Numbered, OfRun, Record, RunKind, RunState
from sgpu_magic.wire.devices import Device, Inventory

PROTOCOL_VERSION = 1

HISTORY_STEP_S = 10.0
"""Seconds between two points of a device's history."""
HISTORY_POINTS = 60
"""The most points of a device's history: ten minutes."""

# ---------------------------------------------------------------- locating a local pool

# sun_path of a Unix socket's address has 108 bytes, with the final zero
MAX_SOCKET_PATH_BYTES = 107


class PoolAddress(Record, frozen=True, kw_only=True):
    """Contents of `pool.json` in the state directory. It is a running pool's while the lock beside it is held.

    Args:
        pid: The pool's process ID in its own PID namespace, for display: it may be another process's elsewhere.
        process_start: When the process was started, in the kernel's clock.
        runtime: The directory of its sockets.
        host: Host name of its machine, for display.
        boot: Id of the kernel's boot, the same in all containers of a machine; "" if unknown.
    """

    pid: int
    process_start: int
    protocol_version: int
    package_version: str
    started_at: float
    runtime: str = ""
    host: str = ""
    boot: str = ""


def socket_file(runtime: Path) -> Path:
    return runtime / "pool.sock"


def lock_file(directory: Path) -> Path:
    return directory / "pool.lock"


def agent_socket_file(runtime: Path) -> Path:
    return runtime / "node.sock"


def session_socket_file(runtime: Path) -> Path:
    return runtime / "line.sock"


def address_file(directory: Path) -> Path:
    return directory / "pool.json"


# ---------------------------------------------------------------- the greeting


class Hello(Record, frozen=True, tag="hello", kw_only=True):
    """The first message of a client. Stable across versions.

    Args:
        pid: The client's process id on `host`.
        host: Host name of its machine.
        user: User name on that machine. A remote pool identifies the user by the client's key instead.
        instance: The same for every reconnection of this link; "" if the link does not reconnect.
        same_files: Its machine's files and Pythons are at the same paths on the pool's machine.
    """

    protocol_version: int
    package_version: str
    pid: int
    host: str = ""
    user: str = ""
    instance: str = ""
    same_files: bool = False


class Welcome(Record, frozen=True, tag="welcome", kw_only=True):
    """The answer to `Hello`. Stable across versions.

    Args:
        sees_client: The nodes can read the files of the client's machine and run its Python; otherwise packages, code
            and variables have to be sent.
        same_host: The service is on the client's machine: run directories and memory files are read by path; otherwise
            everything goes over the link.
        near: The ranks are on the client's machine too: a payload is read in place. Otherwise it goes into the pool's
            store.
        user: The client's user name at the pool.
        service: Id of the pool's process, different after each restart.
        pool: The pool's own name.
        settings: (name, value) of the settings that a local pool read when it started.
        bulk_port: TCP port for messages with file data, which `AskBulk` opens to a client; 0 without one.
        started_by: File name of the notebook that started a local pool; "" if no notebook did.
    """

    protocol_version: int
    package_version: str
    pid: int
    busy: bool = False
    sees_client: bool = True
    same_host: bool = True
    near: bool = True
    user: str = ""
    service: str = ""
    pool: str = "local"
    settings: tuple[tuple[str, str], ...] = ()
    bulk_port: int = 0
    started_by: str = ""


# A client sends and receives file data over a second connection (TLS) while there is one:
#
# over the link             AskBulk, then BulkOffered
# over the new connection   OpenBulk, then BulkOpened; then any `FileRequest` and its reply


class AskBulk(Record, frozen=True, tag="ask-bulk", kw_only=True):
    """Ask a remote pool for a second connection. Answered by `BulkOffered`."""


class BulkOffered(Record, frozen=True, tag="bulk-offered", kw_only=True):
    """Where and how the client may connect, once and within a few seconds.

    Args:
        port: The TCP port, at the address of the link.
        certificate: The only certificate (DER) that the client must accept there.
        token: What the client sends first. A later one replaces it.
    """

    port: int
    certificate: bytes
    token: str


class OpenBulk(Record, frozen=True, tag="open-bulk", kw_only=True):
    """The first message of the second connection. Answered by `BulkOpened`, or the connection ends."""

    token: str


class BulkOpened(Record, frozen=True, tag="bulk-opened", kw_only=True):
    """The second connection belongs to the client."""


# ---------------------------------------------------------------- devices, runs, budget


class RunSummary(OfRun, frozen=True, kw_only=True):
    """One row of the ledger.

    Args:
        waiting_for: What a queued run waits for; for any other run, which of its killed ranks have not ended.
        metered_at: When metering began, seconds since the epoch; None before, and for runs that a session pays for.
        hourly: Hourly price of all its devices; None without a price.
        currency: Currency of `hourly` and `cost`.
        gpu_s: Billed device-seconds; None while the run is active, and if nothing is billed.
        cost: Cost of `gpu_s`; None while the run is active, and without a price.
        idle_s: For an ended session: seconds in which no cell ran.
        idle_ends_at: For a session without running cells: wall-clock time at which it ends by itself; None otherwise.
        dead_ranks: For a session: its ranks that are dead until they are restarted.
    """

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
    dead_ranks: tuple[int, ...] = ()


class BudgetState(Record, frozen=True, kw_only=True):
    """A pool's budget and how much of it is used.

    Args:
        limit: The budget, in `currency`.
        days: Number of past days whose spending counts.
        spent: Amount spent in that time, including active runs up to now.
    """

    limit: float
    days: float
    spent: float
    currency: str


class AskStatus(Numbered, frozen=True, tag="ask-status", kw_only=True):
    """Ask for the pool's status. Answered by `PoolStatus`, which lists up to `recent` ended runs.

    Args:
        known: Version of a status that the client has; the answer may have the changes only.
        history: The most devices of which `PoolStatus.history` has one each; of more, it has the mean of each type. 0
            for no history.
    """

    recent: int = 20
    known: str = ""
    history: int = 0


class DeviceHistory(Record, frozen=True, kw_only=True):
    """Use and memory of a device in the last ten minutes, or their means over the devices of a type.

    Both have a value for each `HISTORY_STEP_S`, oldest first, and end now. They begin with the first measurement.

    Args:
        uuid: The device; "" for a type.
        type: Canonical type.
        simulated: The use is the CPU time of ranks, and the memory is theirs.
        utilization_pct: 0 to 100; None where it was not measured.
        memory_pct: Memory in use, 0 to 100; None where it was not measured.
    """

    uuid: str = ""
    type: str
    simulated: bool = False
    utilization_pct: tuple[int | None, ...] = ()
    memory_pct: tuple[int | None, ...] = ()


class StatusChanges(Record, frozen=True, kw_only=True):
    """The differences between a status and an earlier one that the client has.

    Args:
        since: The version to which the changes apply.
        listed: IDs of all runs, in order; None if they are the same. `PoolStatus.runs` has the new and changed ones.
        devices: The devices that have changed; `PoolStatus.inventory` is empty. None if the inventory is complete.
    """

    since: str
    listed: tuple[str, ...] | None = None
    devices: tuple[Device, ...] | None = None


class PoolStatus(Numbered, frozen=True, tag="status", kw_only=True):
    """What `%sgpu_status` and `sgpu status` show.

    Args:
        agent_pid: The agent on the pool's machine; None without one, and from older pools.
        problem: Why no new run is started, and the ledger's problem; None without one.
        idle_ends_at: Wall-clock time at which the idle pool releases its processes; None while it is in use.
        budget: The pool's budget; None without one.
        version: Identifies it among the statuses of a link.
        changes: The differences from an earlier status; None if this one is complete.
        history: Of devices, or of types, that were in use or measured in the last ten minutes; always complete. Empty
            unless the client asked for it.
    """

    pool: str
    pid: int
    package_version: str
    started_at: float
    inventory: Inventory
    cpu_slots_free: int
    runs: tuple[RunSummary, ...]
    clients: int
    agent_pid: int | None = None
    problem: str | None = None
    idle_ends_at: float | None = None
    budget: BudgetState | None = None
    version: str = ""
    changes: StatusChanges | None = None
    history: tuple[DeviceHistory, ...] = ()


def changes_between(old: PoolStatus, new: PoolStatus) -> PoolStatus:
    """Return `new` without what is the same in `old`, for a client that has `old`."""
    # most rows are identical objects, because the service keeps unchanged rows
    differ = [(had, has) for had, has in zip(old.runs, new.runs, strict=False) if had is not has]
    if len(old.runs) == len(new.runs) and all(had.run_id == has.run_id for had, has in differ):
        listed, runs = None, tuple(has for had, has in differ if had != has)
    else:
        known = {run.run_id: run for run in old.runs}
        listed = tuple(run.run_id for run in new.runs)
        runs = tuple(run for run in new.runs if run != known.get(run.run_id))
    devices = _changed_devices(old.inventory, new.inventory)
    return replace(
        new,
        runs=runs,
        inventory=new.inventory if devices is None else Inventory(host=new.inventory.host),
        changes=StatusChanges(since=old.version, listed=listed, devices=devices),
    )


def with_changes(old: PoolStatus | None, new: PoolStatus) -> PoolStatus:
    """Return a complete status: `new` itself, or `old` with its changes.

    Raises:
        ValueError: The changes apply to another status.
    """
    if (changes := new.changes) is None:
        return new
    runs = {run.run_id: run for run in (*(old.runs if old is not None else ()), *new.runs)}
    if old is None or changes.since != old.version or any(run_id not in runs for run_id in changes.listed or ()):
        raise ValueError("changes of a status that is not known")
    inventory = new.inventory
    if changes.devices is not None:
        changed = {device.uuid: device for device in changes.devices}
        inventory = replace(
            old.inventory, devices=tuple(changed.get(device.uuid, device) for device in old.inventory.devices)
        )
    listed = tuple(run.run_id for run in old.runs) if changes.listed is None else changes.listed
    return replace(new, runs=tuple(runs[run_id] for run_id in listed), inventory=inventory, changes=None)


def _changed_devices(old: Inventory, new: Inventory) -> tuple[Device, ...] | None:
    """Return the devices that differ, None if anything else differs too."""
    # fast path for the common case
    if old is new or old == new:
        return ()
    pairs = list(zip(old.devices, new.devices, strict=False))
    same = len(old.devices) == len(new.devices) and all(had.uuid == has.uuid for had, has in pairs)
    if not same or replace(old, devices=()) != replace(new, devices=()):
        return None
    return tuple(has for had, has in pairs if had != has)
