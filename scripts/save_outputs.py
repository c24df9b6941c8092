# ruff: noqa: T201
"""Execute a notebook without a front end and save its outputs in it, without this machine's paths and names.

    python scripts/save_outputs.py [--rich] NOTEBOOK

For notebooks that people read without running them. Cells with the tag `raises-exception` may fail. Outputs are saved
as text, with `--rich` also as HTML and as pictures.
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


def main(source: Path, kinds: frozenset[str]) -> None:
    """Execute the notebook `source` and save it in place, with outputs of these MIME types."""
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
            _simplify(output, changes, kinds)
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, source)
    print(f"saved the outputs of {len(notebook.cells)} cells in {source}")


def _simplify(output: nbformat.NotebookNode, changes: list[tuple[str, str]], kinds: frozenset[str]) -> None:
    """Reduce an output to some of its forms, and replace what is specific to this machine."""
    data = output.get("data", {})
    if "data" in output:
        data = {"text/plain": data.get("text/plain", "")} | {kind: data[kind] for kind in kinds & set(data)}
        output.data = data = nbformat.from_dict(data)
    for place, name in ((output, "text"), (output, "evalue"), (data, "text/plain"), (data, "text/html")):
        if name in place:
            place[name] = _changed(place[name], changes)
    if "traceback" in output:
        output.traceback = [_changed(line, changes) for line in output.traceback]


def _changed(text: str, changes: list[tuple[str, str]]) -> str:
    for pattern, instead in changes:
        text = re.sub(pattern, instead, text)
    return text


if __name__ == "__main__":
    *options, last = sys.argv[1:]
    main(Path(last), frozenset({"text/html", "image/png"} if "--rich" in options else ()))
