"""What Ray runs on nodes, where sgpu-magic need not be installed: tasks and the actor class, pickled by value.

`python agent_main.py <fd> <lifeline>` is the process between Ray's worker and the agent. A worker that loses its raylet
kills its direct children only (`RAY_kill_child_processes_on_worker_exit`). As a grandchild the agent survives, sees its
lifeline close, ends its ranks and removes its files. This process runs as long as the agent and should stay small: the
module imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import Any, NoReturn


def inspect_node() -> dict[str, Any]:
    """Probe the node: return the fields of `NodeFacts` from `devices` on, except `problem`, as plain values."""
    import importlib.metadata
    import importlib.util

    # what a node's agent needs besides the standard library; this package itself is shipped
    needed = ("blake3", "msgspec", "zmq", "platformdirs", "packaging", "pathspec", "psutil", "uv", "cloudpickle")
    devices: list[dict[str, Any]] = []
    driver = ""
    if importlib.util.find_spec("pynvml") is not None:
        nvml: Any = importlib.import_module("pynvml")
        try:
            nvml.nvmlInit()
            driver = str(nvml.nvmlSystemGetDriverVersion())
            for number in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(number)
                total = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
                found = {"uuid": str(nvml.nvmlDeviceGetUUID(handle)), "memory_bytes": total}
                devices.append({**found, "name": str(nvml.nvmlDeviceGetName(handle))})
            nvml.nvmlShutdown()
        except (nvml.NVMLError, OSError, RuntimeError):
            # no driver, or one that does not answer: only Ray's own view of the node remains
            devices = []
    version = ""
    if importlib.util.find_spec("sgpu_magic") is not None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version("sgpu-magic")
    return {
        "devices": as_ray_counts(devices, visible_to_raylet()),
        "driver": driver,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "version": version,
        "lacks": [name for name in needed if importlib.util.find_spec(name) is None],
    }


def visible_to_raylet() -> str | None:
    """Return the CUDA_VISIBLE_DEVICES of the raylet, the parent of Ray's workers; None if it has none.

    Ray sets the variable of its workers anew, so their own says nothing about what the raylet counts.
    """
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    name = b"CUDA_VISIBLE_DEVICES="
    return next((os.fsdecode(entry[len(name) :]) for entry in entries if entry.startswith(name)), None)


def as_ray_counts(devices: list[dict[str, Any]], visible: str | None) -> list[dict[str, Any]]:
    """Return the GPUs that Ray counts, in its order, each with the id by which Ray names it.

    Ray numbers the GPUs that its raylet sees. It names them by their place among those, or by the entries of the
    raylet's CUDA_VISIBLE_DEVICES: an index in CUDA's order, taken to be that of the PCI bus, or the beginning of a
    UUID.

    Args:
        devices: All GPUs by NVML, in its order.
        visible: The raylet's CUDA_VISIBLE_DEVICES, None if it is not set.
    """
    if visible is None:
        return [{**device, "ray_id": str(number)} for number, device in enumerate(devices)]
    found: list[dict[str, Any]] = []
    for entry in visible.split(","):
        name = entry.strip()
        if name.isdigit():
            named = devices[int(name) : int(name) + 1]
        else:
            named = [device for device in devices if name and device["uuid"].startswith(name)]
        if len(named) != 1:
            # as in CUDA, an invalid entry ends the list
            break
        found.append({**named[0], "ray_id": entry})
    return found


def own_gpus() -> list[str]:
    """Return the GPUs that Ray has assigned to this task, by Ray's ids."""
    ray: Any = importlib.import_module("ray")
    return [str(one) for one in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


class NodeAgent:
    """The agent actor of a node. Makes this package importable; `agent_actor.Holder` does the work.

    Args:
        order: An encoded `AgentOrder`.
        package: This package as a zip archive; None if the node has it.
    """

    def __init__(self, order: bytes, package: bytes | None) -> None:
        import tempfile
        import zipfile
        from io import BytesIO

        unpacked = ""
        if package is not None:
            unpacked = tempfile.mkdtemp(prefix="sgpu-package-")
            with zipfile.ZipFile(BytesIO(package)) as archive:
                archive.extractall(unpacked)
            sys.path.insert(0, unpacked)
        actor: Any = importlib.import_module("sgpu_magic.nodes.ray.agent_actor")
        self._holder = actor.Holder(order, unpacked)

    def ready(self) -> bool:
        """Whether the agent runs; otherwise the actor is about to exit."""
        return bool(self._holder.is_there)

    def end(self) -> None:
        """End the agent and its ranks, and wait until it has exited."""
        self._holder.end()


def main() -> NoReturn:
    """Start the agent as a child process, and exit as it does."""
    import resource

    pid = os.fork()
    if pid == 0:
        try:
            os.execv(sys.executable, [sys.executable, "-m", "sgpu_magic.agent", *sys.argv[1:3]])
        finally:
            os._exit(127)
    # the ends of the agent's socket and pipe close with the agent
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        # die by the agent's signal, without a core dump, which would be of the wrong process
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            os.kill(os.getpid(), -code)
    os._exit(abs(code))


if __name__ == "__main__":
    main()
