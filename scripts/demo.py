# ruff: noqa: T201
"""Run the quickstart notebook without a front end and print its accuracy.

    python scripts/demo.py NOTEBOOK FOLDER

Writes the executed notebook and an HTML page of it to FOLDER. Uses a separate pool, which is stopped at the end.
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

_CELL_TIMEOUT_S = 600
_ACCURACY = re.compile(r"^.*accuracy (0\.\d+|1\.0+).*$", re.MULTILINE)
_GOOD = 0.95


def main(source: Path, folder: Path) -> int:
    """Execute the notebook `source`; return 0 if it prints a good accuracy, else 1."""
    folder.mkdir(parents=True, exist_ok=True)
    notebook = nbformat.read(source, as_version=4)
    begin = time.monotonic()
    client = NotebookClient(notebook, timeout=_CELL_TIMEOUT_S, kernel_name="python3")
    print(f"running {source} ...", flush=True)
    with open(folder / "kernel.log", "wb") as log:
        try:
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
    print(f"took {time.monotonic() - begin:.0f} s; the executed notebook is {folder / source.name}")
    print(f"and a page of it {(folder / source.name).with_suffix('.html')}")
    return 0


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
    sys.exit(status)
