"""The devices of this node, and their use outside the pool: compares NVML's process list with the system's."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec
import psutil

from sgpu_magic.agent.faults import call_in_background
from sgpu_magic.agent.watch.nvml import (
    Code,
    Nvml,
    close_nvml,
    code_of,
    memory,
    nvml_error,
    open_nvml,
    raise_if_lost,
    reason_and_remedy,
    told,
    utilization,
)
from sgpu_magic.config import host_name
from sgpu_magic.packages.mismatches import driver_version
from sgpu_magic.system.processes import core_count
from sgpu_magic.wire.costs import read_simulated
from sgpu_magic.wire.devices import Device, Inventory, memory_of, memory_text, type_named, used_bytes_of

BUSY_MEMORY_SHARE = 0.05
KEPT_OPEN_S = 5.0
"""Seconds after an inventory for which NVML stays open."""

# The inode of the machine's first pid namespace, PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h.
_FIRST_PID_NAMESPACE = 0xEFFFFFFC


def take_inventory(*, simulate: str, cpu_slots: int, own_pids: Collection[int] = ()) -> Inventory:
    """Return this node's current devices.

    Opens and closes NVML. This takes 16 ms for an H200, or seconds if the driver's persistence mode is off, and less
    than 1 ms for a GPU while `KeptOpen` keeps it open.

    Args:
        simulate: Simulated devices that replace the real ones, as `a10:4,h100:8`; "" asks NVML.
        cpu_slots: Number of CPU ranks that fit at once, copied to the result.
        own_pids: Processes of this pool. They and their descendants do not count as outside use. In a container NVML
            may list the host's pids, which can't be matched, so callers must ignore `outside_use` of devices that the
            pool has leased.

    Returns:
        The devices in PCI bus order, with each MIG slice as a separate device. `problem` is also set if only some
        devices could be read; on a machine without a driver there are no devices and no problem.

    Raises:
        ValueError: `simulate` can't be parsed; `load_settings` refuses such a setting.
    """
    if simulate.strip():
        devices, problem = _simulated_devices(simulate), ""
    else:
        devices, problem = _real_devices(frozenset(own_pids))
    return Inventory(
        host=host_name(),
        devices=devices,
        cpu_slots=cpu_slots,
        cores=core_count(),
        problem=problem,
        driver=driver_version(),
    )


class KeptOpen:
    """Keeps NVML open between inventories that follow each other within `KEPT_OPEN_S`. For one loop.

    While it is open, an administrator can't reset a GPU, so it is closed after that.
    """

    def __init__(self) -> None:
        self._nvml: Nvml | None = None
        self._lock = threading.Lock()
        self._timer: asyncio.TimerHandle | None = None

    async def during(self, take: Callable[[], Inventory]) -> Inventory:
        """Take an inventory in a thread, since a driver may take seconds to answer."""

        def opened() -> Inventory:
            with self._lock, contextlib.suppress(nvml_error()):
                # NVML counts how often it was opened
                if self._nvml is None:
                    self._nvml = open_nvml()
            return take()

        inventory = await call_in_background(opened, "sgpu-inventory")
        if self._timer is not None:
            self._timer.cancel()
        # what failed is opened anew next time
        wait_s = 0.0 if inventory.problem else KEPT_OPEN_S
        close = functools.partial(call_in_background, self._close, "sgpu-nvml")
        self._timer = asyncio.get_running_loop().call_later(wait_s, close)
        return inventory

    def _close(self) -> None:
        with self._lock:
            if self._nvml is not None:
                close_nvml(self._nvml)
                self._nvml = None


def _simulated_devices(simulate: str) -> tuple[Device, ...]:
    return tuple(
        Device(
            uuid=f"SIM-{kind}-{number}",
            type=kind,
            name=f"simulated {kind}",
            index=number,
            memory_bytes=memory_of(kind),
            simulated=True,
        )
        for kind, count in read_simulated(simulate).items()
        for number in range(count)
    )


# ---------------------------------------------------------------- real


def _real_devices(own_pids: frozenset[int]) -> tuple[tuple[Device, ...], str]:
    failed = nvml_error()
    try:
        nvml = open_nvml()
    except failed as error:
        return (), _open_problem(code_of(error))
    try:
        return _Reader(nvml, own_pids).read()
    except nvml.NVMLError as error:
        return (), _problem_text("the GPUs can't be listed", code_of(error))
    finally:
        close_nvml(nvml)


def _open_problem(code: int) -> str:
    """Return why NVML can't be opened, "" on machines without GPUs."""
    if code == Code.LIBRARY_NOT_FOUND:
        return ""
    # container images often contain the library on machines without a GPU
    if code == Code.DRIVER_NOT_LOADED and not _has_nvidia_hardware():
        return ""
    return _problem_text("the GPUs can't be listed", code)


