"""Sends a pool of another machine the blobs that it lacks; goes on where it stopped when the link was broken.

`Sending` tells how much is there when that takes long.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from sgpu_magic.client.link import PoolLink
from sgpu_magic.client.wires import A, Answer
from sgpu_magic.errors import SerializationError
from sgpu_magic.payload.buffers import regions_of
from sgpu_magic.payload.pack import Packed
from sgpu_magic.system.byte_sizes import format_bytes
from sgpu_magic.wire.attachments import StoredPart, StoredPayload
from sgpu_magic.wire.files import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    PIECE_BYTES,
    WINDOW,
    AskBlobs,
    BlobsHeld,
    BlobTaken,
    PutBlob,
)

# hashing takes about a second for 1 GB and thread; more threads would only compete with the notebook's own
_HASH_THREADS = 2
# after this the pool is asked how far it has got
_ANSWER_S = 15.0
# an answer that takes longer makes the window smaller: other messages have to get through a slow line
_SLOW_S = 0.5
_FIRST_WINDOW = 4
# many small files are asked for together
_HASHED_AHEAD = 512
# what is over within a second needs no word
_FIRST_S = 1.0
_EVERY_S = 1.0


class Piece(msgspec.Struct, frozen=True):
    """What becomes one blob.

    Args:
        size: In bytes.
        load: Returns its bytes, the same at each call.
        digest: Theirs, where it is known already.
    """

    size: int
    load: Callable[[], memoryview]
    digest: str = ""


def pieces_of(path: Path | str, size: int) -> Iterator[Piece]:
    """Yield the pieces of a file.

    Args:
        path: Where it is.
        size: Its size in bytes.
    """
    for begin in range(0, size, PIECE_BYTES):
        part = min(PIECE_BYTES, size - begin)
        yield Piece(part, lambda begin=begin, part=part: _read(path, begin, part))


class BlobSender:
    """One upload at a time.

    Args:
        link: To the pool.
        on_progress: Called with how many bytes are at the pool now, whether they were sent or were there; now and then
            also while nothing is answered.

    Attributes:
        sent_bytes: What went over the link, chunks only.
    """

    def __init__(self, link: PoolLink, on_progress: Callable[[int], None] | None = None) -> None:
        self._link = link
        self._on_progress = on_progress
        self._there = 0
        self._window = _FIRST_WINDOW
        self.sent_bytes = 0

    def send(self, pieces: Iterable[Piece]) -> list[str]:
        """Have all pieces at the pool, and return their digests in order.

        Hashing goes on ahead in threads of its own while what is missing is sent.

        Raises:
            UsageError: The pool has no room.
            PoolLost: The pool ended.
            SerializationError: A file can't be read.
        """
        digests: list[str] = []
        # two files that are the same are asked for in one question, and both are lacking
        sent: set[str] = set()
        hashing: deque[tuple[Piece, Future[str]]] = deque()
        waiting = iter(pieces)
        with ThreadPoolExecutor(_HASH_THREADS, "sgpu-hash") as threads:
            try:
                while True:
                    while len(hashing) < _HASHED_AHEAD and (piece := next(waiting, None)) is not None:
                        hashing.append((piece, threads.submit(_digest, piece)))
                    if not hashing:
                        return digests
                    # all that are hashed by now are asked for together
                    ready = [hashing.popleft()]
                    while hashing and hashing[0][1].done():
                        ready.append(hashing.popleft())
                    found = [(piece, future.result()) for piece, future in ready]
                    held = self._ask([(digest, piece.size) for piece, digest in found])
                    for (piece, digest), bytes_ in zip(found, held, strict=True):
                        self._send_piece(piece, digest, piece.size if digest in sent else bytes_)
                        sent.add(digest)
                        digests.append(digest)
            except OSError as error:
                raise _unreadable(error) from error
            finally:
                # also when interrupted: nothing is hashed for nobody
                threads.shutdown(wait=False, cancel_futures=True)

    def send_file(self, path: Path | str) -> list[str]:
        """Have a file's pieces at the pool, and return their digests in order.

        Raises:
            SerializationError: It can't be read.
        """
        try:
            size = os.stat(path).st_size
        except OSError as error:
            raise _unreadable(error) from error
        return self.send(pieces_of(path, size))

    # ------------------------------------------------------------ within

    def _send_piece(self, piece: Piece, digest: str, held: int) -> None:
        data: memoryview | None = None
        while held < piece.size:
            data = piece.load() if data is None else data
            held = self._send_rest(data, digest, held)
            if held < piece.size:
                # an answer was lost with the link, or somebody else sends the same
                (held,) = self._ask([(digest, piece.size)])
        self._there += piece.size
        self._tell(0)

    def _send_rest(self, data: memoryview, digest: str, begin: int) -> int:
        """Send all from `begin` on, and return how far the pool has got; less than all when it stopped answering."""
        under_way: deque[tuple[Answer, int, float]] = deque()
        taken = at = begin
        try:
            while taken < data.nbytes:
                while at < data.nbytes and len(under_way) < self._window:
                    chunk = bytes(data[at : at + CHUNK_BYTES])
                    order = PutBlob(request=0, digest=digest, size=data.nbytes, offset=at)
                    at += len(chunk)
                    under_way.append((self._link.ask(order, [chunk]), at, time.monotonic()))
                    self.sent_bytes += len(chunk)
                answer, end, sent_at = under_way[0]
                found = _found(answer, BlobTaken)
                if found is None or found.up_to < end:
                    return taken
                under_way.popleft()
                taken = end
                self._tell(taken)
                slow = time.monotonic() - sent_at > _SLOW_S
                self._window = max(1, self._window - 1) if slow else min(WINDOW, self._window + 1)
            return taken
        finally:
            for answer, *_ in under_way:
                answer.give_up()

    def _ask(self, blobs: Sequence[tuple[str, int]]) -> Sequence[int]:
        while True:
            with self._link.ask(AskBlobs(request=0, blobs=tuple(blobs))) as answer:
                found = _found(answer, BlobsHeld)
            if found is not None and len(found.bytes) == len(blobs):
                return found.bytes
            self._tell(0)

    def _tell(self, of_this_piece: int) -> None:
        if self._on_progress is not None:
            self._on_progress(self._there + of_this_piece)


def _found(answer: Answer, kind: type[A]) -> A | None:
    """Return the pool's answer, None when none comes: the link may be broken, and come back."""
    try:
        return answer.of(kind, _ANSWER_S)
    except TimeoutError:
        return None


