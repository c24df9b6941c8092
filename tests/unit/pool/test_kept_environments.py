"""Environment files that a pool keeps: stored once, linked into every run's directory, removed with the last one."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest
from waiting import eventually

from sgpu_magic.config import Settings
from sgpu_magic.pool.environment_store import EnvironmentStore
from sgpu_magic.pool.retention import Retention
from sgpu_magic.wire.base import new_id
from sgpu_magic.wire.client import KeepEnvironment

DIGEST = "0123456789abcdef" * 2
FILES = (("requirements.txt", "six==1.17.0\n"), ("pylock.toml", 'lock-version = "1.0"\n'))


@pytest.fixture
def kept(tmp_path: Path) -> EnvironmentStore:
    (tmp_path / "runs").mkdir()
    return EnvironmentStore(tmp_path / "kept", tmp_path / "runs")


def run_directory(tmp_path: Path) -> tuple[str, Path]:
    run_id = new_id()
    directory = tmp_path / "runs" / run_id
    directory.mkdir()
    return run_id, directory


def text_in(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


def test_a_hundred_runs_have_the_same_two_files(kept: EnvironmentStore, tmp_path: Path):
    kept.keep(KeepEnvironment(digest=DIGEST, files=FILES), "ann")
    runs = [run_directory(tmp_path) for _ in range(100)]
    for run_id, directory in runs:
        kept.link(DIGEST, run_id, "ann")
        assert text_in(directory) == dict(FILES)
    status = (runs[0][1] / "pylock.toml").stat()
    assert status.st_nlink == 101
    assert stat.S_IMODE(status.st_mode) == 0o400
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700


def test_files_that_come_later_and_better_ones_are_put_there_too(kept: EnvironmentStore, tmp_path: Path):
    before, early = run_directory(tmp_path)
    other, others = run_directory(tmp_path)
    kept.link(DIGEST, before, "ann")
    kept.link("f" * 32, other, "ann")
    assert text_in(early) == {}
    kept.keep(KeepEnvironment(digest=DIGEST, files=FILES[:1]), "ann")
    assert text_in(early) == dict(FILES[:1])
    kept.keep(KeepEnvironment(digest=DIGEST, files=(("requirements.txt", "# better\n"), FILES[1])), "ann")
    assert text_in(early) == {"requirements.txt": "# better\n", "pylock.toml": FILES[1][1]}
    assert text_in(others) == {}


def test_a_user_changes_nothing_in_others_directories(kept: EnvironmentStore, tmp_path: Path):
    run_id, directory = run_directory(tmp_path)
    kept.keep(KeepEnvironment(digest=DIGEST, files=FILES, runs=(run_id,)), "ann")
    kept.keep(KeepEnvironment(digest=DIGEST, files=(("requirements.txt", "evil\n"),)), "eve")
    later, after = run_directory(tmp_path)
    kept.link(DIGEST, later, "ann")
    assert (text_in(directory), text_in(after)) == (dict(FILES), dict(FILES))
    evil, eves = run_directory(tmp_path)
    kept.link(DIGEST, evil, "eve")
    assert text_in(eves) == {"requirements.txt": "evil\n"}


def test_a_user_puts_nothing_into_the_directories_of_others_whose_runs_they_name(
    kept: EnvironmentStore, tmp_path: Path
):
    evil = (("requirements.txt", "evil\n"),)
    known, ann = run_directory(tmp_path)
    kept.link(DIGEST, known, "ann")
    kept.keep(KeepEnvironment(digest=DIGEST, files=FILES), "ann")
    unknown, later = run_directory(tmp_path)
    kept.link("", unknown, "ann")
    queued = new_id()
    kept.keep(KeepEnvironment(digest=DIGEST, files=evil, runs=(known, unknown, queued)), "eve")
    assert (text_in(ann), text_in(later)) == (dict(FILES), {})
    directory = tmp_path / "runs" / queued
    directory.mkdir()
    kept.link("", queued, "ann")
    assert text_in(directory) == {}
    kept.keep(KeepEnvironment(digest=DIGEST, files=FILES, runs=(unknown, queued)), "ann")
    assert text_in(later) == text_in(directory) == dict(FILES)


def test_a_run_that_came_before_its_digest_was_known_gets_them(kept: EnvironmentStore, tmp_path: Path):
    run_id, directory = run_directory(tmp_path)
    kept.keep(KeepEnvironment(digest=DIGEST, files=FILES, runs=(run_id, "../elsewhere", new_id())), "ann")
    assert text_in(directory) == dict(FILES)


def test_a_run_that_was_not_taken_yet_when_its_digest_was_told_gets_them(kept: EnvironmentStore, tmp_path: Path):
    run_id = new_id()
    kept.keep(KeepEnvironment(digest=DIGEST, files=FILES, runs=(run_id,)), "ann")
    directory = tmp_path / "runs" / run_id
    directory.mkdir()
    # its spec has no digest
    kept.link("", run_id, "ann")
    assert text_in(directory) == dict(FILES)


@pytest.mark.parametrize("digest", ["", "../../outside", "A" * 32, "0" * 8, "a" * 32 + "/b"])
def test_what_is_no_digest_names_no_file(kept: EnvironmentStore, tmp_path: Path, digest: str):
    run_id, directory = run_directory(tmp_path)
    kept.keep(KeepEnvironment(digest=digest, files=FILES, runs=(run_id,)), "ann")
    kept.link(digest, run_id, "ann")
    assert text_in(directory) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_only_the_two_files_are_kept(kept: EnvironmentStore, tmp_path: Path):
    run_id, directory = run_directory(tmp_path)
    kept.keep(
        KeepEnvironment(digest=DIGEST, files=(("../../evil", "x"), ("cell.py", "x"), FILES[0]), runs=(run_id,)), "ann"
    )
    assert text_in(directory) == dict(FILES[:1])
    assert [path.name for path in (tmp_path / "kept" / "ann" / DIGEST).iterdir()] == ["requirements.txt"]
    assert not (tmp_path / "evil").exists()


def test_where_the_disk_knows_no_links_a_run_has_copies(
    kept: EnvironmentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    run_id, directory = run_directory(tmp_path)
    kept.keep(KeepEnvironment(digest=DIGEST, files=FILES, runs=(run_id,)), "ann")
    assert text_in(directory) == dict(FILES)
    assert (directory / "pylock.toml").stat().st_nlink == 1


def test_they_go_when_no_run_has_them_and_nobody_may_ask_for_them_again(kept: EnvironmentStore, tmp_path: Path):
    run_id, directory = run_directory(tmp_path)
    kept.keep(KeepEnvironment(digest=DIGEST, files=FILES, runs=(run_id,)), "ann")
    later = EnvironmentStore(tmp_path / "kept", tmp_path / "runs")
    later.remove_unlinked()
    assert (tmp_path / "kept" / "ann" / DIGEST).is_dir()
    for path in directory.iterdir():
        path.unlink()
    # this service's clients have sent the files and will not send them again
    kept.remove_unlinked()
    assert (tmp_path / "kept" / "ann" / DIGEST).is_dir()
    later.remove_unlinked()
    assert os.listdir(tmp_path / "kept") == []


def test_retention_removes_them_after_the_last_runs_directory(tmp_path: Path):
    settings = Settings(state_dir=str(tmp_path), keep_days=1)
    (tmp_path / "runs").mkdir()
    earlier = EnvironmentStore(tmp_path / "kept", tmp_path / "runs")
    run_id, directory = run_directory(tmp_path)
    earlier.keep(KeepEnvironment(digest=DIGEST, files=FILES, runs=(run_id,)), "ann")
    for path in (*directory.iterdir(), directory):
        os.utime(path, (1, 1))

    async def look() -> None:
        kept = EnvironmentStore(tmp_path / "kept", tmp_path / "runs")
        retention = Retention(settings, lambda _: False, removed=kept.remove_unlinked, delay_s=0.0)
        retention.schedule()
        while os.listdir(tmp_path / "kept"):
            await asyncio.sleep(0.01)
        retention.close()

    asyncio.run(asyncio.wait_for(look(), 10))
    eventually(lambda: not directory.exists(), 5, "the run's directory goes")
