"""Jobs as `sgpu jobs` lists them: a small file each, in the state directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

import msgspec

from sgpu_magic.config import Settings, private_dir
from sgpu_magic.errors import UsageError
from sgpu_magic.wire.address import process_start
from sgpu_magic.wire.ids import is_valid_id, short

LOG = "log"
_RECORD = "job.json"
_KEPT = 200


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A job.

    Args:
        job_id: Its id, made as a run's.
        source: The notebook or script.
        copy: The executed copy, "" for none.
        pid: The process that executes it, 0 before there is one.
        process_start: Tells that process from another that got its pid.
        started_at: Seconds since the epoch.
        ended_at: The same; None while it goes on.
        code: Exit code; None while it goes on.
        done: Cells that have run.
        cells: How many there are.
        detached: It goes on without its terminal, and has a log.
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
    def goes_on(self) -> bool:
        """Whether its process lives."""
        return self.code is None and self.pid > 0 and process_start(self.pid) == self.process_start

    @property
    def state(self) -> str:
        """A word for a person."""
        if self.code is None:
            return "running" if self.goes_on else "killed"
        return _STATES.get(self.code, "failed")


_STATES = {0: "succeeded", 2: "not possible", 3: "pool failed", 124: "timed out", 130: "interrupted", 143: "terminated"}


def folder_of(settings: Settings, job_id: str) -> Path:
    """Return a job's directory."""
    return settings.state_path / "jobs" / job_id


def write(settings: Settings, record: JobRecord) -> None:
    """Write a job's record, whole or not at all. Nothing is done where it can't be: the job itself goes on."""
    folder = folder_of(settings, record.job_id)
    with contextlib.suppress(OSError):
        private_dir(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        new = folder / f"{_RECORD}.new"
        new.write_bytes(msgspec.json.encode(record))
        os.replace(new, folder / _RECORD)


def begun(record: JobRecord) -> JobRecord:
    """Return the record of a job that this process executes."""
    return msgspec.structs.replace(record, pid=os.getpid(), process_start=process_start(os.getpid()))


def ended(record: JobRecord, code: int) -> JobRecord:
    return msgspec.structs.replace(record, ended_at=time.time(), code=code)


def all_jobs(settings: Settings) -> list[JobRecord]:
    """Return every job that is kept, newest first."""
    found: list[JobRecord] = []
    folder = settings.state_path / "jobs"
    for entry in folder.iterdir() if folder.is_dir() else ():
        if not is_valid_id(entry.name):
            continue
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found.append(msgspec.json.decode((entry / _RECORD).read_bytes(), type=JobRecord))
    return sorted(found, key=lambda record: -record.started_at)


def prune(settings: Settings) -> None:
    """Remove the oldest ones that are over."""
    for record in all_jobs(settings)[_KEPT:]:
        if not record.goes_on:
            shutil.rmtree(folder_of(settings, record.job_id), ignore_errors=True)


def find(settings: Settings, text: str) -> JobRecord:
    """Return the one job whose id begins with `text`.

    Raises:
        UsageError: None does, or more than one.
    """
    prefix = text.strip().lower()
    found = [record for record in all_jobs(settings) if prefix and record.job_id.startswith(prefix)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(f"no job has an id that begins with {text[:40]!r}. `sgpu jobs` lists them.")
    listed = ", ".join(short(record.job_id) for record in found)
    raise UsageError(f"{text[:40]!r} begins the ids of {len(found)} jobs: {listed}. Give more digits.")
