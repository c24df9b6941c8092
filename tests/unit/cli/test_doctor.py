"""`sgpu doctor`: problems are reported with their remedies, on deliberately broken machines."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import nvml_stub as nvml
import pytest
from kept_runs import KeptRuns
from kernels import Home, Kernel, eventually
from listed_pools import list_nowhere, list_pools, listed
from process_table import wait_gone
from served_pools import served_pool

from sgpu_magic.cli import doctor, machine_checks, pools, python_checks, status
from sgpu_magic.cli.finding import Finding, Level
from sgpu_magic.cli.python_checks import ProbeFacts
from sgpu_magic.client import this_machine
from sgpu_magic.client.ledger import recent_runs
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import PoolError
from sgpu_magic.files.locks import take_lock_or_none
from sgpu_magic.files.run_directory import DiskRoom, mount_of
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.pool_status import lock_file, socket_file

nvml_stub = nvml.nvml_stub
ROOT = Path(__file__).parents[3]
LEVELS = {"ok", "warning", "problem"}


@pytest.fixture
def bare_home() -> Iterator[Home]:
    """A home without any runs."""
    made = Home()
    yield made
    made.close()


class Report:
    """The doctor's findings by name, each (level, text, remedy)."""

    def __init__(self, home: Home, variables: dict[str, str] | None = None, shell: str = "") -> None:
        environ = {k: v for k, v in home.environ.items() if not k.startswith(("CUDA_", "GLOO_"))}
        environ.pop("SGPU_CONFIG")
        environ |= {"XDG_CONFIG_HOME": str(home.path)} | (variables or {})
        done = subprocess.run(
            ["bash", "-c", f'{shell}\nexec "$0" -m sgpu_magic.cli doctor', sys.executable],
            env=environ,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.stderr == ""
        self.code, self.text = done.returncode, done.stdout
        self.found: list[tuple[str, str, str, str]] = []
        *lines, empty, self.sum = done.stdout.splitlines()
        assert empty == ""
        for line in lines:
            if line.startswith(" "):
                level, name, text, _ = self.found[-1]
                self.found[-1] = (level, name, text, line.strip())
            else:
                self.found.append((line[:7].strip(), line[9:29].strip(), line[31:], ""))
        assert {level for level, *_ in self.found} <= LEVELS
        assert "\x1b" not in done.stdout
        # its own processes and files are cleaned up
        assert list((home.path / "tmp").iterdir()) == []
        assert home.processes().keys() <= {*home.kernel_pids, *below_pool(home)}

    def of(self, name: str) -> tuple[str, str, str]:
        """Level, text and remedy of the one finding of that name."""
        ((level, _, text, remedy),) = [found for found in self.found if found[1] == name]
        return level, text, remedy

    def has(self, name: str, level: str, *words: str) -> bool:
        return any(
            found[0] == level and found[1] == name and all(word in f"{found[2]} {found[3]}" for word in words)
            for found in self.found
        )


def below_pool(home: Home) -> set[int]:
    pool = home.pool_pid()
    zygotes = home.zygote_pids()
    return ({pool} if pool else set()) | {*home.agent_pids(), *zygotes, *home.standby_pids()}


def test_a_machine_in_order(bare_home: Home):
    report = Report(bare_home)
    assert report.code == 0, report.text
    assert report.sum.startswith("no problem")
    assert report.of("python")[0] == "ok"
    assert report.of("torch")[:2][0] == "ok"
    level, text, _ = report.of("all_reduce")
    assert level == "ok"
    assert text.startswith("2 gloo ranks joined in ")
    assert report.has("state directory", "ok", str(bare_home.state))
    assert report.has("pool", "ok", "none is running")
    for name in ("numpy", "requirements", "hostname", "runtime directory", "disk", "gpu", "open files", "processes"):
        assert any(found[1] == name for found in report.found), name
    assert all(remedy for level, _, _, remedy in report.found if level != "ok")
    assert bare_home.pool_pid() is None


@pytest.mark.slow
def test_everything_wrong_at_once_is_named_with_its_remedy(bare_home: Home):
    packages = bare_home.path / "packages"
    info = packages / "ipykernel-7.0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ipykernel\nVersion: 7.0.1\n")
    config = bare_home.path / "broken.toml"
    config.write_text("pool = \n")
    bare_home.state.rmdir()
    bare_home.state.write_text("a file in the way")
    report = Report(
        bare_home,
        {
            "PYTHONPATH": str(packages),
            "SGPU_CONFIG": str(config),
            "SGPU_CPU_SLOT": "4",
            "SGPU_RUNTIME_DIR": f"{bare_home.path}/{'long' * 30}",
            "GLOO_SOCKET_IFNAME": "nosuch0",
            "CUDA_VISIBLE_DEVICES": "1",
        },
        shell="ulimit -n 200",
    )
    assert report.code == 1
    assert "problems" in report.sum
    assert report.has("ipykernel", "problem", "7.0.1", "pip install")
    # ranks on one machine use loopback whatever the environment says
    assert report.has("all_reduce", "ok")
    assert report.has("settings", "problem", str(config), "Fix it")
    assert report.has("variables", "warning", "SGPU_CPU_SLOT ", "Did you mean `SGPU_CPU_SLOTS`?")
    assert report.has("CUDA_VISIBLE_DEVICES", "warning", "Unset it")
    assert report.has("state directory", "problem", "is not a directory", "SGPU_STATE_DIR")
    assert report.has("runtime directory", "problem", "too long", "SGPU_RUNTIME_DIR")
    assert report.has("open files", "problem", "200", "ulimit -n")


