"""The memory files of a run: the notebook's payload and the ranks' results, held until they are no longer needed.

One thread at idle priority copies them into the run's directory, so that copying does not delay results.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sgpu_magic.agent import faults
from sgpu_magic.files.whole_file import appearing
from sgpu_magic.wire.attachments import FilePayload, InlinePayload, PayloadSource, SharedPayload, StoredPayload
from sgpu_magic.wire.files import PAYLOAD

_CHUNK_BYTES = 16 << 20
_log = logging.getLogger(__name__)
_REUSED = "the notebook's next run used the same memory before it was copied"


class CopyJob(msgspec.Struct):
    """Copy one descriptor's bytes into a file.

    Args:
        source: Descriptor to read; the copier closes it.
        size: Bytes to copy.
        target: The file, complete when it appears.
        done: Called in the copier's thread with whether the copy succeeded and why not.
        given_up: Set to cancel the copy.
    """

    source: int
    size: int
    target: Path
    done: Callable[[bool, str], object]
    given_up: threading.Event = msgspec.field(default_factory=threading.Event)


class BackgroundCopier:
    """Copies memory files into run directories, one at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "sgpu-keeper", _leave_the_cores_to_ranks)

    def keep(self, job: CopyJob) -> None:
        """Queue a copy job. After `close` nothing is copied any more."""
        try:
            self._thread.submit(_keep, job)
        except RuntimeError:
            # timers may still fire while the agent's loop ends
            os.close(job.source)

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
    except Exception as error:  # noqa: BLE001  one job's guard: `done` gets the error
        _log.exception("A fault of sgpu-magic: %s was not kept", job.target)
        kept, why = False, f"an internal error in the agent: {error!r}"
    # the loop is closed when the agent ends
    with contextlib.suppress(RuntimeError):
        job.done(kept, why)


def _copy(job: CopyJob) -> tuple[bool, str]:
    try:
        with appearing(job.target) as target:
            offset = 0
            while offset < job.size:
                if job.given_up.is_set():
                    raise OSError(_REUSED)
                count = os.sendfile(target.fileno(), job.source, offset, min(_CHUNK_BYTES, job.size - offset))
                if count == 0:
                    raise OSError("the memory file was truncated")
                offset += count
    except OSError as error:
        return False, _REUSED if job.given_up.is_set() else f"it could not be written: {error.strerror or error}"
    return True, ""


