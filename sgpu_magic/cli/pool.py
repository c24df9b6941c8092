"""`sgpu pool status` and `sgpu pool stop`."""

from __future__ import annotations

from sgpu_magic.cli import pools
from sgpu_magic.client.local_pool import find_pool
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pools_file import LOCAL, read_pools
from sgpu_magic.config import Settings, host_name
from sgpu_magic.views.pool_tables import status_text


def status(settings: Settings, name: str = "") -> str:
    """Return what `%sgpu_status` shows, of one pool or of all. Never starts a pool.

    Raises:
        PoolError: It does not answer, or is of another version.
    """
    if name != LOCAL and (name or read_pools()):
        return pools.status(settings, name)
    pool = Pool(settings)
    try:
        answer = pool.status(start=False)
    finally:
        pool.close()
    if answer is None:
        return f"no local pool is running on {host_name()}; the first %%distributed cell starts one"
    return status_text(answer)


def stop(settings: Settings, *, force: bool) -> str:
    """Stop the pool, wait for its end, and return a sentence.

    Raises:
        PoolError: Runs are going on and `force` is not set, or it does not end.
    """
    address = find_pool(settings)
    if address is None:
        return f"no local pool is running on {host_name()}"
    Pool(settings).stop(force=force)
    return f"the local pool (process {address.pid}) is stopped"