@pytest.mark.slow
def test_a_torch_that_can_not_be_imported(bare_home: Home):
    fake = bare_home.path / "packages" / "torch"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    report = Report(bare_home, {"PYTHONPATH": str(fake.parent)})
    assert report.code == 1
    assert report.has("torch", "problem", "libcudart.so.12", "pip install torch")
    assert report.has("numpy", "ok")
    assert not any(name == "all_reduce" for _, name, *_ in report.found)


@pytest.mark.slow
def test_a_torch_that_kills_its_process(bare_home: Home):
    fake = bare_home.path / "packages" / "torch"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("import os\nos.kill(os.getpid(), 4)")
    report = Report(bare_home, {"PYTHONPATH": str(fake.parent)}, shell="ulimit -c 0")
    assert report.has("torch", "problem", "ended by signal 4")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (ProbeFacts(torch="2.9.0", numpy="1.26"), "without torch.distributed"),
        (ProbeFacts(torch="2.9.0", numpy="1.26", distributed=True), "without gloo"),
        (ProbeFacts(torch="2.9.0", numpy_error="ImportError: no", distributed=True, gloo=True), "no"),
    ],
)  # fmt: skip
def test_packages_that_do_not_fit(facts: ProbeFacts, words: str):
    (found,) = [found for found in python_checks.packages(facts) if found.level is Level.PROBLEM]
    assert words in found.text
    assert found.remedy


@pytest.mark.slow
def test_a_gpu_and_a_torch_without_cuda(bare_home: Home, nvml_stub: Callable[..., dict[str, str]]):
    import torch

    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch is built for GPUs")
    report = Report(bare_home, nvml_stub(devices=nvml.a10s(2)))
    assert report.code == 1
    assert report.has("gpu", "ok", "2 devices: NVIDIA A10")
    assert report.has("torch and gpu", "problem", "without CUDA", "installation page")


