# ruff: noqa: T201
"""Run the quickstart notebook without a front end and print its accuracy.

    python scripts/demo.py NOTEBOOK FOLDER BEGUN INSTALLED

Writes the executed notebook and an HTML page of it to FOLDER. Uses a separate pool, which is stopped at the end.
BEGUN and INSTALLED are the times, in seconds since the epoch, at which make began and at which the environment was
there: the last line says how long everything took, and how much of that was the installation.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
from ipykernel import kernelspec
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter
from progress import progress

_CELL_TIMEOUT_S = 600
_ACCURACY = re.compile(r"^.*accuracy (0\.\d+|1\.0+).*$", re.MULTILINE)
_GOOD = 0.95
# where nothing is installed, make takes less until it runs this script
_INSTALLED_BEFORE_S = 2


def main(source: Path, folder: Path) -> int:
    """Execute the notebook `source`; return 0 if it prints a good accuracy, else 1."""
    folder.mkdir(parents=True, exist_ok=True)
    notebook = nbformat.read(source, as_version=4)
    client = NotebookClient(notebook, timeout=_CELL_TIMEOUT_S, kernel_name="python3")
    print(f"running {source} ...", flush=True)
    with open(folder / "kernel.log", "wb") as log:
        try:
            with progress("running the notebook"):
                client.execute(cwd=str(source.parent), stderr=log)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            print(f"{error}\nThe kernel's own words are in {log.name}", file=sys.stderr)
            return 1
        finally:
            nbformat.write(notebook, folder / source.name)
    page, _ = HTMLExporter().from_notebook_node(notebook)
    (folder / source.name).with_suffix(".html").write_text(page)
    printed = "".join(
        output["text"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output["output_type"] == "stream"
    )
    line = _ACCURACY.search(printed)
    if line is None or float(line[1]) <= _GOOD:
        print(f"no accuracy above {_GOOD} in {folder / source.name}", file=sys.stderr)
        return 1
    print(line[0])
    print(f"the executed notebook is {folder / source.name}")
    print(f"and a page of it {(folder / source.name).with_suffix('.html')}")
    return 0


def duration(begun_s: float, installed_s: float, ended_s: float) -> str:
    """Return how long everything took; with the parts, if something was installed."""
    whole, installing = f"took {ended_s - begun_s:.0f} s", installed_s - begun_s
    if installing < _INSTALLED_BEFORE_S:
        return whole
    return f"{whole}: {installing:.0f} s to install, {ended_s - installed_s:.0f} s to run the notebook"


@contextlib.contextmanager
def own_pool() -> Iterator[Path]:
    """Use a separate pool in the block, and stop it at the end, even after an error.

    Yields:
        The folder with the pool's directories.
    """
    # short: a socket's path has at most 108 bytes
    places = Path(tempfile.mkdtemp(prefix="sgpu-demo-"))
    os.environ["SGPU_STATE_DIR"], os.environ["SGPU_RUNTIME_DIR"] = str(places / "state"), str(places / "run")
    os.environ["SGPU_CACHE_DIR"] = str(places / "cache")
    # this Python's kernel takes precedence over the user's kernels of that name
    kernelspec.install(prefix=str(places))
    os.environ["JUPYTER_PATH"] = str(places / "share" / "jupyter")
    try:
        yield places
    finally:
        command = [sys.executable, "-m", "sgpu_magic.cli", "pool", "stop", "--force"]
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        shutil.rmtree(places, ignore_errors=True)


if __name__ == "__main__":
    with own_pool():
        status = main(Path(sys.argv[1]), Path(sys.argv[2]))
    if status == 0:
        print(duration(float(sys.argv[3]), float(sys.argv[4]), time.time()))
    sys.exit(status)
