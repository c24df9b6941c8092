"""Preparing a notebook before its execution, and its result: the outputs and the executed copy."""

# nbformat is not typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import os
import re
import shlex
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sgpu_magic.cli.headless.formats import NOTEBOOK, read_notebook, submits_runs
from sgpu_magic.cli.headless.job import INJECTED_TAG, TAG, HeadlessJob, declared, has_tag, source_of
from sgpu_magic.errors import UsageError
from sgpu_magic.files.atomic_file import write_whole
from sgpu_magic.options.notebook_job import as_arguments
from sgpu_magic.payload.notebook_text import uses_databricks_names
from sgpu_magic.views import ansi

SETUP_TAG = "injected-sgpu"

_OURS_WITH = (
    r"(?m)^\s*(?:%%(?:distributed|rank|ray_launch)\b|(?:from|import)\s+(?:sgpu_magic|serverless_gpu|databricks\.air)\b|"
    r"[\w,\s]*=?\s*%sgpu_(?:{})\b)"
)
_OUR_CELLS, _CHOOSES = re.compile(_OURS_WITH.format(r"\w+")), re.compile(_OURS_WITH.format("connect|auto|replay"))
_LOADS = re.compile(r"^\s*%(?:re)?load_ext\s+sgpu_magic\b", re.MULTILINE)
_LOADS_COMPAT = re.compile(r"^\s*%(?:re)?load_ext\s+sgpu_magic\.compat\b", re.MULTILINE)
_WIDGETS = re.compile(r"\bdbutils\.widgets\b")
_LOAD, _LOAD_COMPAT = "%load_ext sgpu_magic", "%load_ext sgpu_magic.compat"
_TITLE_CHARS = 60


def prepared(notebook: Any, job: HeadlessJob) -> list[str]:
    """Insert the job's setup and parameters into a notebook, in place. Replaces those of an earlier `sgpu run`.

    Args:
        notebook: A notebook of nbformat version 4.
        job: The job.

    Returns:
        Notes on parameters that may be mistakes.
    """
    cells = [cell for cell in notebook.cells if not has_tag(cell, SETUP_TAG)]
    notes: list[str] = []
    if job.file.parameters:
        cells, notes = _with_parameters(cells, job)
    sources = [cell.source for cell in cells if cell.cell_type == "code"]
    setup = _setup(sources, job)
    if setup:
        cells.insert(0, _new_cell(setup, SETUP_TAG))
    notebook.cells = cells
    # inserted cells have ids, which need nbformat 4.5
    notebook.nbformat_minor = max(notebook.nbformat_minor, 5)
    return notes


def notebook_of(job: HeadlessJob) -> Any:
    """Read the job's notebook; a script becomes a notebook of one cell."""
    if not job.is_script:
        return read_notebook(job.source, job.form)
    import nbformat

    cell = nbformat.v4.new_code_cell(_as_cell(job.source.read_text(encoding="utf-8"), job))
    return nbformat.v4.new_notebook(cells=[cell])


def _as_cell(source: str, job: HeadlessJob) -> str:
    """Return a script as a cell that runs on the ranks, or in the kernel if the script submits runs itself."""
    text = f"{source.rstrip()}\n"
    on_pool = job.cells == "ranks" or (job.cells == "auto" and not submits_runs(source))
    if not on_pool:
        return text
    again = f" --retries {job.restarts} --retry-on any" if job.restarts else ""
    return f"%%distributed --name {shlex.quote(job.module or job.source.name)}{again}\n{text}"


def kernel_lines(job: HeadlessJob) -> list[str]:
    """Return the options that make a kernel execute a script's cell as `python script` would."""
    # `python -m` searches the working directory
    folder = job.folder if job.module else job.source.parent
    arguments = f"{str(job.source)!r}, {str(folder)!r}, {[job.as_written, *job.arguments]!r}"
    # an expression, so that no further name appears in the script's namespace
    imported = "__import__('sgpu_magic.cli.headless', fromlist=['_'])"
    return [f"--IPKernelApp.exec_lines={imported}.run_as_script(get_ipython(), {arguments})"]


def on_ranks(sources: list[str], job: HeadlessJob) -> bool:
    """Whether plain cells run on the ranks."""
    if job.is_script:
        return False
    if job.cells != "auto":
        return job.cells == "ranks"
    asks = bool(job.defaults.gpus or job.defaults.type)
    return asks and not any(_CHOOSES.search(source) for source in sources)


def _setup(sources: list[str], job: HeadlessJob) -> str:
    loads_compat = any(_LOADS_COMPAT.search(source) for source in sources)
    # `sgpu_magic.compat` loads `sgpu_magic` too
    load = _LOAD_COMPAT if any(map(uses_databricks_names, sources)) and not loads_compat else ""
    if on_ranks(sources, job):
        # in the copy this line documents the ranks; the session lasts as long as the notebook runs
        connect = shlex.join(["%sgpu_connect", "--idle", "0", *as_arguments(job.defaults)])
        return f"{load or _LOAD}\n{connect}\n%sgpu_auto on"
    if load or any(_LOADS.search(source) for source in sources):
        return load
    return _LOAD if any(_OUR_CELLS.search(source) for source in sources) else ""


