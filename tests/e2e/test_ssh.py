"""A pool on a machine that the user logs in to with ssh, where nothing of this package is installed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from homes import Home
from kernels import Kernel
from ssh_servers import SshServer, needs_sshd
from waiting import eventually

from sgpu_magic.client.pools_file import PoolEntry, add_pool

pytestmark = needs_sshd

PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"
CELL = "%%distributed -n 2 --type cpu --pool box"
# what a login shell may do to a protocol on its standard output
LOUD = "echo Welcome to the cluster; printf 'no newline'; echo 'on stderr' >&2\n"
STRICT = ("AllowTcpForwarding no", "AllowStreamLocalForwarding no", "MaxSessions 1", "PermitTTY no")

NewHome = Callable[..., Home]


@pytest.fixture
def machine(new_home: NewHome, tmp_path: Path) -> Iterator[SshServer]:
    made = SshServer(tmp_path / "machine", new_home(), path=PATH, more=STRICT)
    (made.user_home / ".bashrc").write_text(LOUD)
    yield made
    made.stop()


@pytest.fixture
def user(machine: SshServer, new_home: NewHome) -> Home:
    """The home of a user who has listed the machine as `box`."""
    home = new_home()
    home.environ["SGPU_POOLS_FILE"] = str(home.path / "pools.toml")
    home.environ["SGPU_SSH_COMMAND"] = machine.configure("box")
    add_pool(PoolEntry("box", "ssh://box", ""), home.path / "pools.toml")
    return home


@pytest.fixture
def notebook(user: Home) -> Iterator[Kernel]:
    kernel = Kernel(user)
    yield kernel
    kernel.close()


def sgpu(home: Home, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sgpu_magic.cli", *words]
    return subprocess.run(command, env=home.environ, capture_output=True, text=True, timeout=60, cwd=home.work)


def logins(kernel: Kernel) -> list[psutil.Process]:
    return [child for child in psutil.Process(kernel.pid).children() if child.name() == "ssh"]


def test_a_cell_runs_on_a_machine_with_nothing_installed(notebook: Kernel, machine: SshServer, user: Home) -> None:
    assert sgpu(user, "pool", "list").stdout.count("not running") == 2
    notebook.check("base = 20\ndef doubled(value):\n    return 2 * value")
    reply = notebook.check(
        f"{CELL} --out total:all\nimport os\nprint('rank', rank, 'in', os.environ['HOME'])\n"
        "total = doubled(base + rank)"
    )
    assert reply.lines(0) == [f"rank 0 in {machine.user_home}"]
    assert notebook.value("total") == [40, 42]
    # a command is another client of the same pool
    listed = sgpu(user, "runs", "--pool", "box")
    assert "succeeded" in listed.stdout, listed
    stopped = sgpu(user, "pool", "stop", "box")
    assert stopped.returncode == 0, stopped.stderr
    eventually(lambda: not machine.far.processes(), 15, lambda: f"left there: {machine.far.processes()}")


def test_a_run_outlives_the_connection_and_its_output_arrives_whole(
    notebook: Kernel, machine: SshServer, user: Home
) -> None:
    notebook.check(f"{CELL}\npass")
    go = machine.far.work / "go"
    cell = notebook.start(
        f"{CELL}\nimport pathlib, time\nprint('begun')\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\nfor at in range(500): print('line', at)"
    )
    cell.until_shown("begun")
    (login,) = logins(notebook)
    login.send_signal(signal.SIGKILL)
    eventually(lambda: not login.is_running() or login.status() == psutil.STATUS_ZOMBIE, 10, "ssh is dead")
    go.touch()
    reply = cell.wait(30)
    assert reply.status == "ok", reply.story
    assert reply.lines(0) == ["begun", *(f"line {at}" for at in range(500))]
    # one connection, a new one
    assert [process.pid for process in logins(notebook)] != [login.pid]
    assert len(logins(notebook)) == 1


def test_a_session_keeps_its_names(notebook: Kernel, machine: SshServer) -> None:
    notebook.check("%sgpu_connect -n 2 --type cpu --pool box")
    notebook.check("%%distributed\nkept = rank + 1")
    assert notebook.check("%%distributed\nprint(kept)").lines(1) == ["2"]
    notebook.check("%sgpu_disconnect")


def test_an_interrupt_stops_the_cell_there(notebook: Kernel, machine: SshServer) -> None:
    cell = notebook.start(f"{CELL}\nimport time\nprint('begun')\ntime.sleep(600)")
    cell.until_shown("begun")
    notebook.interrupt()
    assert cell.wait(20).ename == "RunCancelled"


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        ("another host key", "ssh-keygen -R"),
        ("unknown host", "once in a terminal"),
        ("no key", "ssh-copy-id"),
        ("nothing listens", "nothing listens"),
        ("no torch", "no torch"),
        ("no space", "No space left"),
    ],
)
def test_what_fails_is_said_with_the_remedy_and_leaves_nothing(
    break_it: str, expected: str, machine: SshServer, user: Home
) -> None:
    if break_it == "another host key":
        machine.trust("client_key.pub")
    elif break_it == "unknown host":
        (machine.folder / "known_hosts").write_text("")
    elif break_it == "no key":
        (machine.folder / "authorized_keys").write_text("")
    elif break_it == "nothing listens":
        machine.stop()
    elif break_it == "no torch":
        python = subprocess.check_output([sys.executable, "-c", "import sys; print(sys._base_executable)"], text=True)
        (user.path / "pools.toml").unlink()
        add_pool(PoolEntry("box", "ssh://box", "", python=python.strip()), user.path / "pools.toml")
    else:
        pytest.skip("needs a small disk") if os.getuid() else (machine.user_home / ".local").symlink_to("/dev/full")
        expected = "can't be unpacked"
    kernel = Kernel(user)
    try:
        reply = kernel.run(f"{CELL}\npass")
        assert reply.status == "error"
        assert expected in reply.evalue, reply.story
        assert "the pool box" in reply.evalue
        assert logins(kernel) == []
    finally:
        kernel.close()
    assert not machine.far.processes()
