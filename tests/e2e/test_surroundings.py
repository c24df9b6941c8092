"""One pool for each state directory, whatever else surrounds the processes that use it.

A pool runs in one surroundings, and another process uses it from others: with the same state directory it finds that
pool and everything works, or it is told at once what differs. With another state directory it has a pool of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from kernels import Home, Kernel, eventually, is_alive

# runs a function on two ranks and prints what its user sees of the pool, the run and its logs
USE = """
import json, os, sys
from sgpu_magic import distributed
from sgpu_magic.client.pool import Pool
from sgpu_magic.config import load_settings

@distributed(gpus=2, gpu_type="cpu")
def work(size):
    rank = int(os.environ["RANK"])
    print("hello from", rank)
    return len(size) + rank

values = bytearray(3_000_000)
run = work.distributed.submit(values)
got = run.result(timeout=60)
status = Pool(load_settings()).status(start=False)
print(json.dumps({"got": got, "log": run.logs(1), "run": run.run_id, "since": status.started_at}))
"""
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="needs root")


class Used(NamedTuple):
    """What came of using a pool."""

    code: int
    seen: dict[str, object]
    error: str


class Place:
    """A home of which nothing says where the sockets are, with a pool that a kernel has started."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.script = home.work / "use.py"
        self.script.write_text(USE)

    def environ(self, **changes: str | None) -> dict[str, str]:
        merged: dict[str, str | None] = {**self.home.environ, **changes}
        return {name: value for name, value in merged.items() if value is not None}

    def call(
        self, command: Sequence[str], inside: Sequence[str] = (), **changes: str | None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*inside, sys.executable, *command],
            env=self.environ(**changes), cwd=self.home.work, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    def use(self, inside: Sequence[str] = (), **changes: str | None) -> Used:
        done = self.call([str(self.script)], inside, **changes)
        seen = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
        return Used(done.returncode, seen, done.stderr)

    def sgpu(self, *words: str, inside: Sequence[str] = (), **changes: str | None) -> str:
        done = self.call(["-m", "sgpu_magic.cli", *words], inside, **changes)
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def pool_home() -> Iterator[Place]:
    home = Home({"SGPU_RUNTIME_DIR": ""})
    (home.path / "xr").mkdir(mode=0o700)
    home.environ["XDG_RUNTIME_DIR"] = str(home.path / "xr")
    yield Place(home)
    home.close()


@pytest.fixture
def kernel(pool_home: Place) -> Iterator[Kernel]:
    made = Kernel(pool_home.home)
    made.check("%%distributed -n 2 --type cpu --ui none\npass")
    yield made
    made.close()


def folder(pool_home: Place, name: str) -> str:
    made = pool_home.home.path / name
    made.mkdir(mode=0o700, exist_ok=True)
    return str(made)


def squatted(pool_home: Place) -> str:
    """A folder in which another user has put something in place of ours."""
    there = Path(folder(pool_home, "squatted"))
    for name in ("sgpu", f"sgpu-{os.getuid()}"):
        if not (there / name).is_symlink():
            (there / name).symlink_to("/tmp")
    return str(there)


