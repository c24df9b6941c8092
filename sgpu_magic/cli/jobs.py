"""`sgpu jobs`: the jobs of `sgpu run`, each with a small record in the state directory."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sgpu_magic.cli.json_form import time_of, time_or_none
from sgpu_magic.cli.json_records import JobList, JobRow, encode
from sgpu_magic.cli.main import CommandParser, add_command, add_json, positive
from sgpu_magic.config import Settings, load_settings, private_dir
from sgpu_magic.errors import UsageError
from sgpu_magic.files.atomic_file import read_json, write_whole
from sgpu_magic.formatting import format_elapsed
from sgpu_magic.system.processes import is_running, process_start
from sgpu_magic.views.units import aligned
from sgpu_magic.wire.base import is_valid_id, short

LOG = "log"
_RECORD = "job.json"
_KEPT = 200
_STATES = {0: "succeeded", 2: "not possible", 3: "pool failed", 124: "timed out", 130: "interrupted", 143: "terminated"}


def listing(settings: Settings, limit: int) -> str:
    """Return the newest jobs as text."""
    found = all_jobs(settings)[:limit]
    if not found:
        return "no jobs yet: `sgpu run notebook.ipynb` starts one"
    rows = [("job", "notebook", "state", "cells", "started", "duration", "executed copy")]
    rows += [_row(record, time.time()) for record in found]
    return "\n".join(aligned(rows, right=(5,)))


def document(settings: Settings, limit: int) -> JobList:
    """Return the newest jobs in the form of `--json`."""
    now = time.time()
    return JobList(jobs=tuple(_json_row(record, now) for record in all_jobs(settings)[:limit]))


def _json_row(record: JobRecord, now: float) -> JobRow:
    return JobRow(
        id=record.job_id,
        source=record.source,
        copy=record.copy or None,
        state=record.state,
        exit_code=record.code,
        started_at=time_of(record.started_at),
        ended_at=time_or_none(record.ended_at),
        duration_s=_duration_s(record, now),
        cells_done=record.done,
        cells=record.cells,
        detached=record.detached,
    )


def _duration_s(record: JobRecord, now: float) -> float | None:
    """Return the seconds since a job's start, until its end or now; None for a killed job, whose end is unknown."""
    if record.code is None and not record.is_active:
        return None
    return (record.ended_at or now) - record.started_at


def _row(record: JobRecord, now: float) -> tuple[str, ...]:
    duration_s = _duration_s(record, now)
    return (
        short(record.job_id),
        Path(record.source).name,
        record.state if record.code in (None, 0) else f"{record.state} ({record.code})",
        f"{record.done}/{record.cells}",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started_at)),
        "-" if duration_s is None else format_elapsed(duration_s),
        record.copy or "-",
    )


def log_text(settings: Settings, job: str) -> str:
    """Return the log of a detached job.

    Raises:
        UsageError: There is no such job, or it has no log.
    """
    record = find(settings, job)
    path = folder_of(settings, record.job_id) / LOG
    try:
        return path.read_text(encoding="utf-8", errors="replace").removesuffix("\n")
    except OSError:
        raise UsageError(
            f"job {short(record.job_id)} was not started with --detach, so its output went to its terminal."
            f"{f' Its executed copy is {record.copy}.' if record.copy else ''}"
        ) from None


def stop(settings: Settings, job: str) -> str:
    """Stop a job and the runs of its notebook, and return a message.

    Raises:
        UsageError: There is no such job, or it has ended.
    """
    record = find(settings, job)
    if not record.is_active:
        raise UsageError(f"job {short(record.job_id)} has ended: {record.state}.")
    os.kill(record.pid, signal.SIGTERM)
    return (
        f"job {short(record.job_id)} is ending: its cell is interrupted and its runs are cancelled. "
        "`sgpu jobs` shows it."
    )


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a job.

    Args:
        job_id: Its id, in the form of a run id.
        source: Path of the notebook or script.
        copy: Path of the executed copy, "" for none.
        pid: The process that executes it, 0 before it has started.
        process_start: Start time of that process, which distinguishes it from a later one with the same pid.
        started_at: Start, seconds since the epoch.
        ended_at: End, seconds since the epoch; None while it runs.
        code: Exit code; None while it runs.
        done: Number of cells that have run.
        cells: Total number of cells.
        detached: Whether it runs without its terminal, with a log.
    """

    job_id: str
    source: str
    copy: str
    started_at: float
    pid: int = 0
    process_start: int = 0
    ended_at: float | None = None
    code: int | None = None
    done: int = 0
    cells: int = 0
    detached: bool = False

    @property
    def is_active(self) -> bool:
        """Whether the job is running: its process is alive."""
        return self.code is None and self.pid > 0 and is_running(self.pid, self.process_start)

    @property
    def state(self) -> str:
        """The state as shown to the user."""
        if self.code is None:
            return "running" if self.is_active else "killed"
        return _STATES.get(self.code, "failed")


def folder_of(settings: Settings, job_id: str) -> Path:
    """Return a job's directory."""
    return settings.state_path / "jobs" / job_id


