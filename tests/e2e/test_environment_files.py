"""What a run's directory says of its packages, in real kernels: at once, after `%pip`, and when the pool was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from installed_venvs import install, make_project, make_venv, make_wheel, site_packages, uv
from kernels import Home, Kernel, eventually, wait_gone
from packaging.pylock import Pylock

RUN = "%%distributed -n 1 --ui none\npass"


@pytest.fixture(scope="module")
def own_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own where something may be installed; it has all that this one has through a path file."""
    folder = tmp_path_factory.mktemp("own")
    python = make_venv(folder / "venv")
    ours = [entry for entry in sys.path if entry.endswith("site-packages")]
    # an editable project's folder is not added: path files in those entries are not read
    lines = [f"import site; site.addsitedir({entry!r})" for entry in ours]
    (site_packages(python) / "ours.pth").write_text("\n".join(lines) + "\n")
    return python


@pytest.fixture
def own_kernel(home: Home, own_python: Path) -> Iterator[Kernel]:
    made = Kernel(home, python=str(own_python))
    yield made
    made.close()


def newest(home: Home) -> Path:
    return home.run_dir(list(home.ledger())[-1])


def requirements_in(directory: Path) -> str:
    """Wait for the file and return it."""
    path = directory / "requirements.txt"
    eventually(path.exists, 15, lambda: f"requirements.txt among {sorted(os.listdir(directory))}")
    return path.read_text()


def digest_of(directory: Path) -> str:
    """The environment's digest in `run.json`."""
    text = (directory / "run.json").read_text()
    found: set[str] = set()

    def look(value: object) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("environment"), str):
                found.add(value["environment"])
            for inner in value.values():
                look(inner)

    look(json.loads(text))
    assert len(found) <= 1, text
    return found.pop() if found else ""


def known(kernel: Kernel) -> str:
    """Wait until the kernel knows its packages, and return their digest."""
    code = "(lambda s: s and s.digest)(__import__('sgpu_magic.packages.snapshot').packages.snapshot.kept_snapshot())"
    return eventually(lambda: kernel.value(code), 15, "the snapshot")


