"""Storages of torch tensors, pickled out of band; tensors that share a storage still share it afterwards.

Torch pickles a tensor as its storage plus offset, sizes and strides. Only the storage is handled here, so Parameters,
views, conjugates, sparse and quantized tensors and subclasses are pickled by torch itself. CPU memory is not copied.
CUDA memory is copied through the host and arrives on the rank's own device; in a notebook on the CPU, unless that uses
CUDA already. Importing this module does not import torch.
"""

from __future__ import annotations

import functools
import os
import pickle
from typing import Any

Reduced = tuple[Any, ...]


class StorageRef:
    """One storage in the pickle stream.

    Args:
        storage: The storage, kept alive while its address is used as a key.
        array: Its bytes on the host.
        on_device: Whether it is on a CUDA device.
    """

    def __init__(self, storage: object, array: Any, *, on_device: bool) -> None:
        self.storage = storage
        self._array = array
        self._on_device = on_device

    def __reduce__(self) -> Reduced:
        data = pickle.PickleBuffer(self._array) if self._array.size else b""
        return rebuild_storage, (data, self._on_device)


def is_storage(torch: Any, obj: object) -> bool:
    return isinstance(obj, torch.storage.TypedStorage | torch.UntypedStorage)


def reduce_storage(torch: Any, storage: Any, refs: dict[tuple[str, int], StorageRef]) -> Any:
    """Return the reduction of a storage, NotImplemented to leave it to torch.

    Args:
        torch: The torch module.
        storage: A typed or untyped storage.
        refs: Storages seen by this pickler, by device and address.
    """
    is_typed = isinstance(storage, torch.storage.TypedStorage)
    untyped = storage._untyped_storage if is_typed else storage
    if untyped.device.type not in ("cpu", "cuda"):
        return NotImplemented
    key = (str(untyped.device), untyped._cdata)
    if (ref := refs.get(key)) is None:
        ref = refs[key] = _ref(torch, untyped)
    return rebuild_typed_storage, (ref, storage.dtype if is_typed else None)


def reduce_tensor(torch: Any, tensor: Any) -> Any:
    """Return the reduction of a tensor whose dtype torch supports in `torch.save` only, else NotImplemented."""
    if tensor.dtype not in _types_unknown_to_pickle(torch) or tensor.device.type == "meta" or tensor.is_sparse:
        return NotImplemented
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return rebuild_as, (tensor.detach().view(integers), tensor.dtype, tensor.requires_grad)


@functools.cache
def _types_unknown_to_pickle(torch: Any) -> frozenset[Any]:
    find: Any = getattr(torch.storage, "_new_dtypes", frozenset)
    return frozenset(find()) - {getattr(torch, "complex32", None)}


def rebuild_as(tensor: Any, dtype: Any, requires_grad: bool) -> Any:
    return tensor.view(dtype).requires_grad_(requires_grad)


def _ref(torch: Any, storage: Any) -> StorageRef:
    on_device = storage.device.type != "cpu"
    host = storage.cpu() if on_device else storage
    view = torch.empty(0, dtype=torch.uint8, device="cpu").set_(host, 0, (host.nbytes(),), (1,))
    return StorageRef(storage, view.numpy(), on_device=on_device)


def rebuild_storage(data: Any, on_device: bool) -> Any:
    """Return a storage over `data`, or on this process's own device."""
    import torch

    if not len(data):
        return torch.UntypedStorage(0, device=own_device() if on_device else "cpu")
    host: Any = torch.frombuffer(data, dtype=torch.uint8)
    return (host.to(own_device()) if on_device else host).untyped_storage()


def rebuild_typed_storage(storage: Any, dtype: Any) -> Any:
    if dtype is None:
        return storage
    import torch

    typed: Any = torch.storage.TypedStorage
    return typed(wrap_storage=storage, dtype=dtype, _internal=True)


def own_device() -> Any:
    """Return the device for incoming CUDA tensors: a rank's own, in a notebook the one it uses, or the CPU.

    A notebook that has not used CUDA does not begin to: its context would hold memory of a GPU that the next run needs,
    and the pool would take it for a program of others.
    """
    import torch

    local_rank = os.environ.get("LOCAL_RANK", "")
    if local_rank.isdigit() and torch.cuda.is_available():
        return torch.device("cuda", int(local_rank) % torch.cuda.device_count())
    if torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