SAME: dict[str, Callable[[Place], dict[str, str | None]]] = {
    "another XDG_RUNTIME_DIR": lambda pool_home: {"XDG_RUNTIME_DIR": folder(pool_home, "xo")},
    "no XDG_RUNTIME_DIR": lambda _: {"XDG_RUNTIME_DIR": None},
    "a missing XDG_RUNTIME_DIR": lambda _: {"XDG_RUNTIME_DIR": "/nowhere/at/all"},
    "a relative XDG_RUNTIME_DIR": lambda _: {"XDG_RUNTIME_DIR": "run"},
    "an XDG_RUNTIME_DIR that is too long": lambda pool_home: {"XDG_RUNTIME_DIR": folder(pool_home, "x" * 120)},
    "a squatted XDG_RUNTIME_DIR": lambda pool_home: {"XDG_RUNTIME_DIR": squatted(pool_home)},
    "another TMPDIR": lambda pool_home: {"XDG_RUNTIME_DIR": None, "TMPDIR": folder(pool_home, "to")},
    "a squatted TMPDIR": lambda pool_home: {"XDG_RUNTIME_DIR": None, "TMPDIR": squatted(pool_home)},
    "another HOME": lambda pool_home: {"HOME": folder(pool_home, "ho")},
    "another XDG_STATE_HOME": lambda pool_home: {"XDG_STATE_HOME": folder(pool_home, "so")},
}
INSIDE = {
    "another PID namespace": ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"],
    "another user namespace": ["unshare", "--user", "--map-root-user"],
    "another host name": ["unshare", "--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "-"],
}


def agrees(pool_home: Place, pool: int | None, used: Used, inside: Sequence[str] = (), **changes: str | None) -> None:
    """Check that everything says the same of the run that was made from there."""
    assert used.code == 0, used.error
    assert used.seen["got"] == [3_000_000, 3_000_001]
    assert used.seen["log"] == "hello from 1\n"
    assert pool_home.home.pool_pid() == pool
    run = str(used.seen["run"])[:4]
    assert run in pool_home.sgpu("runs", inside=inside, **changes)
    assert "hello from 1" in pool_home.sgpu("logs", run, "--rank", "1", inside=inside, **changes)


@pytest.mark.parametrize(
    "differs",
    [pytest.param(name, marks=() if name in ("another XDG_RUNTIME_DIR",) else pytest.mark.slow) for name in SAME],
)
def test_the_same_state_directory_is_the_same_pool(pool_home: Place, kernel: Kernel, differs: str):
    pool = pool_home.home.pool_pid()
    changes = SAME[differs](pool_home)
    used = pool_home.use(**changes)
    agrees(pool_home, pool, used, **changes)
    kernel.check("%%distributed -n 2 --type cpu --ui none\npass")


@AS_ROOT
@pytest.mark.needs_root
@pytest.mark.parametrize(
    "differs",
    [pytest.param(name, marks=() if name == "another PID namespace" else pytest.mark.slow) for name in INSIDE],
)
@pytest.mark.slow
def test_the_same_state_directory_is_the_same_pool_in_another_namespace(pool_home: Place, kernel: Kernel, differs: str):
    pool = pool_home.home.pool_pid()
    inside = INSIDE[differs]
    used = pool_home.use(inside)
    agrees(pool_home, pool, used, inside)
    assert f"process {pool}" in pool_home.sgpu("doctor", inside=inside)
    kernel.check("%%distributed -n 2 --type cpu --ui none\npass")


@pytest.mark.slow
@AS_ROOT
@pytest.mark.needs_root
def test_a_pool_in_another_pid_namespace_is_used_and_stopped_from_outside(pool_home: Place):
    """As in a container that shares the state directory, with an unreadable /proc of the host."""
    pool_home.sgpu("pool", "stop", "--force")
    keeper = subprocess.Popen(
        [*INSIDE["another PID namespace"], "sh", "-c",
         f"{sys.executable} {pool_home.script}; echo used; read line"],
        env=pool_home.environ(), stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert keeper.stdout is not None
        lines = iter(keeper.stdout.readline, "")
        assert next(line for line in lines if line.startswith("used"))
        used = pool_home.use()
        assert used.code == 0, used.error
        assert used.seen["log"] == "hello from 1\n"
        assert "is stopped" in pool_home.sgpu("pool", "stop")
        assert "no local pool" in pool_home.sgpu("pool", "stop")
    finally:
        keeper.kill()
        keeper.communicate()


@AS_ROOT
@pytest.mark.needs_root
@pytest.mark.slow
def test_a_pool_whose_sockets_are_in_another_tmp_is_said_at_once(pool_home: Place, kernel: Kernel):
    pool = pool_home.home.pool_pid()
    # everything of the pool except its sockets
    hidden = f'mount -t tmpfs none {pool_home.home.path / "xr"}; exec "$@"'
    inside = ["unshare", "--mount", "sh", "-c", hidden, "-"]
    used = pool_home.use(inside)
    assert used.code != 0
    for words in (
        f"the pool of the state directory {pool_home.home.state} is running",
        "SGPU_STATE_DIR",
        "which is not there for this process",
    ):
        assert words in used.error, used.error
    assert "can't be reached from here" in pool_home.sgpu("doctor", inside=inside)
    assert pool_home.home.pool_pid() == pool
    kernel.check("%%distributed -n 2 --type cpu --ui none\npass")


@pytest.mark.slow
def test_another_state_directory_is_another_pool(pool_home: Place, kernel: Kernel):
    """As with two homes of one user that share /tmp, in containers or with sudo."""
    own = pool_home.home.pool_pid()
    changes = {"SGPU_STATE_DIR": None, "HOME": folder(pool_home, "stranger"), "XDG_STATE_HOME": None}
    used = pool_home.use(**changes)
    try:
        assert used.code == 0, used.error
        assert used.seen["log"] == "hello from 1\n"
        run = str(used.seen["run"])[:4]
        assert run in pool_home.sgpu("runs", **changes)
        assert "hello from 1" in pool_home.sgpu("logs", run, "--rank", "1", **changes)
        assert run not in pool_home.sgpu("runs", "--all")
        assert pool_home.home.pool_pid() == own
    finally:
        stopped = pool_home.sgpu("pool", "stop", "--force", **changes)
    assert "is stopped" in stopped
    assert own is not None
    assert is_alive(own)
    kernel.check("%%distributed -n 2 --type cpu --ui none\npass")


@pytest.mark.slow
def test_two_state_directories_with_one_runtime_directory_are_told(pool_home: Place, kernel: Kernel):
    shared = folder(pool_home, "shared")
    other = folder(pool_home, "other-state")
    first = pool_home.use(SGPU_STATE_DIR=other, SGPU_RUNTIME_DIR=shared)
    try:
        assert first.code == 0, first.error
        third = pool_home.use(SGPU_STATE_DIR=folder(pool_home, "third-state"), SGPU_RUNTIME_DIR=shared)
        assert third.code != 0
        assert f"the pool of another state directory has its sockets in {shared}" in third.error
    finally:
        pool_home.sgpu("pool", "stop", "--force", SGPU_STATE_DIR=other, SGPU_RUNTIME_DIR=shared)


@pytest.mark.slow
def test_a_pool_whose_state_directory_is_removed_makes_it_again(pool_home: Place, kernel: Kernel):
    pool = pool_home.home.pool_pid()
    for name in ("pool.json", "pool.lock"):
        (pool_home.home.state / name).unlink()
    used = pool_home.use()
    assert used.code == 0, used.error
    assert pool_home.home.pool_pid() == pool
    kernel.check("%%distributed -n 2 --type cpu --ui none\npass")


@pytest.mark.slow
def test_a_pool_whose_runtime_directory_goes_with_its_session_is_found_again(pool_home: Place, kernel: Kernel):
    """As at a logout: the system removes the user's own directory, and it can't be created again."""
    pool = pool_home.home.pool_pid()
    gone = pool_home.home.path / "xr"
    shutil.rmtree(gone)
    gone.symlink_to("/nowhere")
    try:
        eventually(lambda: pool_home.use(XDG_RUNTIME_DIR=None).code == 0, 30, "the pool")
        assert pool_home.home.pool_pid() == pool
    finally:
        gone.unlink()
        gone.mkdir(mode=0o700)
    # the other tests expect the pool's sockets in the user's own directory
    pool_home.sgpu("pool", "stop", "--force")
    assert pool_home.use().code == 0


NOT_TEXT = os.fsdecode(b"/opt/caf\xe9")


@pytest.mark.slow
def test_variables_that_are_no_text_reach_ranks_as_they_are(pool_home: Place):
    """Each of them is read at import by Python, torch, the loader or NCCL, or names a directory."""
    names = ["TORCH_HOME", "LD_LIBRARY_PATH", "NCCL_TOPO_FILE", "PYTHONPATH", "XDG_RUNTIME_DIR", "TMPDIR", "ORDINARY"]
    kernel = Kernel(pool_home.home, variables=dict.fromkeys(names, NOT_TEXT))
    try:
        out = kernel.check(
            f"%%distributed -n 2 --type cpu\nimport os\nprint([ascii(os.environ.get(name)) for name in {names}])"
        )
        assert out.lines(1)[-1].count("caf\\\\udce9") == len(names), out.story
        assert "process" in pool_home.sgpu("doctor", **dict.fromkeys(names, NOT_TEXT))
    finally:
        kernel.close()
