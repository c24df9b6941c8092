# ruff: noqa: T201
"""Run the tests in `tests/gpu` with a Python that already has a torch for this machine's GPUs, without a network.

    python scripts/test_gpu.py [--wheels FOLDER] [ARGUMENT...]

That Python is not changed. The tests run in a separate environment in `build/test_gpu`, which sees torch and other
requirements that this Python has through links, and installs the rest from the wheels in FOLDER (see `gpu_wheels.py`).
ARGUMENTs go to pytest.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

# `-I` leaves the script's own folder off the path
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_needs import ROOT, name_of, requirements
from make_venv import OLDEST_PYTHON, fail, required, site_packages, works
from setup import OLDEST_TORCH

FOLDER = ROOT / "build" / "test_gpu"
# measured for comparison if installed
PEERS = ("accelerate",)
# the tests share the GPUs, so they run one at a time; the rows of figures keep the order of their file
_PYTEST = ("-o", "addopts=-q --strict-markers", "-p", "no:randomly", "-p", "no:xdist", "-p", "no:anyio", "-rs")
_INSIDE = "--inside"


def main(arguments: Sequence[str]) -> int:
    """Make the environment and run the tests in it; return the exit status."""
    if arguments[:1] == [_INSIDE]:
        return inside(arguments[1], arguments[2], arguments[3:])
    parser = argparse.ArgumentParser(description="Run the tests that need a real GPU.", allow_abbrev=False)
    parser.add_argument("--wheels", default="", help="folder of wheels for what this Python lacks")
    options, for_pytest = parser.parse_known_args(arguments)
    problem = why_not(options.wheels)
    if problem:
        return fail(problem)
    python, state = FOLDER / "venv" / "bin" / "python", FOLDER / "made_of"
    made_of = fingerprint()
    if not works(python) or not state.is_file() or state.read_text() != made_of:
        state.unlink(missing_ok=True)
        made = make(python)
        if made != 0:
            return made
        state.write_text(made_of)
    wheels = str(Path(options.wheels).absolute()) if options.wheels else ""
    return subprocess.run([python, "-I", __file__, _INSIDE, sys.executable, wheels, *for_pytest]).returncode


def why_not(wheels: str) -> str:
    """Return why this Python can't run the tests, "" if it can."""
    who, another = sys.executable, "Name another one: make test-gpu PYTHON=/path/to/python"
    if sys.version_info < OLDEST_PYTHON:
        return f"{who} is Python {sys.version.split()[0]}; {_dotted(OLDEST_PYTHON)} or newer is needed. {another}"
    try:
        torch = distribution("torch").version
    except PackageNotFoundError:
        return f"{who} has no torch; one for this machine's GPUs is needed. {another}"
    if tuple(int(part) for part in torch.split("+")[0].split(".")[:2]) < OLDEST_TORCH:
        return f"torch {torch} of {who} is too old; {_dotted(OLDEST_TORCH)} or newer is needed. {another}"
    if wheels and not any(Path(wheels).glob("*.whl")):
        return f"There are no wheels in {wheels}. {_how_to_collect(wheels)}"
    return ""


def fingerprint() -> str:
    """Return a hash of what the environment depends on: this Python, its packages and the requirements."""
    has = sorted(f"{found.name}=={found.version}" for found in distributions())
    text = "\n".join([sys.executable, sys.version, *has, *requirements()])
    return hashlib.sha256(text.encode()).hexdigest()


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _how_to_collect(wheels: str) -> str:
    return (
        f"On a machine with a network, `make gpu-wheels PY={_dotted(sys.version_info[:2])} "
        f"WHEELS={shlex.quote(wheels)}` collects them."
    )


# ---------------------------------------------------------------- the environment


