"""Where a rank stands: the kernel's directory, path, environment and umask, its devices, its random seeds."""

from __future__ import annotations

import os
import random
import sys

import torch

from sgpu_magic.protocol.node_messages import Execute
from sgpu_magic.protocol.records import RankContext


def stand_where_the_kernel_stands(context: RankContext, rank_variables: dict[str, str]) -> None:
    """Take over working directory, `sys.path`, umask and the whole environment.

    Raises:
        OSError: The kernel's directory can't be entered any more.
    """
    os.umask(context.umask)
    os.environ.clear()
    os.environ.update(context.environ)
    for name, value in rank_variables.items():
        os.environ[name] = value
    if context.cwd:
        os.chdir(context.cwd)
    sys.path[:] = context.sys_path
    sys.argv[:] = [""]
    # a directory that did not exist when the zygote looked counts as empty for good; changed ones are noticed by
    # their time of change, without `importlib.invalidate_caches`, which touches 1.5 MB in every rank
    for entry in [entry for entry, finder in sys.path_importer_cache.items() if finder is None]:
        del sys.path_importer_cache[entry]


def reseed() -> None:
    """Give this rank random numbers of its own, as every new process has them.

    A new process seeds torch's CPU generator from the system (c10 `createCPUGenerator`), its CUDA ones all alike.
    """
    random.seed()
    torch.default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def set_threads(context_environ: dict[str, str], ranks_here: int) -> None:
    """Use the user's `OMP_NUM_THREADS`, else an equal share of the cores (torchrun gives 1).

    `OMP_NUM_THREADS` alone does nothing once torch is imported. numpy's BLAS was held at one thread in the zygote.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = context_environ.get("OMP_NUM_THREADS", "")
    threads = int(asked) if asked.isdigit() and int(asked) > 0 else max(1, cores // ranks_here)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if threads > 1:
        try:
            import threadpoolctl
        except ImportError:
            return
        threadpoolctl.threadpool_limits(limits=threads, user_api="blas")


def set_device(order: Execute) -> torch.device:
    """Make the rank's own GPU current and return the rank's device."""
    if order.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if order.rank_variables["LOCAL_RANK"] == "0":
            sys.stderr.write(
                f"the run has GPUs, but torch {torch.__version__} can't use them: its ranks compute on the CPU. "
                "`sgpu doctor` says why.\n"
            )
        return torch.device("cpu")
    device = torch.device("cuda", int(order.rank_variables["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device
