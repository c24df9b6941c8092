"""The Ray actor that holds one node's agent: starts it, links it to the pool, cleans up after its exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path

import msgspec

from sgpu_magic.config import Settings, private_dir
from sgpu_magic.files.locks import LOCK_FILE, HeldLock, take_lock
from sgpu_magic.nodes.ray.cluster import ray, remove_groups_on
from sgpu_magic.nodes.ray.uplink import AgentOrder, Uplink
from sgpu_magic.system import processes
from sgpu_magic.wire.decoding import decode_json, decode_msgpack

# a Unix socket's path is limited to 108 bytes
_SHORT_PATH = 40
_END_S = 20.0
_LEAVE_S = 5.0
_LOCKS = "locks"
_LOCK = "actor.lock"


class Holder:
    """Holds the agent in the actor's process, with a separate thread for the link.

    Args:
        order: An encoded `AgentOrder`.
        unpacked: The directory where this package was unpacked for the actor; "" if it is installed.

    Raises:
        OSError: The agent can't be started.
    """

    def __init__(self, order: bytes, unpacked: str) -> None:
        self._order = decode_msgpack(order, type=AgentOrder)
        self._unpacked = unpacked
        self._base, self._lock = _base(self._order)
        settings = _settings_here(decode_json(self._order.settings, type=Settings), self._base)
        self._order = msgspec.structs.replace(self._order, settings=msgspec.json.encode(settings))
        # orphans of a killed agent become children of this process, and are killed in `_run`
        processes.become_subreaper()
        begun = Future[Uplink]()
        self._thread = threading.Thread(target=self._run, args=(begun,), name="sgpu-uplink", daemon=True)
        self._thread.start()
        self._uplink = begun.result()

    @property
    def is_there(self) -> bool:
        """Whether the agent runs."""
        return self._thread.is_alive() and not self._uplink.finished.done()

    def end(self) -> None:
        """End the agent and its ranks, and wait for its exit."""
        with contextlib.suppress(RuntimeError):
            self._uplink.finished.get_loop().call_soon_threadsafe(self._uplink.end)
        self._thread.join(_END_S)

    def _run(self, begun: Future[Uplink]) -> None:
        try:
            asyncio.run(self._hold(begun))
        finally:
            # if it has not started, release the constructor that waits for it
            leaves = not begun.cancel() and begun.exception() is None
            processes.end_children()
            self._clean_up(leaves=leaves)

    async def _hold(self, begun: Future[Uplink]) -> None:
        try:
            uplink = Uplink(self._order, self._lock.fileno())
        except OSError as error:
            begun.set_exception(OSError(f"the agent can't be started: {error}"))
            return
        begun.set_result(uplink)
        try:
            await uplink.finished
        finally:
            uplink.close()
        if uplink.abandoned:
            # no pool service connected: nothing else would release the devices of its runs
            remove_groups_on(self._order.node, self._order.prefix)

    def _clean_up(self, *, leaves: bool) -> None:
        shutil.rmtree(self._base, ignore_errors=True)
        self._lock.close()
        if self._unpacked:
            shutil.rmtree(self._unpacked, ignore_errors=True)
        if leaves:
            # let Ray terminate the worker first, and exit anyway if it does not do so in time
            timer = threading.Timer(_LEAVE_S, os._exit, (0,))
            timer.daemon = True
            timer.start()
            ray.get_runtime_context().current_actor.__ray_terminate__.remote()


def _base(order: AgentOrder) -> tuple[Path, HeldLock]:
    """Create the pool's private directory on this node; the actor removes it. Returns it and its lock."""
    folder = Path(tempfile.gettempdir())
    if len(str(folder)) > _SHORT_PATH:
        folder = Path("/tmp")
    mine = f"sgpu-{os.getuid()}-"
    pool = order.namespace.removeprefix("sgpu-")[:24]
    base = folder / f"{mine}{pool}-{order.node[:10]}"
    for other in folder.glob(f"{mine}*-*/{_LOCKS}/{_LOCK}"):
        # the leftover of an actor that was killed together with its agent
        if other.parents[1] != base and (left := take_lock(other, wait=False, flags=os.O_RDWR)) is not None:
            shutil.rmtree(other.parents[1], ignore_errors=True)
            left.close()
    while True:
        private_dir(base)
        # None if another actor has removed the folder meanwhile
        if (lock := take_lock(private_dir(base / _LOCKS) / _LOCK, flags=LOCK_FILE)) is not None:
            return base, lock


def _settings_here(settings: Settings, base: Path) -> Settings:
    """The pool's settings with this node's directories. Environments are kept for later runs, outside of `base`."""
    environments = settings.environment_dir or str(base.parent / f"sgpu-{os.getuid()}-environments")
    here = msgspec.structs.replace(
        settings,
        state_dir=str(private_dir(base / "state")),
        runtime_dir=str(private_dir(base / "run")),
        lock_dir=str(base / _LOCKS),
        environment_dir=environments,
        simulate="",
    )
    private_dir(here.runs_path)
    return here
