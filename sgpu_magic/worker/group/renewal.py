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

import _thread
import contextlib
import datetime
import functools
import gc
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Generator, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from sgpu_magic.wire.decoding import JsonDecoder
from sgpu_magic.worker.group import local_names, lost_groups, rendezvous
from sgpu_magic.worker.process import position

_PATIENCE = datetime.timedelta(seconds=60)
_ABORT_PATIENCE_S = 20.0
# torch's own backend types end below, and the type is stored in one byte
_FIRST_TYPE, _LAST_TYPE = 16, 255
_DEFAULT = "default"
# the classes themselves, also while `_handing_out` replaces them
_GLOO: Any = c10d.ProcessGroupGloo
_NCCL: Any = getattr(c10d, "ProcessGroupNCCL", None)


class _Census(msgspec.Struct):
    """One rank's groups.

    Args:
        backend: torch's name for the backends of its default group; empty if it has none.
        timeout_s: The time limit of its default group.
        count: torch's number for the next group.
        meetings: How often it has met all ranks at the store for a second `init_process_group`.
        generation: Number of the store in which groups of some ranks were made.
        groups: Global ranks of each other group that the rank is in, by the group's name.
    """

    backend: str = ""
    timeout_s: float = 0.0
    count: int = 0
    meetings: int = 0
    generation: int = 0
    groups: dict[str, list[int]] = msgspec.field(default_factory=dict[str, list[int]])


# the last type that each group got; never reused: a group keeps using the backend that it already has for a type
_last_types: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
# backends that `Release` has aborted, and its aborts that may still be going on
_aborted: list[Any] = []
_aborts: list[threading.Event] = []


def renew(rank: int, ranks: int, store_path: str, replaced: Sequence[int] = (), *, cuda: bool) -> str | None:
    """Reconnect the groups. Returns a sentence about the lost ones, None if all were reconnected.

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
    every_census = _exchange_groups(store, rank, ranks)
    was_grouped = dist.is_initialized()
    if was_grouped:
        _wait_for_aborts()
        for group in list(c10d._world.pg_map):
            _abort_backends(group)
        _connect(c10d.GroupMember.WORLD, _DEFAULT, rank, ranks, store)
    else:
        known = next((census for census in every_census if census.backend), None)
        _initialise(rank, ranks, store, known, cuda=cuda and dist.is_nccl_available())
    lost = _connect_others(rank, store, every_census, replaced)
    _count_alike(every_census)
    position.forget_collectives()
    if was_grouped:
        mend_models()
    if lost:
        lost_groups.clear_caches()
        lost_groups.refuse_models()
    store.set_timeout(c10d.default_pg_timeout)
    return lost


def ends_without_error() -> bool:
    """Whether this rank has groups whose aborted collectives may end without an error, as NCCL's do."""
    return dist.is_initialized() and any(_aborted_devices(group) for group in list(c10d._world.pg_map))


def abort(*, stays: bool) -> None:
    """Release a rank that is blocked in a collective of NCCL (torch 2.6 or newer) or of a backend like it.

    Gloo's collectives are released by shutting down their sockets. Returns at once: an abort may hang, and the calling
    thread has other messages to answer.

    Args:
        stays: Abort only the backends, and keep the groups for a renewal.
    """
    if not ends_without_error():
        return
    done = threading.Event()
    _aborts.append(done)
    # not a `threading.Thread`: the process must be able to end while the abort hangs
    _thread.start_new_thread(_abort_groups, (done, stays))


def _abort_groups(done: threading.Event, stays: bool) -> None:
    try:
        if stays:
            for group in list(c10d._world.pg_map):
                _abort_backends(group)
        else:
            c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]
    except Exception:  # noqa: BLE001  a thread's top
        traceback.print_exc()
    finally:
        done.set()


def _wait_for_aborts() -> None:
    """Wait until the aborts that `Release` has begun are over.

    Raises:
        RuntimeError: One hangs.
    """
    while _aborts:
        if not _aborts[0].wait(_ABORT_PATIENCE_S):
            raise RuntimeError(
                f"its process groups were not aborted within {_ABORT_PATIENCE_S:.0f} s: NCCL or the driver hangs. "
                "Restart the ranks"
            )
        del _aborts[0]


# ---------------------------------------------------------------- groups to reconnect


def _exchange_groups(store: Any, rank: int, ranks: int) -> list[_Census]:
    """Publish this rank's groups, and return those of all ranks."""
    own = _Census(meetings=rendezvous.late_store.meetings, generation=local_names.generation())
    if dist.is_initialized():
        world: Any = c10d.GroupMember.WORLD
        own.backend, own.count = str(c10d._world.pg_map[world][0]), c10d._world.group_count
        own.timeout_s = _timeout_of(world, next(iter(_backends_of(world)))).total_seconds()
        for group, name in c10d._world.pg_names.items():
            if group is not world:
                own.groups[str(name)] = sorted(c10d._world.pg_group_ranks[group])
    store.set(f"census/{rank}", msgspec.json.encode(own))
    decode = JsonDecoder(_Census).decode
    return [decode(store.get(f"census/{other}")) for other in range(ranks)]


