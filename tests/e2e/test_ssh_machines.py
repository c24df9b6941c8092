"""Pools over ssh on machines of every kind: shells, jump hosts, homes, Pythons, users, and links that go wrong."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from homes import Home
from kernels import Kernel
from ssh_servers import PATH, SshServer, logins, needs_sshd, sgpu
from tcp_proxy import Proxy
from waiting import eventually

from sgpu_magic.ssh.package import this_package

pytestmark = [needs_sshd, pytest.mark.slow]

CELL = "%%distributed -n 2 --type cpu --pool box"
FISH = shutil.which("fish")
SYSTEM_PYTHON = "/usr/bin/python3"
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="makes users, file systems or network namespaces")

NewHome = Callable[..., Home]
NewMachine = Callable[..., SshServer]


@pytest.fixture
def new_machine(new_home: NewHome, tmp_path: Path) -> Iterator[NewMachine]:
    """Makes machines; takes the arguments of `SshServer` after the home."""
    made: list[SshServer] = []

    def make(folder: Path | None = None, **options: object) -> SshServer:
        folder = folder or tmp_path / f"machine{len(made)}"
        found = SshServer(folder, new_home(), **{"path": PATH, **options})  # pyright: ignore[reportArgumentType]
        made.append(found)
        return found

    yield make
    for machine in made:
        machine.stop()


@pytest.fixture
def user(new_home: NewHome) -> Home:
    return new_home()


@pytest.fixture
def new_notebook(user: Home) -> Iterator[Callable[[], Kernel]]:
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(contextlib.closing(Kernel(user)))


@pytest.mark.parametrize(
    ("shell", "startup"),
    [
        ("", "echo hello; this-command-is-unknown; false\n"),
        ("", "trap 'echo bye' EXIT\n"),
        ("fish", ""),
    ],
)
def test_any_login_shell_will_do(
    shell: str, startup: str, user: Home, new_machine: NewMachine, new_notebook: Callable[[], Kernel]
) -> None:
    if shell and FISH is None:
        pytest.skip("fish is not installed")
    # as sshd runs the command of a login by the user's shell
    forced = [f'ForceCommand {FISH} -c "$SSH_ORIGINAL_COMMAND"'] if shell else []
    machine = new_machine(more=forced)
    (machine.user_home / ".bashrc").write_text(startup)
    machine.list_for(user, "box")
    assert new_notebook().check(f"{CELL}\nprint(rank)").lines(1) == ["1"]


def test_a_shell_that_ends_before_the_command_is_shown_with_its_words(
    user: Home, new_machine: NewMachine, new_notebook: Callable[[], Kernel]
) -> None:
    machine = new_machine()
    (machine.user_home / ".bashrc").write_text("echo Only for maintenance today; exit 3\n")
    machine.list_for(user, "box")
    reply = new_notebook().run(f"{CELL}\npass")
    assert "Only for maintenance today" in reply.evalue, reply.story


def test_a_machine_behind_another_one(
    user: Home, new_machine: NewMachine, new_notebook: Callable[[], Kernel], tmp_path: Path
) -> None:
    jump, machine = new_machine(), new_machine(more=["AllowTcpForwarding no"])
    machine.list_for(user, "box", "ProxyJump jump")
    with (machine.folder / "ssh_config").open("a") as file:
        file.write(jump.host_lines("jump"))
    notebook = new_notebook()
    assert notebook.check(f"{CELL}\nprint(rank)").lines(1) == ["1"]
    # ends the jump host's process, and with it the way to the machine
    assert "Accepted publickey" in jump.log.read_text()


@pytest.mark.parametrize("name", ["with blanks and 'quotes' in it", "ümläut"])
def test_a_home_directory_of_any_name(
    name: str, user: Home, new_machine: NewMachine, new_notebook: Callable[[], Kernel], tmp_path: Path
) -> None:
    home = tmp_path / name
    machine = new_machine(environment={"HOME": str(home)})
    machine.list_for(user, "box")
    assert new_notebook().check(f"{CELL}\nimport os\nprint(os.environ['HOME'])").lines(1) == [str(home)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [("size=2m", "MB free"), ("size=200m,nr_inodes=200", "can't be unpacked"), ("ro", "Read-only file system")],
)
@needs_root
def test_a_home_that_takes_no_files(
    options: str,
    expected: str,
    user: Home,
    new_machine: NewMachine,
    new_notebook: Callable[[], Kernel],
    tmp_path: Path,
) -> None:
    home = tmp_path / "small"
    home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(home)], check=True)
    try:
        machine = new_machine(environment={"HOME": str(home)})
        machine.list_for(user, "box")
        reply = new_notebook().run(f"{CELL}\npass")
        assert expected in reply.evalue, reply.story
        assert list(home.rglob("*.pyc")) == []
    finally:
        subprocess.run(["umount", str(home)], check=True)


def _python_that(folder: Path, says: str) -> str:
    """Return the path of a stand-in for a Python that fails the check of its version."""
    folder.mkdir()
    path = folder / "python3"
    path.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit 1\n")
    path.chmod(0o755)
    return str(path)


def test_a_machine_without_a_python_that_will_do(
    user: Home, new_machine: NewMachine, new_notebook: Callable[[], Kernel], tmp_path: Path
) -> None:
    machine = new_machine()
    old = _python_that(tmp_path / "old", "is Python 3.9")
    for python, expected in ((old, f"{old} is Python 3.9"), ("/opt/none/bin/python", "/opt/none/bin/python is not")):
        machine.list_for(user, "box", python=python)
        reply = new_notebook().run(f"{CELL}\npass")
        assert expected in reply.evalue, reply.story
        assert "`sgpu pool add box ssh://box --replace --python" in reply.evalue


def _python_with_torch(folder: Path) -> Path:
    """Make an environment that has torch and what torch needs, and nothing else. Returns the folder of its programs."""
    import torch

    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    packages = next(folder.glob("lib/python3*/site-packages"))
    site = Path(torch.__path__[0]).parent
    for name in ("torch", "torchgen", "functorch", "typing_extensions.py", "sympy", "mpmath", "networkx", "jinja2",
                 "markupsafe", "fsspec", "filelock", "numpy", "numpy.libs"):  # fmt: skip
        if (site / name).exists():
            (packages / name).symlink_to(site / name)
    for info in site.glob("*.dist-info"):
        if info.name.partition("-")[0].lower() in ("torch", "typing_extensions", "numpy", "filelock", "jinja2"):
            (packages / info.name).symlink_to(info)
    return folder / "bin"


def test_what_the_python_lacks_is_installed(
    user: Home, new_machine: NewMachine, new_notebook: Callable[[], Kernel], tmp_path: Path
) -> None:
    machine = new_machine(path=f"{_python_with_torch(tmp_path / 'bare')}:/usr/bin:/bin")
    machine.list_for(user, "box", same_files=False)
    new_notebook().check(f"{CELL}\nimport zmq", 300)
    # of the machine's pool
    assert list(machine.user_home.glob(".local/share/sgpu-magic/ssh/*/lib/python3*/site-packages/zmq"))


def test_wheels_are_brought_to_a_machine_without_a_network(
    user: Home, new_machine: NewMachine, new_notebook: Callable[[], Kernel], tmp_path: Path
) -> None:
    wheels = tmp_path / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(wheels), *this_package().requires]
    subprocess.run(command, check=True)
    nowhere = {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/", "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_FIND_LINKS": ""}
    machine = new_machine(
        path=f"{_python_with_torch(tmp_path / 'bare')}:/usr/bin:/bin",
        environment={**nowhere, "UV_CACHE_DIR": str(tmp_path / "cache")},
    )
    machine.list_for(user, "box")
    reply = new_notebook().run(f"{CELL}\npass", 120)
    assert "can't be installed there" in reply.evalue, reply.story
    machine.list_for(user, "box", wheels=str(wheels))
    reply = new_notebook().check(f"{CELL}\nprint(rank)", 300)
    assert reply.lines(1) == ["1"]
    assert sgpu(user, "pool", "remove", "box", "--records").returncode == 0
    assert not (machine.user_home / ".local/share/sgpu-magic").exists()


@needs_root
def test_a_machine_that_has_nothing_where_the_notebook_has_its_python(
    user: Home, new_machine: NewMachine, new_notebook: Callable[[], Kernel], tmp_path: Path
) -> None:
    venv, python = Path(sys.prefix), tmp_path / "python"
    python.mkdir()
    # in a mount namespace of its own, without the notebook's environment and folders
    hidden = " && ".join(f"mount -t tmpfs none {path}" for path in (venv, user.work, user.path / "ipython"))
    mounts = f'mount --bind {venv} {python} && {hidden} && exec "$@"'
    machine = new_machine(path=f"{python}/bin:/usr/bin:/bin", wrapper=["unshare", "-m", "sh", "-c", mounts, "sh"])
    machine.list_for(user, "box", same_files=False)
    shown = "import os, sys, torch\nprint(sys.prefix, os.path.realpath(torch.__file__))"
    where = new_notebook().check(f"{CELL}\n{shown}", 120).lines(0)[0]
    assert str(venv) not in where
    # packages were installed into an environment of the run; torch is the machine's
    assert where.startswith(str(machine.far.state))
    assert f" {python}/" in where


def test_commands_before_the_search_for_python(
    user: Home, new_machine: NewMachine, new_notebook: Callable[[], Kernel]
) -> None:
    machine = new_machine(path="/usr/bin:/bin")
    prologue = f"export GREETING='it is loaded'; PATH={Path(sys.executable).parent}:$PATH"
    machine.list_for(user, "box", prologue=prologue)
    reply = new_notebook().check(f"{CELL}\nimport os\nprint(os.environ.get('GREETING'))")
    assert reply.lines(0) == ["it is loaded"]


def test_two_notebooks_at_once_on_a_new_machine(
    user: Home, new_machine: NewMachine, new_notebook: Callable[[], Kernel]
) -> None:
    machine = new_machine()
    machine.list_for(user, "box")
    cells = [new_notebook().start(f"{CELL}\nprint(rank)") for _ in range(2)]
    for cell in cells:
        reply = cell.wait(120)
        assert reply.status == "ok", reply.story
    folder = machine.user_home / ".local/share/sgpu-magic/ssh"
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 1
    # both are clients of one pool
    assert sgpu(user, "runs", "--pool", "box").stdout.count("succeeded") == 2


def _is_version_of_tests(python: str) -> bool:
    if not os.path.exists(python):
        return False
    shown = "import sys; print(*sys.version_info[:2])"
    return subprocess.check_output([python, "-c", shown], text=True).split() == [str(n) for n in sys.version_info[:2]]


class OtherUser(NamedTuple):
    """Another user of this machine, with a Python that has the packages of the tests.

    Attributes:
        name: The login name.
        uid: The user ID.
        home: The home directory.
    """

    name: str
    uid: int
    home: Path

    def processes(self) -> list[int]:
        """Return the IDs of this user's processes."""
        found: list[int] = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if path.stat().st_uid == self.uid:
                    found.append(int(path.name))
        return found


