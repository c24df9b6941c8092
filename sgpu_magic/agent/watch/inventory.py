"""The devices of this node, and their use outside the pool: compares NVML's process list with the system's."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
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
    utilization,
    value_or,
)
from sgpu_magic.config import host_name
from sgpu_magic.config.pool_terms import read_simulated
from sgpu_magic.packages.nvidia_driver import driver_version
from sgpu_magic.system.processes import core_count
from sgpu_magic.wire.devices import Device, Inventory, is_slice, memory_of, memory_text, type_named, used_bytes_of

BUSY_MEMORY_SHARE = 0.05
KEPT_OPEN_S = 5.0
"""Seconds after an inventory for which NVML stays open."""

# Processes that serve a GPU's users or its screen. A GPU that only these processes use is idle.
SYSTEM_PROCESSES = frozenset({
    "nvidia-cuda-mps-server", "nvidia-cuda-mps-control", "nvidia-persistenced", "nvidia-fabricmanager",
    "nv-fabricmanager", "nv-hostengine", "dcgm-exporter", "nvidia-powerd", "nvidia-settings", "nvidia-smi",
    "Xorg", "X", "Xwayland", "Xvfb", "gnome-shell", "gnome-remote-desktop-daemon", "gdm-x-session", "mutter",
    "kwin_x11", "kwin_wayland", "plasmashell", "ksmserver", "sddm-greeter", "lightdm-gtk-greeter", "xfwm4", "xfdesktop",
    "cinnamon", "marco", "compiz", "weston", "sway",
})  # fmt: skip
# the kernel truncates process names to this length
_NAME_CHARS = 15
_SYSTEM_NAMES = frozenset(name[:_NAME_CHARS] for name in SYSTEM_PROCESSES)

# The inode of the machine's first pid namespace, PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h.
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
_BATCH_SYSTEMS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "OAR_JOB_ID", "COBALT_JOBID")


def take_inventory(*, simulate: str, cpu_slots: int, own_pids: Collection[int] = ()) -> Inventory:
    """Return this node's current devices.

    Opens and closes NVML. This takes 16 ms for an H200, or seconds if the driver's persistence mode is off, and less
    than 1 ms for a GPU while `NvmlSession` keeps it open.

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
        devices, problem = _simulated_devices(simulate), None
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


class NvmlSession:
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
                # NVML counts initializations: open it only once, so that `_close` shuts it down
                if self._nvml is None:
                    self._nvml = open_nvml()
            return take()

        inventory = await call_in_background(opened, "sgpu-inventory")
        if self._timer is not None:
            self._timer.cancel()
        # after a failure, NVML is reopened next time
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


def _real_devices(own_pids: frozenset[int]) -> tuple[tuple[Device, ...], str | None]:
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


def _open_problem(code: int) -> str | None:
    """Return why NVML can't be opened, None on machines without GPUs."""
    if code == Code.LIBRARY_NOT_FOUND:
        return None
    # container images often contain the library on machines without a GPU
    if code == Code.DRIVER_NOT_LOADED and not _has_nvidia_hardware():
        return None
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


# by the UUIDs of two devices; cached, since it does not change
_distances: dict[tuple[str, str], int] = {}


