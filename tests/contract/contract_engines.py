"""The engines that the contract holds for, each as a pool that a test may use: `ENGINES` by name."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from homes import Home
from many_agents import ManyAgents
from pool_client import PoolClient
from process_table import wait_gone
from ray_clusters import FakeCluster, RayPool
from waiting import eventually


class Service(Protocol):
    """A pool service with room for four ranks."""

    nodes: int

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

    def kill(self) -> None:
        pid = eventually(self._home.pool_pid, 10, "there is no pool")
        os.kill(pid, signal.SIGKILL)
        wait_gone(pid)

    def restart(self) -> None:
        """The client that follows a run does so."""

    def close(self) -> None:
        """Its home does so."""


def two_nodes(home: Home) -> Service:
    """Two nodes with two CPU slots each: a run of four ranks is on both."""
    home.environ["SGPU_CPU_SLOTS"] = "2"
    return ManyAgents(home, 2)


class RayService:
    """A Ray cluster whose head and fake nodes have two GPUs each, or whose head alone has four; a pool service on it.

    Args:
        home: The service's.
        nodes: Number of nodes, 1 or 2.
    """

    def __init__(self, home: Home, nodes: int) -> None:
        self.nodes = nodes
        self._cluster = FakeCluster((2,) * (nodes - 1), head_gpus=4 // nodes)
        self._pool = RayPool(self._cluster.address, {"SGPU_RAY_AGENT_IDLE_S": "60"}, home)

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
    "many": two_nodes,
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
