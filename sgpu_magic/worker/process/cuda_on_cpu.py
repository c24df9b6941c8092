"""Maps `cuda` to the CPU in a rank without a GPU, so that code for GPUs can be tried out (`SGPU_STAND_IN=cpu,cuda`).

A `TorchFunctionMode` replaces devices: torch calls it for `torch.device(...)`, `.to`, `.cuda`, `Module.to` and every
function with `device=`, so no object of type `cuda` ever exists, and devices compare and print as what they are. What
torch does not route through a mode is replaced: functions of `torch.cuda`, the device types of autocast, gradient
scalers and device meshes, DDP's `device_ids`, `map_location`, and NCCL. `torch.cuda` claims one device for each rank of
the node, and so does `torch.accelerator`. Processes that a rank starts with multiprocessing map cuda too
(`patches`); other programs that it starts do not.
"""

# torch is only partly typed, and most of what is replaced here is not meant to be
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.overrides import TorchFunctionMode

from sgpu_magic.worker.process import cuda_functions

NOTE = "cuda is mapped to the CPU (SGPU_STAND_IN=cpu,cuda): memory, speed and numerics are the CPU's"

# code that adds an index to the accelerator's type gets `cpu:1` here
_MAPPED = re.compile(r"cuda(:\d+)?|cpu:\d+")
_CPU = torch.device("cpu")
# methods of a tensor that return it as it is
_SAME: Any = (torch.Tensor.cuda, torch.Tensor.pin_memory)
_TO: Any = (torch.Tensor.to, torch._C._nn._parse_to)
LIGHTNING = tuple(
    f"{package}.accelerators.cuda"
    for package in ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning")
)
"""Modules that `accept_cpu` changes after their import."""
FSDP = "torch.distributed.fsdp._init_utils"
"""The module that `accept_fsdp` changes after its import."""


_is_installed = False


def install(local_rank: int, ranks_here: int) -> bool:
    """Map cuda to the CPU in this process from now on. Called in a rank's main thread, before its first cell.

    Returns False if it is mapped already.

    Args:
        local_rank: The device that is current.
        ranks_here: Number of devices.
    """
    global _is_installed
    if _is_installed:
        return False
    _is_installed = True
    _CudaOnCpu().__enter__()
    _in_new_threads()
    cuda_functions.replace(local_rank, ranks_here)
    _replace_types()
    _replace_distributed()
    return True


class _CudaOnCpu(TorchFunctionMode):
    """Replaces cuda by the CPU in the arguments of torch's functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return _device(args, kwargs)
        if func in _SAME:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"], numbers=True)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func in _TO:
            # `x.to(0)`: the first argument after the tensor
            at = 0 if func is _TO[1] else 1
            args = (*args[:at], *(on_cpu(value, numbers=True) for value in args[at : at + 1]), *args[at + 1 :])
        return func(*args, **kwargs)


def _device(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    first = args[0] if args else kwargs.get("type", kwargs.get("device"))
    if on_cpu(first, numbers=True) is first:
        return torch.device(*args, **kwargs)
    return _CPU


def on_cpu(value: Any, *, numbers: bool = False) -> Any:
    """Return the CPU for a cuda device or its name, and any other value as it is.

    Args:
        value: The value.
        numbers: Take a number for the index of a device.
    """
    if isinstance(value, str):
        return "cpu" if _MAPPED.fullmatch(value) else value
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if numbers and isinstance(value, int) and not isinstance(value, bool):
        return _CPU
    return value


def _in_new_threads() -> None:
    """Enter the mode in threads that the rank starts: a mode belongs to one thread."""
    thread: Any = threading.Thread
    original = thread._bootstrap_inner

    @functools.wraps(original)
    def _bootstrap_inner(self: threading.Thread) -> None:
        with _CudaOnCpu():
            original(self)

    thread._bootstrap_inner = _bootstrap_inner


# ---------------------------------------------------------------- functions that torch does not route through a mode


def _changed(owner: Any, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Let `change` edit the arguments, by name, of every call of a function or constructor."""
    original = getattr(owner, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            # the original reports the mistake
            return original(*args, **kwargs)
        change(bound.arguments)
        return original(*bound.args, **bound.kwargs)

    setattr(owner, name, changed)


def _mapped(*names: str) -> Callable[[dict[str, Any]], None]:
    """Return a change that maps the named arguments."""

    def change(arguments: dict[str, Any]) -> None:
        arguments.update({name: on_cpu(arguments[name]) for name in names if name in arguments})

    return change


def _without(*names: str) -> Callable[[dict[str, Any]], None]:
    """Return a change that leaves out the named arguments."""

    def change(arguments: dict[str, Any]) -> None:
        for name in names:
            arguments.pop(name, None)

    return change


def _replace_types() -> None:
    """Autocast, gradient scalers, generators, and `map_location`."""
    _changed(torch.amp.autocast_mode.autocast, "__init__", _mapped("device_type"))
    scaler: Any = torch.amp.GradScaler
    # by default a scaler is for cuda
    _changed(scaler, "__init__", lambda given: given.update(device=on_cpu(given.get("device", "cuda"))))
    _changed(torch, "load", _load_on_cpu)
    # its own module, where pickle looks for it
    torch.serialization.load = torch.load
    torch.Generator = _Generator
    for name in ("is_autocast_enabled", "get_autocast_dtype", "get_device_module"):
        original = getattr(torch, name)
        setattr(torch, name, _with_first_mapped(original))


def _with_first_mapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        return original(*map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()})

    return mapped