@pytest.mark.slow
def test_a_pool_that_lives_and_one_that_was_killed(new_home: Callable[..., Home]):
    home = new_home({"SGPU_SIMULATE": "a10:2"})
    kernel = Kernel(home)
    try:
        kernel.check("%sgpu_status")
        pid = home.pool_pid()
        assert pid is not None
        home.runtime.chmod(0o755)
        report = Report(home)
        assert report.code == 0, report.text
        assert report.has("pool", "ok", f"process {pid}", "1 client")
        assert report.has("gpu", "ok", "simulated", "a10:2")
        assert report.has("runtime directory", "warning", "0755", "chmod 700")
        assert home.pool_pid() == pid
        os.kill(pid, signal.SIGKILL)
        wait_gone(pid)
        eventually(lambda: not home.unexpected(), 20, lambda: str(home.unexpected()))
        report = Report(home)
        assert report.has("pool", "warning", "killed", "pool.sock", "the next pool")
        for left in home.runtime.iterdir():
            left.unlink()
    finally:
        kernel.close()


def test_a_home_on_a_network(tmp_path: Path):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda1 / ext4 rw 0 0\n"
        "server:/home /home nfs4 rw 0 0\n"
        "server:/a /mnt/two\\040words nfs rw 0 0\n"
        "tmpfs /home/local tmpfs rw 0 0\n"
    )
    kinds = {
        "/": "ext4",
        "/homeless/x": "ext4",
        "/home/someone/.local": "nfs4",
        "/home/local/x": "tmpfs",
        "/mnt/two words/x": "nfs",
    }
    assert {path: mount_of(Path(path), mounts)[1] for path in kinds} == kinds


def test_the_state_directory_of_another_user(bare_home: Home):
    if os.getuid() != 0:
        pytest.skip("needs root to give a directory away")
    os.chown(bare_home.state, 12345, 12345)
    (found,) = doctor.state_directory(Settings(state_dir=str(bare_home.state)))
    assert (found.level, "another user" in found.text) == (Level.PROBLEM, True)


# ---------------------------------------------------------------- settings and directories


def reported(found: Iterable[Finding]) -> list[tuple[str, Level, str]]:
    return [(finding.name, finding.level, finding.text) for finding in found]


def test_which_settings_file_is_read(tmp_path: Path):
    path = tmp_path / "mine.toml"
    environ = {"SGPU_CONFIG": str(path), "HOME": str(tmp_path)}
    _, found = doctor.settings_file(environ)
    text = f"SGPU_CONFIG names {path}, which does not exist: the defaults apply"
    assert reported(found) == [("settings", Level.WARNING, text)]
    path.write_text('pool = "team"\n')
    settings, found = doctor.settings_file(environ)
    assert reported(found) == [("settings", Level.OK, str(path))]
    assert settings.pool == "team"
    # the other checks use the directories from the variables
    path.write_text("pool =\n")
    settings, found = doctor.settings_file(environ | {"SGPU_STATE_DIR": "/a", "SGPU_RUNTIME_DIR": "/b"})
    assert [finding.level for finding in found] == [Level.PROBLEM]
    assert (settings.state_dir, settings.runtime_dir) == ("/a", "/b")


def test_a_check_that_the_system_refuses_is_a_warning_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def refuse(_: Settings) -> Iterator[Finding]:
        raise OSError(5, "Input/output error", "/data")

    monkeypatch.setattr(doctor, "state_directory", refuse)
    # the torch probe takes seconds and is not under test here
    monkeypatch.setattr(python_checks, "probe", lambda _: ProbeFacts(numpy="2.3"))
    monkeypatch.setattr(machine_checks, "encryption", lambda: iter(()))
    out = io.StringIO()
    places = {"SGPU_STATE_DIR": str(tmp_path / "state"), "SGPU_RUNTIME_DIR": str(tmp_path / "run")}
    assert doctor.run(doctor.findings({"HOME": str(tmp_path)} | places), out) is False
    text = out.getvalue()
    assert re.search(
        r"^warning  state directory +could not be checked: \[Errno 5\] Input/output error: '/data'$", text, re.M
    )
    assert text.index("state directory") < text.index("runtime directory") < text.index("open files")