@dataclass(eq=False, repr=False)
class RunMemory:
    """Descriptors of one run's payload and results.

    Args:
        source: Where the payload is.
        directory: The run's directory.
        copier: Copies in the background.
        keep_bytes: Size limit of a payload or result that is kept on disk.
        on_released: Called once when the payload's memory is no longer read, with why the payload was not kept, "" when
            it was.

    Attributes:
        payload_fd: The payload's descriptor, -1 when it is inline or not open.
    """

    source: PayloadSource
    directory: Path
    copier: BackgroundCopier
    keep_bytes: int
    on_released: Callable[[str], None]

    def __post_init__(self) -> None:
        self._released = isinstance(self.source, InlinePayload)
        self.payload_fd = -1
        self._job: CopyJob | None = None
        self._results: dict[int, int] = {}
        self._loop = asyncio.get_running_loop()

    def open_payload(self) -> None:
        """Open the payload, so that it outlives the notebook.

        Raises:
            OSError: The payload does not exist (any more).
        """
        if self.payload_fd >= 0:
            # opened by an earlier attempt
            return
        match self.source:
            case SharedPayload(pid=pid, fd=fd):
                self.payload_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            case FilePayload(path=path):
                self.payload_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            case StoredPayload():
                raise FileNotFoundError("its variables have not arrived from the pool's store")
            case InlinePayload():
                pass

    def take_payload(self, descriptor: int, path: str) -> None:
        """Take over a payload that was fetched from the pool's store.

        Args:
            descriptor: The payload's descriptor, owned by this object from now on.
            path: The payload's file, "" for memory.
        """
        self._close_payload()
        self.payload_fd = descriptor
        if path:
            self.source = FilePayload(path=path, size=os.fstat(descriptor).st_size)

    @property
    def at_hand(self) -> bool:
        """Whether the payload can be sent to ranks again."""
        return self.payload_fd >= 0 or isinstance(self.source, InlinePayload)

    @property
    def in_use(self) -> bool:
        """Whether there are unfetched results, or a payload that is still being read."""
        return bool(self._results) or not self._released

    def hold_result(self, rank: int, descriptor: int) -> None:
        self._results[rank] = descriptor

    def keep(self) -> None:
        """Copy results and payload into the run's directory, in the background."""
        for rank, descriptor in self._results.items():
            size = os.fstat(descriptor).st_size
            if size <= self.keep_bytes:
                self._copy(os.dup(descriptor), size, f"result-{rank}.bin", functools.partial(self._result_copied, rank))
        if self._released or self._job is not None:
            return
        if self.payload_fd < 0:
            self._payload_done("it was never read")
            return
        size = os.fstat(self.payload_fd).st_size
        why = self._too_large(size)
        if isinstance(self.source, FilePayload):
            self._close_payload()
            self._take_file(self.source.path, why)
        elif why:
            self._close_payload()
            self._payload_done(why)
        else:
            descriptor, self.payload_fd = self.payload_fd, -1
            self._job = self._copy(descriptor, size, PAYLOAD, lambda kept, why: self._payload_done(why))

    def leave_to_pool(self) -> None:
        """Close the payload without a copy: the pool keeps it from its own store."""
        if self._released or self.payload_fd < 0:
            return
        size = os.fstat(self.payload_fd).st_size
        self._close_payload()
        self._payload_done(self._too_large(size))

    def give_payload_up(self) -> None:
        """Release the memory file for reuse by the notebook. No rank may map it any more."""
        if self._job is not None:
            self._job.given_up.set()
        elif not self._released:
            self._close_payload()
            self._payload_done(_REUSED)

    @property
    def result_bytes(self) -> int:
        """Total size of the results in memory."""
        return sum(os.fstat(descriptor).st_size for descriptor in self._results.values())

    def close_results(self) -> None:
        """Close the results: the notebook has received them, or will not fetch them."""
        for descriptor in self._results.values():
            os.close(descriptor)
        self._results.clear()

    def close(self) -> None:
        self.close_results()
        self._close_payload()

    def _copy(self, descriptor: int, size: int, name: str, done: Callable[[bool, str], None]) -> CopyJob:
        """Copy a descriptor into the run's directory and close it; `done` is called in the loop."""
        in_loop = functools.partial(self._loop.call_soon_threadsafe, faults.bound(done))
        job = CopyJob(descriptor, size, self.directory / name, in_loop)
        self.copier.keep(job)
        return job

    def _take_file(self, path: str, why: str) -> None:
        """Move the payload's file, which was made for this run, into the run's directory, or remove it."""
        try:
            if why:
                os.unlink(path)
            else:
                os.replace(path, self.directory / PAYLOAD)
        except OSError as error:
            why = f"it could not be moved: {error.strerror}"
        self._payload_done(why)

    def _too_large(self, size: int) -> str:
        """Return why a payload of that size is not kept, "" when it is."""
        if size <= self.keep_bytes:
            return ""
        return f"its size is {size / 1e9:.1f} GB, more than the setting keep_payload allows"

    def _close_payload(self) -> None:
        if self.payload_fd >= 0:
            os.close(self.payload_fd)
            self.payload_fd = -1

    def _result_copied(self, rank: int, kept: bool, why: str) -> None:
        # from now on the result is read from the run's directory
        if kept and (descriptor := self._results.pop(rank, -1)) >= 0:
            os.close(descriptor)

    def _payload_done(self, why: str) -> None:
        if not self._released:
            self._released = True
            self.on_released(why)