def _count_alike(every_census: Sequence[_Census]) -> None:
    """Give all ranks the same number for the next group: new ranks, and ranks that failed earlier, have lower ones."""
    c10d._world.group_count = max(c10d._world.group_count, *(census.count for census in every_census))
    rendezvous.late_store.meetings = max(census.meetings for census in every_census)
    local_names.begin_generation(max(census.generation for census in every_census) + 1)


def _connect_others(rank: int, store: Any, every_census: Sequence[_Census], replaced: Sequence[int]) -> str | None:
    """Reconnect the groups that all their members have, in the same order on all ranks. As `renew`."""
    lost: dict[str, None] = {}
    groups = {str(name): group for group, name in c10d._world.pg_names.items()}
    if not replaced:
        reason = "it was not created on all of them"
    elif len(replaced) == 1:
        reason = f"rank {replaced[0]} is a new process"
    else:
        reason = "some ranks are new processes"
    for name in sorted({name for census in every_census for name in census.groups}):
        members = next(census.groups[name] for census in every_census if name in census.groups)
        if any(every_census[member].groups.get(name) != members for member in members):
            which = f"({', '.join(map(str, members))})"
            lost[which] = None
            if name in groups:
                lost_groups.remove(
                    groups[name], f"the process group of ranks {which} was lost: {reason}. Create it again."
                )
        elif rank in members and name in groups:
            _connect(groups[name], f"group/{name}", members.index(rank), len(members), store)
    if not lost:
        return None
    which = ", ".join(lost)
    if replaced:
        return f"The process groups of ranks {which} can't continue, as {reason}: create them again."
    return f"The process groups of ranks {which} were not created on all of them: create them again."


def _backends_of(group: Any) -> dict[str, str]:
    return rendezvous.backends_of(group)


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
        timeout = _timeout_of(group, devices[0])
        backend = make(c10d.PrefixStore(f"{name}/{backend_name}", store), rank, ranks, timeout)
        # as torch does for a new group
        backend.options.global_ranks_in_group = members
        backend.options.group_name = own_name
        backend._set_sequence_number_for_group()
        number = _last_types.get(group, _FIRST_TYPE - 1) + 1
        if number > _LAST_TYPE:
            raise RuntimeError("a process group was reconnected more often than torch can count: restart the ranks")
        _last_types[group] = number
        kind = c10d.ProcessGroup.BackendType(number)
        for device in devices:
            group._register_backend(torch.device(device), kind, backend)
    # these also pass on to the new backends
    group._set_group_name(own_name)
    group._set_group_desc(group.group_desc)
    c10d._world.pg_map[group] = (c10d._world.pg_map[group][0], c10d.PrefixStore(f"{name}/torch", store))


def _timeout_of(group: Any, device: str) -> datetime.timedelta:
    with contextlib.suppress(RuntimeError, AttributeError):
        backend = group._get_backend(torch.device(device))
        # in torch's debug mode a wrapper, which has no options
        return getattr(backend, "wrapped_pg", backend).options._timeout
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


def _aborted_devices(group: Any) -> list[str]:
    """Return the devices whose collectives are released by an abort."""
    return [device for device, name in _backends_of(group).items() if name != "gloo"]


def _abort_backends(group: Any) -> None:
    for device in _aborted_devices(group):
        # a group implemented in Python is its own backend
        backend = group if type(group) is not c10d.ProcessGroup else group._get_backend(torch.device(device))
        if not any(backend is aborted for aborted in _aborted):
            _aborted.append(backend)
            backend.abort()


# ---------------------------------------------------------------- the default group of a new process


def _initialise(rank: int, ranks: int, store: Any, known: _Census | None, *, cuda: bool) -> None:
    """Make torch's default group with the backends and the time limit that those of the other ranks have."""
    name = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if known is not None:
        name = known.backend
    with contextlib.ExitStack() as stack:
        stack.enter_context(_handing_out("ProcessGroupGloo", _make_gloo, f"{_DEFAULT}/gloo", store))
        if cuda:
            stack.enter_context(_handing_out("ProcessGroupNCCL", _make_nccl, f"{_DEFAULT}/nccl", store))
        dist.init_process_group(name, store=store, rank=rank, world_size=ranks)
    world: Any = c10d.GroupMember.WORLD
    c10d._world.pg_map[world] = (c10d._world.pg_map[world][0], c10d.PrefixStore(f"{_DEFAULT}/torch", store))
    if known is not None:
        rendezvous.set_timeout(datetime.timedelta(seconds=known.timeout_s))


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
            # the reset would wait for this result, which never arrives
            group._all_gather_result = None
    module.reset_iter_state()
