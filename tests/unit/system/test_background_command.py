"""A command that runs in the background and ends with the process that started it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from waiting import eventually

from sgpu_magic.system.background_command import BackgroundCommand
from sgpu_magic.system.processes import is_alive

# as a web server with workers in sessions of their own, which ignores SIGTERM
SERVES = (
    "import os, pathlib, signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    "print('listening', flush=True)\n"
    "pathlib.Path(sys.argv[1] + '.part').write_text(f'{os.getpid()} {child.pid}')\n"
    "os.rename(sys.argv[1] + '.part', sys.argv[1])\n"
    "time.sleep(600)\n"
)
STARTS = (
    "import sys, time\n"
    "from sgpu_magic.system.background_command import BackgroundCommand\n"
    "command = BackgroundCommand([sys.executable, *sys.argv[1:]])\n"
    "time.sleep(600)\n"
)


def pids(file: Path) -> list[int]:
    """Return the pids of the command and of its child, once they are there."""
    eventually(file.exists, 20, "the command does not start")
    return [int(pid) for pid in file.read_text().split()]


def test_nothing_is_left_of_a_command_that_is_ended(tmp_path: Path):
    command = BackgroundCommand([sys.executable, "-c", SERVES, str(tmp_path / "pids")])
    started = pids(tmp_path / "pids")
    assert command.is_running
    assert command.last_output() == "listening"
    command.end()
    assert not command.is_running
    assert not any(map(is_alive, started))


def test_nothing_is_left_when_the_process_that_started_it_is_killed(tmp_path: Path):
    owner = subprocess.Popen([sys.executable, "-c", STARTS, "-c", SERVES, str(tmp_path / "pids")])
    try:
        started = pids(tmp_path / "pids")
        assert all(map(is_alive, started))
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    eventually(lambda: not any(map(is_alive, started)), 20, lambda: f"left: {[*filter(is_alive, started)]}")


def test_the_end_of_a_command_that_fails_is_seen_with_its_last_words():
    command = BackgroundCommand([sys.executable, "-c", "import sys; sys.exit('no such store')"])
    eventually(lambda: not command.is_running, 20, "the command does not end")
    assert command.last_output() == "no such store"
    command.end()


def test_a_program_that_does_not_exist_is_named():
    command = BackgroundCommand(["/nowhere/mlflow"])
    eventually(lambda: not command.is_running, 20, "the supervisor does not end")
    assert command.last_output().endswith("No such file or directory: '/nowhere/mlflow'")
    command.end()
