"""A pool service with the Ray engine in the foreground, for tests: `python ray_pool.py` with a home's environment."""

from __future__ import annotations

import asyncio
import sys

from sgpu_magic import config
from sgpu_magic.pool.lifecycle import PoolPresence
from sgpu_magic.pool.service import PoolService
from sgpu_magic.pool.serving import engine_settings, make_engine
from sgpu_magic.system import processes


async def _serve(settings: config.Settings, presence: PoolPresence) -> None:
    service = PoolService(settings, presence, make_engine("ray", settings))
    ready = asyncio.create_task(service.ready.wait())
    try:
        await asyncio.wait([ready, service.finished], return_when=asyncio.FIRST_COMPLETED)
        presence.announce()
        await service.finished
    finally:
        ready.cancel()
        service.close()
    if service.broken_why is not None:
        sys.exit(service.broken_why)


def main() -> None:
    processes.become_subreaper()
    settings = engine_settings("ray", config.load_settings())
    for path in (settings.runtime_path, settings.state_path, settings.runs_path):
        config.private_dir(path)
    asyncio.run(_serve(settings, PoolPresence(settings.runtime_path, settings.state_path)))
    processes.end_children()
    sys.exit(0)


if __name__ == "__main__":
    main()
