"""Which address file belongs to a running pool, and why none was started; tests/e2e/test_lifecycle.py starts pools."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sgpu_magic import config
from sgpu_magic.client import this_machine
from sgpu_magic.client.this_machine import (
    find_pool,
    has_pool,
    listener_at,
    running_pool,
    start_pool,
    this_context,
    this_interpreter,
    this_umask,
    wait_for_exit,
)
from sgpu_magic.config import Settings, private_dir
from sgpu_magic.errors import PoolError
from sgpu_magic.files.locks import LOCK_FILE, is_locked, take_lock, take_lock_or_none
from sgpu_magic.system.processes import process_start
from sgpu_magic.wire.client import Warm
from sgpu_magic.wire.pool_status import PoolAddress, address_file, lock_file


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=str(private_dir(tmp_path / "state")), runtime_dir=str(tmp_path / "run"))


def address(pid: int, start: int, **more: str) -> bytes:
    return msgspec.json.encode(
        PoolAddress(pid=pid, process_start=start, protocol_version=1, package_version="0", started_at=1.0, **more)
    )


@pytest.fixture
def held(settings: Settings) -> Iterator[None]:
    """The lock of a running pool."""
    lock = take_lock(lock_file(settings.state_path), flags=LOCK_FILE)
    assert lock is not None
    yield
    lock.close()


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize(
    "pid", [pytest.param(os.getpid(), id="of another process"), pytest.param(0x7FFFFFFF, id="of none")]
)
def test_a_pool_is_there_while_its_lock_is_held_whatever_its_pid_is_here(settings: Settings, pid: int):
    assert find_pool(settings) is None
    address_file(settings.state_path).write_bytes(address(pid, 1))
    found = find_pool(settings)
    assert found is not None
    assert found.pid == pid


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="half"),
        pytest.param(b"\xff\xfe", id="no text"),
        pytest.param(b'{"pid": "x"}', id="no number"),
        pytest.param(address(os.getpid(), process_start(os.getpid())), id="a living process"),
        # pids are never this large
        pytest.param(address(0x7FFFFFFF, 1), id="dead"),
    ],
)
def test_what_a_killed_pool_left_is_none(settings: Settings, content: bytes):
    lock_file(settings.state_path).touch()
    address_file(settings.state_path).write_bytes(content)
    assert find_pool(settings) is None


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize(
    ("runtime", "boot", "says"),
    [
        ("/nowhere/sgpu", "", "its sockets are in /nowhere/sgpu, which is not there for this process"),
        ("/nowhere/sgpu", "another", "it runs on the machine node7, and this is "),
        ("", "", "can't be used: "),
    ],
)
def test_what_keeps_a_running_pool_from_being_reached_is_said(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, runtime: str, boot: str, says: str
):
    private_dir(settings.runtime_path)
    monkeypatch.setattr(this_machine, "_EXIT_S", 0.02)
    monkeypatch.setattr(this_machine, "_RESTORED_S", 0.01)
    address_file(settings.state_path).write_bytes(address(7, 1, runtime=runtime, boot=boot, host="node7"))
    found = find_pool(settings)
    assert found is not None
    with pytest.raises(PoolError) as raised:
        listener_at(settings, found)
    assert says in raised.value.message
    assert f"the pool of the state directory {settings.state_path} is running" in raised.value.message
    assert "SGPU_STATE_DIR" in raised.value.message


def test_looking_at_a_lock_never_keeps_a_pool_from_taking_it(settings: Settings):
    path = lock_file(settings.state_path)
    path.touch()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            is_locked(path)

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(200):
            lock = take_lock_or_none(path)
            assert lock is not None
            assert is_locked(path)
            lock.close()
    finally:
        over.set()
        for looker in lookers:
            looker.join()


# ---------------------------------------------------------------- starting one


def python(folder: Path, text: str) -> str:
    """A program in place of the pool's Python."""
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
    settings.state_path.rmdir()
    settings.state_path.touch()
    with pytest.raises(PoolError, match=r"the pool can't record the run in \S+/state/runs: .*File exists"):
        start_pool(settings)


def test_a_pool_is_waited_for_until_it_has_exited(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    process = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(this_machine, "_EXIT_S", 0.02)
    try:
        with pytest.raises(PoolError) as raised:
            wait_for_exit(settings, process.pid, 0.02)
        assert raised.value.message == (
            f"the local pool (process {process.pid}) did not end within 0 s; end it with `kill -9 {process.pid}`."
        )
        monkeypatch.setattr(this_machine, "_EXIT_S", 30.0)
        # a zombie has exited
        process.kill()
        wait_for_exit(settings, process.pid)
    finally:
        process.kill()
        process.wait()
    wait_for_exit(settings, process.pid)


@pytest.mark.usefixtures("held")
def test_a_pool_that_can_not_be_seen_is_waited_for_by_its_lock(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(this_machine, "_EXIT_S", 0.02)
    with pytest.raises(PoolError, match=r"in another PID namespace\. End it where"):
        wait_for_exit(settings, 0, 0.02)


def test_a_process_that_holds_the_lock_and_has_no_address_is_named(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(this_machine, "_STARTING_S", 0.02)
    assert (running_pool(settings), has_pool(settings)) == (None, False)
    lock = take_lock_or_none(lock_file(private_dir(settings.state_path)))
    assert lock is not None
    try:
        assert has_pool(settings)
        with pytest.raises(PoolError, match=rf"process {os.getpid()} holds the lock of the state directory .*`kill "):
            running_pool(settings)
    finally:
        lock.close()


def test_a_pool_that_is_starting_is_waited_for(settings: Settings):
    lock = take_lock_or_none(lock_file(private_dir(settings.state_path)))
    assert lock is not None
    written = address(os.getpid(), process_start(os.getpid()) or 0)
    timer = threading.Timer(0.1, lambda: address_file(settings.state_path).write_bytes(written))
    timer.start()
    try:
        assert running_pool(settings) == msgspec.json.decode(written, type=PoolAddress)
    finally:
        timer.join()
        lock.close()


# ---------------------------------------------------------------- this process


def test_a_process_without_a_directory_a_name_or_proc_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def gone(*_: object) -> str:
        raise KeyError("uid")

    monkeypatch.setattr(config.getpass, "getuser", gone)
    # the user has no entry in the user database
    assert config.user_name.__wrapped__() == str(os.getuid())
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
