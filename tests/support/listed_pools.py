"""Served pools in a user's list."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from free_ports import free_port
from homes import Home
from msgspec.structs import replace
from served_pools import ServedPool

from sgpu_magic.client.pools_file import PoolEntry, add_pool
from sgpu_magic.system.secure_sockets import KeyPair, new_key_pair, write_key_pair


def listed(home: Home) -> Path:
    """Return the path of the list."""
    return home.path / "pools.toml"


def list_pools(home: Home, pools: Iterable[tuple[str, ServedPool, dict[str, Any]]]) -> KeyPair:
    """Give a home's user a key that these pools accept, and add the pools to the user's list.

    Args:
        home: The user's home.
        pools: Each pool's name in the list, the pool, and what its entry has besides address and key.
    """
    keys = new_key_pair()
    write_key_pair(home.path / "client.key", keys)
    for name, pool, more in pools:
        pool.command("authorize", "ann", keys.public)
        add_pool(replace(pool.entry, name=name, **more), listed(home))
    return keys


def list_nowhere(home: Home, name: str) -> PoolEntry:
    """Add a pool to the list at whose address nothing listens."""
    entry = PoolEntry(name, f"tcp://127.0.0.1:{free_port()}", new_key_pair().public)
    add_pool(entry, listed(home))
    return entry
