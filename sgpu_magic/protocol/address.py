"""Where a local pool is found: the names in its runtime directory and the address file's shape."""

from __future__ import annotations

from pathlib import Path

from sgpu_magic.protocol.records import Record

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


def address_file(runtime: Path) -> Path:
    return runtime / "pool.json"


def process_start(pid: int) -> int:
    """The process's start in clock ticks since boot, 0 where the system does not tell or it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0
