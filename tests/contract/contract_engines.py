"""The engines that the contract holds for, each as a pool that a test may use: `ENGINES` by name."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from homes import Home
from many_agents import ManyAgents
from pool_client import PoolClient, set_environ
from process_table import stop_process, wait_gone
from ray_clusters import FakeCluster, RayPool
from ssh_servers import SshMachines
from waiting import eventually

from sgpu_magic.client.pool import Pool
from sgpu_magic.config import load_settings


class Service(Protocol):
    """A pool service with room for four ranks."""

    nodes: int

    def client(self) -> PoolClient:
        """Return this process as a client of it."""
        ...

    def kill(self) -> None:
        """KILL it; what it has started stays."""
        ...

    def restart(self) -> None:
        """See that there is one again."""
        ...

    def close(self) -> None: ...


class LocalService:
    """This machine's own; every client starts it.

    Args:
        home: Its home.
    """

    nodes = 1

    def __init__(self, home: Home) -> None:
        self._home = home

    def client(self) -> PoolClient:
        return PoolClient(self._home)

    def kill(self) -> None:
        pid = eventually(self._home.pool_pid, 10, "there is no pool")
        os.kill(pid, signal.SIGKILL)
        wait_gone(pid)

    def restart(self) -> None:
        """The client that follows a run does so."""

    def close(self) -> None:
        """Its home does so."""


class TwoNodes(ManyAgents):
    """Two nodes with two CPU slots each: a run of four ranks is on both.

    Args:
        home: Its home.
    """

    def __init__(self, home: Home) -> None:
        home.environ["SGPU_CPU_SLOTS"] = "2"
        super().__init__(home, 2)

    def client(self) -> PoolClient:
        return PoolClient(self.home)


class SshService:
    """Machines behind ssh with room for four ranks on one of them, or on two of three.

    Args:
        home: The first machine's.
        machines: Number of machines.
    """

    def __init__(self, home: Home, machines: int) -> None:
        self.nodes = min(machines, 2)
        self._home, self._user = home, Home()
        self._others = [Home() for _ in range(machines - 1)]
        self._folder = Path(tempfile.mkdtemp(prefix="sgtm"))
        slots = {"SGPU_CPU_SLOTS": str(4 // self.nodes)}
        self._machines = SshMachines(self._folder, [home, *self._others], self._user, variables=[slots] * machines)

    def client(self) -> PoolClient:
        before = dict(os.environ)
        set_environ(self._user.environ)
        pool = Pool(load_settings(), print, self._machines.entry)
        set_environ(before)
        return PoolClient(self._user, pool)

    def kill(self) -> None:
        pid = eventually(self._home.pool_pid, 10, "there is no pool")
        os.kill(pid, signal.SIGKILL)
        wait_gone(pid)

    def restart(self) -> None:
        """The client that follows a run does so."""

    def close(self) -> None:
        # the first machine's pool ends the agents on the others
        if (pid := self._home.pool_pid()) is not None:
            stop_process(pid, signal.SIGTERM, 20)
        self._machines.stop()
        for home in (self._user, *self._others):
            home.close()
        shutil.rmtree(self._folder)


class FirstHome(Home):
    """The home of the first of several machines, with the directories of their pool."""

    @property
    def state(self) -> Path:
        return next((self.path / "state" / "pools").glob("hosts-*"), self.path / "state")

    @property
    def runtime(self) -> Path:
        return next((self.path / "run").glob("hosts-*"), self.path / "run")


class RayService:
    """A Ray cluster whose head and fake nodes have two GPUs each, or whose head alone has four; a pool service on it.

    Args:
        home: The service's.
        nodes: Number of nodes, 1 or 2.
    """

    def __init__(self, home: Home, nodes: int) -> None:
        self.nodes = nodes
        self._home = home
        self._cluster = FakeCluster((2,) * (nodes - 1), head_gpus=4 // nodes)
        self._pool = RayPool(self._cluster.address, {"SGPU_RAY_AGENT_IDLE_S": "60"}, home)

    def client(self) -> PoolClient:
        return PoolClient(self._home)

    def kill(self) -> None:
        self._pool.kill()

    def restart(self) -> None:
        self._pool.start()

    def close(self) -> None:
        try:
            self._pool.stop()
            assert self._cluster.left(self._pool.name) == {}
        finally:
            self._cluster.close()


ENGINES: dict[str, Callable[[Home], Service]] = {
    "local": LocalService,
    "many": TwoNodes,
    "ssh": functools.partial(SshService, machines=1),
    "ssh three": functools.partial(SshService, machines=3),
    "ray": functools.partial(RayService, nodes=2),
    "ray alone": functools.partial(RayService, nodes=1),
}


@dataclass
class PoolUnderTest:
    """A pool of one engine.

    Args:
        home: Its directories and processes.
        service: Its program.
        client: This process as a client of it.
    """

    home: Home
    service: Service
    client: PoolClient
