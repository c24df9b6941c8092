"""Values that are one rank's part of something larger: sharded tensors, samplers of one rank, device meshes.

A rank's `state_dict()` under FSDP2 holds the rank's shards, each a DTensor with the shape of the whole. Sent to other
ranks as it is, each of them would take the shard for its own. So the pickler records such parts:

- **Out of a rank**, a part is sent unchanged, and a note of the run says that it is one.
- **Into ranks**, parts are accepted only if every rank of the run finds its own among them, as in the list that
  `--out sd:all` brings back. On each rank its own part is rebuilt, and `ForeignPart` stands for those of others.

A DeviceMesh knows the coordinate of the process that created it. On a rank it gets that rank's.

Importing this module does not import torch: an object of a class has imported the class's module.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch is only accessed through `sys.modules`, without types

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import msgspec

_DTENSOR = ("torch.distributed.tensor", "DTensor")
_MESH = ("torch.distributed.device_mesh", "DeviceMesh")
_SHARDED_TENSOR = ("torch.distributed._shard.sharded_tensor", "ShardedTensor")
# classes that select one rank's items: their attributes with the rank and the number of ranks
_SELECTIONS = {
    ("torch.utils.data.distributed", "DistributedSampler"): ("rank", "num_replicas"),
    ("transformers.trainer_pt_utils", "DistributedLengthGroupedSampler"): ("rank", "num_replicas"),
    ("accelerate.data_loader", "BatchSamplerShard"): ("process_index", "num_processes"),
    ("accelerate.data_loader", "IterableDatasetShard"): ("process_index", "num_processes"),
}

WHOLE_STATE = (
    "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options=StateDictOptions("
    "full_state_dict=True, cpu_offload=True))"
)
"""The call that returns the whole state of a sharded model on rank 0."""


class Part(msgspec.Struct, frozen=True, eq=False):
    """One rank's part, found while a value was pickled.

    Args:
        value: The object.
        kind: What it is, with its article: `a DTensor`.
        rank: The rank whose part it is; None if unknown.
        ranks: All ranks that have a part.
        selects: Whether it selects one rank's items, as a sampler does, instead of being a piece of the data.
        path: Its notation in the notebook, `sd['weight']`; "" if it was not looked for.
    """

    value: object
    kind: str
    rank: int | None
    ranks: tuple[int, ...]
    selects: bool = False
    path: str = ""


def is_dtensor(obj: object) -> bool:
    return _is(obj, _DTENSOR)


def is_mesh(obj: object) -> bool:
    return _is(obj, _MESH)


def is_sharded_tensor(obj: object) -> bool:
    """Whether it is a ShardedTensor of FSDP1, which only the process that made it can read."""
    return _is(obj, _SHARDED_TENSOR)


def is_selection(obj: object) -> bool:
    return any(_is(obj, known) for known in _SELECTIONS)


def part_of(obj: Any) -> Part | None:
    """Return what is known of a DTensor or of a selection as a part; None if it is whole."""
    if not is_dtensor(obj):
        attributes = next(names for known, names in _SELECTIONS.items() if _is(obj, known))
        rank, ranks = (getattr(obj, name, None) for name in attributes)
        if not isinstance(ranks, int) or ranks < 2:
            return None
        owner = rank if isinstance(rank, int) else None
        return Part(obj, f"a {type(obj).__name__}", owner, tuple(range(ranks)), selects=True)
    mesh = obj.device_mesh
    if all(placement.is_replicate() or mesh.size(at) == 1 for at, placement in enumerate(obj.placements)):
        return None
    return Part(obj, "a sharded DTensor", _rank_of(mesh), _ranks_of(mesh))


class ForeignPart:
    """Another rank's part on a rank, which it can't use: every use raises.

    Args:
        kind: What it is, with its article.
        rank: The rank that it belongs to; None if unknown.
    """

    def __init__(self, kind: str, rank: int | None) -> None:
        self._kind = kind
        self._rank = rank

    def __repr__(self) -> str:
        owner = "another rank" if self._rank is None else f"rank {self._rank}"
        return f"<{self._kind} of {owner}, which rank {_own_rank()} can't use>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(f"{self!r}: take the rank's own from the list, as in `values[rank]`.")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = _refuse
    __getitem__ = __setitem__ = __len__ = __iter__ = __float__ = __int__ = __bool__ = _refuse
    __array__ = __torch_function__ = _refuse


def rebuild(kind: str, rank: int | None, make: Callable[..., object], *arguments: object) -> object:
    """Return the part of this rank; in another rank, what stands for it."""
    own = _own_rank()
    if own is not None and rank is not None and own != rank:
        return ForeignPart(kind, rank)
    return make(*arguments)


# ---------------------------------------------------------------- parts into ranks


class Missing(msgspec.Struct, frozen=True):
    """Why parts can't be sent to the ranks of a run.

    Args:
        part: One of the parts.
        has: The ranks whose parts there are.
        of: The number of ranks that they were made for.
    """

    part: Part
    has: tuple[int, ...]
    of: int


def missing(parts: Collection[Part], ranks: Sequence[int], world_size: int) -> Missing | None:
    """Return what is wrong with one value's parts for these ranks; None if each finds its own.

    Args:
        parts: All parts in the value.
        ranks: The ranks that receive the value.
        world_size: Their number with those of the run that don't.
    """
    if not parts:
        return None
    has = {part.rank for part in parts if part.rank is not None}
    of = {rank for part in parts for rank in part.ranks}
    unknown = any(part.rank is None for part in parts)
    if not unknown and has.issuperset(ranks) and len(of) == world_size:
        return None
    return Missing(next(iter(parts)), tuple(sorted(has)), len(of))


def join_parts(parts: Sequence[Any]) -> Any:
    """Return the whole tensor that these DTensors, by rank, are the shards of; None if they aren't all of one."""
    first = parts[0]
    mesh = first.device_mesh
    if len(first.placements) != 1 or not first.placements[0].is_shard() or len(_ranks_of(mesh)) != len(parts):
        return None
    torch: Any = sys.modules["torch"]
    return torch.cat([part.to_local() for part in parts], dim=first.placements[0].dim)


