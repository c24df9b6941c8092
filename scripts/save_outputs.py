# ruff: noqa: T201
"""Execute a notebook without a front end and save its outputs in it, as text without this machine's paths and names.

    python scripts/save_outputs.py notebooks/troubleshooting.ipynb

For notebooks that people read without running them. Cells with the tag `raises-exception` may fail.
"""

from __future__ import annotations

import re
import socket
import sys
import sysconfig
from pathlib import Path

import nbformat
from demo import own_pool
from nbclient import NotebookClient

_CELL_TIMEOUT_S = 120


def main(source: Path) -> None:
    """Execute the notebook `source` and save it in place."""
    notebook = nbformat.read(source, as_version=4)
    with own_pool() as places:
        client = NotebookClient(notebook, timeout=_CELL_TIMEOUT_S, kernel_name="python3", record_timing=False)
        client.execute(cwd=str(source.parent))
    changes = [
        (re.escape(str(places / "state")), "/home/you/.local/state/sgpu-magic"),
        (re.escape(str(places / "run")), "/run/user/1000/sgpu"),
        (re.escape(sysconfig.get_path("purelib")), "/home/you/.venv/lib/python3/site-packages"),
        (re.escape(sys.prefix), "/home/you/.venv"),
        (rf"\b{re.escape(socket.gethostname())}\b", "node-1"),
    ]
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            _simplify(output, changes)
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, source)
    print(f"saved the outputs of {len(notebook.cells)} cells in {source}")


def _simplify(output: nbformat.NotebookNode, changes: list[tuple[str, str]]) -> None:
    """Reduce an output to its text, and replace what is specific to this machine."""
    if "data" in output:
        output.data = nbformat.from_dict({"text/plain": output.data.get("text/plain", "")})
    for place, name in ((output, "text"), (output, "evalue"), (output.get("data", {}), "text/plain")):
        if name in place:
            place[name] = _changed(place[name], changes)
    if "traceback" in output:
        output.traceback = [_changed(line, changes) for line in output.traceback]


def _changed(text: str, changes: list[tuple[str, str]]) -> str:
    for pattern, instead in changes:
        text = re.sub(pattern, instead, text)
    return text


if __name__ == "__main__":
    main(Path(sys.argv[1]))
