"""What devices this node has and who uses them. The one owner of NVML."""

from __future__ import annotations

import contextlib
import enum
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from sgpu_magic.agent.device_users import outside_use
from sgpu_magic.config import host_name
from sgpu_magic.errors import UsageError
from sgpu_magic.protocol.device_types import ANY, CPU, canonical_type, memory_of
from sgpu_magic.protocol.records import Device, Inventory

"""Share of a device's memory above which it counts as in use, though no process of ours is on it."""

MAX_SIMULATED = 1024
"""Simulated devices of one type."""

_SIMULATED = re.compile(r"(?P<type>[^:]+):\s*(?P<count>[0-9]{1,4})\s*")


def take_inventory(*, simulate: str, cpu_slots: int, own_pids: Collection[int] = ()) -> Inventory:
    """Return what this node has at this moment.

    NVML is opened and closed again, which takes tens of milliseconds and seconds where the driver's
    persistence mode is off, and leaves nothing behind that would keep an administrator from resetting a GPU.

    Args:
        simulate: Simulated devices, `a10:4,h100:8`. They stand in place of the real ones; "" asks NVML.
        cpu_slots: CPU ranks that fit at once, passed on.
        own_pids: Processes of this pool. They and their descendants are no outside use. In a container NVML
            may give the host's pids, which can't be matched: of a device that it has leased itself the
            caller must disregard `outside_use`.

    Returns:
        The devices in PCI bus order, each slice of a GPU in MIG mode as a device of its own. `problem` is
        also set when only some devices could be read; a machine without a driver has neither.

    Raises:
        UsageError: `simulate` can't be understood.
    """
    if simulate.strip():
        devices, problem = simulated_devices(simulate), ""
    else:
        devices, problem = _real_devices(frozenset(own_pids))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Inventory(host=host_name(), devices=devices, cpu_slots=cpu_slots, cores=cores, problem=problem)


def utilizations(uuids: Collection[str]) -> dict[str, float]:
    """Return how busy these GPUs were in the last moments, 0 to 100; without those whose driver does not tell.

    Opens and closes NVML, so call it in a thread of its own.
    """
    devices, _ = _real_devices(frozenset())
    return {
        device.uuid: device.utilization_pct
        for device in devices
        if device.uuid in uuids and device.utilization_pct is not None
    }


# ---------------------------------------------------------------- simulated


def simulated_devices(text: str) -> tuple[Device, ...]:
    """Return the devices that `text` (the setting `simulate`) declares.

    Raises:
        UsageError: A part is not `type:count`, or a type stands twice.
    """
    devices: list[Device] = []
    seen: set[str] = set()
    for part in text.split(","):
        match = _SIMULATED.fullmatch(part)
        count = int(match["count"]) if match else 0
        if not match or not 1 <= count <= MAX_SIMULATED:
            wanted = f"a type, a colon and a count from 1 to {MAX_SIMULATED}"
            raise _simulate_error(text, f"{part.strip()!r} is not {wanted}.")
        try:
            kind = canonical_type(match["type"])
        except ValueError as error:
            raise _simulate_error(text, str(error)) from None
        if kind in (CPU, ANY):
            raise _simulate_error(text, f"{kind} can't be simulated.")
        if kind in seen:
            raise _simulate_error(text, f"{kind} stands twice.")
        seen.add(kind)
        start = len(devices)
        devices.extend(
            Device(
                uuid=f"SIM-{kind}-{number}",
                type=kind,
                name=f"simulated {kind}",
                index=start + number,
                memory_bytes=memory_of(kind),
                simulated=True,
            )
            for number in range(count)
        )
    return tuple(devices)


def _simulate_error(text: str, reason: str) -> UsageError:
    return UsageError(
        f"the simulated devices {text!r} can't be understood: {reason} "
        "Set SGPU_SIMULATE (or simulate in config.toml) to something like a10:4,h100:8, or leave it empty."
    )


# ---------------------------------------------------------------- real


