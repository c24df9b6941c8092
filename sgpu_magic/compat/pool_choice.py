"""The documented variables that choose a pool, and what becomes of the choice here.

`DATABRICKS_REMOTE_GPU_POOL_ID` names a pool, `DATABRICKS_USE_RESERVED_GPU_POOL` asks for a reserved one,
`DATABRICKS_USE_POOL` for an on-demand one. The first that is set counts, in this order: who names a pool means it.
"""

from __future__ import annotations

from collections.abc import Mapping

from sgpu_magic.config import load_settings

POOL_ID = "DATABRICKS_REMOTE_GPU_POOL_ID"
RESERVED = "DATABRICKS_USE_RESERVED_GPU_POOL"
ON_DEMAND = "DATABRICKS_USE_POOL"

_NO = frozenset({"", "0", "false", "no", "off", "none"})


def note(environ: Mapping[str, str]) -> str:
    """Return what to say of the pool that the variables choose, "" when they choose none or the one that is there.

    Args:
        environ: Variables.

    Raises:
        UsageError: The settings can't be read.
    """
    pool = load_settings(environ).pool
    name = environ.get(POOL_ID, "")
    if name:
        return "" if name == pool else f"{POOL_ID} names the pool {name!r}, which is not known here; {_instead(pool)}"
    if _is_set(environ, RESERVED):
        return f"{RESERVED} asks for a reserved pool, and none is known here; {_instead(pool)}"
    if _is_set(environ, ON_DEMAND):
        return f"{ON_DEMAND} asks for an on-demand pool, and none is known here; {_instead(pool)}"
    return ""


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() not in _NO


def _instead(pool: str) -> str:
    return f"the run goes to the pool {pool!r}."
