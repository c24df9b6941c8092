"""The memory files of a run: the notebook's payload and the ranks' results, held until nobody needs them.

One thread at idle priority copies them into the run's directory, off the way to anybody's result.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from sgpu_magic.wire.attachments import FilePayload, InlinePayload, PayloadSource, SharedPayload, StoredPayload
from sgpu_magic.wire.files import PAYLOAD

_CHUNK_BYTES = 16 << 20
_log = logging.getLogger(__name__)
_REUSED = "the notebook's next run used the same memory before it was copied"


@dataclass(slots=True)
class CopyJob:
    """Copy one descriptor's bytes into a file.

    Args:
        source: Descriptor to read; the copier closes it.
        size: Bytes.
        target: The file, complete when it appears.
        done: Called in the copier's thread with whether it was kept and why not.
    """

    source: int
    size: int
    target: Path
    done: Callable[[bool, str], None]
    given_up: threading.Event = field(default_factory=threading.Event)


class BackgroundCopier:
    """Copies into run directories, one thing at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "sgpu-keeper", _leave_the_cores_to_ranks)

    def keep(self, job: CopyJob) -> None:
        self._thread.submit(_keep, job)

    def close(self) -> None:
        self._thread.shutdown(wait=False)


def _leave_the_cores_to_ranks() -> None:
    with contextlib.suppress(OSError, AttributeError):
        # per thread on Linux
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


def _keep(job: CopyJob) -> None:
    try:
        try:
            kept, why = _copy(job)
        finally:
            os.close(job.source)
    except Exception as error:  # noqa: BLE001  one job's guard: what waits for it is told
        _log.exception("A fault of sgpu-magic: %s was not kept", job.target)
        kept, why = False, f"the agent met a fault: {error!r}"
    # the loop is closed when the agent ends
    with contextlib.suppress(RuntimeError):
        job.done(kept, why)


def _copy(job: CopyJob) -> tuple[bool, str]:
    temporary = job.target.with_name(f".{job.target.name}.part")
    try:
        target = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            offset = 0
            while offset < job.size:
                if job.given_up.is_set():
                    temporary.unlink()
                    return False, _REUSED
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


