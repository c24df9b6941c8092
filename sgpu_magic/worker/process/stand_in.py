"""CUDA devices that stand for the CPU, on machines without a GPU."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import multiprocessing.spawn
import sys
from collections.abc import Callable
from typing import Any

from sgpu_magic.worker.process.patches import after_import

_KEY = "sgpu_cuda_on_cpu"


class _Mapping:
    """Unpickles as a call of `map_cuda`."""

    def __init__(self, devices: int) -> None:
        self._devices = devices

    def __reduce__(self) -> tuple[Callable[[int], str], tuple[int]]:
        return map_cuda, (self._devices,)


def _prepare_children(devices: int) -> None:
    """Let processes that this one starts map cuda.

    Args:
        devices: Number of devices that they see.
    """
    spawn: Any = multiprocessing.spawn
    if hasattr(spawn.get_preparation_data, "__wrapped__"):
        return
    original: Callable[[str], dict[str, Any]] = spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        return original(name) | {_KEY: _Mapping(devices)}

    spawn.get_preparation_data = get_preparation_data


def map_cuda(devices: int, current: int = 0) -> str:
    """Map cuda in this process, as soon as it imports torch, and in those that it starts.

    Args:
        devices: Number of devices that it sees.
        current: Index of the current device.

    Returns:
        A value for the data that is read.
    """
    # a child of this process may import torch although this one does not
    _prepare_children(devices)
    if "torch" in sys.modules:
        _install(current, devices)
    else:
        after_import(("torch",), lambda module: _install(current, devices))
    return "mapped"


def map_cuda_in_task() -> None:
    """Map cuda in a process of Ray's that runs tasks or an actor, which has one device."""
    map_cuda(1)


def _install(current: int, devices: int) -> None:
    from sgpu_magic.worker.process import cuda_on_cpu

    if cuda_on_cpu.install(current, devices):
        after_import(cuda_on_cpu.LIGHTNING, cuda_on_cpu.accept_cpu)
        after_import((cuda_on_cpu.FSDP,), cuda_on_cpu.accept_fsdp)
