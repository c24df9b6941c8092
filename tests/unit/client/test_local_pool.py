"""Which address file is a living pool's, and why none was started; tests/e2e/test_lifecycle.py starts real ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from sgpu_magic.client import this_machine
from sgpu_magic.client.this_machine import (
    find_pool,
    start_pool,
    this_context,
    this_interpreter,
    this_umask,
    wait_for_exit,
)
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError
from sgpu_magic.system.processes import process_start
from sgpu_magic.wire.client import Warm
from sgpu_magic.wire.pool_status import PoolAddress, address_file


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


# ---------------------------------------------------------------- starting one


def python(folder: Path, text: str) -> str:
    """A program in the place of the pool's Python."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo out of memory >&2", "the local pool could not be started: out of memory. Its log is {log}."),
        ("exit 0", "the local pool could not be started: it printed nothing. Its log is {log}."),
        ("echo the port is taken.", "the local pool could not be started: the port is taken. Its log is {log}."),
        (
            "exec sleep 60",
            "the local pool did not start within 0 s. Its log is {log}; `sgpu doctor` looks for the reason.",
        ),
        ("echo ready", "the local pool ended right after its start; `sgpu doctor` looks for the reason."),
    ],
)
def test_why_a_pool_did_not_start_is_said(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
):
    monkeypatch.setattr(this_machine.sys, "executable", python(tmp_path, text))
    monkeypatch.setattr(this_machine, "_EXIT_S", 0.02)
    if "sleep" in text:
        monkeypatch.setattr(this_machine, "_START_TIMEOUT_S", 0.1)
    with pytest.raises(PoolError) as raised:
        start_pool(settings, Warm(interpreter=this_interpreter()))
    assert raised.value.message == why.format(log=settings.state_path / "pool.log")


def test_directories_that_can_not_be_made_are_named(settings: Settings):
    settings.state_path.touch()
    with pytest.raises(PoolError, match=r"the pool can't record the run in \S+/state/runs: .*File exists"):
        start_pool(settings)


def test_a_pool_is_waited_for_until_it_has_exited(monkeypatch: pytest.MonkeyPatch):
    process = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(this_machine, "_EXIT_S", 0.02)
    try:
        with pytest.raises(PoolError) as raised:
            wait_for_exit(process.pid)
        assert raised.value.message == (
            f"the local pool (process {process.pid}) did not end within 0 s; end it with `kill -9 {process.pid}`."
        )
        monkeypatch.setattr(this_machine, "_EXIT_S", 30.0)
        # a zombie has exited
        process.kill()
        wait_for_exit(process.pid)
    finally:
        process.kill()
        process.wait()
    wait_for_exit(process.pid)


# ---------------------------------------------------------------- this process


def test_a_process_without_a_directory_a_name_or_proc_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def gone(*_: object) -> str:
        raise KeyError("uid")

    monkeypatch.setattr(this_machine.getpass, "getuser", gone)
    # the user has no entry in the system's list
    assert this_machine._user_name.__wrapped__() == str(os.getuid())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert this_context({}, b"k").sys_path[0] == os.path.realpath(tmp_path)
    tmp_path.rmdir()
    here = this_context({}, b"k")
    assert (here.cwd, "" in here.sys_path) == ("", False)
    assert set(here.sys_path) == {entry for entry in sys.path if entry}
    before = os.umask(0o027)
    try:
        assert this_umask() == 0o027

        def closed(*_: object) -> None:
            raise FileNotFoundError

        # a system without /proc
        monkeypatch.setattr(this_machine, "open", closed, raising=False)
        assert (this_umask(), this_umask()) == (0o027, 0o027)
    finally:
        os.umask(before)
