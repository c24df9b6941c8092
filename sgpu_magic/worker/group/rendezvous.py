"""The run's process group: joins it before the cell, and accepts a second `init_process_group` by user code.

The second call has the same effect as under torchrun. If the existing group is the one that it describes, the call
keeps it and applies the time limit. If the call names another backend, NCCL's options or a device, torch makes a new
default group with these arguments, and the one before stays registered as a group of all ranks, for objects that hold
it.

On one node the first rendezvous uses a file (a memory file where the system has them), which needs neither a free port
nor name resolution. `MASTER_ADDR` and `MASTER_PORT` name a loopback socket that the agent has already bound. Rank 0
starts a store server on it only when user code makes another rendezvous. Then `TORCHELASTIC_USE_AGENT_STORE` tells
torch, as under torchrun, that the launcher hosts the store, so every rank is a client. The variable does not stay in
the environment: processes that a rank starts may rendezvous at another address, where one of them must be the host.
Across nodes the first rendezvous uses this server too, on the first node's address.

A rendezvous of all ranks uses this server at whatever address user code has written into `MASTER_ADDR` and
`MASTER_PORT`: the port may be in use, and behind it may be another program's store. A rendezvous of other processes, or
of some of the ranks, uses the address that it was given.
"""

# torch.distributed re-exports its stores without saying so
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import inspect
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from sgpu_magic.system import processes

_USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
"""The interface of groups on one node."""

_GLOO_LOOP = "gloo_tcp_loop"
_GLOO_SLACK_S = 0.04


def let_loops_sleep() -> None:
    """Let the loops of this process's gloo groups wake up less often: the rank waits for its run, or for its next cell.

    The loop of each group wakes up every 10 ms without a purpose but to see whether it is to end, 0.2 % of a core for
    each idle rank. With a slack of 40 ms it wakes up 20 times a second, and a group's end takes up to 0.1 s longer.
    Data is not delayed: it wakes the loop itself. Not while a group is made, which would take 25 ms longer.
    """
    processes.delay_timers(_GLOO_LOOP, _GLOO_SLACK_S)


class _LateStore:
    """The store at `MASTER_ADDR` and `MASTER_PORT`, whose server starts when it is first needed.

    Attributes:
        meetings: How often all ranks have met at this store.
        address: `MASTER_ADDR` and `MASTER_PORT` as set by the agent; user code may change them in the environment.
        rank: This rank.
        ranks: World size.
        listening_fd: Rank 0's listening socket, bound to `MASTER_PORT`, until the server takes it.
        server: The store's server in rank 0, None until it is needed.
    """

    def __init__(self) -> None:
        self.meetings = 0
        self.address: tuple[str, str] = ("", "")
        self.rank = self.ranks = -1
        self.listening_fd: int | None = None
        self.server: object | None = None

    def start_server(self) -> None:
        if self.listening_fd is not None and self.server is None:
            fd, self.listening_fd = self.listening_fd, None
            with socket.socket(fileno=os.dup(fd)) as listening:
                address, port = listening.getsockname()[:2]
            self.server = dist.TCPStore(
                address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd, use_libuv=False
            )


class _FileStores:
    """The file stores of this rank's rendezvous; the last one is in use.

    torch writes to a store's file when the store is freed, and ends the process if it can't. So no store is ever freed
    and no descriptor closed.
    """

    def __init__(self) -> None:
        self._stores: list[dist.FileStore] = []
        self._descriptor = -1
        # the main thread opens stores, the helper's thread announces and revokes them
        self._lock = threading.Lock()
        self._announced = self._is_revoked = False

    def announce(self) -> None:
        """Record that a store is about to be opened, so that `revoke` applies to it too."""
        with self._lock:
            self._announced, self._is_revoked = True, False

    def open(self, path: str, ranks: int) -> dist.FileStore:
        with self._lock:
            store = dist.FileStore(path, ranks)
            self._stores.append(store)
            name = path.removeprefix("/proc/self/fd/")
            self._descriptor = int(name) if name.isdigit() else -1
            if self._is_revoked:
                self._revoke()
            self._announced = self._is_revoked = False
        return store

    def revoke(self) -> None:
        """Make every wait for a peer in the store fail.

        A waiting store reopens its file again and again. The descriptor becomes a socket, which can't be opened. Stores
        in a named file are left alone.
        """
        with self._lock:
            self._is_revoked = self._announced
            self._revoke()

    def _revoke(self) -> None:
        if self._descriptor < 0:
            return
        with socket.socket(socket.AF_UNIX) as unopenable:
            os.dup2(unopenable.fileno(), self._descriptor, inheritable=False)
        self._descriptor = -1


late_store = _LateStore()
file_stores = _FileStores()


