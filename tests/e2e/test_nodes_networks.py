"""Nodes with addresses of their own: ranks meet over the interface that has the node's address. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import cast

import pytest
from homes import Home
from many_agents import ManyAgents
from pool_client import PoolClient

from sgpu_magic.agent.ranks.orders import LOOPBACK, interface_of

ADDRESSES = ("10.77.0.1", "10.77.0.2")


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, ...]]:
    """Two, with a dead end that comes first and a way to each other."""
    if os.getuid() or shutil.which("ip") is None:
        pytest.skip("needs root and ip(8) for network namespaces")
    names = tuple(f"sgn{os.getpid()}-{number}" for number in range(2))
    with contextlib.ExitStack() as made:
        for name in names:
            ip("netns", "add", name)
            made.callback(ip, "netns", "delete", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "add", "dead0", "type", "veth", "peer", "name", "dead1")
            for number, interface in enumerate(("dead0", "dead1"), 1):
                ip("-n", name, "address", "add", f"192.168.77.{number}/24", "dev", interface)
                ip("-n", name, "link", "set", interface, "up")
        ip("-n", names[0], "link", "add", "fast0", "type", "veth", "peer", "name", "fast7", "netns", names[1])
        for name, interface, address in zip(names, ("fast0", "fast7"), ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "address", "add", f"fd77::{address[-1]}/64", "dev", interface, "nodad")
            ip("-n", name, "link", "set", interface, "up")
        yield names


@pytest.mark.slow
@pytest.mark.needs_root
def test_ranks_of_nodes_with_several_interfaces_meet_over_that_of_the_nodes_address(namespaces: tuple[str, ...]):
    home = Home({"SGPU_CPU_SLOTS": "2"})
    places = [f"{address}@{name}" for address, name in zip(ADDRESSES, namespaces, strict=True)]
    service = ManyAgents(home, places=places)
    client = PoolClient(home)
    try:
        run = client.begin(
            "import os, torch, torch.distributed as dist\n"
            "one = torch.ones(1)\ndist.all_reduce(one)\n"
            "dist.destroy_process_group()\ndist.init_process_group('gloo')\ndist.all_reduce(one)\n"
            "names = ('GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME', 'MASTER_ADDR')\n"
            "(one.item(), *(os.environ[name] for name in names))",
            ranks=4,
        )
        values = [cast("tuple[object, ...]", value) for value in run.values]
        home.check_leaks()
    finally:
        client.close()
        service.close()
        home.close()
    # rank 0 may be on either node
    master = values[0][3]
    interfaces = ["fast0", "fast7"] if master == ADDRESSES[0] else ["fast7", "fast0"]
    assert master in ADDRESSES
    for rank, value in enumerate(values):
        interface = interfaces[rank // 2]
        assert value == (16.0, interface, f"={interface}", master)


@pytest.mark.needs_root
def test_the_interface_of_an_address_is_found(namespaces: tuple[str, ...]):
    questions = (ADDRESSES[1], "192.168.77.1", "fd77::2", "127.0.0.9", "10.77.0.1", "not an address")
    module = "sgpu_magic.agent.ranks.orders"
    code = f"from {module} import interface_of\nprint([interface_of(a) for a in {questions!r}])"
    reported = subprocess.run(
        ["ip", "netns", "exec", namespaces[1], sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert reported.stdout.strip() == str(["fast7", "dead0", "fast7", "lo", "", ""])


def test_all_of_loopback_is_loopback():
    assert interface_of("127.0.0.1") == interface_of("127.3.2.1") == interface_of("::1") == LOOPBACK
    assert interface_of("203.0.113.7") == ""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
