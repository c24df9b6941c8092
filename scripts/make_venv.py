# ruff: noqa: T201
"""Make a virtual environment, or keep an existing one that works.

    python scripts/make_venv.py FOLDER

The environment gets the Python that runs this script. If that Python has torch, the environment sees torch and its
requirements through links, which come after its own packages on the path: nothing is downloaded again, and nothing is
installed into that Python.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

# Python's option -I leaves it out
sys.path.insert(0, str(Path(__file__).parent))

from progress import progress

OLDEST_PYTHON = (3, 11)
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def main(folder: Path) -> int:
    """Make the environment in `folder`; return the exit status."""
    if sys.version_info < OLDEST_PYTHON:
        has, needs = ".".join(map(str, sys.version_info[:2])), ".".join(map(str, OLDEST_PYTHON))
        return fail(f"{sys.executable} is Python {has}; {needs} or newer is needed: make PYTHON=/path/to/python")
    python = folder / "bin" / "python"
    if works(python):
        return 0
    print(f"making {folder} with Python {sys.version.split()[0]}", flush=True)
    with progress(f"making {folder}"):
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], stdin=subprocess.DEVNULL)
    if made.returncode != 0 or not works(python):
        return fail(
            "the virtual environment could not be made. On Debian and Ubuntu the package python3-venv is needed."
        )
    try:
        torch = distribution("torch")
    except PackageNotFoundError:
        return 0
    print(f"torch {torch.version} of {sys.executable} is used", flush=True)
    borrow(torch, folder.absolute() / "borrowed" / "site-packages", site_packages(python))
    return 0


def borrow(package: Distribution, folder: Path, site: Path) -> None:
    """Link a package and its requirements into `folder`, and put that after `site` on the path."""
    # the name `site-packages` marks its modules as installed packages, not as the user's code
    folder.mkdir(parents=True)
    for found in required(package):
        for file in found.files or ():
            top = Path(file.parts[0])
            link = folder / top
            # scripts are outside, under `..`
            if top.name not in ("..", "__pycache__") and not link.is_symlink():
                link.symlink_to(Path(str(found.locate_file(top))).absolute())
    (site / "borrowed.pth").write_text(f"{folder}\n")


def required(package: Distribution) -> list[Distribution]:
    """Return the package and all of its installed requirements."""
    found = {package.name: package}
    waiting = [package]
    while waiting:
        for line in waiting.pop().requires or ():
            name = _NAME.match(line)
            if name is None or "extra ==" in line or name[0] in found:
                continue
            try:
                found[name[0]] = distribution(name[0])
            except PackageNotFoundError:
                # not installed, as for a marker of another platform
                continue
            waiting.append(found[name[0]])
    return list(found.values())


def site_packages(python: Path) -> Path:
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([python, "-c", query], capture_output=True, text=True, check=True).stdout.strip())


def works(python: Path) -> bool:
    """Whether this is a Python with pip."""
    if not python.exists():
        return False
    return subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0


def fail(reason: str) -> int:
    print(reason, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
