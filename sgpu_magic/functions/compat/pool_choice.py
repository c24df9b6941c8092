"""The documented variables that choose a pool, and what becomes of the choice here.

`DATABRICKS_REMOTE_GPU_POOL_ID` names a pool, `DATABRICKS_USE_RESERVED_GPU_POOL` asks for a reserved one,
`DATABRICKS_USE_POOL` for an on-demand one. The first that is set counts, in this order: who names a pool means it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sgpu_magic.client.pools_file import LOCAL, pools_path, read_pools
from sgpu_magic.config import load_settings

POOL_ID = "DATABRICKS_REMOTE_GPU_POOL_ID"
RESERVED = "DATABRICKS_USE_RESERVED_GPU_POOL"
ON_DEMAND = "DATABRICKS_USE_POOL"

_NO = frozenset({"", "0", "false", "no", "off", "none"})


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """What the variables choose.

    Args:
        pool: A pool's name, `reserved` or `on-demand`; "" leaves the choice to us.
        note: What to say of it, "" when they choose nothing or what is there.
    """

    pool: str = ""
    note: str = ""


def choice(environ: Mapping[str, str]) -> PoolChoice:
    """Return the pool that the variables choose.

    Args:
        environ: Variables.

    Raises:
        UsageError: The settings or the list of pools can't be read.
    """
    setting = load_settings(environ).pool
    entries = read_pools(pools_path(environ))
    name = environ.get(POOL_ID, "")
    if name:
        if name in (LOCAL, setting, *(entry.name for entry in entries)):
            return PoolChoice(name)
        said = f"{POOL_ID} names the pool {name!r}, which is not known here"
    elif _is_set(environ, RESERVED):
        if any(entry.reserved for entry in entries):
            return PoolChoice("reserved")
        said = f"{RESERVED} asks for a reserved pool, and none is known here"
    elif _is_set(environ, ON_DEMAND):
        if any(not entry.reserved for entry in entries):
            return PoolChoice("on-demand")
        said = f"{ON_DEMAND} asks for an on-demand pool, and none is known here"
    else:
        return PoolChoice()
    instead = f"the pool {setting or LOCAL!r}" if setting or not entries else "the pool that fits best"
    return PoolChoice("", f"{said}; the run goes to {instead}. `sgpu pool add` lists others.")


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() not in _NO