def join(rank: int, ranks: int, store_path: str, *, cuda: bool, several_nodes: bool = False) -> None:
    """Initialise the default process group and return when this rank is in it.

    Args:
        rank: Global rank.
        ranks: World size.
        store_path: File of the first rendezvous if all ranks are on this node.
        cuda: Also use NCCL, for tensors on the rank's GPU.
        several_nodes: Use the store at `MASTER_ADDR` and `MASTER_PORT`, and the interface that the environment names.
    """
    if several_nodes:
        late_store.start_server()
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.PrefixStore("ranks", dist.TCPStore(address, port, is_master=False, wait_for_workers=False))
    else:
        # overrides a cluster's settings: all ranks are on this node, and other interfaces need name resolution
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
        store = file_stores.open(store_path, ranks)
    backend = "cpu:gloo,cuda:nccl" if cuda and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)


def accept_second_init() -> None:
    """Let user code and frameworks call `init_process_group` although the group exists.

    Called before user code can import the function by name.
    """
    original_init = c10d.init_process_group
    os.register_at_fork(after_in_child=_disown_groups)

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            original_init(*args, **kwargs)
            return
        try:
            given = inspect.signature(original_init).bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"init_process_group() {error}") from None
        _check_arguments(given)
        if _describes_another_group(given):
            _replace_default_group(given, original_init)
        elif given.get("timeout") is not None:
            set_timeout(given["timeout"])
        if given.get("timeout") is not None and _has_no_limit():
            described.remark(
                "init_process_group(timeout=...): collectives of a session over NCCL have no time limit, since NCCL's "
                "would end the ranks and their variables. The view reports ranks that wait for each other, and an "
                "interrupt releases them. TORCH_NCCL_ASYNC_ERROR_HANDLING=1 in the notebook's environment, set before "
                "the session is connected, makes torch end them."
            )

    # under torch's own name it is pickled by reference, for a process that the rank spawns
    functools.update_wrapper(init_process_group, original_init)
    c10d.init_process_group = init_process_group
    dist.init_process_group = init_process_group


def accept_second_rendezvous() -> None:
    """Let all ranks rendezvous again, where no launcher hosts a store.

    Called in the zygote, before user code can import the function by name.
    """
    # the package has a function of the same name
    torch_rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    create_store: Callable[..., Any] = torch_rendezvous._create_c10d_store

    def create_store_with_server(
        hostname: str, port: int, rank: int, world_size: int, *args: Any, **kwargs: Any
    ) -> Any:
        if _is_child() and (hostname, str(port)) == late_store.address:
            rank_variable = os.environ.get("RANK", "?")
            raise RuntimeError(
                f"init_process_group() in a process that rank {rank_variable} has started: MASTER_ADDR and MASTER_PORT "
                "belong to the run's group, which its ranks have joined already and no other process can join. Train "
                "in the ranks, which the run has started as torchrun does: in Lightning with strategy='ddp' instead of "
                "'ddp_notebook'. Processes of a rank that form a group need a port of their own."
            )
        if _is_child() or (rank, world_size) != (late_store.rank, late_store.ranks):
            return create_store(hostname, port, rank, world_size, *args, **kwargs)
        late_store.start_server()
        late_store.meetings += 1
        address, own_port = late_store.address
        before = os.environ.get(_USE_AGENT_STORE)
        os.environ[_USE_AGENT_STORE] = "True"
        try:
            store = create_store(address, int(own_port), rank, world_size, *args, **kwargs)
        finally:
            if before is None:
                del os.environ[_USE_AGENT_STORE]
            else:
                os.environ[_USE_AGENT_STORE] = before
        # without a prefix, as under torchrun, a third group reads the addresses of the second and hangs
        return dist.PrefixStore(f"group_{late_store.meetings}", store)

    torch_rendezvous._create_c10d_store = create_store_with_server


def set_timeout(timeout: datetime.timedelta) -> None:
    """Set the time limit of the default group's collectives and of its store, as `init_process_group` does."""
    group: Any = c10d.GroupMember.WORLD
    for device in backends_of(group):
        # the device may have no backend: cuda on a rank without a GPU
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(torch.device(device))
            # in torch's debug mode a wrapper, which has no time limit of its own
            getattr(backend, "wrapped_pg", backend)._set_default_timeout(timeout)
    c10d._world.pg_map[group][1].set_timeout(timeout)  # pyright: ignore[reportPrivateUsage]


def backends_of(group: Any) -> dict[str, str]:
    """Return a group's backends by device, such as `{"cpu": "gloo"}`."""
    config: Any = c10d._world.pg_backend_config[group]  # pyright: ignore[reportPrivateUsage]
    return dict(c10d.BackendConfig(config).get_device_backend_map())