def test_each_runs_directory_says_what_was_installed(kernel: Kernel, home: Home):
    digest = known(kernel)
    for _ in range(2):
        kernel.check(RUN)
        directory = newest(home)
        text = requirements_in(directory)
        assert text.startswith(f"# Python {sys.version.split()[0]} on ")
        assert f"digest {digest}" in text.splitlines()[0]
        assert digest_of(directory) == digest
    mine = {line.split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert any(line.startswith("torch==") for line in mine)
    first, second = (home.run_dir(run_id) / "requirements.txt" for run_id in list(home.ledger())[-2:])
    assert first.samefile(second)


@pytest.mark.slow
def test_a_run_in_a_kernel_that_does_not_know_yet_gets_its_files_too(home: Home, new_kernel: Callable[..., Kernel]):
    kernel = new_kernel(load=False)
    # if the pool had to start first, the background snapshot would finish before the run is sent
    kernel.check(
        "import threading\nfrom sgpu_magic.packages import snapshot as snapshots\n"
        "look, sent = snapshots.take_snapshot, threading.Event()\n"
        "snapshots.take_snapshot = lambda: look() if sent.wait(60) else None\n"
        "%load_ext sgpu_magic\n"
        "get_ipython().run_cell_magic('distributed', '-n 1 --ui none', 'pass')\n"
        "snapshots.take_snapshot = look\nsent.set()"
    )
    directory = newest(home)
    assert digest_of(directory) == ""
    text = requirements_in(directory)
    assert f"digest {known(kernel)}" in text.splitlines()[0]


@pytest.mark.parametrize("installed", ["long ago", pytest.param("just now", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_script_that_ends_at_once_leaves_its_packages(home: Home, own_python: Path, installed: str):
    at = time.time() - (3600 if installed == "long ago" else 0)
    os.utime(site_packages(own_python), (at, at))
    script = home.work / "short.py"
    script.write_text(
        "from sgpu_magic import distributed\n"
        "@distributed(gpus=1, gpu_type='cpu', ui='none')\ndef nothing():\n    pass\n"
        "if __name__ == '__main__':\n    run = nothing.distributed.submit()\n    run.detach()\n    print(run.run_id)\n"
    )
    done = subprocess.run(
        [str(own_python), str(script)], env=home.environ, cwd=home.work, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    run_id = done.stdout.split()[-1]
    # the process has ended: it can report nothing more
    text = requirements_in(home.run_dir(run_id))
    assert any(line.startswith("torch==") for line in text.splitlines())
    eventually(lambda: home.ledger()[run_id].state == "succeeded", 30, "the run ends")


@pytest.mark.slow
def test_what_pip_installs_is_in_the_next_run(own_kernel: Kernel, home: Home, tmp_path: Path):
    before = known(own_kernel)
    own_kernel.check(RUN)
    first = newest(home)
    assert "sgpu-test-newcomer" not in requirements_in(first)
    wheel = make_wheel(tmp_path, "sgpu-test-newcomer", "3.1")
    own_kernel.check(f"%pip install --quiet --no-deps {wheel}", 90)
    after = known(own_kernel)
    assert after != before
    own_kernel.check(RUN)
    second = newest(home)
    lines = [line for line in requirements_in(second).splitlines() if line.startswith("sgpu-test-newcomer")]
    assert lines == [f"sgpu-test-newcomer @ {wheel.as_uri()}  # 3.1, in no package index"]
    assert (digest_of(first), digest_of(second)) == (before, after)
    own_kernel.check("%pip uninstall --quiet --yes sgpu-test-newcomer", 90)
    assert known(own_kernel) == before


@pytest.mark.slow
def test_the_next_pool_gets_them_too(home: Home, new_kernel: Callable[..., Kernel]):
    kernel = new_kernel()
    known(kernel)
    kernel.check(RUN)
    requirements_in(newest(home))
    pool = home.pool_pid()
    assert pool is not None
    os.kill(pool, signal.SIGKILL)
    wait_gone(pool)
    for path in (home.state / "environment-files").rglob("*.txt"):
        path.unlink()
    kernel.check(RUN)
    requirements_in(newest(home))


@pytest.mark.slow
def test_a_lock_file_comes_when_the_notebook_is_quiet(new_home: Callable[..., Home]):
    home = new_home({"SGPU_LOCK_ENVIRONMENTS": "on"})
    kernel = Kernel(home)
    try:
        kernel.check(RUN)
        kernel.check(RUN)
        runs = [home.run_dir(run_id) for run_id in home.ledger()]
        eventually(lambda: all((run / "pylock.toml").exists() for run in runs), 60, "pylock.toml")
        text = (runs[0] / "pylock.toml").read_text()
        packages = {package.name for package in Pylock.from_dict(tomllib.loads(text)).packages}
        assert {"torch", "numpy", "sgpu-magic"} <= packages
        assert (runs[0] / "pylock.toml").samefile(runs[1] / "pylock.toml")
        assert "# With hashes: pylock.toml beside this file." in requirements_in(runs[1])
        home.check_leaks()
    finally:
        kernel.close()


def test_a_submission_asks_in_no_time(kernel: Kernel):
    known(kernel)
    measured = """
import statistics, time
from sgpu_magic.runs import packages
from sgpu_magic.runs.kernel_context import kernel_context
def microseconds():
    began = time.perf_counter()
    assert packages.packages_of(kernel_context().pool).digest_for("")
    return (time.perf_counter() - began) * 1e6
took = statistics.median(microseconds() for _ in range(200))
"""
    kernel.check(measured)
    assert kernel.value("took") < 100


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_node_that_builds_has_the_editable_project_and_the_unpublished_wheel(
    new_home: Callable[..., Home], own_python: Path, tmp_path: Path
):
    project = make_project(tmp_path / "project", "sgpu-test-project", "0.7", "STEP = 1\n")
    wheel = make_wheel(tmp_path, "sgpu-test-unpublished", "4.2")
    install(own_python, "--editable", project)
    install(own_python, wheel)
    home = new_home({"SGPU_ENVIRONMENTS": "built", "SGPU_LOCK_ENVIRONMENTS": "on"})
    kernel = Kernel(home, python=str(own_python))
    ask = (
        "%%distributed -n 1 --ui none --out told\n"
        "import sgpu_test_project, sgpu_test_unpublished\n"
        "told = [sgpu_test_project.STEP, sgpu_test_unpublished.VERSION, sgpu_test_project.__file__]"
    )
    try:
        kernel.check(ask, 240)
        step, version, file = kernel.value("told")
        assert (step, version) == (1, "4.2")
        assert file.startswith(str(home.state / "environments"))
        directory = newest(home)
        text = requirements_in(directory)
        assert "as a node was asked to build them" in text
        assert "# sgpu-magic==" in text
        eventually((directory / "pylock.toml").exists, 60, "pylock.toml")
        packages = {
            package.name: package
            for package in Pylock.from_dict(tomllib.loads((directory / "pylock.toml").read_text())).packages
        }
        assert {"sgpu-test-project", "sgpu-test-unpublished"} <= packages.keys()
        assert "torch" not in packages
        # a changed project file leads to another wheel and another environment
        (project / "sgpu_test_project/__init__.py").write_text("STEP = 22\n")
        kernel.check(ask, 240)
        assert kernel.value("told")[0] == 22
        assert digest_of(newest(home)) != digest_of(directory)
    finally:
        kernel.close()
        uv("pip", "uninstall", "--quiet", "--python", own_python, "sgpu-test-project", "sgpu-test-unpublished")
