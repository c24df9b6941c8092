"""The process group of a run: joined before the cell, accepted when user code asks again.

On one node the first rendezvous goes over a file (a memory file where there are such): no port to guess, no name to
look up. `MASTER_ADDR` and `MASTER_PORT` name a loopback socket that the agent has bound already. Its server starts in
rank 0 only when somebody rendezvouses through it; torch is told, as under torchrun, that the launcher hosts the store
(`TORCHELASTIC_USE_AGENT_STORE`), so every rank is a client. Over several nodes that server, on the first node's own
address, is where the ranks meet at first too.
"""

# torch.distributed re-exports its stores without saying so
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d


class _LateStore:
    """Rank 0's listening socket, and the server once somebody needs it; and how often this rank has made the group."""

    def __init__(self) -> None:
        self.groups_made = 0
        self.listening_fd: int | None = None
        self.server: object | None = None

    def start_server(self) -> None:
        if self.listening_fd is not None and self.server is None:
            fd, self.listening_fd = self.listening_fd, None
            with socket.socket(fileno=os.dup(fd)) as listening:
                address, port = listening.getsockname()[:2]
            self.server = dist.TCPStore(
                address,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=fd,
                use_libuv=False,
            )


class _FileStores:
    """The files over which this rank has met the others; the last one is in use.

    torch writes to a store's file when the store is freed, and ends the process where it can't: none ever is, and no
    descriptor is closed.
    """

    def __init__(self) -> None:
        self._stores: list[dist.FileStore] = []
        self._descriptor = -1

    def open(self, path: str, ranks: int) -> dist.FileStore:
        store = dist.FileStore(path, ranks)
        self._stores.append(store)
        name = path.removeprefix("/proc/self/fd/")
        self._descriptor = int(name) if name.isdigit() else -1
        return store

    def revoke(self) -> None:
        """Whoever waits in the store for a peer gets an error: it opens the file again and again.

        A socket can't be opened. Stores of a file with a name are left alone.
        """
        if self._descriptor < 0:
            return
        with socket.socket(socket.AF_UNIX) as unopenable:
            os.dup2(unopenable.fileno(), self._descriptor, inheritable=False)
        self._descriptor = -1


_late_store = _LateStore()
_file_stores = _FileStores()
open_store = _file_stores.open
revoke_store = _file_stores.revoke


def keep_listening_socket(descriptor: int) -> None:
    """Rank 0 only: the socket behind `MASTER_PORT`."""
    _late_store.listening_fd = descriptor


def join(rank: int, ranks: int, store_path: str, *, cuda: bool, several_nodes: bool = False) -> None:
    """Initialise the default process group and return when this rank is in it.

    Args:
        rank: Global rank.
        ranks: World size.
        store_path: File of the first rendezvous, where all ranks are on this node.
        cuda: Also use NCCL, for tensors on the rank's GPU.
        several_nodes: The ranks meet at `MASTER_ADDR` and `MASTER_PORT`, over the interface that the environment names.
    """
    if not dist.is_available():
        return
    if several_nodes:
        _late_store.start_server()
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.PrefixStore("ranks", dist.TCPStore(address, port, is_master=False, wait_for_workers=False))
    else:
        # whatever a cluster's settings say: all ranks are on this node, and any other interface looks names up
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        store = open_store(store_path, ranks)
    backend = "cpu:gloo,cuda:nccl" if cuda and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)


def accept_second_init() -> None:
    """Let user code and frameworks call `init_process_group` although the group is there, and rendezvous again.

    Done in the zygote, before anybody can have imported the functions by name.
    """
    original_init = c10d.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            return
        _late_store.groups_made += 1
        original_init(*args, **kwargs)

    init_process_group.__doc__ = original_init.__doc__
    init_process_group.__wrapped__ = original_init  # pyright: ignore[reportFunctionMemberAccess]
    c10d.init_process_group = init_process_group
    dist.init_process_group = init_process_group

    # the package has a function of the same name
    torch_rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    create_store: Callable[..., Any] = torch_rendezvous._create_c10d_store

    def create_store_with_server(hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
        if str(port) != os.environ.get("MASTER_PORT"):
            return create_store(hostname, port, *args, **kwargs)
        _late_store.start_server()
        store = create_store(hostname, port, *args, **kwargs)
        # under torchrun a third group reads the addresses of the second and hangs
        return dist.PrefixStore(f"group_{_late_store.groups_made}", store)

    torch_rendezvous._create_c10d_store = create_store_with_server


def groups() -> list[object]:
    """Return torch's process groups that this rank is in."""
    return list(c10d._world.pg_map) if dist.is_available() else []  # pyright: ignore[reportPrivateUsage]


def is_grouped() -> bool:
    """Whether the default process group is there."""
    return dist.is_available() and dist.is_initialized()


def abort_nccl(*, stays: bool) -> None:
    """Free a rank that sits in an NCCL collective (torch 2.6 or newer). Gloo's are freed through their sockets.

    Args:
        stays: The groups are kept, to be connected anew: only their backends are aborted.
    """
    if not is_grouped() or "nccl" not in str(dist.get_backend_config()):
        return
    if not stays:
        c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]
        return
    from sgpu_magic.worker import renewal

    renewal.abort_nccl_backends()