def _unreadable(error: OSError) -> SerializationError:
    return SerializationError(
        f"what the run ships can't be read: {error}. Run the cell again; if it stays, remove "
        f"{error.filename or 'the file'} and have it made anew."
    )


def _digest(piece: Piece) -> str:
    return piece.digest or hashlib.blake2b(piece.load(), digest_size=DIGEST_BYTES).hexdigest()


def _read(path: Path | str, begin: int, size: int) -> memoryview:
    with open(path, "rb") as file:
        data = os.pread(file.fileno(), size, begin)
    if len(data) != size:
        raise OSError(f"{path} is shorter than it was")
    return memoryview(data)


class Sending:
    """One run's way to a pool of another machine; a context, at whose end nothing is told any more.

    Args:
        pool: The pool's name.
        link: To it.
        tell: Called with a sentence about once a second, "" at the end when there was one; None tells nobody.
    """

    def __init__(self, pool: str, link: PoolLink, tell: Callable[[str], None] | None) -> None:
        self._pool = pool
        self._link = link
        self._tell = tell
        self._due = time.monotonic() + _FIRST_S
        self._told = False

    def __enter__(self) -> Sending:
        return self

    def __exit__(self, *_: object) -> None:
        if self._told and self._tell is not None:
            self._tell("")

    def part(self, what: str, total: int) -> Callable[[int], None]:
        """Return what is to be called with the bytes of one part that are at the pool.

        Args:
            what: The part, such as `variables`.
            total: All its bytes.
        """
        return lambda there: self._progress(what, there, total)

    def _progress(self, what: str, there: int, total: int) -> None:
        now = time.monotonic()
        if self._tell is None or now < self._due:
            return
        self._due = now + _EVERY_S
        self._told = True
        silent_s = self._link.silent_s
        silent = f"; the link has been silent for {silent_s:.0f} s, it goes on when that is back" if silent_s else ""
        self._tell(f"sending {what} to {self._pool}: {format_bytes(there)} of {format_bytes(total)} are there{silent}")


def send_packed(packed: Packed, link: PoolLink, sending: Sending) -> StoredPayload:
    """Send a pool whose ranks are on other machines what it lacks of the packed bytes."""
    regions = list(regions_of(packed))
    sender = BlobSender(link, sending.part("variables", packed.total_bytes))
    digests = sender.send(Piece(region.size, region.load) for region in regions)
    parts = (
        StoredPart(digest=digest, offset=region.offset, size=region.size)
        for digest, region in zip(digests, regions, strict=True)
    )
    return StoredPayload(parts=tuple(parts), size=packed.total_bytes)
