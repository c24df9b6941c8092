"""`serverless_gpu.data`: files of a volume for training, and checkpoints there, with torch's own classes.

A volume is a folder: `/Volumes/...` and `dbfs:/...` are looked up in the setting `volumes_dir`, other paths are taken
as they are, and URLs such as `s3://bucket/folder` are read through fsspec. Files that are not on this machine's disks
are copied to the node's cache (`sgpu_magic.runtime.cached`) when they are first read.
"""

# fsspec has no types, and torch's checkpoint classes only some
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, runtime_checkable

import fsspec
import torch.utils.data as torch_data
from fsspec.implementations.local import LocalFileSystem
from torch import distributed
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from sgpu_magic import runtime
from sgpu_magic.functions.compat.notebook.file_system import located

__all__ = ["Checkpointable", "DataLoader", "UCVolumeDataset", "UCVolumeReader", "UCVolumeWriter"]

_METADATA = ".metadata"


def __getattr__(name: str) -> object:
    raise AttributeError(f"sgpu-magic provides {', '.join(__all__)} of serverless_gpu.data, not {name!r}")


@runtime_checkable
class Checkpointable(Protocol):
    """Something whose position is saved with a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return its position."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position."""
        ...


class UCVolumeDataset(torch_data.IterableDataset[str]):
    """Yields the local paths of the files of a volume, in the order of their names.

    Each rank and each of its `DataLoader`'s workers gets another part of the files, so that no sampler is needed: the
    file at position `i` belongs to slot `i % (ranks * workers)`. All ranks must use the same number of workers.

    Args:
        path: The volume's folder, or a single file.
        cache_dir: Copy the files to this folder before they are read. Default: files on local disks are read in place,
            others are copied to the node's cache.
    """

    def __init__(self, path: str | os.PathLike[str], *, cache_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self.path = os.fspath(path)
        self.cache_dir = None if cache_dir is None else Path(cache_dir)

    def __iter__(self) -> Iterator[str]:
        files, root = fsspec.core.url_to_fs(located(self.path))
        if not files.exists(root):
            raise FileNotFoundError(f"{self.path}: there is no such file or folder ({root})")
        names = sorted(files.find(root))
        rank, ranks = _shard()
        worker = torch_data.get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for name in islice(names, rank * workers + number, None, ranks * workers):
            yield from self._local(files, name)

    def _local(self, files: Any, name: str) -> Iterator[str]:
        if self.cache_dir is not None:
            copy = self.cache_dir / _entry(files, name)
            if not copy.exists():
                self.cache_dir.mkdir(parents=True, exist_ok=True)
                # other workers may copy the same file
                part = copy.with_name(f".{copy.name}.{os.getpid()}")
                files.get_file(name, str(part))
                os.replace(part, copy)
            yield str(copy)
        elif isinstance(files, LocalFileSystem):
            yield name
        else:
            with runtime.cached(_entry(files, name), lambda path: files.get_file(name, str(path))) as path:
                # the cache entry is kept until the caller requests the next file
                yield str(path)


def _shard() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    # a worker of a DataLoader has no process group, but has its rank's environment variables
    return runtime.get_global_rank(), runtime.get_world_size()


def _entry(files: Any, name: str) -> str:
    """Return the name of a file's copy, another one when the file changes."""
    info = files.info(name)
    changed = next((info[key] for key in ("mtime", "LastModified", "ETag") if info.get(key)), "")
    seen = f"{files.protocol}:{name}:{info.get('size')}:{changed}"
    return f"{hashlib.sha256(seen.encode()).hexdigest()[:24]}-{PurePosixPath(name).name[-80:]}"


class DataLoader(torch_data.DataLoader[Any]):
    """torch's `DataLoader` with defaults for data that is far away, and a position that can be saved.

    The time that the training waits for each batch is logged to the active MLflow run as `data_wait_s`.

    Args:
        dataset: The dataset.
        batch_size: As in torch.
        num_workers: As in torch; 6 by default.
        prefetch_factor: As in torch; 4 by default.
        options: The further arguments of torch's `DataLoader`.
    """

    def __init__(
        self,
        dataset: torch_data.Dataset[Any],
        batch_size: int | None = 1,
        *,
        num_workers: int = 6,
        prefetch_factor: int | None = None,
        **options: Any,
    ) -> None:
        if num_workers:
            prefetch_factor = prefetch_factor or 4
        super().__init__(
            dataset, batch_size=batch_size, num_workers=num_workers, prefetch_factor=prefetch_factor, **options
        )
        self._delivered = 0
        self._skipped = 0

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Iterate over the batches; after `load_state_dict` over those that come after the position."""
        begin, self._skipped = self._skipped, 0
        self._delivered = begin
        asked_at = time.monotonic()
        for batch in islice(super().__iter__(), begin, None):
            self._log(time.monotonic() - asked_at)
            self._delivered += 1
            yield batch
            asked_at = time.monotonic()
        self._delivered = 0

    def state_dict(self) -> dict[str, Any]:
        """Return how many batches of this pass were delivered, and the dataset's position if it has one."""
        state: dict[str, Any] = {"batches": self._delivered}
        if isinstance(self.dataset, Checkpointable):
            state["dataset"] = self.dataset.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batches that `state` counts. A dataset with its own position continues from there."""
        if "dataset" in state and isinstance(self.dataset, Checkpointable):
            self.dataset.load_state_dict(state["dataset"])
        else:
            self._skipped = int(state["batches"])

    def _log(self, waited_s: float) -> None:
        # not imported for this alone
        mlflow = sys.modules.get("mlflow")
        if mlflow is not None and mlflow.active_run() is not None:
            mlflow.log_metric("data_wait_s", waited_s, step=self._delivered)


class UCVolumeWriter(FileSystemWriter):
    """Writes a `torch.distributed.checkpoint` to a volume, through a local folder.

    Each rank uploads its own files; `.metadata` is written last, so that a checkpoint which has it is whole.

    Args:
        path: The checkpoint's folder, or a URL that fsspec can write to.
        options: The further arguments of torch's `FileSystemWriter`.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        self._volume = _Volume(path)
        super().__init__(self._volume.local, **options)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switch to another checkpoint's folder; called by torch at the start of each save."""
        if checkpoint_id:
            self._volume = _Volume(checkpoint_id)
        super().reset(self._volume.local)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part locally and upload it."""
        written = super().write_data(plan, planner)
        self._volume.upload({result.storage_data.relative_path for result in written.wait()})
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Upload the metadata, after all ranks have uploaded their parts."""
        super().finish(metadata, results)
        self._volume.upload({_METADATA})


class UCVolumeReader(FileSystemReader):
    """Reads a `torch.distributed.checkpoint` from a volume, through a local folder.

    Args:
        path: The checkpoint's folder, or a URL that fsspec can read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._volume = _Volume(path)
        super().__init__(self._volume.local)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switch to another checkpoint's folder; called by torch at the start of each load."""
        if checkpoint_id:
            self._volume = _Volume(checkpoint_id)
        super().reset(self._volume.local)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Download and read the metadata.

        Raises:
            FileNotFoundError: There is no whole checkpoint.
        """
        self._volume.download({_METADATA})
        return super().read_metadata(*args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Download the files that this rank needs and read them."""
        self._volume.download({self.storage_data[item.storage_index].relative_path for item in plan.items})
        return super().read_data(plan, planner)


class _Volume:
    """A checkpoint's folder and the local folder for its files; the same folder if it is on a local disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._files, self._root = fsspec.core.url_to_fs(located(self._path))
        self._is_local = isinstance(self._files, LocalFileSystem)
        self.local: str = self._root
        if not self._is_local:
            self.local = tempfile.mkdtemp(prefix="sgpu-checkpoint-")
            weakref.finalize(self, shutil.rmtree, self.local, ignore_errors=True)

    def upload(self, names: Iterable[str]) -> None:
        if self._is_local:
            return
        self._files.makedirs(self._root, exist_ok=True)
        for name in sorted(names):
            self._files.put_file(os.path.join(self.local, name), f"{self._root}/{name}")

    def download(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            if not self._files.exists(f"{self._root}/{name}"):
                raise FileNotFoundError(f"{self._path} has no {name}: it is no whole checkpoint")
            if not self._is_local and not os.path.exists(os.path.join(self.local, name)):
                self._files.get_file(f"{self._root}/{name}", os.path.join(self.local, name))