@pytest.mark.parametrize(
    ("kind", "free_bytes", "sent"),
    [
        ("ext4", 10**12, [("state directory", Level.OK), ("disk", Level.OK)]),
        ("nfs4", 10**12, [("state directory", Level.WARNING), ("disk", Level.OK)]),
        ("fuse.sshfs", 10**12, [("state directory", Level.WARNING), ("disk", Level.OK)]),
        ("ext4", 999_999_999, [("state directory", Level.OK), ("disk", Level.WARNING)]),
        ("ext4", 49_999_999, [("state directory", Level.OK), ("disk", Level.PROBLEM)]),
        ("ext4", 1000, [("disk", Level.PROBLEM)]),
    ],
)
def test_the_disk_of_the_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, free_bytes: int, sent: list[tuple[str, Level]]
):
    room = DiskRoom(tmp_path, "/data", kind, free_bytes, None, writable=True)
    monkeypatch.setattr(doctor, "disk_room", lambda _: room)
    found = list(doctor.state_directory(Settings(state_dir=str(tmp_path / "new" / "state"))))
    assert [(finding.name, finding.level) for finding in found] == sent
    for finding in found:
        if finding.name == "state directory" and finding.level is Level.WARNING:
            assert f"is on a network file system ({kind})" in finding.text
            assert "Set SGPU_STATE_DIR to a directory on a local disk" in finding.remedy
    assert not (tmp_path / "new").exists()


def test_a_state_directory_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(**_: object) -> object:
        raise PermissionError(13, "Permission denied")

    # root may write everywhere
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    ((name, level, text),) = reported(doctor.state_directory(Settings(state_dir=str(tmp_path))))
    assert (name, level, text) == ("state directory", Level.PROBLEM, f"{tmp_path} can't be written: Permission denied")
    ((name, level, text),) = reported(doctor.runtime_directory(Settings(runtime_dir="/tmp")))
    assert (name, level, text) == ("runtime directory", Level.PROBLEM, "/tmp can't be written: Permission denied")


def test_a_ledger_that_was_moved_aside_is_named(tmp_path: Path):
    aside = tmp_path / "ledger.sqlite3.damaged-20260101"
    aside.touch()
    *_, found = doctor.state_directory(Settings(state_dir=str(tmp_path)))
    assert (found.name, found.level) == ("ledger", Level.WARNING)
    assert found.text == f"{aside} could not be used and was moved aside"


def test_a_runtime_directory_that_is_not_private(tmp_path: Path):
    # a short path: socket paths are limited to 108 bytes
    with tempfile.TemporaryDirectory(prefix="sgpu-", dir="/tmp") as folder:
        here, link = Path(folder, "run"), Path(folder, "link")
        here.mkdir(mode=0o700)
        link.symlink_to(here)
        assert reported(doctor.runtime_directory(Settings(runtime_dir=str(here)))) == [
            ("runtime directory", Level.OK, str(here))
        ]
        here.chmod(0o750)
        (found,) = doctor.runtime_directory(Settings(runtime_dir=str(here)))
        assert (found.level, found.remedy) == (Level.WARNING, f"`chmod 700 {here}`.")
        assert "has mode 0750, so others can access it" in found.text
        (found,) = doctor.runtime_directory(Settings(runtime_dir=str(link)))
        assert (found.level, found.text) == (
            Level.PROBLEM, f"{link} is a link, and private files are not kept behind links",
        )  # fmt: skip


def test_a_pool_that_was_killed_is_no_problem(bare_home: Home):
    settings = Settings(state_dir=str(bare_home.state), runtime_dir=str(bare_home.runtime))
    left = socket_file(bare_home.runtime)
    left.touch()
    (found,) = doctor.pool(settings)
    assert (found.level, found.text) == (Level.WARNING, f"none is running, but one that was killed left {left}")
    left.unlink()


