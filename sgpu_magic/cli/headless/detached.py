"""A job that goes on without the terminal: in a session of its own, with a log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from sgpu_magic.cli.headless import records
from sgpu_magic.cli.headless.records import JobRecord
from sgpu_magic.config import Settings, private_dir
from sgpu_magic.wire.address import process_start


def start(settings: Settings, record: JobRecord, arguments: Sequence[str]) -> JobRecord:
    """Start the process that executes a job, and return the record with it.

    Args:
        settings: Where jobs lie.
        record: The job.
        arguments: What follows `sgpu`.

    Raises:
        OSError: It can't be started.
    """
    folder = records.folder_of(settings, record.job_id)
    private_dir(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(os.open(folder / records.LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as log:
        # as nohup has it: what is ignored here stays ignored there, from its first moment on
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "sgpu_magic.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # a terminal's Ctrl-C does not reach it
                start_new_session=True,
                close_fds=True,
            )
        finally:
            signal.signal(signal.SIGHUP, before)
    # nobody waits for it here: it is to outlive this process
    process.returncode = 0
    started = msgspec.structs.replace(record, pid=process.pid, process_start=process_start(process.pid), detached=True)
    records.write(settings, started)
    return started