class RunMemory:
    """Descriptors of one run's payload and results.

    Args:
        source: Where the payload lies.
        directory: The run's directory.
        copier: Who copies in the background.
        keep_bytes: Largest part that is kept.
        released: Called once when the payload's memory is no longer read, with whether it was kept and why not.

    Attributes:
        payload_fd: The payload's descriptor, -1 when it travels inline.
    """

    def __init__(
        self,
        source: PayloadSource,
        directory: Path,
        copier: BackgroundCopier,
        keep_bytes: int,
        released: Callable[[bool, str], None],
    ) -> None:
        self._source = source
        self._directory = directory
        self._copier = copier
        self._keep_bytes = keep_bytes
        self.on_released = released
        self._released = isinstance(source, InlinePayload)
        self.payload_fd = -1
        self._job: CopyJob | None = None
        self._results: dict[int, int] = {}
        self._loop = asyncio.get_running_loop()
        # the copier's thread has none of its own
        self._context = contextvars.copy_context()

    def open_payload(self) -> None:
        """Hold the payload, so that it outlives the notebook.

        Raises:
            OSError: It is gone, or was never there.
        """
        if self.payload_fd >= 0:
            # an earlier attempt's
            return
        match self._source:
            case SharedPayload(pid=pid, fd=fd):
                self.payload_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            case FilePayload(path=path):
                self.payload_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            case StoredPayload():
                raise FileNotFoundError("its variables have not come from the pool's store")
            case InlinePayload():
                pass

    def take_payload(self, descriptor: int, path: str) -> None:
        """Hold the payload that was brought from the pool's store.

        Args:
            descriptor: It; ours from now on.
            path: The file that it is in, "" for memory.
        """
        self._close_payload()
        self.payload_fd = descriptor
        if path:
            self._source = FilePayload(path=path, size=os.fstat(descriptor).st_size)

    @property
    def at_hand(self) -> bool:
        """Whether the payload can be given to ranks once more."""
        return self.payload_fd >= 0 or isinstance(self._source, InlinePayload)

    @property
    def in_use(self) -> bool:
        """Results that nobody has fetched, or a payload that is still being read."""
        return bool(self._results) or not self._released

    def hold_result(self, rank: int, descriptor: int) -> None:
        self._results[rank] = descriptor

    def keep(self) -> None:
        """Copy what lies in memory into the run's directory, in the background."""
        for rank, descriptor in self._results.items():
            size = os.fstat(descriptor).st_size
            if size <= self._keep_bytes:
                target = self._directory / f"result-{rank}.bin"
                copied = functools.partial(self._result_copied_in_thread, rank)
                self._copier.keep(CopyJob(os.dup(descriptor), size, target, copied))
        if self._released or self._job is not None:
            return
        if self.payload_fd < 0:
            self._payload_done(False, "it was never read")
            return
        descriptor, self.payload_fd = self.payload_fd, -1
        if isinstance(self._source, FilePayload):
            os.close(descriptor)
            self._take_file(self._source)
            return
        size = os.fstat(descriptor).st_size
        keeps = _keeps(size, self._keep_bytes)
        if not keeps[0]:
            os.close(descriptor)
            self._payload_done(*keeps)
            return
        self._job = CopyJob(descriptor, size, self._directory / PAYLOAD, self._copied_in_thread)
        self._copier.keep(self._job)

    def leave_to_pool(self) -> None:
        """The pool keeps the payload itself, of what it has in its store."""
        if self._released or self.payload_fd < 0:
            return
        size = os.fstat(self.payload_fd).st_size
        self._close_payload()
        self._payload_done(*_keeps(size, self._keep_bytes))

    def give_payload_up(self) -> None:
        """The notebook wants its memory file back. Only once no rank maps it any more."""
        if self._job is not None:
            self._job.given_up.set()
        elif not self._released:
            self._close_payload()
            self._payload_done(False, _REUSED)

    @property
    def result_bytes(self) -> int:
        """What the results in memory have together."""
        return sum(os.fstat(descriptor).st_size for descriptor in self._results.values())

    def close_results(self) -> None:
        """The notebook holds them itself, or nobody will fetch them."""
        for descriptor in self._results.values():
            os.close(descriptor)
        self._results.clear()

    def close(self) -> None:
        self.close_results()
        self._close_payload()

    def _take_file(self, source: FilePayload) -> None:
        """The file was made for this run: it moves into the run's directory, or goes."""
        keeps = _keeps(source.size, self._keep_bytes)
        try:
            if not keeps[0]:
                os.unlink(source.path)
                self._payload_done(*keeps)
                return
            os.replace(source.path, self._directory / PAYLOAD)
        except OSError as error:
            self._payload_done(False, f"it could not be moved: {error.strerror}")
        else:
            self._payload_done(True, "")

    def _close_payload(self) -> None:
        if self.payload_fd >= 0:
            os.close(self.payload_fd)
            self.payload_fd = -1

    def _result_copied_in_thread(self, rank: int, kept: bool, why: str) -> None:
        # whoever comes now finds it in the run's directory
        if kept:
            self._loop.call_soon_threadsafe(self._close_result, rank, context=self._context)

    def _close_result(self, rank: int) -> None:
        descriptor = self._results.pop(rank, -1)
        if descriptor >= 0:
            os.close(descriptor)

    def _copied_in_thread(self, kept: bool, why: str) -> None:
        self._loop.call_soon_threadsafe(self._payload_done, kept, why, context=self._context)

    def _payload_done(self, kept: bool, why: str) -> None:
        if not self._released:
            self._released = True
            self.on_released(kept, why)


def _keeps(size: int, most: int) -> tuple[bool, str]:
    """Whether a payload of that size is kept, and why not."""
    if size <= most:
        return True, ""
    return False, f"it has {size / 1e9:.1f} GB, more than the setting keep_payload allows"
