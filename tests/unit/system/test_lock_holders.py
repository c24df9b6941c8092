"""Who holds a file's lock."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgpu_magic.system.processes import flock_holder


@pytest.fixture
def file_systems(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two new file systems, whose first files have the same inode number."""
    mounted = (tmp_path / "one", tmp_path / "other")
    try:
        for context in mounted:
            context.mkdir()
            if subprocess.run(["mount", "-t", "tmpfs", "none", context], capture_output=True, check=False).returncode:
                pytest.skip("can't mount file systems")
        yield mounted
    finally:
        for context in mounted:
            subprocess.run(["umount", "-l", context], capture_output=True, check=False)


def test_a_lock_is_that_of_the_file_and_not_of_one_with_its_number(file_systems: tuple[Path, Path]):
    one, other = (context / "pool.lock" for context in file_systems)
    one.touch()
    other.touch()
    assert one.stat().st_ino == other.stat().st_ino
    with one.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert flock_holder(one) == os.getpid()
        assert flock_holder(other) == 0
    assert flock_holder(one) == 0
