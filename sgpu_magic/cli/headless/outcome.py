"""What a notebook leaves: its executed copy, kept while the cells run, and an exit code for cron and CI."""

# nbformat is not typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import enum
import os
import re
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sgpu_magic.cli.headless.formats import NOTEBOOK
from sgpu_magic.cli.headless.job import Job
from sgpu_magic.errors import UsageError
from sgpu_magic.views import ansi

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
            handle, path = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(path, stat.S_IMODE(self.path.stat().st_mode))
            os.replace(path, self.path)
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
