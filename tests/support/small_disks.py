"""A real file system of a few megabytes that a test fills, makes read-only and frees again."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    """A file system mounted at a directory; needs root.

    Args:
        path: The mount point.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """Leave no byte free."""
        with contextlib.suppress(OSError), open(self.path / "filler", "ab", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        with contextlib.suppress(OSError), open(self.path / "filler", "ab", buffering=0) as file:
            while True:
                file.write(b"0")

    def use_up_inodes(self) -> None:
        """Leave no inode free."""
        (self.path / "fillers").mkdir()
        with contextlib.suppress(OSError):
            for number in range(1_000_000):
                (self.path / "fillers" / str(number)).touch()

    def make_room(self) -> None:
        """Undo `fill` and `use_up_inodes`."""
        (self.path / "filler").unlink(missing_ok=True)
        shutil.rmtree(self.path / "fillers", ignore_errors=True)

    def grow(self, megabytes: int) -> None:
        """Enlarge a tmpfs."""
        _run("mount", "-o", f"remount,size={megabytes}m", str(self.path))

    def freeze(self, on: bool) -> None:
        """Forbid new files in the directories of an ext4, or allow them again, in a way that also binds root."""
        folders = [str(self.path), *(str(entry) for entry in self.path.iterdir() if entry.is_dir())]
        subprocess.run(["chattr", "+i" if on else "-i", *folders], check=on, capture_output=True)


@contextlib.contextmanager
def small_disk(path: Path, kind: str = "ext4", *, megabytes: int = 40, inodes: int = 0) -> Iterator[SmallDisk]:
    """Mount an `ext4` image by a loop device, or a `tmpfs`, at a directory; skip the test if that is not permitted."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root and mount(8)")
    image = path.with_name(f"{path.name}.img")
    if kind == "ext4":
        with open(image, "wb") as file:
            file.truncate(megabytes << 20)
        _run("mkfs.ext4", "-q", "-m", "0", *(("-N", str(inodes)) if inodes else ()), str(image))
        _run("mount", "-o", "loop", str(image), str(path))
    else:
        options = f"size={megabytes}m,mode=0700" + (f",nr_inodes={inodes}" if inodes else "")
        _run("mount", "-t", "tmpfs", "-o", options, "sgpu-test", str(path))
    path.chmod(0o700)
    try:
        yield SmallDisk(path)
    finally:
        # the pool's logs lie there until its end
        subprocess.run(["umount", "-l", str(path)], check=True)
        image.unlink(missing_ok=True)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"needs {error.filename}")
    if done.returncode:
        pytest.skip(f"may not mount: {done.stderr.strip()}")