def write(settings: Settings, record: JobRecord) -> None:
    """Write a job's record atomically. Errors are ignored, so that the job itself continues."""
    folder = folder_of(settings, record.job_id)
    with contextlib.suppress(OSError):
        private_dir(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        write_whole(folder / _RECORD, msgspec.json.encode(record))


def with_this_process(record: JobRecord) -> JobRecord:
    """Return the record with this process as the one that executes the job."""
    return msgspec.structs.replace(record, pid=os.getpid(), process_start=process_start(os.getpid()))


def all_jobs(settings: Settings) -> list[JobRecord]:
    """Return all recorded jobs, newest first."""
    paths = (settings.state_path / "jobs").glob(f"*/{_RECORD}")
    found = [read_json(path, JobRecord) for path in paths if is_valid_id(path.parent.name)]
    return sorted(filter(None, found), key=lambda record: -record.started_at)


def prune(settings: Settings, kept: int = _KEPT) -> None:
    """Remove the jobs that have ended, except those among the `kept` newest ones."""
    for record in all_jobs(settings)[kept:]:
        if not record.is_active:
            shutil.rmtree(folder_of(settings, record.job_id), ignore_errors=True)


def find(settings: Settings, text: str) -> JobRecord:
    """Return the only job whose id begins with `text`.

    Raises:
        UsageError: No job or several match.
    """
    prefix = text.strip().lower()
    found = [record for record in all_jobs(settings) if prefix and record.job_id.startswith(prefix)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(f"no job has an id that begins with {text[:40]!r}. `sgpu jobs` lists them.")
    listed = ", ".join(short(record.job_id) for record in found)
    raise UsageError(f"{text[:40]!r} matches {len(found)} jobs: {listed}. Give more digits.")


def start_detached(settings: Settings, record: JobRecord, arguments: Sequence[str]) -> JobRecord:
    """Start a detached process that executes a job, and return the updated record.

    Args:
        settings: Gives the jobs' directory.
        record: The job.
        arguments: Arguments of the `sgpu` command.

    Raises:
        OSError: The process can't be started.
    """
    folder = folder_of(settings, record.job_id)
    private_dir(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as log:
        # like nohup: the child inherits the ignored SIGHUP from its start
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            command = [sys.executable, "-m", "sgpu_magic.cli", *arguments]
            # in its own session: a terminal's Ctrl-C does not reach it
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        finally:
            signal.signal(signal.SIGHUP, before)
    # it outlives this process: prevents Popen's warning about a running child
    process.returncode = 0
    started = msgspec.structs.replace(record, pid=process.pid, process_start=process_start(process.pid), detached=True)
    write(settings, started)
    return started


def _list(options: argparse.Namespace) -> str:
    settings = load_settings()
    return encode(document(settings, options.number)) if options.json else listing(settings, options.number)


def _options(parser: CommandParser) -> None:
    parser.add_argument(
        "-n", dest="number", type=positive, default=20, metavar="N", help="how many to show (default: 20)"
    )
    add_json(parser)
    parser.does(_list)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    log = add_command(actions, "log", "print the output of a detached job", "sgpu jobs log 3c1e")
    log.does(lambda options: log_text(load_settings(), options.job))
    ends = add_command(actions, "stop", "stop a job and its runs", "sgpu jobs stop 3c1e")
    ends.does(lambda options: stop(load_settings(), options.job))
    for made in (log, ends):
        made.add_argument("job", metavar="JOB", help="ID of the job, or its first digits")


COMMANDS = {"jobs": _options}