def _load_on_cpu(arguments: dict[str, Any]) -> None:
    where = arguments.get("map_location")
    if isinstance(where, dict):
        given = cast("dict[Any, Any]", where)
        arguments["map_location"] = {"cuda": "cpu"} | {key: on_cpu(value) for key, value in given.items()}
    elif where is None or not callable(where):
        arguments["map_location"] = _CPU if where is None else on_cpu(where)


class _AnyGenerator(type(torch._C.Generator)):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch._C.Generator)


class _Generator(torch._C.Generator, metaclass=_AnyGenerator):  # pyright: ignore[reportGeneralTypeIssues]
    """`torch.Generator`, whose constructor is not routed through a mode."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator(on_cpu(device, numbers=True))


def _replace_distributed() -> None:
    """DDP's devices, device meshes, and NCCL: each of them in all modules that have it by name."""
    _changed(torch.nn.parallel.DistributedDataParallel, "__init__", _without("device_ids", "output_device"))
    _replace_data_parallel()
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    check = ddp._check_comm_hook
    # gloo supports bfloat16, but torch assumes that only NCCL does
    ddp._check_comm_hook = lambda self, hook: None if "bf16" in getattr(hook, "__name__", "") else check(self, hook)
    mesh: Any = dist.device_mesh
    _changed(mesh.DeviceMesh, "__init__", _mapped("device_type"))
    _changed(mesh, "init_device_mesh", _mapped("device_type"))
    dist.init_device_mesh = mesh.init_device_mesh
    for name in ("init_process_group", "new_group", "barrier"):
        _changed(c10d, name, _on_gloo)
        setattr(dist, name, getattr(c10d, name))
    for name in ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"):
        # the names ending in `single` came with torch 2.13
        if hasattr(c10d, name):
            _changed(c10d, name, _flat)
            setattr(dist, name, getattr(c10d, name))


def accept_fsdp(module: Any) -> None:
    """Let FSDP1 take the CPU without a `device_id`, where it looks for an accelerator and refuses the CPU."""
    original = module._init_device_handle

    @functools.wraps(original)
    def _init_device_handle(state: Any, *args: Any, **kwargs: Any) -> Any:
        state._device_handle = module._FSDPDeviceHandle.from_device(_CPU)
        return state

    module._init_device_handle = _init_device_handle


def _replace_data_parallel() -> None:
    original: Any = torch.nn.DataParallel.__init__

    @functools.wraps(original)
    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        original(self, module, device_ids=[0])
        # without devices it calls the module itself
        self.device_ids = []

    torch.nn.DataParallel.__init__ = init


def _on_gloo(arguments: dict[str, Any]) -> None:
    """Replace NCCL by gloo, and leave out devices, which only NCCL takes."""
    _without("device_id", "device_ids", "pg_options")(arguments)
    backend = arguments.get("backend")
    if isinstance(backend, str) and "nccl" in backend.lower():
        arguments["backend"] = "gloo"


def _flat(arguments: dict[str, Any]) -> None:
    """Pass tensors without dimensions: NCCL looks only at their sizes, gloo at their shapes."""
    for name in arguments.keys() & {"output_tensor", "input_tensor", "output", "input"}:
        tensor = arguments[name]
        if tensor.is_contiguous():
            arguments[name] = tensor.view(-1)


def accept_cpu(module: Any) -> None:
    """Let Lightning's accelerator for cuda accept the CPU, whose type it checks."""
    module.CUDAAccelerator.setup_device = lambda self, device: torch.cuda.set_device(device)
