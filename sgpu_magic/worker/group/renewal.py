"""Reconnects process groups after a lost connection, by giving each group object a new backend.

A model wrapped in DDP or sharded by FSDP, a DeviceMesh and the user's own groups hold torch's `ProcessGroup`, which
dispatches to a backend by device. The group object stays, and gets a new backend over a new store. First, every rank
publishes its groups in that store: only groups that all their members still have can be reconnected.

DDP and FSDP2 keep the state of an iteration in the model. After a lost connection has cut off an iteration, this state
must be reset on all ranks alike (`mend_models`), else the next iteration raises or mismatches its collectives.

Tested with gloo on torch 2.13. NCCL is reconnected in the way that torch allows since 2.6.
"""

# torch.distributed re-exports its stores without saying so, and much of it is private
# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import os
import sys
from collections.abc import Generator, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from sgpu_magic.worker.group import rendezvous
from sgpu_magic.worker.process import position

_PATIENCE = datetime.timedelta(seconds=60)
# torch's own backend types end below, and the type is stored in one byte
_FIRST_TYPE, _LAST_TYPE = 16, 255
_DEFAULT = "default"
# the classes themselves, also while `_handing_out` replaces them
_GLOO: Any = c10d.ProcessGroupGloo
_NCCL: Any = getattr(c10d, "ProcessGroupNCCL", None)


class _Census(msgspec.Struct):
    """One rank's groups.

    Args:
        backends: Backends of its default group by device; empty if it has none.
        count: torch's number for the next group.
        groups: Global ranks of each other group that the rank is in, by the group's name.
    """

    backends: dict[str, str]
    count: int
    groups: dict[str, list[int]]


# never reused: a group keeps using the backend that it already has for a type
_types = iter(range(_FIRST_TYPE, _LAST_TYPE + 1))
# NCCL backends that `Release` has aborted
_aborted: list[Any] = []


def renew(rank: int, ranks: int, store_path: str, replaced: Sequence[int] = (), *, cuda: bool) -> str:
    """Reconnect the groups. Returns a sentence about the lost ones, "" if all were reconnected.

    Every rank of the default group calls this with the same store. A rank without a default group (a new process, or
    one whose cell has destroyed the group) initialises it.

    Args:
        rank: Global rank.
        ranks: World size.
        store_path: The new store's file.
        replaced: Ranks that are new processes.
        cuda: The rank has its own GPU.

    Raises:
        RuntimeError: A rank does not take part within 60 s, or torch refuses.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = rendezvous.LOOPBACK
    store = rendezvous.file_stores.open(store_path, ranks)
    store.set_timeout(_PATIENCE)
    every_census = _take_census(store, rank, ranks)
    was_grouped = dist.is_initialized()
    if was_grouped:
        for group in list(c10d._world.pg_map):
            _abort_nccl(group)
        _connect(c10d.GroupMember.WORLD, _DEFAULT, rank, ranks, store)
    else:
        _initialise(rank, ranks, store, cuda=cuda and dist.is_nccl_available())
    lost = _connect_others(rank, store, every_census, replaced)
    # ranks that failed before they made a group, and new ones, would number the next group differently
    c10d._world.group_count = max(c10d._world.group_count, *(census.count for census in every_census))
    position.forget_collectives()
    if was_grouped:
        mend_models()
    store.set_timeout(c10d.default_pg_timeout)
    return lost


def abort_nccl(*, stays: bool) -> None:
    """Release a rank that is blocked in an NCCL collective (torch 2.6 or newer).

    Gloo's collectives are released by shutting down their sockets.

    Args:
        stays: Abort only the backends, and keep the groups for a renewal.
    """
    if not dist.is_initialized() or "nccl" not in str(dist.get_backend_config()):
        return
    if not stays:
        c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]
        return
    for group in list(c10d._world.pg_map):
        _abort_nccl(group)


# ---------------------------------------------------------------- which groups


def _take_census(store: Any, rank: int, ranks: int) -> list[_Census]:
    """Publish this rank's groups, and return those of all ranks."""
    own = _Census(backends={}, count=0, groups={})
    if dist.is_initialized():
        world = c10d.GroupMember.WORLD
        own.backends, own.count = _backends_of(world), c10d._world.group_count
        for group, name in c10d._world.pg_names.items():
            if group is not world:
                own.groups[str(name)] = sorted(c10d._world.pg_group_ranks[group])
    store.set(f"census/{rank}", msgspec.json.encode(own))
    decode = msgspec.json.Decoder(_Census).decode
    return [decode(store.get(f"census/{other}")) for other in range(ranks)]


def _connect_others(rank: int, store: Any, every_census: Sequence[_Census], replaced: Sequence[int]) -> str:
    """Reconnect the groups that all their members have, in the same order on all ranks. Returns the lost ones."""
    lost: dict[str, None] = {}
    groups = {str(name): group for group, name in c10d._world.pg_names.items()}
    for name in sorted({name for census in every_census for name in census.groups}):
        members = next(census.groups[name] for census in every_census if name in census.groups)
        if any(every_census[member].groups.get(name) != members for member in members):
            lost[f"({', '.join(map(str, members))})"] = None
        elif rank in members and name in groups:
            _connect(groups[name], f"group/{name}", members.index(rank), len(members), store)
    if not lost:
        return ""
    which = ", ".join(lost)
    if replaced:
        new = f"rank {replaced[0]} is a new process" if len(replaced) == 1 else "some ranks are new processes"
        return f"The process groups of ranks {which} can't continue, as {new}: create them again."
    return f"The process groups of ranks {which} were not created on all of them: create them again."


def _backends_of(group: Any) -> dict[str, str]:
    """Return the backends by device, such as `{"cpu": "gloo"}`."""
    config: Any = c10d._world.pg_backend_config[group]
    return dict(c10d.BackendConfig(config).get_device_backend_map())


