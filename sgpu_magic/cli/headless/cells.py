"""Where a notebook's cells run, and what is put before them."""

# nbformat is not typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ast
import re
import shlex
from typing import Any

from sgpu_magic.cli.headless.formats import submits_runs
from sgpu_magic.cli.headless.job import INJECTED_TAG, TAG, Job, declared, has_tag, source_of
from sgpu_magic.options.defaults import as_words

SETUP_TAG = "injected-sgpu"

_OURS = re.compile(
    r"^\s*(?:%%(?:distributed|rank|ray_launch)\b|[\w,\s]*=?\s*%sgpu_\w+|(?:from|import)\s+(?:sgpu_magic|serverless_gpu)\b)",
    re.MULTILINE,
)
_CHOOSES = re.compile(
    r"^\s*(?:%%(?:distributed|rank|ray_launch)\b|[\w,\s]*=?\s*%sgpu_(?:connect|auto|replay)\b|"
    r"(?:from|import)\s+(?:sgpu_magic|serverless_gpu)\b)",
    re.MULTILINE,
)
_LOADS = re.compile(r"^\s*%(?:re)?load_ext\s+sgpu_magic\b", re.MULTILINE)


def prepared(notebook: Any, job: Job) -> list[str]:
    """Put what the job says into a notebook, in place; what an earlier `sgpu run` has put there is replaced.

    Args:
        notebook: As nbformat has read it, of its version 4.
        job: What is to be run.

    Returns:
        Sentences about what may not be meant.
    """
    cells = [cell for cell in notebook.cells if not has_tag(cell, SETUP_TAG)]
    notes: list[str] = []
    if job.parameters:
        cells, notes = _with_parameters(cells, job)
    sources = [cell.source for cell in cells if cell.cell_type == "code"]
    setup = _setup(sources, job)
    if setup:
        cells.insert(0, _new_cell(setup, SETUP_TAG))
    elif job.cells == "auto" and _asks(job) and not any(_CHOOSES.search(source) for source in sources):
        notes.append("nothing in it runs on a pool, and --gpus and --type have no effect.")
    notebook.cells = cells
    # cell ids came with 4.5, and what was inserted has one
    notebook.nbformat_minor = max(notebook.nbformat_minor, 5)
    return notes


def as_cell(source: str, job: Job) -> str:
    """Return a script as a cell: for the ranks, or for the kernel when it submits runs of its own."""
    lines = f"{source.rstrip()}\n".splitlines(keepends=True)
    at = _after_future_imports(source)
    arguments = [str(job.source), *job.arguments]
    lines.insert(at, f"import sys; sys.argv, __file__ = {arguments!r}, {str(job.source)!r}\n")
    on_pool = job.cells == "ranks" or (job.cells == "auto" and not submits_runs(source))
    magic = f"%%distributed --name {shlex.quote(job.source.name)}\n" if on_pool else ""
    # a program's last line is no value to bring back
    return f"{magic}{''.join(lines)}pass\n"


def _after_future_imports(source: str) -> int:
    """Return the number of the first line that is neither the docstring nor an import from `__future__`."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return 0
    last = [
        each
        for at, each in enumerate(body)
        if (isinstance(each, ast.ImportFrom) and each.module == "__future__")
        or (at == 0 and isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
    ]
    return (last[-1].end_lineno or 0) if last else 0


def on_ranks(sources: list[str], job: Job) -> bool:
    """Whether plain cells run on the ranks."""
    if job.is_script:
        return False
    if job.cells != "auto":
        return job.cells == "ranks"
    return _asks(job) and not any(_CHOOSES.search(source) for source in sources)


def _asks(job: Job) -> bool:
    return bool(job.defaults.gpus or job.defaults.type)


def _setup(sources: list[str], job: Job) -> str:
    if on_ranks(sources, job):
        return f"%load_ext sgpu_magic\n{_connect_line(job)}\n%sgpu_auto on"
    if any(_OURS.search(source) for source in sources) and not any(_LOADS.search(source) for source in sources):
        return "%load_ext sgpu_magic"
    return ""


def _connect_line(job: Job) -> str:
    """What connects to the ranks: so that the copy tells what it ran on, and can be run again by hand."""
    # as long as the notebook runs, whatever its cells here take
    return shlex.join(["%sgpu_connect", "--idle", "0", *as_words(job.defaults)])


def _with_parameters(cells: list[Any], job: Job) -> tuple[list[Any], list[str]]:
    """papermill's ways: in place of an injected cell, else after the one tagged `parameters`, else first."""
    notes: list[str] = []
    new = _new_cell(source_of(job.parameters), INJECTED_TAG)
    tagged = next((at for at, cell in enumerate(cells) if has_tag(cell, TAG)), None)
    if tagged is None:
        notes.append("no cell is tagged `parameters`: they are set before the first cell.")
    else:
        known = declared(cells[tagged].source)
        if known is not None:
            there = ", ".join(sorted(known))
            notes += [
                f"the parameter {name} is not among those that the cell tagged `parameters` sets: {there}."
                for name in job.parameters
                if name not in known
            ]
    cells = [cell for cell in cells if not has_tag(cell, INJECTED_TAG)]
    tagged = next((at for at, cell in enumerate(cells) if has_tag(cell, TAG)), -1)
    return [*cells[: tagged + 1], new, *cells[tagged + 1 :]], notes


def _new_cell(source: str, tag: str) -> Any:
    import nbformat

    return nbformat.v4.new_code_cell(source, metadata={"tags": [tag]})
