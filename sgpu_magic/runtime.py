"""Functions for code that runs on a rank: the same values as `rank`, `world_size` ... in a cell, and data paths.

They read torchrun's environment variables, so they also work under plain torchrun. In the notebook itself there is
one process: rank 0 of 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from sgpu_magic.errors import UsageError
from sgpu_magic.wire.decoding import load_json

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
    """Return this process's rank among all ranks of the run, from 0."""
    return int(os.environ.get("RANK", "0"))


def get_local_rank() -> int:
    """Return this process's rank among the ranks of its node, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_size() -> int:
    """Return the number of ranks of the run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def get_local_world_size() -> int:
    """Return the number of ranks on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def get_node_rank() -> int:
    """Return the index of this node, from 0."""
    return int(os.environ.get("GROUP_RANK", "0"))


def get_restart_count() -> int:
    """Return how many times the run was restarted after a failure (`--retries`): 0 the first time."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def checkpoint_dir() -> Path:
    """Return the directory for the run's checkpoints; it is created on first use.

    All ranks and all attempts of a run with `--retries` share it, and each run has its own: any files in it come from
    an earlier attempt of the same run. It is the folder `checkpoints` in the run's directory and is deleted with it,
    by default after 30 days or when ended runs take more than 20 GB. Copy what you want to keep.

    Under plain torchrun or in the notebook itself there is no run, so set SGPU_CHECKPOINT_DIR. A run's `_air.py` uses
    that run's `checkpoints` folder.

    Raises:
        UsageError: There is no run, and SGPU_CHECKPOINT_DIR is not set.
    """
    path = os.environ.get("SGPU_CHECKPOINT_DIR", "")
    if not path:
        # do not fall back to ./checkpoints: this training would resume from checkpoints that another one saved there
        raise UsageError(
            "this process is not in a run, so checkpoint_dir() has no directory to return. Call it in a cell that "
            "begins with %%distributed, or set SGPU_CHECKPOINT_DIR to your own directory."
        )
    directory = Path(path)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def cache_dir() -> Path:
    """Return this node's folder for copies of data on local disk, which is kept between runs within a budget.

    It is private to you (mode 0700) and shared by all your runs and ranks on the node. Its path is
    `~/.cache/sgpu-magic/HOST`, or the setting `cache_dir` (SGPU_CACHE_DIR), which should be on the node's fastest disk.
    Each file or folder directly in it is an entry. When the entries exceed the setting `cache_bytes`, the least
    recently used ones are deleted. Entries that you create yourself are kept at least until every process that has
    called `cache_dir()` has ended; with `cached`, an entry is kept while its block runs.

    Raises:
        UsageError: The folder is not yours, or can't be created.
    """
    from sgpu_magic.files.node_cache import node_cache

    return node_cache().folder()


def cached(name: str, fill: Callable[[Path], object]) -> AbstractContextManager[Path]:
    """Open an entry of `cache_dir()` in a `with` block: create it if it is missing, and keep it while the block runs.

        with runtime.cached(f"shard-{n}.npy", lambda path: shutil.copy(far / f"shard-{n}.npy", path)) as path:
            rows = np.load(path)

    One process on the node fills the entry while the others wait. The entry appears only when it is complete; partial
    output of a killed or failed `fill` is never visible. To make room, the least recently used entries are deleted;
    entries in use are kept even above the budget. Do not modify the files: all your runs share them.

    Args:
        name: The entry's name, a single path component.
        fill: Function that writes a file or a folder at exactly the path that it is given.

    Raises:
        UsageError: The name is invalid, or `fill` wrote nothing.
    """
    from sgpu_magic.files.node_cache import node_cache

    return node_cache().entry(name, fill)


def upload_path(name: str | os.PathLike[str] = "") -> Path:
    """Return the path on this node of a folder or file that was uploaded with the run (`--upload data`).

    All ranks of the node share one read-only copy. On the notebook's own machine it is the original folder or file. In
    the notebook, where there is no run, it is the absolute path of `name`.

    Args:
        name: The path as given to `--upload`, or its last component. Optional if there is only one upload.

    Raises:
        UsageError: No upload matches, or more than one does.
    """
    uploads = os.environ.get("SGPU_UPLOADS", "")
    if not uploads:
        if name and "RANK" not in os.environ and os.path.exists(os.path.expanduser(name)):
            return Path(os.path.abspath(os.path.expanduser(name)))
        raise UsageError(
            f"this run has no uploads, so upload_path({os.fspath(name)!r}) has no path to return. Begin the "
            "cell with %%distributed --upload PATH, or pass upload=PATH to @distributed."
        )
    known: dict[str, str] = load_json(uploads)
    wanted = os.path.normpath(os.path.expanduser(name)) if os.fspath(name) else ""
    by_last = [path for text, path in known.items() if wanted in ("", os.path.basename(text))]
    found = [known[wanted]] if wanted in known else by_last
    if len(found) != 1:
        raise UsageError(
            f"upload_path({os.fspath(name)!r}) matches none of this run's uploads, or several. The uploads are: "
            f"{', '.join(sorted(known))}. Name one of them as it is listed here."
        )
    return Path(found[0])


def get_device() -> torch.device:
    """Return this rank's device: its GPU, or the CPU if it has none."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", get_local_rank())
    return torch.device("cpu")
