"""Exact tracking of writes to this process's own memory, by the kernel's page tables.

Linux 6.7 and newer write-protect pages for a process that asks (userfaultfd in its asynchronous mode) and report which
of them have been written since (the ioctl PAGEMAP_SCAN). The kernel resolves the fault of a first write itself, so the
writer only takes a microsecond longer. Every write counts: by Python, by C code, by another thread, by a system call
or by another process with `ptrace`. What does not go through this process's page tables is a transfer by a device;
`bypasses_page_tables` tells whether there may be one.

See https://docs.kernel.org/admin-guide/mm/pagemap.html and https://docs.kernel.org/admin-guide/mm/userfaultfd.html.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import re
import struct
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

Range = tuple[int, int]
"""The address of a range's first byte, and of the first byte after it."""

PAGE_BYTES = mmap.PAGESIZE

# number of userfaultfd(2) by machine; elsewhere nothing is tracked
_SYSTEM_CALLS = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1  # needs no privilege
_API = 0xAA
_WRITES_ARE_RESOLVED = 1 << 15  # UFFD_FEATURE_WP_ASYNC; includes pages that do not exist yet
_MODE_WRITE = 2
_PROTECT = 1
_UNREGISTER = (2 << 30) | (16 << 16) | (_API << 8) | 0x01
_REGIONS = 1024
_REGION = struct.Struct("QQQ")
_DEVICES_WITHOUT_TRANSFERS = re.compile(r"/dev/(null|zero|full|u?random|tty.*|ptmx|pts/.*|shm/.*|mqueue/.*|console)")
_HARMLESS_INODES = re.compile(
    r"anon_inode:\[?(eventpoll|eventfd|timerfd|signalfd|inotify|fanotify|pidfd|userfaultfd|perf_event)\]?"
)
_AIO = " /[aio]"
# lines of /proc/self/maps: private mappings without a file; the paths of devices
_PRIVATE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ...p [0-9a-f]+ [0-9a-f:]+ 0\b", re.MULTILINE)
_DEVICE = re.compile(r" (/dev/.*?)(?: \(deleted\))?$", re.MULTILINE)


def _ioctl_number(kind: int, number: int, size: int) -> int:
    return (3 << 30) | (size << 16) | (kind << 8) | number


_ANNOUNCE = _ioctl_number(_API, 0x3F, 24)
_REGISTER = _ioctl_number(_API, 0x00, 32)
_WRITE_PROTECT = _ioctl_number(_API, 0x06, 24)
_SCAN = _ioctl_number(ord("f"), 16, 96)

# flags and categories of PAGEMAP_SCAN
_PROTECT_MATCHING, _FAIL_IF_UNTRACKED = 1, 2
_WRITTEN, _PRESENT, _SWAPPED = 2, 8, 16


class NotTracked(Exception):
    """Part of a range is not tracked, for instance because its memory was unmapped and mapped anew."""


class WriteTracking:
    """Tracks writes to ranges of this process's private memory. Not thread-safe; useless in a forked child.

    Create it with `start`, which returns None where the system does not support it.
    """

    def __init__(self, fault_fd: int, pages_fd: int) -> None:
        self._fault_fd, self._pages_fd = fault_fd, pages_fd
        self._close = weakref.finalize(self, _close, fault_fd, pages_fd)
        self._regions = ctypes.create_string_buffer(_REGIONS * _REGION.size)

    @classmethod
    def start(cls) -> WriteTracking | None:
        """Start tracking. Returns None if the kernel does not support or permit it, or fails a test of it."""
        number = _SYSTEM_CALLS.get(platform.machine())
        if number is None or ctypes.sizeof(ctypes.c_void_p) != 8:
            return None
        libc = ctypes.CDLL(None, use_errno=True)
        fault_fd: int = libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY)
        if fault_fd < 0:
            return None
        try:
            fcntl.ioctl(fault_fd, _ANNOUNCE, bytearray(struct.pack("QQQ", _API, _WRITES_ARE_RESOLVED, 0)))
            pages_fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(fault_fd)
            return None
        tracking = cls(fault_fd, pages_fd)
        try:
            if _keeps_its_promises(tracking):
                return tracking
        except (OSError, NotTracked):
            pass
        tracking.stop()
        return None

    def stop(self) -> None:
        """Stop all tracking; the memory is again as it was. In a forked child, release the descriptors."""
        self._close()

    def track(self, part: Range) -> None:
        """Begin to track a range of whole pages. The caller checks with `is_private` that it can be tracked.

        Raises:
            NotTracked: The kernel refuses.
        """
        begin, end = part
        self._fault(_REGISTER, struct.pack("QQQQ", begin, end - begin, _MODE_WRITE, 0))

    def untrack(self, part: Range) -> None:
        """Stop tracking a range, and every tracked range that overlaps it.

        Raises:
            NotTracked: It was not tracked.
        """
        begin, end = part
        self._fault(_UNREGISTER, struct.pack("QQ", begin, end - begin))

    def take_written(self, part: Range) -> list[Range]:
        """Return what has been written in a tracked range since the last call for these pages.

        A page that is written while this runs is returned by this call or by the next one.

        Args:
            part: The range. Its pages are protected afterwards, so a later write is seen.

        Returns:
            Ranges of whole pages, in no order. Memory that was returned to the system counts as written.

        Raises:
            NotTracked: Part of the range is not tracked.
        """
        begin, end = part
        written = list(self._scan(part, protect=True))
        missing: list[Range] = []
        at = begin
        for known_begin, known_end in self._scan(part, protect=False):
            if known_begin > at:
                missing.append((at, known_begin))
            at = max(at, known_end)
        if at < end:
            missing.append((at, end))
        # a page that was dropped is neither present nor marked; without protection it would be reported forever
        for first, last in missing:
            self._fault(_WRITE_PROTECT, struct.pack("QQQ", first, last - first, _PROTECT))
        return written + missing

    def _scan(self, part: Range, *, protect: bool) -> Iterator[Range]:
        """Yield the written pages of a range and protect them, or yield those that are known to be unwritten."""
        begin, end = part
        flags = _FAIL_IF_UNTRACKED | (_PROTECT_MATCHING if protect else 0)
        inverted, required = (0, _WRITTEN) if protect else (_WRITTEN, _WRITTEN)
        any_of = 0 if protect else _PRESENT | _SWAPPED
        address = ctypes.addressof(self._regions)
        while begin < end:
            # `return_mask` includes more than is needed: with PAGE_IS_WRITTEN alone the kernel takes a faster path,
            # which before 6.13 did not distinguish a swapped page from a present one
            request = struct.pack(
                "12Q", 96, flags, begin, end, 0, address, _REGIONS, 0, inverted, required, any_of, _PRESENT | _WRITTEN
            )
            try:
                found, answer = _ioctl(self._pages_fd, _SCAN, request)
            except OSError as error:
                raise NotTracked from error
            for first, last, _ in _REGION.iter_unpack(memoryview(self._regions)[: found * _REGION.size]):
                yield first, last
            begin = struct.unpack("12Q", answer)[4]

    def _fault(self, number: int, request: bytes) -> None:
        try:
            _ioctl(self._fault_fd, number, request)
        except OSError as error:
            raise NotTracked from error


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _ioctl(descriptor: int, number: int, request: bytes) -> tuple[int, bytes]:
    buffer = bytearray(request)
    return fcntl.ioctl(descriptor, number, buffer), bytes(buffer)


