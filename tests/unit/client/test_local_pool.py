"""Which address file is a living pool's; what is done where none is, tests/e2e/test_lifecycle.py has."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from sgpu_magic.client.this_machine import find_pool
from sgpu_magic.config import Settings
from sgpu_magic.wire.pool_status import PoolAddress, address_file, process_start


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=str(tmp_path / "state"), runtime_dir=str(tmp_path))


def address(pid: int, start: int) -> bytes:
    return msgspec.json.encode(
        PoolAddress(pid=pid, process_start=start, protocol_version=1, package_version="0", started_at=1.0)
    )


def test_a_living_process_that_started_then_is_it(settings: Settings):
    assert find_pool(settings) is None
    address_file(settings.runtime_path).write_bytes(address(os.getpid(), process_start(os.getpid()) or 0))
    found = find_pool(settings)
    assert found is not None
    assert found.pid == os.getpid()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="half"),
        pytest.param(b"\xff\xfe", id="no text"),
        pytest.param(b'{"pid": "x"}', id="no number"),
        pytest.param(address(os.getpid(), 1), id="its pid is another process's now"),
        # the system gives no such pid
        pytest.param(address(0x7FFFFFFF, 1), id="dead"),
    ],
)
def test_what_a_killed_pool_left_is_none(settings: Settings, content: bytes):
    address_file(settings.runtime_path).write_bytes(content)
    assert find_pool(settings) is None
