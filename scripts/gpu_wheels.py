# ruff: noqa: T201
"""Collect the wheels that `make test-gpu` needs on a machine without a network.

    python scripts/gpu_wheels.py 3.12 FOLDER

The wheels are for Linux on x86-64 with glibc 2.34 or newer and for the given version of CPython, whatever Python runs
this script. They don't include torch and what only torch requires: the machine with the GPUs has these. uv resolves the
versions, since pip would evaluate markers for its own Python and system; pip downloads them from its configured index.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu_needs import requirements
from make_venv import fail
from setup import pips_index

MOST_BYTES = 60_000_000
_GLIBC_MINOR = 34
# pip accepts exactly the platforms that are named
_PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(_GLIBC_MINOR, 4, -1)), "manylinux2014_x86_64")
_PLATFORMS = (*_PLATFORMS, "manylinux2010_x86_64", "manylinux1_x86_64")
_HAS_TORCH = re.compile(r"(torch|triton|cuda|nvidia_(?!ml_py))", re.IGNORECASE)
_LISTED = 5


def main() -> int:
    """Resolve, download, check the size; return the exit status."""
    parser = argparse.ArgumentParser(description="Collect the wheels that `make test-gpu` needs.")
    parser.add_argument("python", help="version of the Python that is to run the tests, such as 3.12")
    parser.add_argument("folder", type=Path, help="where the wheels are put")
    options = parser.parse_args()
    if not re.fullmatch(r"3\.\d+", options.python):
        return fail(f"{options.python!r} is no version such as 3.12: make gpu-wheels PY=3.12 WHEELS=folder")
    with tempfile.TemporaryDirectory() as folder:
        pins, wheels = Path(folder) / "pins.txt", Path(folder) / "wheels"
        status = resolve(options.python, pins) or download(options.python, pins, wheels)
        if status != 0:
            return fail(f"The wheels for Python {options.python} can't be had; what failed is said above.")
        found = sorted(wheels.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size)
        problem = why_not(found)
        if problem:
            return fail(problem)
        size = sum(wheel.stat().st_size for wheel in found)
        options.folder.mkdir(parents=True, exist_ok=True)
        for wheel in found:
            shutil.move(wheel, options.folder / wheel.name)
    print(f"{len(found)} wheels for Python {options.python}, {size / 1e6:.1f} MB together, are in {options.folder}")
    return 0


def resolve(python: str, pins: Path) -> int:
    """Write a version of each package to `pins`; return uv's exit status."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--python-version", python]
    command += ["--python-platform", f"x86_64-manylinux_2_{_GLIBC_MINOR}", "--only-binary", ":all:"]
    # as in pip, which must find the same versions: it treats all of its indexes alike
    command += [*pips_index(), "--index-strategy", "unsafe-best-match"]
    command += ["--no-header", "--no-annotate", "--output-file", str(pins), "-"]
    return subprocess.run(command, input="\n".join(requirements()), text=True, stdout=subprocess.DEVNULL).returncode


def download(python: str, pins: Path, folder: Path) -> int:
    """Download the packages in `pins`; return pip's exit status."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    command += ["--dest", str(folder), "--requirement", str(pins)]
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode


def why_not(wheels: list[Path]) -> str:
    """Return why these wheels are not acceptable, "" if they are.

    Args:
        wheels: The wheels, largest first.
    """
    torchs = [wheel.name for wheel in wheels if _HAS_TORCH.match(wheel.name)]
    if torchs:
        return f"torch and its own are not to be among the wheels: {', '.join(torchs)}"
    size = sum(wheel.stat().st_size for wheel in wheels)
    if size <= MOST_BYTES:
        return ""
    largest = ", ".join(f"{wheel.name} {wheel.stat().st_size / 1e6:.1f} MB" for wheel in wheels[:_LISTED])
    return f"{len(wheels)} wheels have {size / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:.0f}. The largest: {largest}"


if __name__ == "__main__":
    sys.exit(main())
