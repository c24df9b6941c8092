"""The functions of `torch.cuda` and `torch.accelerator` on a rank whose CPU stands in for a GPU (see `cuda_on_cpu`)."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import torch

from sgpu_magic.system.processes import memory_available_bytes

NAME = "CPU in place of a GPU"
# that of the first GPUs with bfloat16, which the CPU supports too
_CAPABILITY = (8, 0)
# functions of `torch.cuda` with a constant result
_ANSWERS: dict[str, Any] = {
    "is_available": True, "is_bf16_supported": True, "is_current_stream_capturing": False,
    "can_device_access_peer": True, "get_device_name": NAME, "get_device_capability": _CAPABILITY, "get_arch_list": [],
    "memory_summary": f"{NAME}: no memory of its own", "utilization": 0, "memory_allocated": 0,
    "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0, "memory_cached": 0,
    "max_memory_cached": 0, "manual_seed": None, "manual_seed_all": None, "seed": None, "seed_all": None, "init": None,
    "_lazy_init": None, "synchronize": None, "empty_cache": None, "ipc_collect": None, "reset_peak_memory_stats": None,
    "reset_max_memory_allocated": None, "reset_max_memory_cached": None, "reset_accumulated_memory_stats": None,
    "set_per_process_memory_fraction": None, "set_stream": None,
}  # fmt: skip


class _Done:
    """On the CPU, work is done when the call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing: all work is done."""

    def wait(self, *args: object, **kwargs: object) -> None:
        """Do nothing: all work is done."""


class Event(_Done):
    """A point in time."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._at_s = 0.0

    def record(self, stream: object = None) -> None:
        self._at_s = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds until the other event."""
        return (end_event._at_s - self._at_s) * 1000.0


class Stream(_Done):
    """A queue that is always empty."""

    wait_stream = wait_event = _Done.wait

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = torch.device("cpu")
        self.cuda_stream = 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record()
        return event


class _Device:
    """The current device of this process, an index without effect."""

    def __init__(self, current: int, count: int) -> None:
        self.current = current
        self.count = count

    def index_of(self, device: Any) -> int:
        """Return the index that a number or name has; a device, which is the CPU here, is the current one."""
        if device is None or isinstance(device, torch.device):
            return self.current
        text = str(device).removeprefix("cuda").removeprefix(":")
        index = int(text) if text.isdigit() else self.current
        if not 0 <= index < self.count:
            # begins like torch's own message on CUDA
            raise RuntimeError(f"CUDA error: invalid device ordinal: {index}, and this rank has {self.count} devices")
        return index

    def select(self, device: Any) -> None:
        self.current = self.index_of(device)

    def exchange(self, device: int) -> int:
        """Make a device current and return the one before; a negative number changes nothing."""
        before = self.current
        if device >= 0:
            self.select(device)
        return before


def replace(local_rank: int, ranks_here: int) -> None:
    """Replace the functions that need CUDA.

    Args:
        local_rank: The current device.
        ranks_here: Number of devices.
    """
    cuda: Any = torch.cuda
    own = _Device(local_rank, ranks_here)
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = SimpleNamespace(
        name=NAME,
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=total_bytes,
        multi_processor_count=os.cpu_count() or 1,
        is_integrated=1,
        is_multi_gpu_board=0,
        # torch built without CUDA uses this name in the cache key of compiled code
        gcnArchName="",
    )
    for name, answer in {**_ANSWERS, "get_device_properties": properties}.items():
        setattr(cuda, name, _answering(answer))
    cuda.device_count = lambda: own.count
    cuda.current_device = lambda: own.current
    cuda.set_device = own.select
    # two distinct objects, since torch.compile keeps a table keyed by function
    cuda._exchange_device = lambda device: own.exchange(device)
    cuda._maybe_exchange_device = lambda device: own.exchange(device)
    cuda.mem_get_info = lambda device=None: (memory_available_bytes(), total_bytes)
    cuda.memory_stats = lambda device=None: {}
    cuda.Event, cuda.Stream = Event, Stream
    cuda.current_stream = lambda device=None: Stream()
    cuda.default_stream = lambda device=None: Stream()
    cuda.stream = lambda stream=None: contextlib.nullcontext(stream)
    # the original accepts only torch's own streams
    torch.Tensor.record_stream = _answering(None)
    _replace_random(cuda)
    _replace_accelerator(own)
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, _answering(0))
    cuda.nvtx.range = _no_range


def _replace_random(cuda: Any) -> None:
    """The generators of cuda are the CPU's, which `torch.manual_seed` seeds as well."""
    cuda.initial_seed = torch.initial_seed
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.get_rng_state_all = lambda: [torch.get_rng_state()]
    cuda.set_rng_state = lambda new_state, device=None: torch.set_rng_state(new_state)
    cuda.set_rng_state_all = lambda new_states: torch.set_rng_state(new_states[0])


def _replace_accelerator(own: _Device) -> None:
    """The accelerator is the CPU, with as many devices as `torch.cuda`."""
    accelerator: Any = torch.accelerator
    cuda: Any = torch.cuda
    accelerator.current_accelerator = lambda check_available=False: torch.device("cpu")
    accelerator.is_available = _answering(True)
    accelerator.device_count = lambda: own.count
    for name in ("current_device_index", "current_device_idx"):
        setattr(accelerator, name, lambda: own.current)
    for name in ("set_device_index", "set_device_idx"):
        setattr(accelerator, name, _another(own.select))
    accelerator.device_index = cuda.device
    accelerator.get_memory_info = _another(cuda.mem_get_info)
    accelerator.empty_host_cache = _answering(None)
    for name in (
        "current_stream", "empty_cache", "max_memory_allocated", "max_memory_reserved", "memory_allocated",
        "memory_reserved", "memory_stats", "reset_accumulated_memory_stats", "reset_peak_memory_stats", "set_stream",
        "synchronize",
    ):  # fmt: skip
        setattr(accelerator, name, _another(getattr(cuda, name)))


def _another(function: Callable[..., Any]) -> Any:
    """Return a new function that calls this one: torch.compile accepts a function under one name only."""
    return lambda *args, **kwargs: function(*args, **kwargs)


def _answering(answer: Any) -> Any:
    return lambda *args, **kwargs: answer  # pyright: ignore[reportUnknownLambdaType]


@contextlib.contextmanager
def _no_range(msg: str, *args: object, **kwargs: object) -> Generator[None]:
    yield