class _Memory(Protocol):
    total: int
    used: int


class _Process(Protocol):
    pid: int


class _Nvml(Protocol):
    """The part of `pynvml` (nvidia-ml-py) that is used here; the module itself has no types."""

    NVMLError: type[Exception]
    NVMLLibraryMismatchError: type[Exception]
    nvmlMemory_v2: int

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> object: ...
    def nvmlDeviceGetPciInfo(self, handle: object) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: object) -> str: ...
    def nvmlDeviceGetName(self, handle: object) -> str: ...
    def nvmlDeviceGetMemoryInfo(self, handle: object, version: int | None = None) -> _Memory: ...
    def nvmlDeviceGetUtilizationRates(self, handle: object) -> Any: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> Sequence[_Process]: ...
    def nvmlDeviceGetMigMode(self, handle: object) -> Sequence[int]: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: object) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: object, index: int) -> object: ...


class _Code(enum.IntEnum):
    """Return codes of NVML, nvmlReturn_t in nvml.h."""

    UNINITIALIZED = 1
    NO_PERMISSION = 4
    NOT_FOUND = 6
    DRIVER_NOT_LOADED = 9
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18


def _real_devices(own_pids: frozenset[int]) -> tuple[tuple[Device, ...], str]:
    import pynvml

    nvml = cast(_Nvml, pynvml)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), _open_problem(_code(error))
    try:
        return _Reader(nvml, own_pids).read()
    except nvml.NVMLError as error:
        return (), _problem("the GPUs can't be listed", _code(error))
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


