"""Writes to memory that the kernel reports: all ways in which memory is written, returned and mapped again."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from sgpu_magic.payload.memory_digests import shared_digests
from sgpu_magic.system.write_tracking import PAGE_BYTES, MemoryMap, NotTracked, Range, WriteTracking, pages_of

PAGES = 1024
SIZE = PAGES * PAGE_BYTES
PROT, PRIVATE, SHARED, FIXED, MAY_MOVE, MOVE_FIXED = 3, 0x22, 0x21, 0x10, 1, 3
FAILED = ctypes.c_void_p(-1).value

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Memory:
    """Memory for one test, with all its pages written."""

    def __init__(self, tracking: WriteTracking, flags: int = PRIVATE, advice: int | None = None) -> None:
        # aligned to huge pages
        self.begin: int = -(-libc.mmap(None, SIZE * 2, PROT, flags, -1, 0) // SIZE) * SIZE
        if advice is not None:
            libc.madvise(self.begin, SIZE, advice)
        ctypes.memset(self.begin, 1, SIZE)
        self.tracking = tracking

    @property
    def range(self) -> Range:
        return self.begin, self.begin + SIZE

    def address(self, page: int) -> int:
        return self.begin + page * PAGE_BYTES

    def written(self) -> set[int]:
        return {
            (address - self.begin) // PAGE_BYTES
            for begin, end in self.tracking.take_written(self.range)
            for address in range(begin, end, PAGE_BYTES)
        }


@pytest.fixture
def tracking() -> Iterator[WriteTracking]:
    found = WriteTracking.start()
    if found is None:
        pytest.skip("this kernel does not track writes")
    yield found
    found.stop()


@pytest.fixture
def memory(tracking: WriteTracking) -> Iterator[Memory]:
    found = Memory(tracking)
    tracking.track(found.range)
    found.written()
    yield found
    libc.munmap(found.begin, SIZE)


def by_pipe(address: int) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"x")
    os.readv(reading, [(ctypes.c_char * 1).from_address(address)])
    os.close(reading)
    os.close(writing)


def by_another_process(address: int) -> None:
    """As a debugger does it."""
    parent = os.getpid()
    if not (child := os.fork()):
        with open(f"/proc/{parent}/mem", "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), b"x", address)
        os._exit(0)
    os.waitpid(child, 0)


def by_thread(address: int) -> None:
    thread = threading.Thread(target=ctypes.memset, args=(address, 7, 1))
    thread.start()
    thread.join()


WRITES: dict[str, Callable[[int], object]] = {
    "C code": lambda address: ctypes.memset(address, 7, 1),
    "the same value": lambda address: ctypes.memset(address, 1, 1),
    "a system call": by_pipe,
    "a thread": by_thread,
    "another process": by_another_process,
    "returned to the system": lambda address: libc.madvise(address, PAGE_BYTES, mmap.MADV_DONTNEED),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("advice", [None, mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE], ids=["", "huge", "small"])
def test_a_write_is_reported_once(tracking: WriteTracking, how: str, advice: int | None):
    memory = Memory(tracking, advice=advice)
    tracking.track(memory.range)
    assert memory.written() == set(range(PAGES))
    assert memory.written() == set()
    assert ctypes.string_at(memory.begin, SIZE) == b"\1" * SIZE
    assert memory.written() == set()
    for page in (0, 1, 500, PAGES - 1):
        WRITES[how](memory.address(page))
        assert memory.written() == {page}
    assert memory.written() == set()


def test_many_scattered_writes(memory: Memory):
    """More than a single system call can report."""
    pages = set(range(0, PAGES, 3))
    for page in pages:
        ctypes.memset(memory.address(page), 7, 1)
    assert memory.written() == pages
    assert memory.written() == set()


def test_pages_that_were_never_touched(tracking: WriteTracking):
    begin = libc.mmap(None, SIZE, PROT, PRIVATE, -1, 0)
    tracking.track((begin, begin + SIZE))
    tracking.take_written((begin, begin + SIZE))
    assert tracking.take_written((begin, begin + SIZE)) == []
    assert ctypes.string_at(begin + 8 * PAGE_BYTES, 1) == b"\0"
    assert tracking.take_written((begin, begin + SIZE)) == []
    ctypes.memset(begin + 8 * PAGE_BYTES, 1, 1)
    assert tracking.take_written((begin, begin + SIZE)) == [(begin + 8 * PAGE_BYTES, begin + 9 * PAGE_BYTES)]
    libc.munmap(begin, SIZE)


def test_a_fork_changes_nothing_and_later_writes_are_seen(memory: Memory):
    reading, writing = os.pipe()
    if not (child := os.fork()):
        # the child's copy
        ctypes.memset(memory.begin, 9, SIZE)
        os.write(writing, b"done")
        os._exit(0)
    os.read(reading, 4)
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    assert memory.written() == set()
    ctypes.memset(memory.address(3), 9, 1)
    assert memory.written() == {3}


def anew(memory: Memory) -> None:
    assert libc.mmap(memory.address(5), PAGE_BYTES, PROT, PRIVATE | FIXED, -1, 0) == memory.address(5)


def all_anew(memory: Memory) -> None:
    libc.munmap(memory.begin, SIZE)
    assert libc.mmap(memory.begin, SIZE, PROT, PRIVATE | FIXED, -1, 0) == memory.begin


def moved_there(memory: Memory) -> None:
    """Move other tracked memory to the place of this tracked memory."""
    other = Memory(memory.tracking)
    memory.tracking.track(other.range)
    other.written()
    assert libc.mremap(other.begin, SIZE, SIZE, MOVE_FIXED, memory.begin) == memory.begin


def shared_there(memory: Memory) -> None:
    assert libc.mmap(memory.begin, SIZE, PROT, SHARED | FIXED, -1, 0) == memory.begin


@pytest.mark.parametrize("change", [anew, all_anew, moved_there, shared_there])
def test_memory_that_is_mapped_anew_is_not_tracked(memory: Memory, change: Callable[[Memory], None]):
    change(memory)
    with pytest.raises(NotTracked):
        memory.written()


def test_memory_that_grows_in_place(tracking: WriteTracking):
    begin = libc.mmap(None, 2 * SIZE, PROT, PRIVATE, -1, 0)
    libc.munmap(begin + SIZE, SIZE)
    ctypes.memset(begin, 1, SIZE)
    tracking.track((begin, begin + SIZE))
    tracking.take_written((begin, begin + SIZE))
    assert libc.mremap(begin, SIZE, 2 * SIZE, 0, None) == begin
    assert (begin + SIZE, begin + 2 * SIZE) in tracking.take_written((begin, begin + 2 * SIZE))
    assert tracking.take_written((begin, begin + 2 * SIZE)) == []
    libc.munmap(begin, 2 * SIZE)


def test_after_the_end_memory_is_as_it_was(memory: Memory):
    memory.tracking.stop()
    ctypes.memset(memory.begin, 7, SIZE)
    memory.tracking.stop()
    assert ctypes.string_at(memory.begin, SIZE) == b"\7" * SIZE


def test_a_kernel_without_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert WriteTracking.start() is None
    memory = memoryview(bytearray(3_000_000))
    assert shared_digests().digests_of([memory]) == shared_digests().digests_of([memory])


# ---------------------------------------------------------------- memory that can be tracked


def test_private_memory(tmp_path: Path):
    own, shared = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), mmap.mmap(-1, SIZE)
    (tmp_path / "file").write_bytes(bytes(SIZE))
    with open(tmp_path / "file", "r+b") as file:
        of_file = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_COPY)
    found = MemoryMap()
    of_numpy = np.zeros(SIZE, np.uint8)
    assert found.is_private(pages_of(np.frombuffer(own, np.uint8).ctypes.data, SIZE))
    assert MemoryMap().is_private(pages_of(of_numpy.ctypes.data, SIZE))
    for other in (shared, of_file):
        assert not found.is_private(pages_of(np.frombuffer(other, np.uint8).ctypes.data, SIZE))
    assert not found.is_private((0, PAGE_BYTES))


def open_io_uring(_: Path) -> int:
    descriptor: int = libc.syscall(425, 4, ctypes.create_string_buffer(120))
    if descriptor < 0:
        pytest.skip("this kernel has no io_uring")
    return descriptor


def open_direct(folder: Path) -> int:
    try:
        return os.open(folder / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        pytest.skip("this file system has no O_DIRECT")


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(open_io_uring, id="io_uring"),
        pytest.param(open_direct, id="O_DIRECT"),
        pytest.param(lambda _: os.open("/dev/fuse", os.O_RDWR), id="device"),
    ],
)
def test_what_may_write_past_the_page_tables(begin: Callable[[Path], int], tmp_path: Path):
    assert not MemoryMap().bypasses_page_tables()
    with contextlib.ExitStack() as stack:
        try:
            descriptor = begin(tmp_path)
        except OSError:
            pytest.skip("this machine has no such device")
        stack.callback(os.close, descriptor)
        assert MemoryMap().bypasses_page_tables()
    assert not MemoryMap().bypasses_page_tables()


def test_what_does_not(tmp_path: Path):
    import select

    opened = [os.open(path, os.O_RDWR) for path in ("/dev/null", "/dev/zero")]
    opened += [os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT), os.eventfd(0), os.memfd_create("x"), *os.pipe()]
    with select.epoll():
        assert not MemoryMap().bypasses_page_tables()
    for descriptor in opened:
        os.close(descriptor)
