"""`serverless_gpu.data` on folders and in a store of fsspec: parts of ranks, copies, positions, checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from lazy_modules import torch

from sgpu_magic.errors import UsageError
from sgpu_magic.functions.compat.notebook.file_system import located

FILES = [f"{number}.txt" for number in range(7)]


@pytest.fixture(scope="module")
def data() -> Any:
    from sgpu_magic.functions.compat.serverless_gpu import data

    return data


@pytest.fixture
def volumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a volume, and the setting that finds it."""
    monkeypatch.setenv("SGPU_VOLUMES_DIR", str(tmp_path))
    folder = tmp_path / "Volumes" / "main" / "default" / "texts"
    (folder / "more").mkdir(parents=True)
    for name in FILES[:5]:
        (folder / name).write_text(name)
    for name in FILES[5:]:
        (folder / "more" / name).write_text(name)
    return folder


@pytest.fixture
def store() -> Iterator[str]:
    """A URL of a store in memory, with the same files."""
    memory = fsspec.filesystem("memory")
    for name in FILES:
        memory.pipe_file(f"/texts/{name}", name.encode())
    yield "memory://texts"
    memory.rm("/", recursive=True)


# ------------------------------------------------------------ paths


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/Volumes/main/default/texts", "DIR/Volumes/main/default/texts"),
        ("dbfs:/Volumes/main/default/texts", "DIR/Volumes/main/default/texts"),
        ("dbfs:/tmp/x", "DIR/dbfs/tmp/x"),
        ("/dbfs/tmp/x", "DIR/dbfs/tmp/x"),
        ("file:/tmp/x", "/tmp/x"),
        ("file:///tmp/x", "/tmp/x"),
        ("/VolumesOfMine/x", "/VolumesOfMine/x"),
        ("s3://bucket/x", "s3://bucket/x"),
        ("data/x", "data/x"),
    ],
)
def test_paths_are_looked_up_in_the_folder_of_the_setting(path: str, found: str, volumes: Path, tmp_path: Path):
    assert located(path) == found.replace("DIR", str(tmp_path))


def test_a_volume_without_a_folder_says_what_to_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SGPU_VOLUMES_DIR", raising=False)
    with pytest.raises(UsageError, match="SGPU_VOLUMES_DIR") as raised:
        located("/Volumes/main/default/texts")
    assert "VOLUMES_DIR/Volumes/main/default/texts" in raised.value.message


# ------------------------------------------------------------ files


def texts(paths: list[str]) -> list[str]:
    return [Path(path).read_text() for path in paths]


def test_files_are_read_in_the_order_of_their_names(data: Any, volumes: Path):
    dataset = data.UCVolumeDataset("/Volumes/main/default/texts")
    assert texts(list(dataset)) == FILES
    assert next(iter(dataset)) == str(volumes / FILES[0]), "on a local disk in place"
    with pytest.raises(FileNotFoundError, match="/Volumes/main/default/none"):
        list(data.UCVolumeDataset("/Volumes/main/default/none"))


def test_each_rank_and_worker_gets_another_part(data: Any, volumes: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    found: list[list[str]] = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        loader = data.DataLoader(data.UCVolumeDataset(str(volumes)), batch_size=None, num_workers=2)
        found.append(texts(list(loader)))
    assert sorted(found[0] + found[1]) == FILES
    assert sorted(found[0]) == ["0.txt", "1.txt", "4.txt", "5.txt"]


def test_what_is_far_is_copied_once(data: Any, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGPU_CACHE_DIR", str(tmp_path / "cache"))
    for folder in (None, tmp_path / "own"):
        dataset = data.UCVolumeDataset(store, cache_dir=folder)
        first = list(dataset)
        assert texts(first) == FILES
        before = [os.stat(path).st_mtime_ns for path in first]
        assert list(dataset) == first
        assert [os.stat(path).st_mtime_ns for path in first] == before
    fsspec.filesystem("memory").pipe_file("/texts/0.txt", b"changed")
    assert texts(list(data.UCVolumeDataset(store, cache_dir=tmp_path / "own")))[0] == "changed"


def test_a_loader_goes_on_from_a_position(data: Any, volumes: Path):
    def loader() -> Any:
        return data.DataLoader(data.UCVolumeDataset(str(volumes)), batch_size=2, num_workers=0)

    first = loader()
    passes = iter(first)
    begun = [next(passes), next(passes)]
    state = first.state_dict()
    assert state == {"batches": 2}
    again = loader()
    again.load_state_dict(state)
    rest = list(again)
    assert texts([path for batch in begun + rest for path in batch]) == FILES
    assert len(list(again)) == 4, "the next pass is whole"


def test_a_dataset_with_a_position_of_its_own_goes_on_itself(data: Any):
    class Counted(torch.utils.data.IterableDataset):
        at = 0

        def __iter__(self):
            while self.at < 5:
                self.at += 1
                yield self.at

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    loader = data.DataLoader(Counted(), num_workers=0)
    passes = iter(loader)
    next(passes)
    next(passes)
    state = loader.state_dict()
    assert state == {"batches": 2, "dataset": {"at": 2}}
    again = data.DataLoader(Counted(), num_workers=0)
    again.load_state_dict(state)
    assert [int(batch) for batch in again] == [3, 4, 5]


@pytest.mark.slow
def test_the_wait_for_data_is_logged(data: Any, volumes: Path, monkeypatch: pytest.MonkeyPatch):
    import mlflow

    logged: list[tuple[str, int]] = []
    monkeypatch.setattr(mlflow, "active_run", lambda: object())
    monkeypatch.setattr(mlflow, "log_metric", lambda name, value, step: logged.append((name, step)))
    list(data.DataLoader(data.UCVolumeDataset(str(volumes)), batch_size=None, num_workers=0))
    assert logged == [("data_wait_s", step) for step in range(7)]


# ------------------------------------------------------------ checkpoints


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("where", ["volume", "store"])
def test_a_checkpoint_comes_back_and_is_whole_when_it_has_its_metadata(
    data: Any, volumes: Path, store: str, where: str, monkeypatch: pytest.MonkeyPatch
):
    from torch.distributed import checkpoint

    path = "/Volumes/main/default/texts/step_10" if where == "volume" else f"{store}/step_10"
    files, root = fsspec.core.url_to_fs(located(path))
    saved = {"w": torch.arange(6.0), "step": 10}
    order: list[str] = []
    put = files.put_file

    def noted(here: str, there: str) -> None:
        order.append(os.path.basename(there))
        put(here, there)

    monkeypatch.setattr(files, "put_file", noted)
    checkpoint.save(saved, storage_writer=data.UCVolumeWriter(path), no_dist=True)
    assert files.exists(f"{root}/.metadata")
    if where == "store":
        assert order[-1] == ".metadata"
    loaded = {"w": torch.zeros(6), "step": 0}
    checkpoint.load(loaded, storage_reader=data.UCVolumeReader(path), no_dist=True)
    assert torch.equal(loaded["w"], saved["w"])
    assert loaded["step"] == 10
    files.rm(f"{root}/.metadata")
    with pytest.raises((FileNotFoundError, checkpoint.CheckpointException), match="whole checkpoint"):
        checkpoint.load(loaded, storage_reader=data.UCVolumeReader(path), no_dist=True)


def test_a_name_that_is_not_there_says_which_are(data: Any):
    with pytest.raises(AttributeError, match="UCVolumeDataset"):
        _ = data.UCTable
