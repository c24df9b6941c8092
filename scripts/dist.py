# ruff: noqa: T201
"""Build the source distribution and the wheel, check them, and try the wheel in an empty environment.

    python scripts/dist.py FOLDER

Writes both files to FOLDER. The wheel is built from the source distribution, as users of an index may build it. The
trial installs the wheel with pip into a new virtual environment, and runs a cell on two ranks in a terminal IPython.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRIAL = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.extension_manager.load_extension("sgpu_magic")
shell.run_cell("ten = 10")
shell.run_cell("%%distributed -n 2 --type cpu --out total\\nimport torch\\ntotal = torch.tensor(float(ten + rank))\\n"
               "torch.distributed.all_reduce(total)")
assert shell.user_ns["total"].item() == 21.0
"""


def main(folder: Path) -> int:
    """Build, check and try; return the exit status of the first command that failed, else 0."""
    shutil.rmtree(folder, ignore_errors=True)
    build = [sys.executable, "-m", "uv", "build", "--quiet", "--out-dir", str(folder), str(ROOT)]
    if status := run(build):
        return status
    files = sorted(folder.iterdir())
    names = [str(file) for file in files if file.suffix in (".whl", ".gz")]
    if status := run([sys.executable, "-m", "twine", "check", "--strict", *names]):
        return status
    wheel = next(name for name in names if name.endswith(".whl"))
    with tempfile.TemporaryDirectory(prefix="sgpu-dist-") as trial:
        return run_trial(wheel, Path(trial))


def run_trial(wheel: str, folder: Path) -> int:
    """Install the wheel into an empty environment and use it there; return the exit status."""
    python = folder / "venv" / "bin" / "python"
    if status := run([sys.executable, str(ROOT / "scripts" / "make_venv.py"), str(folder / "venv")]):
        return status
    pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    if status := run([*pip, wheel]):
        return status
    home = {f"SGPU_{name}_DIR": str(folder / name.lower()) for name in ("STATE", "RUNTIME")}
    environ = {**os.environ, **home, "SGPU_CONFIG": str(folder / "config.toml")}
    sgpu = [str(python.with_name("sgpu")), "--version"], [str(python), "-c", TRIAL]
    for command in sgpu:
        if status := run(command, environ, folder):
            return status
    return run([str(python.with_name("sgpu")), "pool", "stop"], environ, folder)


def run(command: list[str], environ: dict[str, str] | None = None, cwd: Path = ROOT) -> int:
    print("+", *(part if "\n" not in part else "..." for part in command), flush=True)
    return subprocess.run(command, env=environ, cwd=cwd, stdin=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