def make(python: Path) -> int:
    """Make the environment, with links to requirements that this Python has; return the exit status."""
    print(f"making {FOLDER / 'venv'} with Python {sys.version.split()[0]}", flush=True)
    command = [sys.executable, "-m", "venv", "--clear", FOLDER / "venv"]
    if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode != 0:
        # a Python without ensurepip, such as Debian's without python3-venv, may still have a pip to borrow
        subprocess.run([*command, "--without-pip"], stdin=subprocess.DEVNULL)
    if not python.exists():
        return fail("the virtual environment could not be made; what failed is said above.")
    # outside the environment: pip would treat the links as its own packages and remove their targets. The name
    # `site-packages` marks the modules as installed packages, not as the user's code
    borrowed, site = FOLDER / "borrowed" / "site-packages", site_packages(python)
    names = ["torch", *map(name_of, requirements()), *PEERS]
    link(what_is_there(names if works(python) else [*names, "pip"]), borrowed)
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    (site / "project.pth").write_text(f"{ROOT}\n")
    if not works(python):
        return fail("no pip was found. On Debian and Ubuntu the package python3-venv is needed.")
    return 0


def what_is_there(names: Iterable[str]) -> list[Distribution]:
    """Return the packages and their requirements, as far as this Python has them."""
    found: dict[str, Distribution] = {}
    for name in names:
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        found.update((each.name, each) for each in required(package))
    return list(found.values())


def link(packages: Iterable[Distribution], folder: Path) -> None:
    """Recreate `folder` with links to the packages' files and folders in `site-packages`."""
    if folder.is_dir():
        # removes the links, never their targets
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for package in packages:
        for file in package.files or ():
            top = Path(file.parts[0])
            place = folder / top
            # scripts are outside, under `..`
            if top.name not in ("..", "__pycache__") and not place.is_symlink():
                place.symlink_to(Path(str(package.locate_file(top))).absolute())


# ---------------------------------------------------------------- in the environment


def inside(python: str, wheels: str, for_pytest: Sequence[str]) -> int:
    """In the environment's own Python, install missing packages and run the tests; return the exit status.

    Args:
        python: The Python that has torch.
        wheels: The folder of wheels, "" for none.
        for_pytest: pytest's arguments.
    """
    lacking = missing()
    if lacking and not wheels:
        return fail(
            f"The tests need packages that {python} does not have: {', '.join(lacking)}. "
            f"{_how_to_collect('wheels')} Bring that folder here and name it: "
            f"make test-gpu PYTHON={shlex.quote(python)} WHEELS=wheels"
        )
    if lacking:
        installed = install(wheels)
        if installed != 0:
            return fail(f"The wheels in {wheels} are not enough. {_how_to_collect(wheels)}")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST_"))}
    tests = () if any("tests/" in argument for argument in for_pytest) else ("tests/gpu",)
    command = [sys.executable, "-m", "pytest", *_PYTEST, *tests, *for_pytest]
    return subprocess.run(command, cwd=ROOT, env=environ).returncode


def missing() -> list[str]:
    """Return the requirements that this environment does not meet, including those of its installed packages."""
    # pip's copy: the package itself may be missing
    from pip._vendor.packaging.requirements import Requirement

    lacking: dict[str, None] = {}
    waiting, seen = [Requirement(line) for line in requirements()], set[str]()
    while waiting:
        wanted = waiting.pop(0)
        if str(wanted) in seen:
            continue
        seen.add(str(wanted))
        try:
            found = distribution(wanted.name)
        except PackageNotFoundError:
            lacking[f"{wanted.name}{wanted.specifier}"] = None
            continue
        if not wanted.specifier.contains(found.version, prereleases=True):
            lacking[f"{wanted.name}{wanted.specifier} (it has {found.version})"] = None
        for further in map(Requirement, found.requires or ()):
            extras = ("", *wanted.extras)
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                further.marker = None
                waiting.append(further)
    return list(lacking)


def install(wheels: str) -> int:
    """Install missing packages from a folder of wheels; return pip's exit status."""
    print(f"installing what is missing from {wheels}", flush=True)
    # without pip's configuration, so that it searches nowhere else
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-index", "--find-links", wheels, *requirements()]
    return subprocess.run(command, env=environ | {"PIP_CONFIG_FILE": os.devnull}, stdin=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
