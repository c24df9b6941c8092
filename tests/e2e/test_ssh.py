"""A pool on a machine that the user logs in to with ssh, where nothing of this package is installed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from homes import Home
from kernels import Kernel
from ssh_servers import PATH, STRICT, SshServer, logins, needs_sshd, sgpu
from waiting import eventually

pytestmark = needs_sshd

CELL = "%%distributed -n 2 --type cpu --pool box"
# what a login shell may do to a protocol on its standard output
LOUD = "echo Welcome to the cluster; printf 'no newline'; echo 'on stderr' >&2\n"

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
    machine.list_for(home, "box")
    return home


@pytest.fixture
def notebook(user: Home) -> Iterator[Kernel]:
    kernel = Kernel(user)
    yield kernel
    kernel.close()


def test_a_cell_runs_on_a_machine_with_nothing_installed(notebook: Kernel, machine: SshServer, user: Home) -> None:
    # the kernel's own Python is not there: the node builds an environment
    machine.list_for(user, "box", same_files=False)
    assert sgpu(user, "pool", "list").stdout.count("not running") == 2
    notebook.check("base = 20\ndef doubled(value):\n    return 2 * value")
    reply = notebook.check(
        f"{CELL} --out total:all\nimport os\nprint('rank', rank, 'in', os.environ['HOME'])\n"
        "total = doubled(base + rank)",
        120,
    )
    assert reply.lines(0) == [f"rank 0 in {machine.user_home}"]
    assert notebook.value("total") == [40, 42]
    # a command is another client of the same pool
    listed = sgpu(user, "runs", "--pool", "box")
    assert "succeeded" in listed.stdout, listed
    removed = sgpu(user, "pool", "remove", "box")
    assert "the records of 1 run" in removed.stdout, removed
    eventually(lambda: not machine.far.processes(), 15, lambda: f"left there: {machine.far.processes()}")
    assert _files_left(machine) == []
    machine.list_for(user, "box")
    assert "Nothing of sgpu-magic is on its machine" in sgpu(user, "pool", "remove", "box", "--records").stdout


def test_nothing_is_left_of_a_pool_that_is_removed_with_its_records(
    notebook: Kernel, machine: SshServer, user: Home
) -> None:
    notebook.check(f"{CELL} --out kept:all\nkept = rank")
    going = notebook.start(f"{CELL}\nimport time\nprint('begun')\ntime.sleep(600)")
    going.until_shown("] begun")
    kept = sgpu(user, "pool", "remove", "box")
    assert "Its machine stays as it is" in kept.stdout, kept
    notebook.interrupt()
    going.wait(20)
    machine.list_for(user, "box")
    removed = sgpu(user, "pool", "remove", "box", "--records")
    assert "Nothing of sgpu-magic is left" in removed.stdout, removed
    assert not machine.far.processes()
    assert _files_left(machine, machine.far.state, machine.far.runtime) == []


def _files_left(machine: SshServer, *folders: Path) -> list[Path]:
    """Return the files in the home directory there, and in further folders."""
    found = (path for folder in (machine.user_home, *folders) for path in folder.rglob("*"))
    return [path for path in found if not path.is_dir() and path.name != ".bashrc"]


def test_a_run_outlives_the_connection_and_its_output_arrives_whole(
    notebook: Kernel, machine: SshServer, user: Home
) -> None:
    notebook.check(f"{CELL}\npass")
    go = machine.far.work / "go"
    cell = notebook.start(
        f"{CELL}\nimport pathlib, time\nprint('begun')\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\nfor at in range(500): print('line', at)"
    )
    cell.until_shown("] begun")
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


def test_files_of_the_notebook_are_asked_for_or_travel_by_themselves(
    notebook: Kernel, machine: SshServer, user: Home
) -> None:
    (user.work / "data").mkdir()
    (user.work / "data" / "x.csv").write_text("1,2,3")
    read = "print(open('data/x.csv').read())"
    wrapped = f"try:\n    {read}\nexcept OSError as error:\n    raise ValueError('no data') from error"
    for cell in (read, wrapped):
        reply = notebook.run(f"{CELL}\n{cell}")
        assert "is only on the notebook's machine: add --upload data/x.csv" in reply.shown, reply.story
    reply = notebook.check(f"{CELL} --files auto\n{read}")
    assert reply.lines(1) == ["1,2,3"]
    assert "took along data/x.csv" in reply.text
    # neither what UTF-8 can't encode nor a secret in a name does harm
    odd = notebook.run(f"{CELL} --env TOKEN=hush-hush-4711\nopen('hush-hush-4711' + chr(0xdc80))")
    assert "No such file" in odd.evalue, odd.story
    assert "hush-hush" not in odd.shown
    notebook.check("%env SGPU_FILES=auto")
    notebook.check("%sgpu_connect -n 2 --type cpu --pool box")
    assert notebook.check(f"%%distributed\n{read}").lines(1) == ["1,2,3"]
    notebook.check("%sgpu_disconnect")


def test_an_interrupt_stops_the_cell_there(notebook: Kernel, machine: SshServer) -> None:
    cell = notebook.start(f"{CELL}\nimport time\nprint('begun')\ntime.sleep(600)")
    cell.until_shown("] begun")
    notebook.interrupt()
    assert cell.wait(20).ename == "RunCancelled"


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        ("another host key", "known_hosts"),
        ("unknown host", "once in a terminal"),
        ("no key", "ssh-copy-id"),
        ("nothing listens", "nothing listens"),
        ("no torch", "no torch"),
        ("no folder", "can't be unpacked"),
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
        machine.list_for(user, "box", python=python.strip())
    else:
        (machine.user_home / ".local").symlink_to("/dev/full")
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
