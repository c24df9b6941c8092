"""Checks of this Python, its packages and GPUs, with a real group of two ranks that reduces a tensor over loopback.

torch is imported only in two child processes, as in ranks, not in this one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata

import msgspec
from packaging.requirements import Requirement

from sgpu_magic.agent.watch.inventory import take_inventory
from sgpu_magic.cli.finding import Finding, ok, problem, warning
from sgpu_magic.formatting import count_of, format_seconds
from sgpu_magic.packages.distributions import SGPU_MAGIC
from sgpu_magic.packages.mismatches import find_mismatches
from sgpu_magic.packages.package_metadata import packages_of
from sgpu_magic.packages.snapshot import take_snapshot
from sgpu_magic.wire.decoding import convert, load_json
from sgpu_magic.wire.devices import type_label

# extras whose packages are checked if they are installed
_EXTRAS = ("lab", "ray", "run")
# `packages` reports these if they are missing
_IMPORTED = ("numpy", "torch")
_PROBE_TIMEOUT_S = 90.0
# set by launchers; not passed on to the two ranks
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")

# Arguments: rank, the store's file. Prints one JSON object per step, so that a crash loses no earlier result.
_PROBE = r"""
import json, os, sys, threading, time
from datetime import timedelta

def ends_with_its_parent():
    os.read(0, 1)
    os._exit(3)

def say(**facts):
    print(json.dumps(facts), flush=True)

def text_of(error):
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]

threading.Thread(target=ends_with_its_parent, daemon=True).start()
rank, store_path = int(sys.argv[1]), sys.argv[2]
try:
    import numpy
    say(numpy=numpy.__version__)
except Exception as error:
    say(numpy_error=text_of(error))
start = time.perf_counter()
try:
    import torch
    import torch.distributed as dist
except Exception as error:
    say(torch_error=text_of(error))
    os._exit(0)
say(torch=torch.__version__, import_s=time.perf_counter() - start,
    gpu_build=torch.version.cuda or torch.version.hip or "", distributed=dist.is_available())
if not dist.is_available():
    os._exit(0)
say(gloo=dist.is_gloo_available(), nccl=dist.is_nccl_available())
if not dist.is_gloo_available():
    os._exit(0)
try:
    store = dist.FileStore(store_path, 2)
    store.set_timeout(timedelta(seconds=60))
    store.set(f"here-{rank}", "1")
    store.wait(["here-0", "here-1"])
    start = time.perf_counter()
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=2,
                            timeout=timedelta(seconds=20))
    group_s = time.perf_counter() - start
    tensor = torch.full((1000,), rank + 1.0)
    start = time.perf_counter()
    dist.all_reduce(tensor)
    say(group_s=group_s, reduce_s=time.perf_counter() - start, right=bool((tensor == 3).all()))
except Exception as error:
    say(group_error=text_of(error))
say(gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0)
os._exit(0)
"""


class ProbeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The results of rank 0 of the probe; fields that it did not reach have their defaults.

    Args:
        gpu_build: CUDA or ROCm version that torch was built with, "" for none.
        import_s: Seconds for `import torch`.
        group_s: Seconds for `init_process_group`; None if it failed.
        reduce_s: Seconds for the first `all_reduce`.
        right: Whether the reduced tensor has the right values.
        gpus: Number of GPUs that torch can use; None if unknown.
        error_output: Last line on standard error, or how the process ended.
    """

    numpy: str = ""
    numpy_error: str = ""
    torch: str = ""
    torch_error: str = ""
    import_s: float = 0.0
    gpu_build: str = ""
    distributed: bool = False
    gloo: bool = False
    nccl: bool = False
    group_s: float | None = None
    reduce_s: float = 0.0
    right: bool = False
    group_error: str = ""
    gpus: int | None = None
    error_output: str = ""


def probe(environ: Mapping[str, str], timeout_s: float = _PROBE_TIMEOUT_S) -> ProbeFacts:
    """Start two ranks of this Python that reduce a tensor, and return the results of rank 0."""
    variables = {name: value for name, value in environ.items() if name not in _RANK_VARIABLES}
    # as in a rank, where this overrides the user's variable
    variables["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    variables["OMP_NUM_THREADS"] = "1"
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="sgpu-doctor-") as folder, contextlib.ExitStack() as stack:
        # the other end stays open here, so that the ranks see end of file when the doctor exits
        lifeline, end = os.pipe()
        for descriptor in (lifeline, end):
            stack.callback(os.close, descriptor)
        for rank in (0, 1):
            command = [sys.executable, "-P", "-c", _PROBE, str(rank), os.path.join(folder, "store")]
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, env=variables, cwd=folder, stdin=lifeline, stdout=pipe, stderr=pipe)
            ranks.append(stack.enter_context(process))
            stack.callback(process.kill)
        try:
            printed, errors = ranks[0].communicate(timeout=timeout_s)
            error_output = _last_line_of(ranks[0].returncode, errors)
        except subprocess.TimeoutExpired as error:
            printed, error_output = error.stdout or b"", f"it took longer than {timeout_s:.0f} s"
    facts: dict[str, object] = {"error_output": error_output}
    for line in printed.decode(errors="replace").splitlines():
        if line.startswith("{"):
            facts |= load_json(line)
    return convert(facts, ProbeFacts)


