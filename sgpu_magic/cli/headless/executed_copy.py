"""The executed copy of a notebook: where it goes, and how it is kept while the cells run."""

# nbformat is not typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sgpu_magic.cli.headless.formats import NOTEBOOK
from sgpu_magic.cli.headless.job import Job
from sgpu_magic.errors import UsageError


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
