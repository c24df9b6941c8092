"""This project's own notebooks, executed from top to bottom in a separate home, for their tests."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from homes import Home
from kernels import plain
from lazy_modules import nbclient, nbformat

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
FAILS = "raises-exception"
_CELL_TIMEOUT_S = 120


@dataclass(frozen=True)
class Shown:
    """A cell of an executed notebook.

    Args:
        section: The heading above it.
        fails: It is tagged `raises-exception`.
        text: All text below it, an error's traceback last.
        errors: Names of the errors shown.
    """

    section: str
    source: str
    fails: bool
    text: str
    errors: tuple[str, ...]


@dataclass(frozen=True)
class Executed:
    """An executed notebook's code cells, and its duration in seconds."""

    cells: tuple[Shown, ...]
    seconds: float

    def of(self, section: str) -> str:
        return "\n".join(cell.text for cell in self.cells if cell.section == section)


def headings(notebook: Path) -> list[str]:
    """Return the headings of the notebook's sections, in order."""
    return [
        line.removeprefix("## ")
        for cell in nbformat.read(notebook, as_version=4).cells
        if cell.cell_type == "markdown"
        for line in cell.source.splitlines()
        if line.startswith("## ")
    ]


def introduction(notebook: Path) -> str:
    """Return the text of the notebook's first cell."""
    return nbformat.read(notebook, as_version=4).cells[0].source


def execute(notebook: Path, home: Home) -> Executed:
    """Execute a notebook without a front end, in the home's working directory with this Python's kernel."""
    folder = Path(home.environ["JUPYTER_DATA_DIR"]) / "kernels" / "python3"
    folder.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "test", "language": "python"}))
    made = nbformat.read(notebook, as_version=4)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in home.environ.items():
            patch.setenv(name, value)
        resources = {"metadata": {"path": str(home.work)}}
        client = nbclient.NotebookClient(made, timeout=_CELL_TIMEOUT_S, resources=resources)
        begin = time.monotonic()
        client.execute()
        seconds = time.monotonic() - begin
    nbformat.validate(made)
    return Executed(tuple(shown(made)), seconds)


def saved(notebook: Path) -> list[Shown]:
    """Return the notebook's code cells with the outputs saved in the file."""
    return list(shown(nbformat.read(notebook, as_version=4)))


def shown(made: nbformat.NotebookNode) -> Iterator[Shown]:
    """Yield a notebook's code cells as a reader sees them."""
    section = ""
    for cell in made.cells:
        if cell.cell_type == "markdown":
            section = next((line[3:] for line in cell.source.splitlines() if line.startswith("## ")), section)
            continue
        texts: list[str] = []
        for output in cell.outputs:
            texts.append(output.get("text", "") or output.get("data", {}).get("text/plain", ""))
        failed = [output for output in cell.outputs if output.output_type == "error"]
        texts += ["\n".join(output.traceback) for output in failed]
        yield Shown(
            section,
            cell.source,
            FAILS in cell.metadata.get("tags", []),
            plain("\n".join(texts)).strip(),
            tuple(output.ename for output in failed),
        )