def test_a_pool_that_holds_the_lock_and_does_not_answer_is_found_by_every_command(
    bare_home: Home, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(this_machine, "_STARTING_S", 0.02)
    settings = Settings(state_dir=str(bare_home.state), runtime_dir=str(bare_home.runtime))
    kept = KeptRuns(settings)
    kept.add("7f3a0000", RunState.RUNNING)
    lock = take_lock_or_none(lock_file(bare_home.state))
    assert lock is not None
    held = f"process {os.getpid()} holds the lock of the state directory {bare_home.state}, and no pool answers there"
    try:
        (found,) = doctor.pool(settings)
        assert found.level is Level.PROBLEM
        assert found.text.startswith(held)
        for ask in (lambda: pools.stop(settings, force=True), lambda: status.ask(settings, "")):
            with pytest.raises(PoolError, match=re.escape(held)):
                ask()
        # whether it has ended is not known
        assert [run.state for run in recent_runs(settings, 10)] == [RunState.RUNNING]
    finally:
        lock.close()
    assert [run.state for run in recent_runs(settings, 10)] == [RunState.FAILED]
    kept.close()


# ---------------------------------------------------------------- pools of other machines


def said_of_pools(home: Home) -> dict[str, Finding]:
    """The doctor's findings about the pools file, the key and the pools of a home, by name."""
    return {found.name: found for found in doctor.listed_pools(load_settings(home.environ))}


@pytest.fixture
def user_home(bare_home: Home, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home whose variables this process has."""
    for name, value in bare_home.environ.items():
        monkeypatch.setenv(name, value)
    return bare_home


def test_nothing_is_said_of_pools_where_none_is_listed(user_home: Home):
    assert said_of_pools(user_home) == {}


@pytest.mark.slow
def test_listed_pools_are_looked_at(user_home: Home, monkeypatch: pytest.MonkeyPatch):
    with served_pool({"SGPU_SIMULATE": "a10:2"}) as team:
        list_pools(user_home, [("team", team, {})])
        list_nowhere(user_home, "gone")
        found = said_of_pools(user_home)
        assert list(found) == ["key", "encryption", "pool team", "pool gone"]
        assert (found["key"].level, found["key"].text) == (Level.OK, str(user_home.path / "client.key"))
        assert found["pool team"].level is Level.OK
        assert found["pool team"].text == f"{team.entry.address} has 2 A10 (24 GB), 16 CPU ranks"
        assert found["pool gone"].level is Level.PROBLEM
        assert found["pool gone"].text.startswith("the pool gone can't be reached: nothing answers at")
        assert "firewall" in found["pool gone"].text
        monkeypatch.setattr(doctor, "__version__", "0.0.9")
        assert said_of_pools(user_home)["pool team"].level is Level.WARNING
        assert "and this is 0.0.9" in said_of_pools(user_home)["pool team"].text
        # a newly created key is not on any pool's list
        (user_home.path / "client.key").unlink()
        found = said_of_pools(user_home)
        assert found["key"].level is Level.PROBLEM
        assert "`sgpu pool keygen`" in found["key"].remedy
        assert found["pool team"].level is Level.PROBLEM


def test_slow_encryption_is_reported_with_a_remedy():
    (fast,) = machine_checks.encryption(slow_bytes_per_s=0.0)
    assert fast.level is Level.OK
    assert re.fullmatch(r"\d[\d.]* [MG]B a second at most over the link to a pool on another machine", fast.text)
    (slow,) = machine_checks.encryption(slow_bytes_per_s=1e15)
    assert slow.level is Level.WARNING
    assert "libzmq3-dev" in slow.remedy


def test_a_key_and_a_list_that_others_can_get_at(user_home: Home):
    list_nowhere(user_home, "gone")
    key = user_home.path / "client.key"
    key.write_text("x")
    key.chmod(0o644)
    found = said_of_pools(user_home)["key"]
    assert found.level is Level.PROBLEM
    assert f"chmod 600 {key}" in found.text
    listed(user_home).chmod(0o666)
    found = said_of_pools(user_home)
    assert list(found) == ["pools"]
    assert found["pools"].level is Level.PROBLEM
    assert "chmod 600" in found["pools"].text
    listed(user_home).write_text("[team\n")
    listed(user_home).chmod(0o600)
    assert "line 1" in said_of_pools(user_home)["pools"].text
