"""Folders that are created once and kept while in use, and which are removed when space runs out."""

from __future__ import annotations

import asyncio
import functools
import os
from pathlib import Path

import msgspec
import pytest
from launches import placed_launch

from sgpu_magic.agent.reports import FileRequests
from sgpu_magic.agent.runs import run_memory
from sgpu_magic.agent.runs.preparing import LaunchInputs
from sgpu_magic.config import load_settings
from sgpu_magic.files.atomic_file import appearing
from sgpu_magic.files.content_store import blob_path
from sgpu_magic.files.disk_usage import evict
from sgpu_magic.files.folder_cache import FolderCache
from sgpu_magic.files.locks import locked, take_lock
from sgpu_magic.wire.attachments import StoredPart, StoredPayload


def fill(folder: Path, text: str) -> None:
    (folder / "a.txt").write_text(text)


def says(folder: Path, text: str) -> bool:
    return (folder / "a.txt").read_text() == text


@pytest.fixture
def kept(tmp_path: Path) -> FolderCache:
    return FolderCache(tmp_path / "kept", 1_000_000)


def test_it_is_made_once_for_all_that_want_it(tmp_path: Path, kept: FolderCache):
    assert kept.keep_for("one", "run-1") is None
    path = kept.put("one", functools.partial(fill, text="x"))
    assert path == tmp_path / "kept" / "one"
    assert kept.keep_for("one", "run-2") == path
    other = FolderCache(tmp_path / "kept", 0)
    assert other.keep_for("one", "run-3") is None
    assert other.find("one") == path
    kept.release("run-1")
    kept.release("run-2")
    with locked(path, wait=False) as mine:
        assert not mine, "another agent has it still"
    other.release("run-3")
    with locked(path, wait=False) as mine:
        assert mine


def test_one_that_was_written_in_makes_room_unless_it_is_used(tmp_path: Path, kept: FolderCache):
    whole = functools.partial(says, text="x")
    kept.keep_for("one", "run-1")
    first = kept.put("one", functools.partial(fill, text="x"), whole)
    fill(first, "changed")
    other = FolderCache(tmp_path / "kept", 1_000_000)
    other.keep_for("one", "run-2")
    assert other.find("one", whole) is None
    second = other.put("one", functools.partial(fill, text="x"), whole)
    assert (first.name, second.name) == ("one", "one-1")
    kept.release("run-1")
    later = FolderCache(tmp_path / "kept", 1_000_000)
    later.keep_for("one", "run-3")
    assert later.find("one", whole) == second
    assert not first.exists()


def test_what_nobody_wants_any_more_is_not_held(kept: FolderCache):
    kept.keep_for("one", "run-1")
    kept.release("run-1")
    path = kept.put("one", functools.partial(fill, text="x"))
    assert not kept.is_kept_for("one", "run-1")
    with locked(path, wait=False) as mine:
        assert mine


def test_a_filling_that_fails_leaves_nothing(tmp_path: Path, kept: FolderCache):
    def fails(folder: Path) -> None:
        fill(folder, "half")
        raise OSError("no room")

    kept.keep_for("one", "run-1")
    with pytest.raises(OSError, match="no room"):
        kept.put("one", fails)
    assert os.listdir(tmp_path / "kept") == []


def test_the_longest_unused_goes_and_never_one_that_is_used(tmp_path: Path):
    small = FolderCache(tmp_path / "kept", 2500)
    for age, name in enumerate(("one", "two")):
        small.keep_for(name, f"run-{name}")
        path = small.put(name, functools.partial(fill, text="x" * 1000))
        os.utime(path, (1_700_000_000 + age, 1_700_000_000 + age))
    small.release("run-two")
    small.keep_for("three", "run-three")
    small.put("three", functools.partial(fill, text="x" * 1000))
    assert sorted(os.listdir(tmp_path / "kept")) == ["one", "three"]


def test_evict_stops_as_soon_as_the_rest_fits():
    there = {"a": (3.0, 10), "b": (1.0, 10), "c": (2.0, 10), "used": (0.0, 10)}

    def remove(name: str) -> bool:
        return name != "used" and there.pop(name) is not None

    assert evict([(at, size, name) for name, (at, size) in there.items()], 25, remove) == 20
    assert sorted(there) == ["a", "used"]


def test_a_lock_of_something_that_is_not_there_is_none(tmp_path: Path):
    assert take_lock(tmp_path / "gone") is None


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write_half() -> None:
        with appearing(path) as file:
            file.write(b"half of the new")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["a.txt"])


def test_a_payload_that_can_not_be_joined_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_memory, "fits_memory", lambda size: False)
    settings = load_settings({"SGPU_STATE_DIR": str(tmp_path / "state")})
    launch = msgspec.structs.replace(placed_launch(tmp_path, is_remote=False), store="ann")
    digest = "a" * 64
    path = blob_path(settings.state_path / "blobs", launch.store, digest)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"shorter than it was")
    source = StoredPayload(parts=(StoredPart(digest=digest, offset=0, size=100),), size=100)

    async def go() -> None:
        await LaunchInputs(settings, FileRequests(lambda *_: None)).payload(launch, source)

    with pytest.raises(OSError, match="shorter"):
        asyncio.run(go())
    assert os.listdir(launch.run_dir) == []