def pages_of(address: int, size: int) -> Range:
    """Return the pages that a buffer touches, including those that it shares with other objects."""
    end = address + size
    return address - address % PAGE_BYTES, end + -end % PAGE_BYTES


def _keeps_its_promises(tracking: WriteTracking) -> bool:
    """Whether the kernel reports each kind of write, and nothing else, in a small test mapping."""
    count = 8
    own = mmap.mmap(-1, count * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = ctypes.addressof(ctypes.c_char.from_buffer(own))
    whole = (first, first + count * PAGE_BYTES)
    own[: 4 * PAGE_BYTES] = bytes(4 * PAGE_BYTES)
    tracking.track(whole)
    tracking.take_written(whole)

    def by_system_call() -> None:
        reading, writing = os.pipe()
        try:
            os.write(writing, b"x")
            os.readv(reading, [memoryview(own)[3 * PAGE_BYTES : 3 * PAGE_BYTES + 1]])
        finally:
            os.close(reading)
            os.close(writing)

    writes: list[tuple[Callable[[], object], set[int]]] = [
        (lambda: bytes(own), set()),
        (lambda: own.__setitem__(5, 1), {0}),
        (lambda: ctypes.memset(first + 2 * PAGE_BYTES - 1, 1, 2), {1, 2}),
        (by_system_call, {3}),
        (lambda: own.__setitem__(6 * PAGE_BYTES, 1), {6}),
        (lambda: own.madvise(mmap.MADV_DONTNEED, 0, PAGE_BYTES), {0}),
        (lambda: None, set()),
    ]
    for write, expected in writes:
        write()
        seen = {
            (address - first) // PAGE_BYTES
            for begin, end in tracking.take_written(whole)
            for address in range(begin, end, PAGE_BYTES)
        }
        if seen != expected:
            return False
    return True


# ---------------------------------------------------------------- memory that can be tracked


class MemoryMap:
    """This process's mappings at the time of construction."""

    def __init__(self) -> None:
        text = Path("/proc/self/maps").read_text(errors="surrogateescape")
        self._private = [(int(begin, 16), int(end, 16)) for begin, end in _PRIVATE.findall(text)]
        devices = (path for path in _DEVICE.findall(text) if not _DEVICES_WITHOUT_TRANSFERS.fullmatch(path))
        self._has_transfers = _AIO in text or next(devices, None) is not None

    def is_private(self, part: Range) -> bool:
        """Whether a range is memory of this process alone: neither shared nor of a file."""
        at, end = part
        for first, last in self._private:
            if first <= at < last:
                at = last
                if at >= end:
                    return True
        return False

    def bypasses_page_tables(self) -> bool:
        """Whether memory may be written without a page fault: by a device, or by a transfer that is under way.

        A device writes to pages that were pinned for it. Pinning needs an open device (a GPU, a network adapter for
        RDMA), an `io_uring`, a context of `io_submit`, or a file that was opened with `O_DIRECT`.
        """
        return self._has_transfers or any(map(_may_transfer, os.listdir("/proc/self/fd")))


def _may_transfer(descriptor: str) -> bool:
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
        if target.startswith("/dev/"):
            return not _DEVICES_WITHOUT_TRANSFERS.fullmatch(target)
        if target.startswith("anon_inode:"):
            return not _HARMLESS_INODES.fullmatch(target)
        if not target.startswith("/"):
            return False
        info = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    except OSError:
        # the descriptor was closed meanwhile
        return False
    flags = next(line for line in info.splitlines() if line.startswith("flags:"))
    return bool(int(flags.split()[1], 8) & os.O_DIRECT)
