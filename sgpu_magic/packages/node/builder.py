"""Builds one environment with uv, in a temporary folder that is renamed when it is complete.

claim -> venv -> sizes -> install -> base layer -> rename      usable
      -> room within the budget -> byte code                   in the background
"""

from __future__ import annotations

import compileall
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

from sgpu_magic.files.atomic_file import sha256_of
from sgpu_magic.packages.distributions import distribution_name, normalised
from sgpu_magic.packages.environment_digest import own_python
from sgpu_magic.packages.node import refusals
from sgpu_magic.packages.node.base_layer import base_layer, link_layer
from sgpu_magic.packages.node.refusals import BuildFailed, estimate
from sgpu_magic.packages.node.store import BuildMoved, BuildOrder, Built, BuiltEnvironments, HeldLock
from sgpu_magic.packages.requirement_files import key_of
from sgpu_magic.packages.uv_command import UvFailed, index_variables, run_uv
from sgpu_magic.system import processes
from sgpu_magic.wire.attachments import Environment, Wheel
from sgpu_magic.wire.decoding import load_json

_POLL_S = 0.05
# would be installed as dependencies, although the base layer has them
_FROM_BASE = ("torch", "torchvision", "torchaudio", "triton", "pytorch-triton")
_PATH_ENTRY = "sgpu_base_layer.pth"


class Builder:
    """Builds the environment of an order.

    Args:
        order: What to build, and where.
        moved: Called with the progress.
    """

    def __init__(self, order: BuildOrder, moved: Callable[[BuildMoved], None]) -> None:
        self._order = order
        self._environment = order.environment
        self._root = Path(order.root)
        self._store = BuiltEnvironments(self._root)
        self._moved = moved
        self._packages = len(self._environment.requirements) + len(self._environment.wheels)
        self._index = index_variables(order.index_url)

    def build(self) -> tuple[bool, HeldLock]:
        """Build the environment unless it exists.

        Returns:
            Whether it was built by this process, and the lock that keeps it from being removed.

        Raises:
            BuildFailed: It can't be built. Nothing is left behind.
        """
        refusals.refuse_unfit(self._environment)
        try:
            return self._build_or_wait()
        except UvFailed as failed:
            raise refusals.of_uv(failed, self._root) from None
        except OSError as error:
            raise refusals.of_system(error, self._root) from error

    def tidy_up(self) -> None:
        """Remove old environments and write byte code, after the environment is usable. Runs at idle priority."""
        os.nice(19)
        processes.yield_cores_to_ranks()
        name = self._order.name
        # on a full disk the ranks' imports are only slower
        with contextlib.suppress(OSError):
            self._store.measure(name)
            self._store.make_room(self._order.budget_bytes)
            # the environment has this Python
            compileall.compile_dir(_site_packages(self._store.folder(name) / "venv"), quiet=2)
            self._store.measure(name)

    # ------------------------------------------------------------ one builder at a time

    def _build_or_wait(self) -> tuple[bool, HeldLock]:
        """Build the environment, or wait for another process that builds it."""
        name, reported = self._order.name, False
        while True:
            there = self._store.open(name)
            if there is not None:
                return False, there[1]
            lock = self._store.claim(name)
            if lock is not None:
                if not self._store.is_whole(name):
                    return True, self._build_claimed(lock)
                # built between the two checks
                lock.close()
                continue
            if not reported:
                reported = True
                self._moved(BuildMoved(step="waiting", packages=self._packages))
            time.sleep(_POLL_S)

    def _build_claimed(self, lock: HeldLock) -> HeldLock:
        try:
            building = self._store.begin(self._order.name)
            built = self._make(building)
            self._store.finish(self._order.name, building, built)
            lock.share()
        except BaseException:
            # also on an interrupt: leave nothing of an unfinished build
            self._store.abandon(self._order.name)
            lock.close()
            raise
        return lock

    # ------------------------------------------------------------ the steps

    def _make(self, building: Path) -> Built:
        environment = self._environment
        venv = building / "venv"
        final = self._store.folder(self._order.name)
        self._moved(BuildMoved(step="resolving", packages=self._packages))
        interpreter = getattr(sys, "_base_executable", sys.executable)
        run_uv(
            ["venv", "--quiet", "--relocatable", "--no-python-downloads", "--python", interpreter, str(venv)],
            variables=self._index,
        )
        python = venv / "bin" / "python"
        lines = [*environment.requirements, *(self._checked(wheel, building) for wheel in environment.wheels)]
        options = ["--python", str(python), *self._resolution(building)]
        layer = _Layer(environment, building / "base")
        if lines:
            compile_ = ["pip", "compile", "--quiet", "--format", "pylock.toml", "--no-header", *options, "-"]
            sizes = estimate(
                environment,
                self._root / "sizes.json",
                lambda lines: run_uv(compile_, stdin="\n".join(lines), variables=self._index),
            )
            refusals.refuse_large(sizes, self._order.limit_bytes)
            self._install(lines, options, layer.foresee)
        site = _site_packages(venv)
        has_itself = {normalised(info.name.partition("-")[0]) for info in site.glob("*.dist-info")}
        layer.complete(has_itself)
        path = _path_of(venv, site)
        (site / _PATH_ENTRY).write_text(f"{final / 'base'}\n")
        return Built(
            prefix=str(final / "venv"),
            executable=str(final / "venv" / "bin" / "python"),
            sys_path=(*(entry.replace(str(building), str(final), 1) for entry in path), str(final / "base")),
            digest=environment.digest,
            packages=len(has_itself),
        )

    def _resolution(self, building: Path) -> list[str]:
        environment = self._environment
        options: list[str] = [] if environment.allow_build else ["--no-build"]
        if not environment.resolve:
            return [*options, "--no-deps"]
        if not environment.torch_mine:
            # a marker that is never true: torch and its companions come from the base layer
            overrides = building / "overrides.txt"
            overrides.write_text("".join(f'{name} ; python_version < "0"\n' for name in _FROM_BASE))
            options += ["--override", str(overrides)]
        return options

    def _install(self, lines: list[str], options: list[str], meanwhile: Callable[[], None]) -> None:
        def on_line(line: str) -> None:
            word, number, *_ = [*line.split(" ", 2), ""]
            count = int(number) if number.isdigit() else 0
            if word == "Resolved":
                self._packages = count
                self._moved(BuildMoved(step="downloading", packages=count))
            elif word == "Prepared":
                self._moved(BuildMoved(step="installing", packages=self._packages))
            elif word == "Installed":
                self._moved(BuildMoved(step="installing", done=count, packages=self._packages))

        run_uv(
            ["pip", "install", *options, "--requirement", "-"],
            stdin="\n".join(lines),
            variables=self._index,
            on_line=on_line,
            meanwhile=meanwhile,
        )

    def _checked(self, wheel: Wheel, building: Path) -> str:
        """Return the requirement line for a wheel, after checking its hash."""
        if os.path.basename(wheel.file) != wheel.file or not wheel.file.endswith(".whl"):
            raise BuildFailed(f"{wheel.file!r} is not the name of a wheel; the notebook's client has to be repaired.")
        path = Path(wheel.path)
        try:
            digest = sha256_of(path)
        except FileNotFoundError:
            raise BuildFailed(
                f"the wheel {wheel.file}, which was built from a package that no registry has, is no longer at "
                f"{wheel.path}. Run the cell again: the notebook rebuilds it."
            ) from None
        if digest != wheel.sha256:
            raise BuildFailed(
                f"the wheel {wheel.file} at {wheel.path} is not the one that the notebook named: its SHA-256 "
                "differs. Remove the file and run the cell again: the notebook rebuilds it."
            )
        if path.name != wheel.file:
            (building / "wheels").mkdir(exist_ok=True)
            (building / "wheels" / wheel.file).symlink_to(path)
            path = building / "wheels" / wheel.file
        return path.as_uri()