def _last_line_of(returncode: int, errors: bytes) -> str:
    lines = errors.decode(errors="replace").strip().splitlines()
    if returncode < 0:
        return f"its process was ended by signal {-returncode}"
    return lines[-1] if lines else f"its process ended with exit code {returncode}"


def python_version() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield ok("python", f"{version} at {sys.executable} (the Python that `sgpu` runs in)")


def requirements() -> Iterator[Finding]:
    """Check the versions of the packages that sgpu-magic's own metadata requires."""
    try:
        lines = metadata.requires(SGPU_MAGIC) or []
    except metadata.PackageNotFoundError:
        # a copy of the package without metadata
        return
    required = [requirement for requirement in map(Requirement, lines) if _is_checked(requirement)]
    unmet = [finding for finding in map(_unmet, required) if finding is not None]
    yield from unmet
    if not unmet:
        yield ok("requirements", f"{len(required)} packages, each in a version that sgpu-magic supports")


def _is_checked(requirement: Requirement) -> bool:
    """Whether the package is needed, or is of an extra whose packages are checked if they are installed."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in _EXTRAS)


def _unmet(requirement: Requirement) -> Finding | None:
    """Return what is wrong with a required package, None if nothing is."""
    name, bounds = requirement.name, requirement.specifier
    is_optional = requirement.marker is not None
    remedy = f"`pip install '{name}{bounds}'`, then restart the kernels."
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        if is_optional or name in _IMPORTED:
            return None
        return problem(name, "is not installed here", remedy)
    if bounds.contains(version, prereleases=True):
        return None
    return (warning if is_optional else problem)(name, f"{version}, and sgpu-magic needs {name}{bounds}", remedy)


def packages(facts: ProbeFacts) -> Iterator[Finding]:
    """Check numpy, torch, and torch's build."""
    if facts.numpy:
        yield ok("numpy", facts.numpy)
    elif facts.numpy_error:
        yield problem("numpy", f"can't be imported: {facts.numpy_error}", "`pip install -U numpy`.")
    if not facts.torch:
        why = facts.torch_error or facts.error_output
        remedy = "`pip install torch` into this Python, or fix the one that is there."
        yield problem("torch", f"can't be imported: {why}", remedy)
        return
    yield ok("torch", f"{facts.torch}, imported in {format_seconds(facts.import_s)}")
    if not facts.distributed or not facts.gloo:
        what = "gloo" if facts.distributed else "torch.distributed"
        yield problem("distributed", f"this torch was built without {what}", "Install a build of torch that has it.")


def mismatches() -> Iterator[Finding]:
    """Check for packages that are known to break together."""
    snapshot = take_snapshot()
    # `gpus` reports a driver that is too old for torch
    found = find_mismatches(packages_of(snapshot))
    for mismatch in found:
        yield problem("packages", mismatch.text, mismatch.remedy)
    if not found:
        yield ok("packages", f"{len(snapshot.distributions)}, none known to break another")


def group(facts: ProbeFacts) -> Iterator[Finding]:
    """Check the all_reduce of the two ranks."""
    if not facts.gloo:
        return
    name = "all_reduce"
    if facts.group_s is None:
        why = facts.group_error or facts.error_output
        remedy = "Loopback (127.0.0.1) must be up and open: see `ip addr show lo` and local firewall rules."
        yield problem(name, f"two gloo ranks on this machine could not reduce a tensor: {why}", remedy)
    elif not facts.right:
        yield problem(name, "two gloo ranks got a wrong sum", "Reinstall torch.")
    else:
        took = f"2 gloo ranks joined in {format_seconds(facts.group_s)}"
        yield ok(name, f"{took} and reduced a tensor in {format_seconds(facts.reduce_s)}")


def gpus(facts: ProbeFacts, simulate: str) -> Iterator[Finding]:
    """Check the driver's devices, and whether this torch can use them."""
    inventory = take_inventory(simulate="", cpu_slots=0)
    real = inventory.devices
    if inventory.problem:
        yield problem("gpu", inventory.problem)
    elif not real:
        yield ok("gpu", "no GPU on this machine: ranks run on CPU with gloo")
    if real:
        names = ", ".join(sorted({device.name or device.type for device in real}))
        yield ok("gpu", f"{count_of(len(real), 'device')}: {names}")
        for device in real:
            if device.outside_use:
                text = f"{type_label(device.type)} {device.index} is in use outside the pool: {device.outside_use}"
                yield warning("gpu", text, "It is leased only with --allow-busy.")
        if facts.torch:
            yield _gpu_torch(facts)
    if simulate:
        yield ok("gpu", f"simulated devices replace the real ones: {simulate}")


def _gpu_torch(facts: ProbeFacts) -> Finding:
    name = "torch and gpu"
    if not facts.gpu_build:
        text = f"torch {facts.torch} was built without CUDA, so no cell can use the GPUs here"
        remedy = "Install a build with CUDA: the installation page of PyTorch gives the command."
        return problem(name, text, remedy)
    if facts.gpus == 0:
        text = f"torch {facts.torch} (CUDA {facts.gpu_build}) can use none of the GPUs that the driver lists"
        remedy = "Update the NVIDIA driver, or install a torch for an older CUDA; "
        return problem(name, text, f'{remedy}`python -c "import torch; torch.cuda.init()"` says why.')
    if not facts.nccl:
        text = "this torch has no NCCL: GPU tensors go over gloo, slowly"
        return warning(name, text, "Install a build with NCCL.")
    return ok(name, f"built for CUDA {facts.gpu_build}, with NCCL")
