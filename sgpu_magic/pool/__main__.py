"""`python -m sgpu_magic.pool`: the local pool, started by the first client that needs it.

Standard input may carry one encoded `Warm`, so that the zygote starts before anything else. The process prints one
line on standard output: `ready`, or why it can't start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from pathlib import Path

    from sgpu_magic.config import Settings
    from sgpu_magic.nodes.engine import Engine
    from sgpu_magic.pool.lifecycle import PoolPresence


def main() -> None:
    first_order = sys.stdin.buffer.read()
    # detach from the kernel: a kernel that shuts down signals its children, and the pool outlives kernels
    if os.fork() > 0:
        os._exit(0)
    os.setsid()
    os.chdir("/")

    from sgpu_magic import config
    from sgpu_magic.errors import UsageError
    from sgpu_magic.pool.lifecycle import AlreadyRunning, PoolPresence, with_socket_directory
    from sgpu_magic.system import processes

    processes.become_subreaper()
    # the `pool` setting names the pool that clients prefer; this process is always the local one
    settings = replace(config.load_settings(), pool="local")
    try:
        settings = with_socket_directory(settings)
        for path in (settings.runtime_path, settings.state_path, settings.runs_path):
            config.private_dir(path)
        presence = PoolPresence(settings.runtime_path, settings.state_path)
    except AlreadyRunning:
        sys.stdout.write("already running\n")
        return
    except UsageError as error:
        sys.stdout.write(f"{error.message}\n")
        return
    except OSError as error:
        from sgpu_magic.files.run_directory import why_no_run

        sys.stdout.write(f"{why_no_run(settings.runs_path, str(error))}\n")
        return
    _run(settings, presence, first_order)
    processes.end_children()


def _run(settings: Settings, presence: PoolPresence, first_order: bytes) -> None:
    from sgpu_magic.nodes.local import LocalAgent
    from sgpu_magic.ssh.machines import MACHINES_FILE
    from sgpu_magic.wire.client import Warm
    from sgpu_magic.wire.codec import Decoder

    warm = Decoder[Warm](Warm).decode(first_order) if first_order else None
    machines = settings.state_path / MACHINES_FILE
    agent = None if machines.exists() else LocalAgent(settings, warm)
    # import the slow modules only now, while the zygote starts

    def start_next() -> None:
        command = [sys.executable, "-m", "sgpu_magic.pool"]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)

    async def serve() -> None:
        from sgpu_magic.errors import SgpuError
        from sgpu_magic.nodes.local import LocalEngine
        from sgpu_magic.pool.health import ServiceFault
        from sgpu_magic.pool.service import EARLIER_FAULT, PoolService

        try:
            engine = _on_machines(settings, machines) if agent is None else LocalEngine(settings, agent, warm)
        except SgpuError as error:
            sys.stdout.write(f"{error.message}\n")
            presence.withdraw()
            return
        try:
            service = PoolService(settings, presence, engine, earlier_fault=os.environ.pop(EARLIER_FAULT, ""))
        except SgpuError as error:
            # report on standard output too: the log's disk may be full
            sys.stdout.write(f"{error.message}\n")
            engine.close()
            presence.withdraw()
            return
        presence.announce()
        # the client that started the pool may have exited; other clients still need the pool
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write("ready\n")
            sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            await service.finished
        except ServiceFault as fault:
            # start the next service from here: a detached run has no client that would start one
            service.hand_over_and_exit(str(fault), start_next)
        service.close()

    asyncio.run(serve())


def _on_machines(settings: Settings, path: Path) -> Engine:
    """Return the engine of several machines.

    Raises:
        UsageError: Their file can't be read.
    """
    import msgspec

    from sgpu_magic.errors import UsageError
    from sgpu_magic.nodes.ssh.engine import SshEngine
    from sgpu_magic.ssh.machines import from_json

    try:
        return SshEngine(settings, from_json(path.read_bytes()))
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"the machines of this pool can't be read from {path}: {error}. Remove it.") from None


if __name__ == "__main__":
    main()
