"""Checks of the system, where a container or sandbox restricts something."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import zmq

from sgpu_magic.cli import machine_checks
from sgpu_magic.cli.finding import Finding, Level
from sgpu_magic.cli.machine_checks import hostname, limits, memory_files, process_control


def by_name(found: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in found}


# ---------------------------------------------------------------- the host's name


# getaddrinfo rejects these without asking a name server; a host name may have 64 characters
@pytest.mark.parametrize("name", ["a" * 64, "two..dots"])
def test_a_host_name_that_can_not_be_resolved(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    (found,) = hostname()
    assert found.level is Level.WARNING
    assert found.text.startswith(f"{name} can't be resolved (")
    assert f"`127.0.1.1 {name}` to /etc/hosts" in found.remedy


def test_a_slow_look_up_and_one_without_an_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    (found,) = hostname(slow_s=-1.0)
    assert (found.level, found.text[:27]) == (Level.WARNING, "localhost: the look-up took")
    asked = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: asked.wait(60))
    try:
        (found,) = hostname(deadline_s=0.01)
    finally:
        asked.set()
    assert (found.level, found.text) == (Level.WARNING, "localhost: no answer within 0 s")


# ---------------------------------------------------------------- memory files, process control


def refused(*_: object) -> int:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_a_sandbox_without_memory_files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "memfd_create", refused, raising=False)
    found = by_name(memory_files())["memory files"]
    assert found.level is Level.WARNING
    assert "Operation not permitted): payloads go through files, which is slower" in found.text
    # Python builds for older Linux versions lack this function
    monkeypatch.delattr(os, "memfd_create")
    assert by_name(memory_files())["memory files"].level is Level.WARNING


def test_shared_memory_that_is_small_or_missing(monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(total=64 << 20))
    found = by_name(memory_files())["/dev/shm"]
    assert found.level is Level.WARNING
    assert found.text.startswith("67.1 MB: DataLoader workers in a cell may die with a bus error")
    assert "--shm-size=8g" in found.remedy
    monkeypatch.setattr(shutil, "disk_usage", refused)
    found = by_name(memory_files())["/dev/shm"]
    assert found.level is Level.WARNING
    assert found.text.startswith("can't be checked: Operation not permitted: DataLoader workers")


def test_a_sandbox_without_process_control(monkeypatch: pytest.MonkeyPatch):
    assert all(found.level is Level.OK for found in process_control())
    monkeypatch.setattr(os, "pidfd_open", refused, raising=False)
    found = by_name(process_control())
    assert (found["pidfd"].level, found["subreaper"].level) == (Level.WARNING, Level.OK)
    assert "a dead kernel is noticed late" in found["pidfd"].text


def test_a_system_that_is_not_linux_has_neither_and_that_is_no_warning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine_checks, "IS_LINUX", False)
    found = [*memory_files(), *process_control()]
    assert [(each.name, each.level) for each in found] == [("memory files", Level.OK), ("process control", Level.OK)]
    assert "payloads go through files" in found[0].text


def test_encryption_that_can_not_be_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zmq.Socket, "poll", lambda *_: 0)
    (found,) = machine_checks.encryption()
    assert (found.level, found.text) == (Level.WARNING, "no encrypted message arrived within 5 s")


# ---------------------------------------------------------------- limits


@pytest.fixture
def soft_limit() -> Iterator[Callable[[int, int], None]]:
    """Sets a soft limit of this process until the test ends."""
    before: dict[int, tuple[int, int]] = {}

    def limit(kind: int, most: int) -> None:
        before.setdefault(kind, resource.getrlimit(kind))
        resource.setrlimit(kind, (most, before[kind][1]))

    yield limit
    for kind, both in before.items():
        resource.setrlimit(kind, both)


@pytest.mark.parametrize(("files", "level"), [(1024, Level.OK), (1023, Level.WARNING), (255, Level.PROBLEM)])
def test_too_few_open_files(soft_limit: Callable[[int, int], None], files: int, level: Level):
    soft_limit(resource.RLIMIT_NOFILE, files)
    found = by_name(limits())["open files"]
    assert found.level is level
    assert found.text.startswith(f"up to {files:,}")
    if level is not Level.OK:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        wanted = 4096 if most == resource.RLIM_INFINITY else min(4096, most)
        assert found.remedy == f"Run `ulimit -n {wanted}` before you start Jupyter."


@pytest.mark.parametrize(("most", "level"), [(511, Level.WARNING), (63, Level.PROBLEM)])
def test_too_few_processes(
    soft_limit: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch, most: int, level: Level
):
    # a user without processes who is not root
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    soft_limit(resource.RLIMIT_NPROC, most)
    found = by_name(limits())["processes"]
    assert found.level is level
    assert found.text == f"ulimit -u {most:,}, 0 in use: too few for 64 ranks"
    assert "ulimit -u" in found.remedy
