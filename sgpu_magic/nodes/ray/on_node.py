"""What runs on a node as Ray's task or actor. It travels by value: nothing of ours need be installed there."""

from __future__ import annotations

from typing import Any


def look() -> dict[str, Any]:
    """Tell what the node is beside Ray's own view: the fields of `NodeFacts` from `devices` on, as plain values."""
    import importlib
    import importlib.metadata
    import importlib.util
    import os

    # what a node's agent needs beside the standard library; pure Python of ours is brought along
    needed = ("msgspec", "zmq", "platformdirs", "packaging", "pathspec", "psutil", "uv", "cloudpickle")
    devices: list[dict[str, Any]] = []
    driver = ""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        nvml = None
    if nvml is not None:
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
            # without a driver, or with one that does not tell: what Ray says of the node has to do
            devices = []
    version = ""
    if importlib.util.find_spec("sgpu_magic") is not None:
        try:
            version = importlib.metadata.version("sgpu-magic")
        except importlib.metadata.PackageNotFoundError:
            version = ""
    return {
        "devices": devices,
        "driver": driver,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "version": version,
        "lacks": [name for name in needed if importlib.util.find_spec(name) is None],
    }


def own_gpus() -> list[str]:
    """Tell which GPUs Ray has given this task, as Ray calls them."""
    import importlib

    ray: Any = importlib.import_module("ray")
    return [str(one) for one in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


class NodeAgent:
    """The actor of a node. See `agent_actor.Holder`, which does the work where our package is.

    Args:
        order: An encoded `AgentOrder`.
        package: Our package as a zip archive; None where the node has it.
    """

    def __init__(self, order: bytes, package: bytes | None) -> None:
        import sys
        import tempfile
        import zipfile
        from io import BytesIO

        unpacked = ""
        if package is not None:
            unpacked = tempfile.mkdtemp(prefix="sgpu-package-")
            with zipfile.ZipFile(BytesIO(package)) as archive:
                archive.extractall(unpacked)
            sys.path.insert(0, unpacked)
        from sgpu_magic.nodes.ray.agent_actor import Holder

        self._holder = Holder(order, unpacked)

    def ready(self) -> bool:
        """Whether its agent is there; one that is over is leaving, and its actor with it."""
        return self._holder.is_there

    def end(self) -> None:
        """End the agent with all that it has, and come back when it is over."""
        self._holder.end()