class _Reader:
    """Reads all devices through an opened NVML.

    Args:
        nvml: The module, initialised.
        own_pids: Processes that are no outside use.
    """

    def __init__(self, nvml: _Nvml, own_pids: frozenset[int]) -> None:
        self._nvml = nvml
        self._own_pids = own_pids
        self._problems: dict[str, None] = {}  # a set that keeps its order

    def read(self) -> tuple[tuple[Device, ...], str]:
        found: list[tuple[tuple[int, int, int], list[Device]]] = []
        for number in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(number)
                pci = self._nvml.nvmlDeviceGetPciInfo(handle)
                found.append(((pci.domain, pci.bus, pci.device), self._gpu(handle, number)))
            except self._nvml.NVMLError as error:
                self._problems[_problem(f"GPU {number} (NVML's number) can't be read", _code(error))] = None
        devices = [device for _, group in sorted(found, key=lambda pair: pair[0]) for device in group]
        placed = tuple(msgspec.structs.replace(device, index=index) for index, device in enumerate(devices))
        return placed, " ".join(self._problems)

    def _gpu(self, handle: object, number: int) -> list[Device]:
        if not self._in_mig_mode(handle):
            return [self._device(handle, self._nvml.nvmlDeviceGetName(handle))]
        slices = self._slices(handle)
        if not slices:
            self._problems[
                f"GPU {number} (NVML's number) is in MIG mode but has no slices, so nothing can run on it: "
                "make some with `nvidia-smi mig -cgi ... -C`, or leave MIG mode with `nvidia-smi -mig 0`."
            ] = None
        return slices

    def _in_mig_mode(self, handle: object) -> bool:
        try:
            return self._nvml.nvmlDeviceGetMigMode(handle)[0] == 1
        except self._nvml.NVMLError as error:
            _raise_if_lost(error)
            return False

    def _slices(self, handle: object) -> list[Device]:
        slices: list[Device] = []
        name = self._nvml.nvmlDeviceGetName(handle)
        for position in range(self._nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                part = self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, position)
            except self._nvml.NVMLError as error:
                if _code(error) == _Code.NOT_FOUND:  # a free place
                    continue
                raise
            try:
                own_name = self._nvml.nvmlDeviceGetName(part)
            except self._nvml.NVMLError as error:
                _raise_if_lost(error)
                own_name = f"{name} MIG"
            slices.append(self._device(part, own_name))
        return slices

    def _device(self, handle: object, name: str) -> Device:
        total, used = self._memory(handle)
        return Device(
            uuid=self._nvml.nvmlDeviceGetUUID(handle),
            type=_type_of(name),
            name=name,
            memory_bytes=total,
            used_bytes=used,
            utilization_pct=self._utilization(handle),
            outside_use=outside_use(self._pids(handle), self._own_pids, total, used),
        )

    def _memory(self, handle: object) -> tuple[int, int | None]:
        """(total, used) in bytes. Version 2 leaves out the driver's own share, over 5 % on small GPUs."""
        for version in (self._nvml.nvmlMemory_v2, None):
            try:
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle, version)
                return int(memory.total), int(memory.used)
            except self._nvml.NVMLError as error:
                _raise_if_lost(error)
        return 0, None

    def _utilization(self, handle: object) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except self._nvml.NVMLError as error:
            _raise_if_lost(error)
            return None

    def _pids(self, handle: object) -> list[int]:
        try:
            return [process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        except self._nvml.NVMLLibraryMismatchError:
            problem = _problem("which processes use the GPUs can't be told", _Code.FUNCTION_NOT_FOUND)
            self._problems[problem] = None
        except self._nvml.NVMLError as error:
            _raise_if_lost(error)
        return []


def _type_of(name: str) -> str:
    """The type of a device that exists: also one of an unknown name must be a type that can be asked for."""
    try:
        return canonical_type(name)
    except ValueError:
        return canonical_type(f"nvidia gpu {name}")


# ---------------------------------------------------------------- NVML's errors


def _code(error: BaseException) -> int:
    return int(getattr(error, "value", 0))


def _raise_if_lost(error: BaseException) -> None:
    """Raise `error` again if the device or the driver is gone. Any other only leaves one value untold."""
    if _code(error) in {
        _Code.UNINITIALIZED,
        _Code.DRIVER_NOT_LOADED,
        _Code.GPU_IS_LOST,
        _Code.RESET_REQUIRED,
        _Code.LIB_RM_VERSION_MISMATCH,
    }:
        raise error


def _open_problem(code: int) -> str:
    if code == _Code.LIBRARY_NOT_FOUND:
        return ""
    # images often bring the library to machines that have no GPU for it
    if code == _Code.DRIVER_NOT_LOADED and not _has_nvidia_hardware():
        return ""
    return _problem("the GPUs can't be listed", code)


def _has_nvidia_hardware() -> bool:
    for vendor in Path("/sys/bus/pci/devices").glob("*/vendor"):
        with contextlib.suppress(OSError):
            if vendor.read_text().strip() == "0x10de":
                return True
    return False


_REASONS: dict[int, tuple[str, str]] = {
    _Code.DRIVER_NOT_LOADED: ("the NVIDIA driver is not loaded", "load it with `modprobe nvidia`, or reboot"),
    _Code.FUNCTION_NOT_FOUND: (
        "the NVIDIA driver is older than the package nvidia-ml-py expects",
        "update the driver, or install an older nvidia-ml-py",
    ),
    _Code.GPU_IS_LOST: (
        "it has fallen off the bus",
        "reset it with `nvidia-smi --gpu-reset` or reboot, and look into `dmesg`",
    ),
    _Code.LIB_RM_VERSION_MISMATCH: (
        "the NVIDIA driver and its library are of different versions, as after an update",
        "reboot, or reload the driver",
    ),
    _Code.NO_PERMISSION: ("this user may not open them", "ask the administrator for access to /dev/nvidia*"),
    _Code.RESET_REQUIRED: ("it must be reset", "run `nvidia-smi --gpu-reset` or reboot"),
}


def _problem(what: str, code: int) -> str:
    """One sentence: what does not work, why, the remedy."""
    reason, remedy = _REASONS.get(code, (f"NVML answers with error {code}", "see what `nvidia-smi` says"))
    return f"{what[:1].upper()}{what[1:]}: {reason}; {remedy}."
