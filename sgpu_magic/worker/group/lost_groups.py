"""Process groups that can't be reconnected: torch forgets them, and code that uses one gets an error with the reason.

torch keeps each group in a registry, from which it takes the next group's name and DTensor the group of a mesh. A group
that exists on some of its members only would give them other names than the rest, and a new DTensor the lost group. A
lost group is therefore removed on all members. Objects that hold it, such as a `DeviceMesh` or a model, raise
`LostGroup` when they use it.
"""

# torch.distributed re-exports its stores without saying so, and much of it is private
# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed.distributed_c10d as c10d

_TENSOR = "torch.distributed.tensor"
_PLANNERS = "clear_redistribute_planner_cache"
_Cache: Any = type(functools.lru_cache(lambda: None))


class LostGroup(RuntimeError):
    """User code uses a process group that can't be reconnected."""


# why each group was lost, by the group and by its name
_groups: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_names: dict[str, str] = {}


def remove(group: Any, why: str) -> None:
    """Remove a group from torch's registry.

    Args:
        group: torch's group.
        why: The message of the error for code that uses it.
    """
    _check_uses()
    world: Any = c10d._world
    name: Any = world.pg_names[group]
    _groups[group] = why
    _names[name] = why
    for one in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        one.pop(group, None)
    world.pg_coalesce_state.pop(group, None)
    for tag, groups in list(world.tags_to_pg.items()):
        groups[:] = [other for other in groups if other is not group]
        if not groups:
            del world.tags_to_pg[tag]
    c10d._unregister_process_group(name)


def clear_caches() -> None:
    """Clear what DTensor caches by mesh: meshes of the same ranks are equal, whatever their groups are.

    Some of these caches are local to functions, so all objects of the process are scanned.
    """
    if _TENSOR not in sys.modules:
        return
    for found in gc.get_objects():
        # by type: `isinstance` may run the user's code
        if type(found) is _Cache and str(found.__module__).startswith(_TENSOR):
            found.cache_clear()
    # torch 2.13 has further caches, in C++ and with weak references
    redistribute = sys.modules.get(f"{_TENSOR}._redistribute")
    for owner, name in ((torch._C, "_clear_DTensor_sharding_propagator_cache"), (redistribute, _PLANNERS)):
        clear: Callable[[], None] | None = getattr(owner, name, None)
        if clear is not None:
            clear()


def refuse_models() -> None:
    """Let models that DDP has wrapped for a lost group raise `LostGroup`: they use the group without torch's Python."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is None:
        return
    ddp: Any = parallel.DistributedDataParallel
    # by type: `isinstance` may run the user's code
    for module in [found for found in gc.get_objects() if issubclass(type(found), ddp)]:
        why = _groups.get(getattr(module, "process_group", None)) if hasattr(module, "process_group") else None
        if why is not None:
            module.forward = functools.partial(_raise, why)


@functools.cache
def _check_uses() -> None:
    """Check groups where torch's Python looks them up: in collectives, functional ones as of DTensor, and meshes."""
    in_group: Callable[[Any], bool] = c10d._rank_not_in_group

    @functools.wraps(in_group)
    def _rank_not_in_group(group: Any) -> bool:
        if isinstance(group, c10d.ProcessGroup) and group in _groups:
            _raise(_groups[group])
        return in_group(group)

    c10d._rank_not_in_group = _rank_not_in_group
    import torch.distributed._functional_collectives as functional

    resolve: Callable[..., Any] = functional._resolve_group

    @functools.wraps(resolve)
    def _resolve_group(*args: Any, **kwargs: Any) -> Any:
        found = resolve(*args, **kwargs)
        why = _names.get(found) if isinstance(found, str) else _groups.get(found)
        if why is not None:
            _raise(why)
        return found

    functional._resolve_group = _resolve_group
    by_name: Callable[[str], Any] = torch._C._distributed_c10d._resolve_process_group

    @functools.wraps(by_name)
    def _resolve_process_group(group_name: str) -> Any:
        if group_name in _names:
            _raise(_names[group_name])
        return by_name(group_name)

    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "torch" and vars(module).get("_resolve_process_group") is by_name:
            module._resolve_process_group = _resolve_process_group


def _raise(why: str, *args: object, **kwargs: object) -> NoReturn:
    raise LostGroup(why)
