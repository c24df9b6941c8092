"""A notebook before and after: what is put before its cells, how it ended, the executed copy that it leaves."""

# nbformat is not typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ast
import enum
import re
import shlex
import signal
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sgpu_magic.cli.headless.formats import NOTEBOOK, submits_runs
from sgpu_magic.cli.headless.job import INJECTED_TAG, TAG, Job, declared, has_tag, source_of
from sgpu_magic.errors import UsageError
from sgpu_magic.files.whole_file import write_whole
from sgpu_magic.options.defaults import as_words
from sgpu_magic.views import ansi

SETUP_TAG = "injected-sgpu"

_OUR_CELLS = re.compile(
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
    asks = bool(job.defaults.gpus or job.defaults.type)
    return asks and not any(_CHOOSES.search(source) for source in sources)


def _setup(sources: list[str], job: Job) -> str:
    if on_ranks(sources, job):
        return f"%load_ext sgpu_magic\n{_connect_line(job)}\n%sgpu_auto on"
    if any(_OUR_CELLS.search(source) for source in sources) and not any(_LOADS.search(source) for source in sources):
        return "%load_ext sgpu_magic"
    return ""


def _connect_line(job: Job) -> str:
    """What connects to the ranks: so that the copy tells what it ran on, and can be run again by hand."""
    # as long as the notebook runs, whatever its cells here take
    return shlex.join(["%sgpu_connect", "--idle", "0", *as_words(job.defaults)])


def _with_parameters(cells: list[Any], job: Job) -> tuple[list[Any], list[str]]:
    """papermill's ways: in place of an injected cell, else after the one tagged `parameters`, else first."""
    notes: list[str] = []
    cells = [cell for cell in cells if not has_tag(cell, INJECTED_TAG)]
    tagged = next((at for at, cell in enumerate(cells) if has_tag(cell, TAG)), -1)
    if tagged < 0:
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
    new = _new_cell(source_of(job.parameters), INJECTED_TAG)
    return [*cells[: tagged + 1], new, *cells[tagged + 1 :]], notes


def _new_cell(source: str, tag: str) -> Any:
    import nbformat

    return nbformat.v4.new_code_cell(source, metadata={"tags": [tag]})


# ---------------------------------------------------------------- how it ended

_TITLE_CHARS = 60
# as `errors.see` has it
_OURS = re.compile(r"See `%?sgpu[ _]help [a-z-]+`")
_USAGE = frozenset(("UsageError", "RunUnknown"))
# none of the notebook's own doing: another time it may be different
_WORTH_A_RETRY = frozenset(
    ("CapacityError", "EnvironmentFailed", "PoolError", "PoolLost", "PoolVersionError", "NodeLost", "InternalError")
)


class ExitCode(enum.IntEnum):
    """The codes of `sgpu run`."""

    OK = 0
    FAILED = 1
    USAGE = 2
    POOL = 3
    TIMED_OUT = 124
    INTERRUPTED = 128 + signal.SIGINT
    TERMINATED = 128 + signal.SIGTERM


def code_of(name: str, traceback: Sequence[str]) -> ExitCode:
    """Return the code for a failed cell.

    Args:
        name: The exception's type.
        traceback: As the kernel sent it: an error of ours ends with the line that names its page of help.
    """
    is_ours = bool(traceback) and _OURS.match(traceback[-1]) is not None
    if is_ours and name in _USAGE:
        return ExitCode.USAGE
    if is_ours and name in _WORTH_A_RETRY:
        return ExitCode.POOL
    if is_ours and name == "RunTimeout":
        return ExitCode.TIMED_OUT
    return ExitCode.FAILED


def title_of(source: str) -> str:
    """Return a line that tells a cell from others."""
    lines = [line for line in source.splitlines() if line.strip()]
    # a magic's line alone says little
    shown = lines[1] if len(lines) > 1 and lines[0].startswith("%%") else lines[0] if lines else "(empty)"
    shown = f"{lines[0].split()[0]} {shown.strip()}" if shown is not (lines or [""])[0] else shown.strip()
    return shown if len(shown) <= _TITLE_CHARS else f"{shown[: _TITLE_CHARS - 3]}..."


def traceback_of(cell: Any) -> list[str]:
    """Return the lines of a failed cell's traceback."""
    found = [output.traceback for output in cell.outputs if output.output_type == "error"]
    return [ansi.plain(line) for line in "\n".join(found[-1]).splitlines()] if found else []


def text_of(cell: Any) -> str:
    """Return all that a cell shows, as text."""
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
    """A notebook's file, written again whenever there is more in it.

    Args:
        notebook: As nbformat has it.
        path: The file; None keeps none.
        say: Takes a sentence about what can't be written.
    """

    def __init__(self, notebook: Any, path: Path | None, say: Callable[[str], None]) -> None:
        self.path = path
        self._notebook = notebook
        self._say = say

    def begin(self, job: Job) -> None:
        """Write it with what papermill keeps, for tools that read that."""
        self._notebook.metadata["papermill"] = {
            "default_parameters": {},
            "environment_variables": {},
            "parameters": dict(job.parameters),
            "input_path": str(job.source),
            "output_path": str(self.path or ""),
            "start_time": _now(),
            "end_time": None,
            "duration": None,
            "exception": None,
        }
        self.save()

    def end(self, seconds: float, *, failed: bool) -> None:
        """Write it for the last time."""
        record = self._notebook.metadata["papermill"]
        record["end_time"] = _now()
        record["duration"] = round(seconds, 3)
        record["exception"] = True if failed else None
        self.save()

    def save(self) -> None:
        """Write it under another name first: nobody ever finds half of one."""
        if self.path is None:
            return
        # half a second, and a mistake in the command is told before
        import nbformat

        text = nbformat.writes(self._notebook)
        try:
            write_whole(self.path, text.encode(), stat.S_IMODE(self.path.stat().st_mode))
        except OSError as error:
            self._say(f"note: the executed copy {self.path} can't be written now: {error.strerror}.\n")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def copy_of(job: Job) -> Path | None:
    """Make the executed copy's file, still empty, and return its path; None for a script that asks for none.

    Raises:
        UsageError: It can't be made.
    """
    if job.is_script and job.output is None:
        return None
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        if job.output is not None:
            path = job.output / f"{job.source.stem}.{stamp}{NOTEBOOK}" if job.output.is_dir() else job.output
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            return path
        for number in range(1, 100):
            more = f"-{number}" if number > 1 else ""
            path = job.source.with_name(f"{job.source.stem}.{stamp}{more}{NOTEBOOK}")
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                # another job began in this second
                continue
            return path
    except OSError as error:
        raise UsageError(
            f"the executed copy can't be written: {error.filename}: {error.strerror}. Say where it shall be with -o."
        ) from None
    raise UsageError(f"{job.source.parent} has too many executed copies of this second. Say another place with -o.")
