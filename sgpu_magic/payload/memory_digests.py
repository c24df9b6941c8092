"""Digests of memory: every byte is hashed, except where the kernel proves that none was written since the last time.

Nothing is inferred from an address, an object's identity or a sample. A digest is used again for the same range of
memory only if `WriteTracking` covered each of its pages before they were hashed and reports no write since then. It
does not matter which object owns the memory: if it was freed and allocated anew, it was written, or it is the same.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

import msgspec
from blake3 import blake3

from sgpu_magic.payload.buffers import address_of
from sgpu_magic.system.write_tracking import MemoryMap, NotTracked, Range, WriteTracking, pages_of

TRACKED_FROM = 1 << 20
"""Smaller buffers are hashed each time: that takes less than 0.3 ms."""

Hashed = Callable[[int], None]
"""Called with the number of bytes that were just hashed."""

# between two chunks an interrupt is handled and progress is reported
_CHUNK = 256 << 20
# for smaller data, waking the other threads costs more than it gains
_THREADS_FROM = 128 << 10
_MOST_RANGES = 4096


def hash_threads() -> int:
    """Return `max_threads` for large data: all cores, one in a forked child, where the hash's threads are missing."""
    return blake3.AUTO if os.getpid() == _pid else 1


_pid = os.getpid()


def digest_of(view: memoryview, hashed: Hashed | None = None) -> bytes:
    """Hash all bytes of a contiguous view, of any format."""
    data = view.cast("B") if view.format != "B" or view.ndim != 1 else view
    hasher = blake3(max_threads=hash_threads() if data.nbytes >= _THREADS_FROM else 1)
    for begin in range(0, data.nbytes, _CHUNK):
        part = data[begin : begin + _CHUNK]
        hasher.update(part)
        if hashed is not None:
            hashed(part.nbytes)
    return hasher.digest()


class _Range(msgspec.Struct):
    """The state of one range of memory.

    Args:
        pages: The pages that it touches.
        digest: Its digest when it was hashed last; None if it never was.
        tracked: Whether writes to it are tracked.
        valid: Whether `digest` is its content: the pages were protected before they were hashed, and no write has been
            reported since.
        steady: Whether its content was the same the last two times. A tracked write costs a page fault, so a range
            that changes between cells is hashed only.
    """

    pages: Range
    digest: bytes | None = None
    tracked: bool = False
    valid: bool = False
    steady: bool = True


class MemoryDigests:
    """Computes digests of buffers, and uses them again while the memory is proven to be unwritten. Thread-safe.

    A process's memory can be tracked once only, so all callers of a process use `shared_digests`.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._tracking: WriteTracking | None = None
        self._started = False
        # by address and size; the least recently used first
        self._ranges: dict[Range, _Range] = {}

    def digests_of(self, views: Sequence[memoryview], hashed: Hashed | None = None) -> list[bytes]:
        """Return the digests of contiguous buffers.

        Args:
            views: The buffers.
            hashed: Called as hashing proceeds; not for memory that is known to be unwritten.
        """
        with self._lock:
            self._forget_after_fork()
            large = [(address_of(view), view.nbytes) for view in views if view.nbytes >= TRACKED_FROM]
            if large and not self._started:
                self._started = True
                self._tracking = WriteTracking.start()
            if large and self._tracking is not None:
                self._protect(dict.fromkeys(large), self._tracking)
            return [self._digest(view, hashed) for view in views]

    # ------------------------------------------------------------ internals

    def _forget_after_fork(self) -> None:
        """In a forked child, forget all: the tracking is the parent's and proves nothing about the child's memory."""
        if self._pid == os.getpid():
            return
        self._ranges.clear()
        if self._tracking is not None:
            self._tracking.stop()
        self._pid, self._tracking, self._started = os.getpid(), None, False

    def _protect(self, large: Iterable[Range], tracking: WriteTracking) -> None:
        """Find out which ranges were written, and protect those that are about to be hashed."""
        looked_at: list[_Range] = []
        for key in large:
            known = self._ranges.pop(key, None) or _Range(pages_of(*key))
            self._ranges[key] = known
            looked_at.append(known)
            if known.tracked:
                self._take_written(known, tracking)
        for known in looked_at:
            if not known.tracked and known.steady:
                self._track(known, tracking)
        to_hash = [known for known in looked_at if known.tracked and not known.valid]
        if to_hash:
            # after they were protected: a transfer that begins later has to write through the page tables
            memory = MemoryMap()
            bypassed = memory.bypasses_page_tables()
            for known in to_hash:
                if bypassed or not memory.is_private(known.pages):
                    self._untrack(known, tracking)
        while len(self._ranges) > _MOST_RANGES:
            del self._ranges[next(iter(self._ranges))]

    def _track(self, known: _Range, tracking: WriteTracking) -> None:
        try:
            tracking.track(known.pages)
        except NotTracked:
            return
        known.tracked = True
        self._take_written(known, tracking)

    def _untrack(self, known: _Range, tracking: WriteTracking) -> None:
        known.tracked = known.valid = False
        with contextlib.suppress(NotTracked):
            tracking.untrack(known.pages)

    def _take_written(self, known: _Range, tracking: WriteTracking) -> None:
        """Take back the digests of all ranges with a written page in this one, whose pages are protected again."""
        try:
            written = tracking.take_written(known.pages)
        except NotTracked:
            # unmapped and mapped anew
            known.tracked = False
            written = [known.pages]
        if not written:
            return
        valid = [each for each in self._ranges.values() if each.valid and _overlap(each.pages, known.pages)]
        for part in written:
            if not valid:
                break
            for each in valid:
                each.valid = not _overlap(each.pages, part)
            valid = [each for each in valid if each.valid]

    def _digest(self, view: memoryview, hashed: Hashed | None) -> bytes:
        known = self._ranges.get((address_of(view), view.nbytes)) if view.nbytes >= TRACKED_FROM else None
        if known is not None and known.valid and known.digest is not None:
            return known.digest
        digest = digest_of(view, hashed)
        if known is not None:
            known.steady = known.digest in (None, digest)
            known.digest = digest
            known.valid = known.tracked
            if known.tracked and not known.steady and self._tracking is not None:
                self._untrack(known, self._tracking)
        return digest


def _overlap(one: Range, other: Range) -> bool:
    return one[0] < other[1] and other[0] < one[1]


_shared: weakref.ref[MemoryDigests] | None = None
_sharing = threading.Lock()


def shared_digests() -> MemoryDigests:
    """Return this process's digests. When the last user drops them, its memory is no longer tracked."""
    global _shared
    with _sharing:
        found = _shared() if _shared is not None else None
        if found is None:
            found = MemoryDigests()
            _shared = weakref.ref(found)
        return found
