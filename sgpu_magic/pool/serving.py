"""`python -m sgpu_magic.pool.serving ENGINE`: a pool for clients on other machines, in the foreground.

`sgpu pool serve` execs this process, with the pool's directories and name as `SGPU_*` variables. On SIGTERM or SIGINT
it ends together with its ranks; when it is killed, the ranks keep running for the next service to adopt.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import sys
from pathlib import Path

import msgspec
import zmq

from sgpu_magic import config, extensions
from sgpu_magic.config import Settings, user_name
from sgpu_magic.errors import PoolError, SgpuError, UsageError
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.pool.clients import AuthorizedClients
from sgpu_magic.pool.health import ServiceFault
from sgpu_magic.pool.lifecycle import AlreadyRunning, PoolPresence, with_socket_directory
from sgpu_magic.pool.remote_clients import Listening
from sgpu_magic.pool.service import EARLIER_FAULT, PoolService
from sgpu_magic.system import processes
from sgpu_magic.system.secure_sockets import KeyPair, kept_key_pair, reached_at
from sgpu_magic.wire.client import Warm

CLIENTS = "clients.toml"
_KEY = "pool.key"
# a client needs one connection, some descriptors for its runs, and briefly open files
_OPEN_FILES = 65536
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_LISTEN = re.compile(r"tcp://(?:\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(?P<port>[0-9]{1,5}|\*)")
ENGINES = ("local", "ray")
"""The values of `sgpu pool serve --engine`."""


def main() -> None:
    try:
        settings = with_socket_directory(engine_settings(sys.argv[1], config.load_settings()))
        for path in (settings.runtime_path, settings.state_path, settings.runs_path):
            config.private_dir(path)
    except SgpuError as error:
        sys.exit(f"sgpu: {error.message}")
    try:
        presence = PoolPresence(settings.runtime_path, settings.state_path)
    except SgpuError as error:
        sys.exit(f"sgpu: {error.message}")
    except AlreadyRunning:
        sys.exit(
            f"sgpu: a pool named {settings.pool} is already running on {config.host_name()} as this user. Stop it "
            "first, or serve this one under another name with --name."
        )
    processes.become_subreaper()
    _raise_limit()
    os.chdir("/")
    try:
        asyncio.run(_serve(sys.argv[1], settings, presence))
    except SgpuError as error:
        sys.exit(f"sgpu: {error.message}")
    finally:
        processes.end_children()


def pool_keys(state: Path) -> KeyPair:
    """Return the pool's key pair; create it if there is none.

    Raises:
        UsageError: The key file can't be trusted or written.
    """
    return kept_key_pair(state / _KEY)


async def _serve(engine_name: str, settings: Settings, presence: PoolPresence) -> None:
    clients = AuthorizedClients(settings.state_path / CLIENTS)
    keys = pool_keys(settings.state_path)
    listening = Listening(settings.listen, keys, clients, settings.link_timeout_s, settings.bulk_port)
    engine = make_engine(engine_name, settings)
    try:
        service = PoolService(settings, presence, engine, listening, earlier_fault=os.environ.pop(EARLIER_FAULT, ""))
    except (zmq.ZMQError, SgpuError) as error:
        engine.close()
        presence.withdraw()
        if isinstance(error, SgpuError):
            raise
        raise PoolError(
            f"the pool can't listen at {settings.listen}: {error.strerror or error}. Choose another with --listen "
            "tcp://0.0.0.0:PORT, or see what listens there with `ss -ltnp`."
        ) from None
    presence.announce()
    saying = asyncio.create_task(_say_when_ready(settings, engine_name, service, listening))
    try:
        await service.finished
    except ServiceFault as fault:
        # clients reconnect to the same port, even if --listen asked for any free one
        os.environ["SGPU_LISTEN"] = service.address
        # exec in place, so that a supervisor sees no exit; descriptors close on exec
        command = [sys.executable, "-m", "sgpu_magic.pool.serving", engine_name]
        service.hand_over_and_exit(str(fault), lambda: os.execv(sys.executable, command))
    saying.cancel()
    service.close()
    if service.broken_why is not None:
        raise PoolError(service.broken_why)


async def _say_when_ready(settings: Settings, engine_name: str, service: PoolService, listening: Listening) -> None:
    await service.ready.wait()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(f"{_startup_text(settings, engine_name, service, listening)}\n")
        sys.stdout.flush()


def _startup_text(settings: Settings, engine: str, service: PoolService, listening: Listening) -> str:
    reached = reached_at(service.address, config.host_name())
    data = f"{service.bulk_port} for variables and files" if service.bulk_port else "no second port"
    name, clients = settings.pool, settings.state_path / CLIENTS
    listing = "" if clients.exists() else f"\nno user is authorized yet: {clients} lists nobody"
    return (
        f"pool {name} · engine {engine} · {service.address} · {data} · add it with: "
        f"sgpu pool add {name} {reached} --key '{listening.keys.public}'{listing}\n"
        f"authorize a user with: sgpu pool authorize WHO 'THEIR PUBLIC KEY' --name {name}\n"
        f"all ranks run as the one OS user {user_name()}: every user of this pool can read and change the files and "
        "memory of others' runs there. For users who must not, run one pool per user, each under that user's own "
        "OS account with its own --name and port."
    )


def _raise_limit() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def served_settings(settings: Settings, name: str) -> Settings:
    """Return the settings of a served pool of this name."""
    return msgspec.structs.replace(config.with_directories_of(settings, "pools", name), pool=name)


def checked_name(name: str) -> str:
    """Return the name if it is valid.

    Raises:
        UsageError: It can't name a pool.
    """
    if _NAME.fullmatch(name) is None or name.lower() == "local":
        raise UsageError(
            f"{name[:40]!r} is not a pool name: use letters, digits, - and _, at most 40, beginning with a letter, and "
            "not `local`."
        )
    return name


def checked_listen(listen: str) -> str:
    """Return the address if it is valid.

    Raises:
        UsageError: It is no address to listen at.
    """
    if (match := _LISTEN.fullmatch(listen)) is None or (match["port"] != "*" and int(match["port"]) > 65535):
        raise UsageError(f"--listen takes tcp://ADDRESS:PORT, such as tcp://0.0.0.0:8700, not {listen[:80]!r}.")
    return listen


def engine_settings(name: str, settings: Settings) -> Settings:
    """Return the settings that an engine needs; the pool service must use the same.

    Ranks on a Ray cluster get built packages, unless its nodes see the same files as the notebooks (`ray_same_files`).
    """
    if name == "ray" and not settings.ray_same_files:
        return msgspec.structs.replace(settings, environments="built")
    return settings


def make_engine(name: str, settings: Settings, warm: Warm | None = None) -> Engine:
    """Return the engine. Call it in the event loop that the pool service will use.

    Args:
        name: One of `ENGINES`.
        settings: As `engine_settings` returns them.
        warm: The interpreter to warm first, None for none; `ray` ignores it, since it has no node yet.

    Raises:
        UsageError: There is no such engine, its dependencies are not installed, or a setting is invalid.
    """
    if name == "local":
        from sgpu_magic.nodes.local import LocalAgent, LocalEngine

        return LocalEngine(settings, LocalAgent(settings, warm), warm)
    if name != "ray":
        raise UsageError(f"there is no engine {name!r}. There are: {', '.join(ENGINES)}.")
    if importlib.util.find_spec("ray") is None:
        raise UsageError(
            "the engine ray needs Ray in the pool's own Python, and it is not installed there: "
            'pip install "sgpu-magic[ray]", with the version of Ray that the cluster has.'
        )
    return extensions.ray_engine(settings)


if __name__ == "__main__":
    main()
