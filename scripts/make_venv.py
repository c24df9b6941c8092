# ruff: noqa: T201
"""Make a virtual environment, or keep the one that is there.

    python scripts/make_venv.py FOLDER

Run by the Python that the environment shall be of. Where that Python has a torch of its own, the environment sees
its packages behind its own ones, so that torch is not downloaded a second time; nothing is installed over there.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OLDEST_PYTHON = (3, 11)
_BORROWED = "borrowed-packages.pth"


def main(folder: Path) -> int:
    """Make the environment in `folder`; return the exit status."""
    if sys.version_info < OLDEST_PYTHON:
        has, needs = ".".join(map(str, sys.version_info[:2])), ".".join(map(str, OLDEST_PYTHON))
        return fail(f"{sys.executable} is Python {has}; {needs} or newer is needed: make PYTHON=/path/to/python")
    python = folder / "bin" / "python"
    if works(python):
        return 0
    print(f"making {folder} with Python {sys.version.split()[0]}", flush=True)
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], stdin=subprocess.DEVNULL)
    if made.returncode != 0 or not works(python):
        return fail(
            "the virtual environment could not be made. On Debian and Ubuntu the package python3-venv is needed."
        )
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return 0
    print(f"torch {torch} of {sys.executable} is used", flush=True)
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([str(python), "-c", query], capture_output=True, text=True, check=True).stdout.strip()
    theirs = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (Path(site) / _BORROWED).write_text("".join(f"{path}\n" for path in theirs))
    return 0


def works(python: Path) -> bool:
    """Whether there is a Python with pip."""
    if not python.exists():
        return False
    return subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True).returncode == 0


def fail(reason: str) -> int:
    print(reason, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
