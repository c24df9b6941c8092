"""Notebooks that run without a front end, with nbclient and papermill."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jupyter_client
from homes import Home
from lazy_modules import nbformat

_KERNEL = "sgpu-test"


def notebook(*cells: str) -> nbformat.NotebookNode:
    """Return a notebook with these code cells."""
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    made.metadata["kernelspec"] = {"name": _KERNEL, "display_name": "test", "language": "python"}
    return made


def install_kernel(home: Home) -> None:
    """Make this Python the kernel of `notebook`. This process's variables must be the home's."""
    folder = Path(home.environ["JUPYTER_DATA_DIR"]) / "kernels" / _KERNEL
    folder.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "test", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))
    assert jupyter_client.kernelspec.KernelSpecManager().get_kernel_spec(_KERNEL).argv[0] == sys.executable
