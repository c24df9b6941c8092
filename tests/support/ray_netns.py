"""A Ray cluster whose nodes have their own addresses: raylets in network namespaces, on a bridge. Needs root."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess

from ray_head import RayHead, RayNode

_HEAD = "10.201.7.1"
_NODE = "10.201.7.{}"


class NetnsCluster:
    """A head without GPUs on the bridge, and nodes with two GPUs each.

    Args:
        nodes: Number of nodes.

    Attributes:
        address: The cluster's address.
        nodes: The nodes in order of their addresses.
    """

    def __init__(self, nodes: int = 2) -> None:
        self._bridge = f"sgb{os.getpid()}"
        self._made = contextlib.ExitStack()
        self.nodes: list[NetnsNode] = []
        self._numbers = itertools.count()
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            self._made.callback(_ip, "link", "delete", self._bridge)
            _ip("address", "add", f"{_HEAD}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            self.head = RayHead(_HEAD, token=False, gpus=0)
            self._made.callback(self.head.close)
            self.address = self.head.address
            for _ in range(nodes):
                self.add()
        except BaseException:
            self._made.close()
            raise

    def add(self) -> None:
        """Add a node with an address that none had before."""
        self.nodes.append(NetnsNode(self.head, self._bridge, next(self._numbers)))
        self._made.callback(self.nodes[-1].close)

    def replace(self, dead: NetnsNode) -> None:
        """Add a node in place of a killed one."""
        self.nodes.remove(dead)
        self.add()

    def node_at(self, address: str) -> NetnsNode:
        """Return the node with this address."""
        (found,) = [node for node in self.nodes if node.ip == address]
        return found

    def close(self) -> None:
        """Stop the cluster and remove its processes, namespaces and interfaces."""
        self._made.close()


class NetnsNode:
    """A raylet in a namespace.

    Args:
        head: The cluster's head.
        bridge: The bridge of its interface.
        number: Its number, from 0.
    """

    def __init__(self, head: RayHead, bridge: str, number: int) -> None:
        self.ip = _NODE.format(11 + number)
        self.name = f"sgn{os.getpid()}x{number}"
        self._outside, inside = f"sgo{os.getpid()}x{number}"[:15], f"sgi{number}"
        self.interface = inside
        _ip("netns", "add", self.name)
        _ip("link", "add", self._outside, "type", "veth", "peer", "name", inside, "netns", self.name)
        _ip("link", "set", self._outside, "master", bridge, "up")
        _ip("-n", self.name, "address", "add", f"{self.ip}/24", "dev", inside)
        _ip("-n", self.name, "link", "set", inside, "up")
        _ip("-n", self.name, "link", "set", "lo", "up")
        self.node = RayNode(
            [f"--address={head.address}"],
            self.ip,
            head.home / f"log{number}",
            head.environ,
            inside=["ip", "netns", "exec", self.name],
        )

    def cut(self) -> None:
        """Disconnect the node's network."""
        _ip("link", "set", self._outside, "down")

    def mend(self) -> None:
        """Reconnect the node's network."""
        _ip("link", "set", self._outside, "up")

    def kill(self) -> None:
        """Kill the node at once, as when a machine fails."""
        self.node.kill()

    def close(self) -> None:
        try:
            self.node.close()
        finally:
            _ip("netns", "delete", self.name)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