def _has_nvidia_hardware() -> bool:
    for vendor in Path("/sys/bus/pci/devices").glob("*/vendor"):
        with contextlib.suppress(OSError):
            if vendor.read_text().strip() == "0x10de":
                return True
    return False


def _problem_text(what: str, code: int) -> str:
    """Return one sentence with what fails, why, and the remedy."""
    reason, remedy = reason_and_remedy(code)
    return f"{what[:1].upper()}{what[1:]}: {reason}; {remedy}."


class _Reader:
    """Reads all devices through an open NVML.

    Args:
        nvml: The initialized module.
        own_pids: Processes that do not count as outside use.
    """

    def __init__(self, nvml: Nvml, own_pids: frozenset[int]) -> None:
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
                self._problems[_problem_text(f"GPU {number} (NVML's number) can't be read", code_of(error))] = None
        devices = [device for _, group in sorted(found, key=lambda pair: pair[0]) for device in group]
        placed = tuple(msgspec.structs.replace(device, index=index) for index, device in enumerate(devices))
        return placed, " ".join(self._problems)

    def _gpu(self, handle: object, number: int) -> list[Device]:
        if told(self._nvml, lambda: self._nvml.nvmlDeviceGetMigMode(handle)[0], 0) != 1:
            return [self._device(handle, self._nvml.nvmlDeviceGetName(handle))]
        slices = self._slices(handle)
        if not slices:
            self._problems[
                f"GPU {number} (NVML's number) is in MIG mode but has no slices, so nothing can run on it: "
                "create some with `nvidia-smi mig -cgi ... -C`, or disable MIG mode with `nvidia-smi -mig 0`."
            ] = None
        return slices

    def _slices(self, handle: object) -> list[Device]:
        slices: list[Device] = []
        name = self._nvml.nvmlDeviceGetName(handle)
        for position in range(self._nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                part = self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, position)
            except self._nvml.NVMLError as error:
                if code_of(error) == Code.NOT_FOUND:  # no slice in this position
                    continue
                raise
            own_name = told(self._nvml, functools.partial(self._nvml.nvmlDeviceGetName, part), f"{name} MIG")
            slices.append(self._device(part, own_name))
        return slices

    def _device(self, handle: object, name: str) -> Device:
        total, used = memory(self._nvml, handle)
        return Device(
            uuid=self._nvml.nvmlDeviceGetUUID(handle),
            type=type_named(name),
            name=name,
            memory_bytes=total,
            used_bytes=used,
            utilization_pct=utilization(self._nvml, handle),
            outside_use=outside_use(self._pids(handle), self._own_pids, total, used),
        )

    def _pids(self, handle: object) -> list[int]:
        try:
            return [process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        except self._nvml.NVMLLibraryMismatchError:
            problem = _problem_text("the processes that use the GPUs can't be listed", Code.FUNCTION_NOT_FOUND)
            self._problems[problem] = None
        except self._nvml.NVMLError as error:
            raise_if_lost(error)
        return []


def outside_use(pids: Sequence[int], own: frozenset[int], total_bytes: int, used_bytes: int | None) -> str:
    """Return why a device counts as in use outside the pool, "" if it does not.

    Args:
        pids: The processes that NVML lists for the device.
        own: The pool's own processes; their descendants count as own too.
        total_bytes: Its total memory.
        used_bytes: Its memory in use; None when unknown.
    """
    is_own = {pid: _descends_from(pid, own) for pid in pids}
    foreign = [pid for pid in pids if not is_own[pid] and not _is_gone(pid)]
    if len(foreign) > 1:
        return f"{_process_text(foreign[0])} and {len(foreign) - 1} more use it"
    if foreign:
        return f"{_process_text(foreign[0])} uses it"
    if used_bytes is not None and used_bytes > BUSY_MEMORY_SHARE * total_bytes and not any(is_own.values()):
        return f"{used_bytes_of(used_bytes, total_bytes) / 1e9:.1f} of {memory_text(total_bytes)} are in use"
    return ""


def _descends_from(pid: int, ancestors: frozenset[int]) -> bool:
    if pid in ancestors:
        return True
    try:
        return any(parent.pid in ancestors for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def _is_gone(pid: int) -> bool:
    """Whether the process has certainly ended. In a container an unknown pid may be the host's, so False."""
    return not _in_container() and not psutil.pid_exists(pid)


def _in_container() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino != _FIRST_PID_NAMESPACE
    except OSError:
        return False


def _process_text(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        kernel = ", a notebook's kernel," if any("ipykernel" in part for part in process.cmdline()) else ""
        # gives the uid if the user has no name
        return f"process {pid} of user {process.username()}{kernel}"
    except psutil.Error:
        return f"process {pid} outside this container" if _in_container() else f"process {pid}"
