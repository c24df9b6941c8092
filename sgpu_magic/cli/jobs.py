"""`sgpu jobs`: notebooks that `sgpu run` executes or has executed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TextIO

from sgpu_magic.cli.headless import records
from sgpu_magic.cli.headless.records import JobRecord
from sgpu_magic.config import Settings
from sgpu_magic.errors import UsageError
from sgpu_magic.views.tables import aligned
from sgpu_magic.views.units import format_clock
from sgpu_magic.wire.ids import short


def listing(settings: Settings, limit: int) -> str:
    """Return the newest jobs as text."""
    found = records.all_jobs(settings)[:limit]
    if not found:
        return "no jobs yet: `sgpu run notebook.ipynb` makes one"
    rows = [("job", "notebook", "state", "cells", "started", "for", "executed copy")]
    rows += [_row(record, time.time()) for record in found]
    return "\n".join(aligned(rows, right=(5,)))


def _row(record: JobRecord, now: float) -> tuple[str, ...]:
    since = (
        "-"
        if record.code is None and not record.goes_on
        else format_clock((record.ended_at or now) - record.started_at)
    )
    return (
        short(record.job_id),
        Path(record.source).name,
        record.state if record.code in (None, 0) else f"{record.state} ({record.code})",
        f"{record.done}/{record.cells}",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started_at)),
        since,
        record.copy or "-",
    )


def show_log(settings: Settings, job: str, out: TextIO) -> None:
    """Write what a detached job has said.

    Raises:
        UsageError: There is no such job, or it has no log.
    """
    record = records.find(settings, job)
    path = records.folder_of(settings, record.job_id) / records.LOG
    try:
        out.write(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        raise UsageError(
            f"job {short(record.job_id)} was not started with --detach, so what it said went to its terminal."
            f"{f' Its executed copy is {record.copy}.' if record.copy else ''}"
        ) from None


def stop(settings: Settings, job: str) -> str:
    """End a job and the runs of its notebook, and return a sentence.

    Raises:
        UsageError: There is no such job, or it is over.
    """
    record = records.find(settings, job)
    if not record.goes_on:
        raise UsageError(f"job {short(record.job_id)} is over: it {record.state}.")
    os.kill(record.pid, signal.SIGTERM)
    return f"job {short(record.job_id)} ends: its cell is interrupted and its runs are cancelled. `sgpu jobs` shows it."
