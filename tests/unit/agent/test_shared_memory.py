"""Files that killed ranks leave in shared memory: removed by name, owner, age and use, and nothing else."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sgpu_magic.agent.ranks.shared_memory import remove_leftovers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm, /proc")


def dead_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def make(directory: Path, name: str) -> Path:
    path = directory / name
    path.write_bytes(bytes(4096))
    return path


def test_what_killed_ranks_left_is_removed(tmp_path: Path):
    names = sorted(["nccl-Ab3dE6", f"torch_{dead_pid()}_1234567_0"])
    for name in names:
        make(tmp_path, name)
    assert remove_leftovers(time.time() - 60, tmp_path) == names
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["psm_0123abcd", "sem.mp-abcdefgh", "nccl-data.bin", "torch_model.pt", "mine"])
def test_files_of_other_names_stay(tmp_path: Path, name: str):
    make(tmp_path, name)
    assert remove_leftovers(0.0, tmp_path) == []


def test_what_was_there_before_the_run_stays(tmp_path: Path):
    make(tmp_path, "nccl-Ab3dE6")
    assert remove_leftovers(time.time() + 60, tmp_path) == []


def test_the_file_of_a_live_process_stays(tmp_path: Path):
    make(tmp_path, f"torch_{os.getpid()}_1234567_0")
    assert remove_leftovers(0.0, tmp_path) == []


def test_a_file_that_is_mapped_or_open_stays(tmp_path: Path):
    with make(tmp_path, "nccl-Mapped").open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 4096)
    with mapping, make(tmp_path, "nccl-Opened").open("rb"):
        assert remove_leftovers(0.0, tmp_path) == []
    assert remove_leftovers(0.0, tmp_path) == ["nccl-Mapped", "nccl-Opened"]


def test_links_are_left_alone(tmp_path: Path):
    target = make(tmp_path, "mine")
    (tmp_path / "nccl-Ab3dE6").symlink_to(target)
    assert remove_leftovers(0.0, tmp_path) == []


def test_a_machine_without_shared_memory_has_none(tmp_path: Path):
    assert remove_leftovers(0.0, tmp_path / "nothing") == []
