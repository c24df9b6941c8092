"""The memory files of a run: the notebook's payload and the ranks' results, held until nobody needs them.

One thread at idle priority copies them into the run's directory, off the way to anybody's result.
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
        size: Bytes.
        target: The file, complete when it appears.
        done: Called in the copier's thread with whether it was kept and why not.
    """

    source: int
    size: int
    target: Path
    done: Callable[[bool, str], object]
    given_up: threading.Event = msgspec.field(default_factory=threading.Event)


class BackgroundCopier:
    """Copies into run directories, one thing at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "sgpu-keeper", _leave_the_cores_to_ranks)

    def keep(self, job: CopyJob) -> None:
        """Copy it after those that came before. Once this is closed nothing is copied any more."""
        try:
            self._thread.submit(_keep, job)
        except RuntimeError:
            # timers are still due while an agent's loop ends
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
    except Exception as error:  # noqa: BLE001  one job's guard: what waits for it is told
        _log.exception("A fault of sgpu-magic: %s was not kept", job.target)
        kept, why = False, f"the agent met a fault: {error!r}"
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
                    raise OSError("the memory file is shorter than it was")
                offset += count
    except OSError as error:
        return False, _REUSED if job.given_up.is_set() else f"it could not be written: {error.strerror or error}"
    return True, ""


@dataclass(eq=False, repr=False)
class RunMemory:
    """Descriptors of one run's payload and results.

    Args:
        source: Where the payload lies.
        directory: The run's directory.
        copier: Who copies in the background.
        keep_bytes: Largest part that is kept.
        on_released: Called once when the payload's memory is no longer read, with why it was not kept, "" when it was.

    Attributes:
        payload_fd: The payload's descriptor, -1 when it travels inline.
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
        """Hold the payload, so that it outlives the notebook.

        Raises:
            OSError: It is gone, or was never there.
        """
        if self.payload_fd >= 0:
            # an earlier attempt's
            return
        match self.source:
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
            self.source = FilePayload(path=path, size=os.fstat(descriptor).st_size)

    @property
    def at_hand(self) -> bool:
        """Whether the payload can be given to ranks once more."""
        return self.payload_fd >= 0 or isinstance(self.source, InlinePayload)

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
        """The pool keeps the payload itself, of what it has in its store."""
        if self._released or self.payload_fd < 0:
            return
        size = os.fstat(self.payload_fd).st_size
        self._close_payload()
        self._payload_done(self._too_large(size))

    def give_payload_up(self) -> None:
        """The notebook wants its memory file back. Only once no rank maps it any more."""
        if self._job is not None:
            self._job.given_up.set()
        elif not self._released:
            self._close_payload()
            self._payload_done(_REUSED)

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

    def _copy(self, descriptor: int, size: int, name: str, done: Callable[[bool, str], None]) -> CopyJob:
        """Copy into the run's directory; `done` is called in the loop. The descriptor is closed."""
        in_loop = functools.partial(self._loop.call_soon_threadsafe, faults.bound(done))
        job = CopyJob(descriptor, size, self.directory / name, in_loop)
        self.copier.keep(job)
        return job

    def _take_file(self, path: str, why: str) -> None:
        """The file was made for this run: it moves into the run's directory, or goes."""
        try:
            if why:
                os.unlink(path)
            else:
                os.replace(path, self.directory / PAYLOAD)
        except OSError as error:
            why = f"it could not be moved: {error.strerror}"
        self._payload_done(why)

    def _too_large(self, size: int) -> str:
        """Why a payload of that size is not kept, "" when it is."""
        if size <= self.keep_bytes:
            return ""
        return f"it has {size / 1e9:.1f} GB, more than the setting keep_payload allows"

    def _close_payload(self) -> None:
        if self.payload_fd >= 0:
            os.close(self.payload_fd)
            self.payload_fd = -1

    def _result_copied(self, rank: int, kept: bool, why: str) -> None:
        # whoever comes now finds it in the run's directory
        if kept and (descriptor := self._results.pop(rank, -1)) >= 0:
            os.close(descriptor)

    def _payload_done(self, why: str) -> None:
        if not self._released:
            self._released = True
            self.on_released(why)
