"""The memory files of a run: the notebook's payload and the ranks' results, held until they are no longer needed.

One thread at idle priority copies them into the run's directory, so that copying does not delay results.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path

import msgspec

from sgpu_magic.files.atomic_file import appearing
from sgpu_magic.files.content_store import join_parts
from sgpu_magic.system.processes import fits_memory, yield_cores_to_ranks
from sgpu_magic.wire.attachments import (
    FilePayload,
    InlinePayload,
    PayloadSource,
    SharedPayload,
    StoredPart,
    StoredPayload,
)
from sgpu_magic.wire.files import PAYLOAD

_CHUNK_BYTES = 16 << 20
# smaller parts are copied: they may share pages, and each mapped one takes a descriptor of every rank for a moment
_MAPPED_FROM_BYTES = 1 << 20
_MOST_MAPPED = 128
_log = logging.getLogger(__name__)
_REUSED = "the notebook's next run used the same memory before it was copied"


class MappedPart(msgspec.Struct, frozen=True):
    """A range of a payload whose bytes are in a file of its own, from which ranks map it.

    Args:
        offset: Where it begins in the payload.
        size: Size in bytes.
        descriptor: The file's descriptor.
    """

    offset: int
    size: int
    descriptor: int


ArrivedPayload = tuple[int, tuple[MappedPart, ...]]
"""The descriptor of a file as large as the payload, and the ranges that are not in it: see `RunMemory.take_payload`."""


def lay_out(run_dir: str, source: StoredPayload, paths: Sequence[Path]) -> ArrivedPayload:
    """Make a payload of its blobs: open those that can be mapped, and copy others to memory, or to a file without name.

    Args:
        run_dir: The run's directory, for the file where memory is short.
        source: The payload's parts.
        paths: The paths of their blobs, in order.

    Raises:
        OSError: A part is too short or outside the payload, or there is not enough space.
    """
    found = list(zip(source.parts, paths, strict=True))
    whole = _whole_pages(source)
    copied = [(part, path) for part, path in found if part not in whole]
    if fits_memory(sum(part.size for part, _ in copied)):
        descriptor = os.memfd_create("sgpu-payload-arrived", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile(dir=run_dir) as file:
            descriptor = os.dup(file.fileno())
    mapped: list[MappedPart] = []
    try:
        join_parts(descriptor, source.size, copied)
        for part, path in found:
            if part in whole:
                blob = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                mapped.append(MappedPart(part.offset, part.size, blob))
                if os.fstat(blob).st_size < part.size:
                    # a rank that read the rest would be killed by SIGBUS
                    raise OSError("a part of them has become shorter")
    except BaseException:
        close_payload(descriptor, mapped)
        raise
    return descriptor, tuple(mapped)


def _whole_pages(source: StoredPayload) -> set[StoredPart]:
    """Return the large parts that share no page of memory with another part."""
    found: set[StoredPart] = set()
    parts = sorted(source.parts, key=lambda part: part.offset)
    for part, begin in zip(parts, [*(part.offset for part in parts[1:]), source.size + PAGESIZE], strict=True):
        end = part.offset + part.size
        apart = part.offset % PAGESIZE == 0 and -(-end // PAGESIZE) * PAGESIZE <= begin and end <= source.size
        if apart and part.size >= _MAPPED_FROM_BYTES and len(found) < _MOST_MAPPED:
            found.add(part)
    return found


def close_payload(descriptor: int, mapped: Iterable[MappedPart]) -> None:
    """Close the descriptors of an arrived payload."""
    for each in (descriptor, *(part.descriptor for part in mapped)):
        os.close(each)


class CopyJob(msgspec.Struct):
    """Copy one descriptor's bytes into a file.

    Args:
        source: Descriptor to read; the copier closes it.
        size: Bytes to copy.
        target: The file, complete when it appears.
        given_up: Set to cancel the copy.
    """

    source: int
    size: int
    target: Path
    given_up: threading.Event = msgspec.field(default_factory=threading.Event)


class BackgroundCopier:
    """Copies memory files into run directories, one at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "sgpu-keeper", yield_cores_to_ranks)

    def keep(self, job: CopyJob) -> Future[str] | None:
        """Queue a copy job. Its result is why the copy failed, "" for success. After `close` nothing is copied."""
        try:
            return self._thread.submit(_keep, job)
        except RuntimeError:
            # timers may still fire while the agent's loop ends
            os.close(job.source)
            return None

    def close(self) -> None:
        self._thread.shutdown(wait=False)


def _keep(job: CopyJob) -> str:
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
        return ""
    except OSError as error:
        return _REUSED if job.given_up.is_set() else f"it could not be written: {error.strerror or error}"
    except Exception as error:  # noqa: BLE001  one job's guard: its future gets the error
        _log.exception("A bug in sgpu-magic: %s was not kept", job.target)
        return f"an internal error in the agent: {error!r}"
    finally:
        os.close(job.source)


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
        mapped: The ranges of the payload that are behind descriptors of their own.
    """

    source: PayloadSource
    directory: Path
    copier: BackgroundCopier
    keep_bytes: int
    on_released: Callable[[str], None]

    def __post_init__(self) -> None:
        self._released = isinstance(self.source, InlinePayload)
        self.payload_fd = -1
        self.mapped: tuple[MappedPart, ...] = ()
        self._job: CopyJob | None = None
        self._results: dict[int, int] = {}

    def open_payload(self) -> None:
        """Open the payload, so that it outlives the notebook.

        Raises:
            OSError: The payload does not exist, or no longer exists.
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

    def take_payload(self, descriptor: int, mapped: tuple[MappedPart, ...]) -> None:
        """Take over a payload that was fetched from the pool's store.

        Args:
            descriptor: The descriptor of a file as large as the payload, which has what is not in `mapped`.
            mapped: The ranges that ranks map from the blobs themselves.
        """
        self._close_payload()
        self.payload_fd, self.mapped = descriptor, mapped

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
            self._job = self._copy(descriptor, size, PAYLOAD, self._payload_done)

    def close_stored_payload(self) -> None:
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

    def _copy(self, descriptor: int, size: int, name: str, done: Callable[[str], None]) -> CopyJob:
        """Copy a descriptor into the run's directory and close it; `done` is called in the loop with the result."""
        job = CopyJob(descriptor, size, self.directory / name)
        if (copying := self.copier.keep(job)) is not None:
            asyncio.wrap_future(copying).add_done_callback(lambda copied: done(copied.result()))
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
            close_payload(self.payload_fd, self.mapped)
            self.payload_fd, self.mapped = -1, ()

    def _result_copied(self, rank: int, why: str) -> None:
        # from now on the result is read from the run's directory
        if not why and (descriptor := self._results.pop(rank, -1)) >= 0:
            os.close(descriptor)

    def _payload_done(self, why: str) -> None:
        if not self._released:
            self._released = True
            self.on_released(why)