def _check_arguments(given: dict[str, Any]) -> None:
    """Reject arguments that torch itself rejects, and those of a group other than the run's.

    Raises:
        ValueError: As in torch, or `rank` or `world_size` differs from the run's.
        AssertionError: As in torch.
    """
    if given.get("store") is not None and given.get("init_method") is not None:
        raise AssertionError("Cannot specify both init_method and store.")
    if given.get("timeout") is not None:
        c10d._check_valid_timeout(given["timeout"])  # pyright: ignore[reportPrivateUsage]
    if given.get("backend") is not None:
        for part in c10d.Backend(given["backend"]).split(","):
            backend = part.rpartition(":")[2].lower()
            if backend not in c10d.Backend.backend_list:
                raise ValueError(f"Unknown c10d backend type {backend.upper()}")
    device = _device_of(given)
    if device is not None:
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or device.type != accelerator.type or device.index is None:
            raise ValueError(
                "init_process_group device_id parameter must be an accelerator with an index, but is "
                f"{given['device_id']!r}; this rank has {accelerator or 'no accelerator'}."
            )
    ranks = given.get("_ranks")
    if ranks and sorted(ranks) != list(range(dist.get_world_size())):
        raise ValueError(f"init_process_group(_ranks={ranks}): the run's process group has all its ranks.")
    for name, own in (("world_size", dist.get_world_size()), ("rank", dist.get_rank())):
        if given.get(name, -1) not in (-1, own):
            raise ValueError(
                f"init_process_group({name}={given[name]}): this run's process group already exists, and its {name} "
                f"is {own}. Call torch.distributed.destroy_process_group() first to make another one."
            )


# ---------------------------------------------------------------- another default group


class _Described:
    """What user code has asked of the default group beyond its backend.

    Attributes:
        options: The `pg_options` that the default group was made with.
        remark: Shows the user a note; replaced for each cell.
    """

    def __init__(self) -> None:
        self.options: object = None
        self.remark: Callable[[str], None] = lambda text: None


described = _Described()


def _device_of(given: dict[str, Any]) -> Any:
    """Return the device that is given, as an object; None for none."""
    device = given.get("device_id")
    if isinstance(device, int):
        accelerator = torch.accelerator.current_accelerator()
        return torch.device(accelerator.type if accelerator is not None else "cpu", device)
    return device


def _describes_another_group(given: dict[str, Any]) -> bool:
    """Whether the arguments describe a group with other backends, options or device than the default group's."""
    world: Any = c10d.GroupMember.WORLD
    bound_to: torch.device | None = world.bound_device_id
    device, backend = _device_of(given), given.get("backend")
    if device is not None and device != bound_to:
        return True
    has = _usable(backends_of(world))
    wanted = has
    if backend is not None:
        wanted = _usable(dict(c10d.BackendConfig(_backend(backend)).get_device_backend_map()))
        if not wanted:
            described.remark(
                f"init_process_group({backend!r}): this run's ranks have no GPU, and {backend} works on GPUs only. The "
                "group is gloo's."
            )
            return False
    if wanted != has:
        return True
    # gloo has no options: torch ignores them
    options = given.get("pg_options")
    return options is not None and options is not described.options and set(wanted.values()) != {"gloo"}


def _backend(name: str) -> Any:
    # torch uses its subclass of str as a type, but declares that its constructor returns a str
    return c10d.Backend(name)


def _usable(backends: dict[str, str]) -> dict[str, str]:
    """Leave out the backends of devices that this rank does not have."""
    return {device: name for device, name in backends.items() if device == "cpu" or _has(device)}


def _has(device: str) -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == device


def _has_no_limit() -> bool:
    """Whether NCCL carries collectives, and its watchdog does not act on late ones."""
    uses_nccl = "nccl" in _usable(backends_of(c10d.GroupMember.WORLD)).values()
    return uses_nccl and os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0"


def _replace_default_group(given: dict[str, Any], original_init: Callable[..., None]) -> None:
    """Let torch make a new default group. The one before stays registered, under its own name.

    It is not destroyed: another rank may still be connecting to it, or be in its last collective.
    """
    before = c10d.GroupMember.WORLD
    c10d._update_default_pg(None)  # pyright: ignore[reportPrivateUsage]
    try:
        original_init(**given)
    except BaseException:
        c10d._update_default_pg(before)  # pyright: ignore[reportPrivateUsage]
        raise
    described.options = given.get("pg_options")


# ---------------------------------------------------------------- processes that a rank forks


_parents_groups: list[object] = []


def _is_child() -> bool:
    """Whether this process was forked by a rank, and so is not in the run's group."""
    return bool(_parents_groups)


def _disown_groups() -> None:
    """Leave all groups in a process that a rank forks, as `torch.multiprocessing` does; it may make its own.

    The group objects are kept: destroying them would wait for threads that don't exist after the fork.
    """
    world: Any = c10d._world  # pyright: ignore[reportPrivateUsage]
    if not dist.is_initialized():
        return
    maps = (
        world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.tags_to_pg, world.pg_to_tag,
        world.pg_coalesce_state,
    )  # fmt: skip
    _parents_groups.extend([world.default_pg, *map(dict, maps)])
    for one in maps:
        one.clear()
    c10d._unregister_all_process_groups()  # pyright: ignore
    c10d._update_default_pg(None)  # pyright: ignore[reportPrivateUsage]
    world.group_count = 0


def groups() -> list[object]:
    """Return torch's process groups that this rank is in."""
    return list(c10d._world.pg_map)  # pyright: ignore[reportPrivateUsage]
