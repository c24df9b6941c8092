"""Where a local pool is found: the names in its runtime directory and the address file's shape."""

from __future__ import annotations

from pathlib import Path

from sgpu_magic.wire.record import Record

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
