"""Where a rank stands: the kernel's directory, path, environment and umask, its devices, its random seeds."""

from __future__ import annotations

import multiprocessing.process
import os
import random
import sys

import torch

from sgpu_magic.wire.records import RankContext


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
        # where a spawned process looks for a script that was started by a relative path
        multiprocessing.process.ORIGINAL_DIR = context.cwd  # pyright: ignore[reportAttributeAccessIssue]
    sys.path[:] = context.sys_path
    sys.argv[:] = [""]
    forget_missing_directories()


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


def follow(old: RankContext, new: RankContext, rank_variables: dict[str, str]) -> None:
    """Take over what the kernel has changed since the last cell; what the rank itself has changed stays.

    Args:
        old: Where the kernel stood at the last cell.
        new: Where it stands now.
        rank_variables: The rank's own, which the kernel's never replace.

    Raises:
        OSError: The kernel's new directory can't be entered any more.
    """
    if new.umask != old.umask:
        os.umask(new.umask)
    if new.environ != old.environ:
        for name in old.environ.keys() - new.environ.keys() - rank_variables.keys():
            os.environ.pop(name, None)
        for name, value in new.environ.items():
            if name not in rank_variables and old.environ.get(name) != value:
                os.environ[name] = value
    if new.cwd != old.cwd and new.cwd:
        os.chdir(new.cwd)
    if new.sys_path != old.sys_path:
        known = set(old.sys_path)
        first = next((at for at, entry in enumerate(sys.path) if entry in known), 0)
        own = [entry for entry in sys.path if entry not in known and entry not in new.sys_path]
        before = [entry for entry in own if entry in sys.path[:first]]
        sys.path[:] = [*before, *new.sys_path, *(entry for entry in own if entry not in before)]
    forget_missing_directories()


def forget_missing_directories() -> None:
    """A directory that did not exist when it was looked for counts as empty for good.

    Changed ones are noticed by their time of change, without `importlib.invalidate_caches`, which touches 1.5 MB in
    every rank.
    """
    for entry in [entry for entry, finder in sys.path_importer_cache.items() if finder is None]:
        del sys.path_importer_cache[entry]


def set_device(kind: str, rank_variables: dict[str, str]) -> torch.device:
    """Make the rank's own GPU current and return the rank's device.

    Args:
        kind: `cpu`, or `cuda` when the rank has a GPU of its own.
        rank_variables: torchrun's.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if rank_variables["LOCAL_RANK"] == "0":
            sys.stderr.write(
                f"the run has GPUs, but torch {torch.__version__} can't use them: its ranks compute on the CPU. "
                "`sgpu doctor` says why.\n"
            )
        return torch.device("cpu")
    device = torch.device("cuda", int(rank_variables["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device