# ---------------------------------------------------------------- one group


def _connect(group: Any, name: str, rank: int, ranks: int, store: Any) -> None:
    """Give the group new backends over the store.

    Args:
        group: torch's group.
        name: Its prefix in the store, the same on all ranks.
        rank: This rank's number in the group.
        ranks: The group's size.
        store: The new store.
    """
    own_name, members = c10d._world.pg_names[group], sorted(c10d._world.pg_group_ranks[group])
    by_backend: dict[str, list[str]] = {}
    for device, backend_name in _backends_of(group).items():
        by_backend.setdefault(backend_name, []).append(device)
    for backend_name, devices in by_backend.items():
        if backend_name not in ("gloo", "nccl"):
            raise RuntimeError(f"a process group of backend {backend_name} can't be reconnected")
        make = _make_gloo if backend_name == "gloo" else _make_nccl
        timeout = _timeout_of(group, devices)
        backend = make(c10d.PrefixStore(f"{name}/{backend_name}", store), rank, ranks, timeout)
        # as torch does for a new group
        backend.options.global_ranks_in_group = members
        backend.options.group_name = own_name
        backend._set_sequence_number_for_group()
        number = next(_types, None)
        if number is None:
            raise RuntimeError("the process groups were reconnected more often than torch can count: restart the ranks")
        kind = c10d.ProcessGroup.BackendType(number)
        for device in devices:
            group._register_backend(torch.device(device), kind, backend)
    # these also pass on to the new backends
    group._set_group_name(own_name)
    group._set_group_desc(group.group_desc)
    c10d._world.pg_map[group] = (c10d._world.pg_map[group][0], c10d.PrefixStore(f"{name}/torch", store))


def _timeout_of(group: Any, devices: Sequence[str]) -> datetime.timedelta:
    # in torch's debug mode the backend is a wrapper without options
    with contextlib.suppress(RuntimeError, AttributeError):
        return group._get_backend(torch.device(devices[0])).options._timeout
    return c10d.default_pg_timeout


@functools.cache
def _device() -> Any:
    return _GLOO.create_device(interface=rendezvous.LOOPBACK)


def _make_gloo(store: Any, rank: int, ranks: int, timeout: datetime.timedelta) -> Any:
    options = _GLOO._Options()
    options._devices, options._threads, options._timeout = [_device()], 1, _PATIENCE
    backend = _GLOO(store, rank, ranks, options)
    backend._set_default_timeout(timeout)
    return backend


def _make_nccl(store: Any, rank: int, ranks: int, timeout: datetime.timedelta) -> Any:
    options = _NCCL.Options()
    options._timeout = timeout
    return _NCCL(store, rank, ranks, options)


def _abort_nccl(group: Any) -> None:
    for device, name in _backends_of(group).items():
        if name != "nccl":
            continue
        backend = group._get_backend(torch.device(device))
        if not any(backend is aborted for aborted in _aborted):
            _aborted.append(backend)
            backend.abort()


# ---------------------------------------------------------------- the default group of a new process


def _initialise(rank: int, ranks: int, store: Any, *, cuda: bool) -> None:
    """Make torch's default group with the backends that the other ranks' renewed groups expect."""
    name = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    with contextlib.ExitStack() as stack:
        stack.enter_context(_handing_out("ProcessGroupGloo", _make_gloo, f"{_DEFAULT}/gloo", store))
        if cuda:
            stack.enter_context(_handing_out("ProcessGroupNCCL", _make_nccl, f"{_DEFAULT}/nccl", store))
        dist.init_process_group(name, store=store, rank=rank, world_size=ranks)
    world: Any = c10d.GroupMember.WORLD
    c10d._world.pg_map[world] = (c10d._world.pg_map[world][0], c10d.PrefixStore(f"{_DEFAULT}/torch", store))


@contextlib.contextmanager
def _handing_out(class_name: str, make: Any, prefix: str, store: Any) -> Generator[None]:
    """Within the block, let torch get our backend where it would create an object of the class."""
    real = getattr(c10d, class_name)

    class StandIn(type):
        def __call__(cls, prefixed: Any, rank: int, ranks: int, *args: Any, **kwargs: Any) -> Any:
            return make(c10d.PrefixStore(prefix, store), rank, ranks, c10d.default_pg_timeout)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

        def __getattr__(cls, name: str) -> Any:
            return getattr(real, name)

    setattr(c10d, class_name, StandIn(class_name, (), {}))
    try:
        yield
    finally:
        setattr(c10d, class_name, real)


def mend_models() -> None:
    """Reset the iteration state of every model that DDP or FSDP2 wraps; partial gradients are lost.

    Scans all objects of the process, which takes 20 ms for a million.
    """
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    sharded = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")
    ddp: Any = getattr(parallel, "DistributedDataParallel", None)
    fsdp: Any = getattr(sharded, "FSDPModule", None)
    kinds = tuple(kind for kind in (ddp, fsdp) if kind is not None)
    if not kinds:
        return
    # by type: `isinstance` may run the user's code
    for module in [found for found in gc.get_objects() if issubclass(type(found), kinds)]:
        if ddp is not None and issubclass(type(module), ddp):
            # also makes all ranks rebuild their buckets at the same iteration
            if hasattr(module, "reducer"):
                module._update_process_group(module.process_group)
        elif hasattr(module, "reset_iter_state"):
            _reset_sharded(module)


def _reset_sharded(module: Any) -> None:
    state = module._get_fsdp_state()
    if state._is_root is not True:
        return
    for one in state._state_ctx.all_states:
        for group in one._fsdp_param_groups:
            # the reset would wait for its result, which never comes
            group._all_gather_result = None
    module.reset_iter_state()