# ---------------------------------------------------------------- device meshes


def reduce_mesh(mesh: Any) -> tuple[Callable[..., object], tuple[object, ...]]:
    """Return the reduction of a DeviceMesh, without its process groups, which only their process has."""
    state = {name: value for name, value in vars(mesh).items() if name != "_pg_registry"}
    return make_mesh, (type(mesh), state)


def make_mesh(kind: Any, state: dict[str, Any]) -> object:
    """Rebuild a DeviceMesh: on a rank with that rank's coordinate and groups, in a notebook as it was.

    Its process groups are named. A name that means other ranks here is dropped, so that a collective over this mesh
    raises instead of reaching them.
    """
    mesh: Any = kind.__new__(kind)
    vars(mesh).update(state)
    if "_pg_registry" in getattr(kind, "__annotations__", {}):
        mesh._pg_registry = {}
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return mesh
    rank: int = dist.get_rank()
    if "_rank" in state:
        mesh._rank = rank
    at = (mesh.mesh == rank).nonzero()
    mesh._coordinate_on_dim = tuple(at[0].tolist()) if len(at) else None
    names = _group_names(dist, mesh, rank)
    if names is None:
        for attribute in ("_dim_group_names", "_dim_group_infos"):
            vars(mesh).pop(attribute, None)
    elif "_dim_group_names" in state:
        mesh._dim_group_names = names
    return mesh


def _group_names(dist: Any, mesh: Any, rank: int) -> list[str] | None:
    """Return the name of each dimension's group in this process, None if there is no such group."""
    if mesh._coordinate_on_dim is None:
        return None
    known = getattr(mesh, "_dim_group_names", None)
    infos = getattr(mesh, "_dim_group_infos", None)
    if known is None:
        # torch before 2.8: (tag, ranks, name) of each dimension
        known = [info[-1] for info in infos] if infos else []
    groups = {group.group_name: sorted(dist.get_process_group_ranks(group)) for group in _groups(dist)}
    found: list[str] = []
    for dimension in range(mesh.ndim):
        at = [*mesh._coordinate_on_dim]
        line = mesh.mesh[(*at[:dimension], slice(None), *at[dimension + 1 :])]
        wanted = sorted(int(each) for each in line)
        name = known[dimension] if dimension < len(known) else ""
        if groups.get(name) == wanted:
            found.append(name)
        elif wanted == list(range(dist.get_world_size())) and infos is None:
            found.append(dist.group.WORLD.group_name)
        else:
            return None
    return found


def _groups(dist: Any) -> list[Any]:
    return [*dist.distributed_c10d._world.pg_map]


# ---------------------------------------------------------------- internals


def _is(obj: object, known: tuple[str, str]) -> bool:
    kind = getattr(sys.modules.get(known[0]), known[1], None)
    return isinstance(kind, type) and isinstance(obj, kind)


def _own_rank() -> int | None:
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else None


def _rank_of(mesh: Any) -> int | None:
    """Return the rank of the process in which the mesh was made."""
    rank = getattr(mesh, "_rank", None)
    if isinstance(rank, int):
        return rank
    coordinate = mesh.get_coordinate()
    return None if coordinate is None else int(mesh.mesh[tuple(coordinate)])


def _ranks_of(mesh: Any) -> tuple[int, ...]:
    # the mesh's own tensor asks for the process's rank, which a notebook does not have
    flat = getattr(mesh, "_rank_map", None)
    return tuple(sorted(int(rank) for rank in (mesh.mesh if flat is None else flat).flatten()))
