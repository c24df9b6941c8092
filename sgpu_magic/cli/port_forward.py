"""`sgpu port-forward`: a dashboard or TensorBoard in a run, in this machine's browser."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import TextIO

from sgpu_magic.client.find_run import check_prefix
from sgpu_magic.client.forwarding import LOOPBACK, Forwarder
from sgpu_magic.client.link import PoolLink
from sgpu_magic.client.pool import Pool
from sgpu_magic.errors import UsageError
from sgpu_magic.wire.ids import short

_MOST = 65535


def forward(pool: Pool, run: str, ports: str, rank: int, out: TextIO, note: Callable[[str], None]) -> int:
    """Forward a port until the run ends or the command is interrupted.

    Args:
        pool: The run's.
        run: The first digits of its id.
        ports: `[LOCAL:]PORT`.
        rank: On whose node.
        out: Takes where to connect to.
        note: Takes sentences about connections, and about the end.

    Returns:
        0: the run ended, or the command was interrupted. 1: the pool ended.

    Raises:
        UsageError: The ports can't be meant, or there is no such run of this user.
        PoolError: No pool runs, or it does not answer.
    """
    local, remote = read_ports(ports)
    return asyncio.run(_forward(pool.link(), check_prefix(run), rank, (local, remote), out, note))


async def _forward(
    link: PoolLink, run: str, rank: int, ports: tuple[int | None, int], out: TextIO, note: Callable[[str], None]
) -> int:
    local, remote = ports
    forwarder = Forwarder(link, run, rank, remote, note)
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    try:
        run_id, here, problem = await forwarder.begin(local)
        print(
            f"http://{LOOPBACK}:{here} leads to port {remote} of rank {rank} of run {short(run_id)}",
            file=out,
            flush=True,
        )
        if problem:
            note(f"{problem} yet; connections are made as soon as something does.")
        serving = loop.create_task(forwarder.serve())
        waiting = loop.create_task(stopped.wait())
        await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not serving.done():
            serving.cancel()
            return 0
        note(f"{serving.result().rstrip('.')}: port {here} is free again.")
        return 1 if link.lost.is_set() else 0
    finally:
        await forwarder.close()


def read_ports(text: str) -> tuple[int | None, int]:
    """Read `[LOCAL:]PORT`; the port here is None when it is left out, 0 for any that is free.

    Raises:
        UsageError: These are no ports.
    """
    local, colon, remote = text.rpartition(":")
    if not _is_port(remote, least=1) or (colon and not _is_port(local, least=0)):
        raise UsageError(
            f"{text!r} are no ports: write the port in the run, as in 8265, or LOCAL:PORT, as in 9000:8265."
        )
    return (int(local) if colon else None), int(remote)


def _is_port(text: str, least: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and least <= int(text) <= _MOST