@pytest.fixture
def other_user() -> Iterator[OtherUser]:
    name = f"sgt{secrets.token_hex(3)}"
    home, shared = Path("/tmp", name), Path("/tmp", f"{name}-shared")
    # a locked account, which is the default, may not log in
    account = ["--create-home", "--home-dir", str(home), "--shell", "/bin/bash", "--password", "*", name]
    subprocess.run(["useradd", *account], check=True)
    made = OtherUser(name, pwd.getpwnam(name).pw_uid, home)
    # the packages of the tests may lie where other users can't reach them
    shared.mkdir()
    subprocess.run(["mount", "--bind", sys.prefix, str(shared)], check=True)
    try:
        packages = shared / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
        subprocess.run([SYSTEM_PYTHON, "-m", "venv", "--without-pip", str(home / "venv")], check=True)
        next(home.glob("venv/lib/python3*/site-packages")).joinpath("shared.pth").write_text(f"{packages}\n")
        yield made
    finally:
        for pid in made.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        subprocess.run(["umount", "--lazy", str(shared)], check=True)
        shared.rmdir()
        subprocess.run(["userdel", "--remove", name], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(home, ignore_errors=True)


@needs_root
@pytest.mark.skipif(not _is_version_of_tests(SYSTEM_PYTHON), reason="the system's Python is of another version")
def test_users_of_one_machine_have_pools_of_their_own(
    user: Home, new_home: NewHome, new_machine: NewMachine, other_user: OtherUser
) -> None:
    home = other_user.home
    there = {f"SGPU_{kind}_DIR": str(home / kind.lower()) for kind in ("STATE", "RUNTIME", "LOCK")}
    there |= {"SGPU_CONFIG": str(home / "no-config.toml"), "UV_CACHE_DIR": str(home / "uv")}
    first = new_machine()
    # sshd reads the keys as this user
    second = new_machine(
        folder=home / "sshd",
        user=other_user.name,
        path=f"{home}/venv/bin:/usr/bin:/bin",
        environment={"HOME": str(home), "TMPDIR": str(home), **there},
    )
    for at, machine in enumerate((first, second)):
        own = user if at == 0 else new_home()
        machine.list_for(own, "box", same_files=at == 0)
        with contextlib.closing(Kernel(own)) as kernel:
            reply = kernel.check(f"{CELL}\nimport getpass\nprint(getpass.getuser())", 120)
            assert reply.lines(0) == [machine.user]
        assert sgpu(own, "pool", "remove", "box", "--records").returncode == 0
    eventually(lambda: not other_user.processes(), 15, lambda: f"left there: {other_user.processes()}")
    assert not (home / "state").exists()


# ---------------------------------------------------------------- sgpu doctor --pool


def test_doctor_checks_each_step_and_the_machine_itself(user: Home, new_machine: NewMachine) -> None:
    machine = new_machine()
    machine.list_for(user, "box")
    checked = sgpu(user, "doctor", "--pool", "box", "--json", timeout_s=120)
    findings = json.loads(checked.stdout)["findings"]
    names = [finding["name"] for finding in findings]
    assert names[:6] == ["ssh", "name", "port", "login", "python", "clock"], checked
    assert {"torch", "all_reduce", "gpu", "disk"} <= set(names)
    assert checked.returncode == 0
    # neither a pool nor anything else runs there now
    eventually(lambda: not machine.far.processes(), 15, lambda: f"left there: {machine.far.processes()}")


@pytest.mark.parametrize(
    ("break_it", "step"),
    [("name", "name"), ("port", "port"), ("host key", "host key"), ("key", "key"), ("shell", "shell"),
     ("python", "python"), ("disk", "disk"), ("link", "port")],
)  # fmt: skip
def test_doctor_names_the_first_step_that_fails(break_it: str, step: str, user: Home, new_machine: NewMachine) -> None:
    machine = new_machine()
    machine.list_for(user, "box", python="/opt/none/bin/python" if break_it == "python" else "")
    if break_it == "name":
        user.environ["SGPU_SSH_COMMAND"] += " -o HostName=no-such-machine.invalid"
    elif break_it == "port":
        machine.stop()
    elif break_it == "host key":
        machine.trust("client_key.pub")
    elif break_it == "key":
        (machine.folder / "authorized_keys").write_text("")
    elif break_it == "shell":
        (machine.user_home / ".bashrc").write_text("exit 3\n")
    elif break_it == "disk":
        (machine.user_home / ".local").symlink_to("/dev/full")
    with contextlib.ExitStack() as stack:
        if break_it == "link":
            # a server that is none of ssh
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            stack.enter_context(answering(listener, b"HTTP/1.1 400 Bad Request\r\n"))
            machine.list_for(user, "box", port=listener.getsockname()[1])
        checked = sgpu(user, "doctor", "--pool", "box", "--json")
    last = json.loads(checked.stdout)["findings"][-1]
    assert (last["name"], last["level"]) == (step, "problem"), checked
    assert checked.returncode == 1


@contextlib.contextmanager
def answering(listener: socket.socket, words: bytes) -> Iterator[None]:
    """Send words to the first connection."""

    def answer() -> None:
        with listener.accept()[0] as connection:
            connection.sendall(words)

    thread = threading.Thread(target=answer)
    thread.start()
    yield
    thread.join()


# ---------------------------------------------------------------- links


@pytest.fixture
def proxied(user: Home, new_machine: NewMachine) -> Iterator[tuple[SshServer, Proxy]]:
    """A machine behind a connection that can be cut and silenced."""
    machine = new_machine()
    proxy = Proxy(machine.port, keeps=False)
    machine.list_for(user, "box", f"HostKeyAlias [127.0.0.1]:{machine.port}", port=proxy.port)
    yield machine, proxy
    proxy.close()


@pytest.mark.parametrize("fault", ["reset", "cut", "silent", "relay", "stopped relay"])
def test_a_run_outlives_every_fault_of_its_link(
    fault: str, proxied: tuple[SshServer, Proxy], new_notebook: Callable[[], Kernel]
) -> None:
    machine, proxy = proxied
    notebook = new_notebook()
    go = machine.far.work / "go"
    cell = notebook.start(
        f"{CELL} --out kept:all\nimport pathlib, time\nprint('begun')\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n"
        "for at in range(500): print('line', at)\nkept = rank"
    )
    cell.until_shown("] begun")
    (login,) = logins(notebook)
    relays = [pid for pid in machine.far.processes() if "ssh.relay" in Path(f"/proc/{pid}/cmdline").read_text()]
    if fault == "reset":
        proxy.reset()
    elif fault == "cut":
        proxy.cut()
    elif fault == "silent":
        proxy.hold()
    else:
        (relay,) = relays
        os.kill(relay, signal.SIGKILL if fault == "relay" else signal.SIGSTOP)
    go.touch()
    try:
        if fault in ("cut", "silent"):
            # the login is given up
            eventually(lambda: not login.is_running() or login.status() == "zombie", 60, "the login has ended")
            proxy.mend()
        reply = cell.wait(90)
    finally:
        if fault == "stopped relay":
            with contextlib.suppress(ProcessLookupError):
                os.kill(relays[0], signal.SIGCONT)
    assert reply.status == "ok", reply.story
    assert reply.lines(0) == ["begun", *(f"line {at}" for at in range(500))]
    assert notebook.value("kept") == [0, 1]


def test_a_port_that_answers_nothing_is_given_up(user: Home, new_machine: NewMachine) -> None:
    machine = new_machine()
    proxy = Proxy(machine.port, keeps=False)
    proxy.hold()
    try:
        machine.list_for(user, "box", "ConnectTimeout 2", f"HostKeyAlias [127.0.0.1]:{machine.port}", port=proxy.port)
        listed = sgpu(user, "pool", "status", "--pool", "box")
        assert "does not answer" in listed.stderr + listed.stdout, listed
    finally:
        proxy.close()


@needs_root
def test_output_overtakes_a_large_upload_on_a_slow_link(
    user: Home, new_machine: NewMachine, new_notebook: Callable[[], Kernel], slow_network: tuple[str, str]
) -> None:
    namespace, address = slow_network
    machine = new_machine(wrapper=["ip", "netns", "exec", namespace], address=address)
    machine.list_for(user, "box")
    notebook, other = new_notebook(), new_notebook()
    other.check(f"{CELL}\npass", 120)
    notebook.check("import numpy\nlarge = numpy.random.default_rng(1).bytes(100 << 20)")
    upload = notebook.start(f"{CELL}\nprint(len(large))")
    upload.until_shown("sending variables")
    # over the same line: a cell of another notebook is answered while the variable is under way
    quick = other.check(f"{CELL}\nprint('quick')", 120)
    ended_at = time.monotonic()
    reply = upload.wait(120)
    assert reply.status == "ok", reply.story
    # the variable alone takes ten seconds
    assert time.monotonic() - ended_at > 2 > quick.seconds


@pytest.fixture
def slow_network() -> Iterator[tuple[str, str]]:
    """A network namespace that is reached at 10 MB/s: its name, and its address."""
    name, number = f"sgt{secrets.token_hex(3)}", secrets.randbelow(200) + 20
    here, there = f"10.211.{number}.1", f"10.211.{number}.2"
    commands = [
        f"ip netns add {name}",
        f"ip link add {name}a type veth peer name {name}b",
        f"ip link set {name}b netns {name}",
        f"ip addr add {here}/24 dev {name}a",
        f"ip link set {name}a up",
        f"ip netns exec {name} ip addr add {there}/24 dev {name}b",
        f"ip netns exec {name} ip link set {name}b up",
        f"ip netns exec {name} ip link set lo up",
        f"tc qdisc add dev {name}a root tbf rate 80mbit burst 64kb latency 50ms",
        f"ip netns exec {name} tc qdisc add dev {name}b root tbf rate 80mbit burst 64kb latency 50ms",
    ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield name, there
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)
        subprocess.run(["ip", "link", "del", f"{name}a"], check=False, stderr=subprocess.DEVNULL)