def _with_parameters(cells: list[Any], job: HeadlessJob) -> tuple[list[Any], list[str]]:
    """Insert the parameters after the cell tagged `parameters`, or else first. Removes cells injected earlier."""
    notes: list[str] = []
    cells = [cell for cell in cells if not has_tag(cell, INJECTED_TAG)]
    tagged = next((at for at, cell in enumerate(cells) if has_tag(cell, TAG)), -1)
    if tagged < 0 and not any(_WIDGETS.search(cell.source) for cell in cells):
        notes.append("no cell is tagged `parameters`: they are set before the first cell.")
    elif tagged >= 0 and (known := declared(cells[tagged].source)) is not None:
        there = ", ".join(sorted(known))
        notes += [
            f"the parameter {name} is not among those that the cell tagged `parameters` sets: {there}."
            for name in job.file.parameters
            if name not in known
        ]
    new = _new_cell(source_of(job.file.parameters), INJECTED_TAG)
    return [*cells[: tagged + 1], new, *cells[tagged + 1 :]], notes


def _new_cell(source: str, tag: str) -> Any:
    import nbformat

    return nbformat.v4.new_code_cell(source, metadata={"tags": [tag]})


# ---------------------------------------------------------------- result


def title_of(source: str) -> str:
    """Return a one-line title of a cell."""
    lines = [line for line in source.splitlines() if line.strip()]
    if not lines:
        return "(empty)"
    title = lines[0].strip()
    if len(lines) > 1 and title.startswith("%%"):
        # add the first line of code
        title = f"{lines[0].split()[0]} {lines[1].strip()}"
    return title if len(title) <= _TITLE_CHARS else f"{title[: _TITLE_CHARS - 3]}..."


def traceback_of(cell: Any) -> list[str]:
    """Return the lines of a failed cell's traceback."""
    found = [output.traceback for output in cell.outputs if output.output_type == "error"]
    return [ansi.plain(line) for line in "\n".join(found[-1]).splitlines()] if found else []


def text_of(cell: Any) -> str:
    """Return all outputs of a cell as text."""
    parts: list[str] = []
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type == "error":
            parts.append("\n".join(output.traceback))
        else:
            parts.append(str(output.get("data", {}).get("text/plain", "")))
    return ansi.plain("\n".join(part.rstrip("\n") for part in parts if part))


# ---------------------------------------------------------------- the copy


class ExecutedCopy:
    """The executed copy of a notebook, saved repeatedly during the execution.

    Args:
        notebook: The notebook, an nbformat object.
        path: Path of the file; None for no copy.
        say: Called with a message if the file can't be written.
    """

    def __init__(self, notebook: Any, path: Path | None, say: Callable[[str], None]) -> None:
        self.path = path
        self._notebook = notebook
        self._say = say

    def begin(self, job: HeadlessJob) -> None:
        """Write the copy with papermill's metadata, for tools that read it."""
        self._notebook.metadata["papermill"] = {
            "default_parameters": {},
            "environment_variables": {},
            "parameters": dict(job.file.parameters),
            "input_path": str(job.source),
            "output_path": str(self.path or ""),
            "start_time": _now(),
            "end_time": None,
            "duration": None,
            "exception": None,
        }
        self.save()

    def exited(self, cell: Any, value: str) -> None:
        """Record the value with which a cell ended its notebook, in the place of the error by which it did."""
        import nbformat

        self._notebook.metadata["sgpu"] = {"exit_value": value}
        exit_output = nbformat.v4.new_output("stream", name="stdout", text=f"Notebook exited: {value}\n")
        cell.outputs = [*(output for output in cell.outputs if output.output_type != "error"), exit_output]

    def end(self, seconds: float, *, failed: bool) -> None:
        """Complete papermill's metadata and write the copy for the last time."""
        record = self._notebook.metadata["papermill"]
        record.update(end_time=_now(), duration=round(seconds, 3), exception=True if failed else None)
        self.save()

    def save(self) -> None:
        """Write the copy atomically."""
        if self.path is None:
            return
        # takes half a second to import, so check the command first
        import nbformat

        text = nbformat.writes(self._notebook)
        try:
            write_whole(self.path, text.encode(), stat.S_IMODE(self.path.stat().st_mode))
        except OSError as error:
            self._say(f"note: the executed copy {self.path} can't be written now: {error.strerror}.\n")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def copy_of(job: HeadlessJob) -> Path | None:
    """Create the empty file of the executed copy and return its path; None for a script without `--output`.

    Raises:
        UsageError: The file can't be created.
    """
    if job.is_script and job.output is None:
        return None
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        if job.output is not None:
            into_folder = job.file.output.endswith(os.sep) or job.output.is_dir()
            path = job.output / f"{job.source.stem}.{stamp}{NOTEBOOK}" if into_folder else job.output
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            return path
        for number in range(1, 100):
            more = f"-{number}" if number > 1 else ""
            path = job.source.with_name(f"{job.source.stem}.{stamp}{more}{NOTEBOOK}")
            # where it exists, another job started in this second
            with contextlib.suppress(FileExistsError):
                path.touch(exist_ok=False)
                return path
    except OSError as error:
        raise UsageError(
            f"the executed copy can't be written: {error.filename}: {error.strerror}. Choose another place with -o."
        ) from None
    raise UsageError(f"{job.source.parent} has too many executed copies of this second. Choose another place with -o.")
