"""Copies payloads and results into run directories, in the background and off the way to anybody's result."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_CHUNK_BYTES = 16 << 20
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class KeepJob:
    """Copy one descriptor's bytes into a file.

    Args:
        source: Descriptor to read; the keeper closes it.
        size: Bytes.
        target: The file, complete when it appears.
        done: Called in the keeper's thread with whether it was kept and why not.
    """

    source: int
    size: int
    target: Path
    done: Callable[[bool, str], None]
    given_up: threading.Event = field(default_factory=threading.Event)


class Keeper:
    """One thread at idle priority."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[KeepJob | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def keep(self, job: KeepJob) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="sgpu-keeper", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            # per thread on Linux
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        while (job := self._jobs.get()) is not None:
            try:
                try:
                    kept, why = _copy(job)
                finally:
                    os.close(job.source)
            except Exception as error:  # noqa: BLE001  one job's guard: the next ones are of other runs
                _log.exception("A fault of sgpu-magic: %s was not kept", job.target)
                kept, why = False, f"the agent met a fault: {error!r}"
            # the loop is closed when the agent ends
            with contextlib.suppress(RuntimeError):
                job.done(kept, why)


def _copy(job: KeepJob) -> tuple[bool, str]:
    temporary = job.target.with_name(f".{job.target.name}.part")
    try:
        target = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            offset = 0
            while offset < job.size:
                if job.given_up.is_set():
                    temporary.unlink()
                    return False, "the notebook's next run used the same memory before it was copied"
                count = os.sendfile(target, job.source, offset, min(_CHUNK_BYTES, job.size - offset))
                if count == 0:
                    raise OSError("the memory file is shorter than it was")
                offset += count
        finally:
            os.close(target)
        os.replace(temporary, job.target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return False, f"it could not be written: {error.strerror or error}"
    return True, ""