class _Layer:
    """The base layer of one environment, linked while uv installs.

    Args:
        environment: The environment.
        folder: The folder for the links.
    """

    def __init__(self, environment: Environment, folder: Path) -> None:
        self._environment = environment
        self._folder = folder
        self._linked: set[str] | None = None

    def foresee(self) -> None:
        """Link it early if the requirements already tell which packages the environment has itself."""
        if not self._environment.resolve:
            lines, wheels = self._environment.requirements, self._environment.wheels
            self._link({*(key_of(line) for line in lines), *map(distribution_name, wheels)})

    def complete(self, has_itself: set[str]) -> None:
        """Link it, or link it again if the environment has other packages than foreseen.

        Args:
            has_itself: Normalised names of the installed packages.

        Raises:
            BuildFailed: The node has no torch or no sgpu-magic.
        """
        if self._linked is None or self._linked & has_itself:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._link(has_itself)
        missing = {"torch", "sgpu-magic"} - has_itself - (self._linked or set())
        if missing:
            raise BuildFailed(
                f"the Python that the pool of {socket.gethostname()} was started with ({sys.executable}) has no "
                f"{' and no '.join(sorted(missing))}, which the ranks import from there. Install it there, or start "
                "the pool with a Python that has it."
            )

    def _link(self, without: set[str]) -> None:
        layer = base_layer(without, map(key_of, self._environment.needed))
        link_layer(layer, self._folder)
        self._linked = set(layer)


def _site_packages(venv: Path) -> Path:
    return venv / "lib" / f"python{own_python()}" / "site-packages"


def _path_of(venv: Path, site: Path) -> list[str]:
    """Return the `sys.path` of the environment's Python. Starts that Python only if a `.pth` file adds entries."""
    if not any(_adds_entries(file) for file in site.glob("*.pth")):
        library = os.path.realpath(sysconfig.get_path("stdlib"))
        standard = (library, os.path.join(library, "lib-dynload"))
        own = [entry for entry in sys.path if entry.endswith(".zip") or os.path.realpath(entry) in standard]
        return [*own, str(site)]
    code = "import json, sys; print(json.dumps(sys.path))"
    done = subprocess.run(
        [venv / "bin" / "python", "-I", "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise BuildFailed(
            f"the Python that was created for the run's packages on {socket.gethostname()} does not start. It says: "
            f"{last} Leave out the package that runs this when Python starts."
        )
    found: list[str] = load_json(done.stdout)
    return found


def _adds_entries(file: Path) -> bool:
    lines = file.read_text(errors="replace").splitlines()
    return any(line.strip() and not line.startswith(("#", "import ", "import\t")) for line in lines)
