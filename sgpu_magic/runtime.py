"""What code on a rank asks about itself: the same as `rank`, `world_size` ... in a cell, as functions.

Reads torchrun's variables, so it works under plain torchrun too. In the notebook itself there is one process:
rank 0 of 1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from sgpu_magic.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = [
    "cache_dir",
    "cached",
    "checkpoint_dir",
    "get_device",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_restart_count",
    "get_world_size",
    "upload_path",
]


def get_global_rank() -> int:
    """This rank's number among all ranks of the run, from 0."""
    return int(os.environ.get("RANK", "0"))


def get_local_rank() -> int:
    """Its number among the ranks of its node, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_size() -> int:
    """Number of ranks of the run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def get_local_world_size() -> int:
    """Number of ranks on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def get_node_rank() -> int:
    """Number of this node, from 0."""
    return int(os.environ.get("GROUP_RANK", "0"))


def get_restart_count() -> int:
    """How often the run was started again after a failure (`--retries`): 0 the first time."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def checkpoint_dir() -> Path:
    """A directory for the run's checkpoints, made when first asked for.

    It is the same for all ranks and for every attempt of a run with `--retries`, and another for each run: what lies
    there is from an earlier attempt of this very run. It is the folder `checkpoints` of the run's directory and goes
    with it, by default after 30 days or when ended runs have more than 20 GB: copy elsewhere what you want to keep.

    Under plain torchrun, or in the notebook itself, there is no run. Set SGPU_CHECKPOINT_DIR there; a run's `_air.py`
    uses its own.

    Raises:
        UsageError: There is no run, and SGPU_CHECKPOINT_DIR is not set.
    """
    path = os.environ.get("SGPU_CHECKPOINT_DIR", "")
    if not path:
        # no ./checkpoints instead: what another training left there would be taken for this one's
        raise UsageError(
            "there is no run here, so checkpoint_dir() has no directory to give. Call it in a cell that begins with "
            "%%distributed, or set SGPU_CHECKPOINT_DIR to a directory of yours."
        )
    directory = Path(path)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def cache_dir() -> Path:
    """A folder of this node for copies of data, on local disk: it stays between runs, within a budget.

    It is yours alone (0700) and the same for all runs and ranks of the node: `~/.cache/sgpu-magic/HOST`, or the setting
    `cache_dir` (SGPU_CACHE_DIR), which belongs on the node's fastest disk. Its budget is the setting `cache_bytes`.
    What is directly in it are its entries, and those that were not used for longest are deleted when there are too
    many. What you put there by hand stays at least until every process that has called `cache_dir()` has ended;
    `cached` says for each entry how long it is needed.

    Raises:
        UsageError: The folder is not yours, or can't be made.
    """
    from sgpu_magic.files.node_cache import node_cache

    return node_cache().folder()


def cached(name: str, fill: Callable[[Path], object]) -> AbstractContextManager[Path]:
    """An entry of `cache_dir()`, made if it is not there, and kept there while the block runs.

        with runtime.cached(f"shard-{n}.npy", lambda path: shutil.copy(far / f"shard-{n}.npy", path)) as path:
            rows = np.load(path)

    One process of the node fills it, the others wait for that. Its name appears when it is whole: what a killed or
    failed `fill` leaves is never seen. Room is made by deleting the entries that nobody uses and that were not used
    for longest; those in use stay even above the budget. Read-only: all runs of yours see the same files.

    Args:
        name: Its name, one component of a path.
        fill: Writes a file or a folder at exactly the path that it is given.

    Raises:
        UsageError: The name can't be one, or `fill` wrote nothing.
    """
    from sgpu_magic.files.node_cache import node_cache

    return node_cache().entry(name, fill)


def upload_path(name: str | os.PathLike[str] = "") -> Path:
    """Where a folder or file lies on this node that went along with the run (`--upload data`).

    It is there once for all ranks of the node, for reading only. On the notebook's own machine it is the folder itself.
    In the notebook, where there is no run, it is the path as it was given.

    Args:
        name: As `--upload` had it, or its last part. May be left out where only one went along.

    Raises:
        UsageError: Nothing of that name went along.
    """
    told = os.environ.get("SGPU_UPLOADS", "")
    if not told:
        if name and "RANK" not in os.environ and os.path.exists(os.path.expanduser(name)):
            return Path(os.path.abspath(os.path.expanduser(name)))
        raise UsageError(
            f"nothing went along with this run, so upload_path({os.fspath(name)!r}) has no path to give. Begin the "
            "cell with %%distributed --upload PATH, or give @distributed upload=PATH."
        )
    known: dict[str, str] = json.loads(told)
    wanted = os.path.normpath(os.path.expanduser(name)) if os.fspath(name) else ""
    found = [path for text, path in known.items() if text == wanted]
    if not found:
        found = [path for text, path in known.items() if wanted in ("", os.path.basename(text))]
    if len(found) != 1:
        listed = ", ".join(sorted(known))
        raise UsageError(
            f"upload_path({os.fspath(name)!r}) names none of what went along with this run, or several. There are: "
            f"{listed}. Name one of them as it stands there."
        )
    return Path(found[0])


def get_device() -> torch.device:
    """The rank's own device: its GPU, or the CPU where it has none."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", get_local_rank())
    return torch.device("cpu")
