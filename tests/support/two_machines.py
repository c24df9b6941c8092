"""Two simulated machines: two Pythons with different packages, and a network namespace.

Machine 1 has the notebook; machine 2 has the pool, whose nodes do not see the notebook's packages. They share the state
directory, as two machines do that have one home. Needs root (network namespaces).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from homes import Home
from kernels import Kernel
from process_table import stop_process
from waiting import eventually

from sgpu_magic.packages.distributions import is_from_node
from sgpu_magic.packages.node.base_layer import base_layer, link_layer
from sgpu_magic.packages.uv_command import index_variables

# packages that a run does not need on either machine; without them there is less to build
_LEFT_OUT = ("mlflow-skinny", "sqlalchemy", "alembic")
_START_S = 30
_PINS = "from importlib.metadata import distributions\nfor one in distributions(): print(f'{one.name}=={one.version}')"


def light_venv(folder: Path, *requirements: str, without: Sequence[str] = _LEFT_OUT) -> Path:
    """Make a virtual environment with these packages, and links to torch, sgpu-magic and their requirements.

    Args:
        folder: The environment's folder.
        requirements: Requirement lines that uv installs.
        without: Names that are not linked.

    Returns:
        The environment's Python.
    """
    _uv("venv", "--quiet", "--python", getattr(sys, "_base_executable", sys.executable), str(folder))
    python = folder / "bin" / "python"
    site = next((folder / "lib").glob("python*/site-packages"))
    if requirements:
        _uv("pip", "install", "--quiet", "--python", str(python), *requirements)
    installed = {re.sub(r"[-_.]+", "-", info.name.partition("-")[0]).lower() for info in site.glob("*.dist-info")}
    further = ("uv", "anywidget", "blake3", "cryptography", "ipywidgets", "pathspec")
    link_layer(base_layer({*installed, *without}, further), site)
    (folder / "bin" / "uv").symlink_to(Path(sys.executable).with_name("uv"))
    return python


class TwoMachines:
    """Machine 1 with a kernel, machine 2 with a pool.

    Args:
        folder: The folder for their virtual environments.
        notebook: Requirements installed on machine 1.
        node: Requirements installed on machine 2.
        variables: Further settings of both.
    """

    def __init__(
        self,
        folder: Path,
        *,
        notebook: Sequence[str] = (),
        node: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.home = Home(variables)
        self.notebook_python = light_venv(folder / "machine1", *notebook)
        self.node_python = light_venv(folder / "machine2", *node)
        self.namespace = f"sgpu{os.getpid()}"
        _ip("netns", "add", self.namespace)
        _ip("-n", self.namespace, "link", "set", "lo", "up")
        self.pool: subprocess.Popen[bytes] | None = None

    @property
    def node_environ(self) -> dict[str, str]:
        """Return machine 2's variables. Its packages come from uv's cache, as its namespace has no network access."""
        return self.home.environ | {
            "SGPU_ENVIRONMENTS": "built",
            "UV_OFFLINE": "1",
        }

    def start_pool(self) -> int:
        """Start machine 2's pool; return its pid."""
        inside = ["ip", "netns", "exec", self.namespace]
        with open(self.home.state / "pool.log", "ab") as log:
            self.pool = subprocess.Popen(
                [*inside, str(self.node_python), "-m", "sgpu_magic.pool"],
                env=self.node_environ,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        return int(eventually(self.home.pool_pid, _START_S, "machine 2's pool"))

    def kernel(self, **options: object) -> Kernel:
        """Return a new kernel on machine 1."""
        return Kernel(self.home, python=str(self.notebook_python), **options)

    def fill_cache_for_notebook(self) -> None:
        """Put machine 1's packages into uv's cache, from which machine 2 builds as from a mirror of the index."""
        # listed by Python itself: newer versions of uv omit linked packages
        pins = subprocess.run([self.notebook_python, "-c", _PINS], capture_output=True, text=True, check=True).stdout
        self._cache(*(pin for pin in pins.split() if not is_from_node(pin.partition("==")[0])))

    def install(self, *requirements: str) -> None:
        """Change machine 1's packages, as `%pip install` does."""
        _uv("pip", "install", "--quiet", "--no-deps", "--python", str(self.notebook_python), *requirements)
        self._cache(*requirements)

    def _cache(self, *requirements: str) -> None:
        scratch = self.home.path / "tmp" / "scratch"
        _uv("venv", "--quiet", "--clear", "--python", str(self.node_python), str(scratch))
        python = str(scratch / "bin" / "python")
        _uv("pip", "install", "--quiet", "--no-deps", "--python", python, *requirements)
        shutil.rmtree(scratch)

    def network_of(self, pid: int) -> str:
        """Return the network namespace of a process."""
        return os.readlink(f"/proc/{pid}/ns/net")

    def close(self) -> None:
        """Stop machine 2, close the home, and check that nothing stays."""
        try:
            pool = self.home.pool_pid()
            if pool is not None:
                stop_process(pool, signal.SIGTERM, 10)
            if self.pool is not None:
                self.pool.wait(10)
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", self.namespace)
            # a test may have used a pool elsewhere
            written = self.home.state / "pool.log"
            log = written.read_text(errors="replace") if written.exists() else ""
            self.home.close()
        assert "Traceback (most recent call last)" not in log, f"faults in machine 2's log:\n{log[-4000:]}"


@contextlib.contextmanager
def two_machines(folder: Path, **options: object) -> Iterator[TwoMachines]:
    """Yield `TwoMachines`, and close them at the end."""
    machines = TwoMachines(folder, **options)  # type: ignore[arg-type]
    try:
        yield machines
    finally:
        machines.close()


def _uv(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("uv")), *arguments]
    environ = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    done = subprocess.run(command, env=environ | index_variables(""), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