class _Reader:
    """Reads all devices through an open NVML.

    Args:
        nvml: The initialized module.
        own_pids: Processes that do not count as outside use.
        environ: The variables of the job, if this is one of a batch system.
        device_nodes: The directory with the files of the GPUs.
    """

    def __init__(
        self,
        nvml: Nvml,
        own_pids: frozenset[int],
        environ: Mapping[str, str] = os.environ,
        device_nodes: Path = Path("/dev"),
    ) -> None:
        self._nvml = nvml
        self._own_pids = own_pids
        self._environ = environ
        self._device_nodes = device_nodes
        self._handles: dict[str, object] = {}
        self._problems: dict[str, None] = {}  # a set that keeps its order

    def read(self) -> tuple[tuple[Device, ...], str | None]:
        found: list[tuple[tuple[int, int, int], list[Device]]] = []
        directory, assigned = self._device_nodes, assigned_by_batch_system(self._environ)
        for number in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(number)
                if not self._has_device_node(handle, directory):
                    continue
                pci = self._nvml.nvmlDeviceGetPciInfo(handle)
                found.append(((pci.domain, pci.bus, pci.device), self._gpu(handle, number)))
            except self._nvml.NVMLError as error:
                self._problems[_problem_text(f"GPU {number} (NVML's number) can't be read", code_of(error))] = None
        groups = [group for _, group in sorted(found, key=lambda pair: pair[0])]
        if assigned is not None:
            groups = _assigned_of(groups, assigned)
        devices = [device for group in groups for device in group]
        distances = self._distances([device.uuid for device in devices])
        placed = tuple(
            msgspec.structs.replace(device, index=index, distances=distances.get(device.uuid, ()))
            for index, device in enumerate(devices)
        )
        return placed, " ".join(self._problems) or None

    def _distances(self, uuids: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Return the devices' `Device.distances`; empty if the driver does not report them, and for slices."""
        if len(uuids) < 2 or any(map(is_slice, uuids)):
            return {}
        try:
            for one, other in itertools.combinations(uuids, 2):
                if (one, other) not in _distances:
                    _distances[one, other] = _distances[other, one] = self._distance(one, other)
        except self._nvml.NVMLError:
            # the devices are usable without the distances
            return {}
        return {one: tuple(0 if one == other else _distances[one, other] for other in uuids) for one in uuids}

    def _distance(self, one: str, other: str) -> int:
        nvml, handles = self._nvml, (self._handles[one], self._handles[other])
        nvlink = value_or(nvml, lambda: nvml.nvmlDeviceGetP2PStatus(*handles, nvml.NVML_P2P_CAPS_INDEX_NVLINK), None)
        return 0 if nvlink == nvml.NVML_P2P_STATUS_OK else int(nvml.nvmlDeviceGetTopologyCommonAncestor(*handles))

    def _has_device_node(self, handle: object, directory: Path) -> bool:
        """Whether this container has the GPU's device file; NVML may list the GPUs of the whole machine."""
        if not (directory / "nvidiactl").exists():
            # GPUs without such files, as in WSL
            return True
        minor = value_or(self._nvml, lambda: int(self._nvml.nvmlDeviceGetMinorNumber(handle)), None)
        return minor is None or (directory / f"nvidia{minor}").exists()

    def _gpu(self, handle: object, number: int) -> list[Device]:
        if value_or(self._nvml, lambda: self._nvml.nvmlDeviceGetMigMode(handle)[0], 0) != 1:
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
            own_name = value_or(self._nvml, functools.partial(self._nvml.nvmlDeviceGetName, part), f"{name} MIG")
            slices.append(self._device(part, own_name))
        return slices

    def _device(self, handle: object, name: str) -> Device:
        total, used = memory(self._nvml, handle)
        uuid = self._nvml.nvmlDeviceGetUUID(handle)
        self._handles[uuid] = handle
        return Device(
            uuid=uuid,
            type=type_named(name),
            name=name,
            memory_bytes=total,
            used_bytes=used,
            utilization_pct=utilization(self._nvml, handle),
            outside_use=outside_use(self._processes(handle), self._own_pids, total, used),
        )

    def _processes(self, handle: object) -> dict[int, int]:
        """Return the memory of each process that computes on the device; 0 if unknown."""
        try:
            listed = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            return {process.pid: process.usedGpuMemory or 0 for process in listed}
        except self._nvml.NVMLLibraryMismatchError:
            problem = _problem_text("the processes that use the GPUs can't be listed", Code.FUNCTION_NOT_FOUND)
            self._problems[problem] = None
        except self._nvml.NVMLError as error:
            raise_if_lost(error)
        return {}


def assigned_by_batch_system(environ: Mapping[str, str]) -> list[str] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES in a job of a batch system, which sets it; None outside of one.

    Elsewhere users set the variable for one program, and a pool, which serves all their programs, ignores it.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not any(environ.get(name) for name in _BATCH_SYSTEMS):
        return None
    return [entry.strip() for entry in visible.split(",")]


def _assigned_of(groups: list[list[Device]], entries: Sequence[str]) -> list[list[Device]]:
    """Return the assigned GPUs and slices, in PCI bus order.

    Args:
        groups: The GPUs in PCI bus order, each as one device or its slices.
        entries: Indices in this order, or beginnings of UUIDs. As in CUDA, an invalid one ends the list.
    """
    uuids: set[str] = set()
    for entry in entries:
        if entry.isdigit():
            named = groups[int(entry)] if int(entry) < len(groups) else []
        else:
            named = [device for group in groups for device in group if entry and device.uuid.startswith(entry)]
        if not named:
            break
        uuids.update(device.uuid for device in named)
    return [[device for device in group if device.uuid in uuids] for group in groups]


def outside_use(
    processes: Mapping[int, int], own: frozenset[int], total_bytes: int, used_bytes: int | None
) -> str | None:
    """Return why a device counts as in use outside the pool, None if it does not.

    Args:
        processes: The memory of the processes that NVML lists for the device, by pid. `SYSTEM_PROCESSES` do not count.
        own: The pool's own processes; their descendants count as own too.
        total_bytes: Its total memory.
        used_bytes: Its memory in use; None when unknown.
    """
    is_own = {pid: _descends_from(pid, own) for pid in processes}
    of_system = {pid for pid in processes if not is_own[pid] and _is_of_system(pid)}
    foreign = [pid for pid in processes if not is_own[pid] and pid not in of_system and not _has_exited(pid)]
    if len(foreign) > 1:
        return f"{_process_text(foreign[0])} and {len(foreign) - 1} more use it"
    if foreign:
        return f"{_process_text(foreign[0])} uses it"
    if used_bytes is not None:
        used_bytes -= sum(processes[pid] for pid in of_system)
    if used_bytes is not None and used_bytes > BUSY_MEMORY_SHARE * total_bytes and not any(is_own.values()):
        return f"{used_bytes_of(used_bytes, total_bytes) / 1e9:.1f} of {memory_text(total_bytes)} are in use"
    return None


def _descends_from(pid: int, ancestors: frozenset[int]) -> bool:
    if pid in ancestors:
        return True
    try:
        return any(parent.pid in ancestors for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def _is_of_system(pid: int) -> bool:
    # not from psutil, which completes a truncated name from the command line, and any process can set that
    try:
        name = Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return False
    return name[:_NAME_CHARS] in _SYSTEM_NAMES


def _has_exited(pid: int) -> bool:
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
        # psutil returns the uid if the user has no name
        return f"process {pid} of user {process.username()}{kernel}"
    except psutil.Error:
        return f"process {pid} outside this container" if _in_container() else f"process {pid}"
