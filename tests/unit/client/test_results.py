"""Results in an agent's memory, which the agent releases once the run's directory has a copy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sgpu_magic.client.run import map_file

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there are no memory files")


def memory(data: bytes, at: int = -1) -> int:
    descriptor = os.memfd_create("result")
    os.write(descriptor, data)
    if at < 0:
        return descriptor
    os.dup2(descriptor, at)
    os.close(descriptor)
    return at


def test_a_number_that_is_another_files_now_is_not_read(tmp_path: Path):
    number = memory(b"rank 0")
    path, inode = f"/proc/{os.getpid()}/fd/{number}", os.fstat(number).st_ino
    try:
        assert bytes(map_file(path, inode)) == b"rank 0"
        # the agent closed the descriptor, and another rank's memory or an unfinished copy reused its number
        memory(b"rank 1", number)
        with pytest.raises(FileNotFoundError):
            map_file(path, inode)
        copy = tmp_path / "result-1.bin"
        copy.write_bytes(b"ran")
        with copy.open("rb") as file:
            os.dup2(file.fileno(), number)
        with pytest.raises(FileNotFoundError):
            map_file(path, inode)
        assert bytes(map_file(str(copy))) == b"ran"
    finally:
        os.close(number)
