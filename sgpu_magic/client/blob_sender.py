"""Sends the blobs that a remote pool lacks; resumes where it stopped after a broken link.

`Sending` reports the progress of long uploads.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import cast

import msgspec

from sgpu_magic.client.link import OnNotice, PoolLink
from sgpu_magic.client.send_queue import A, Answer
from sgpu_magic.errors import SerializationError
from sgpu_magic.files.content_store import blob_digest
from sgpu_magic.formatting import format_bytes
from sgpu_magic.payload.buffers import regions_of
from sgpu_magic.payload.pack import Packed
from sgpu_magic.wire.attachments import StoredPart, StoredPayload
from sgpu_magic.wire.files import (
    CHUNK_BYTES,
    PIECE_BYTES,
    WINDOW,
    AskBlobs,
    BlobsHeld,
    BlobTaken,
    PutBlob,
)

# after this long without a reply, ask the pool how many bytes it has
_ANSWER_TIMEOUT_S = 15.0
# a slower reply shrinks the window, so that other messages get through a slow line
_SLOW_S = 0.5
_FIRST_WINDOW = 4
# digests of many small files are asked for together
_HASHED_AHEAD = 512
# uploads shorter than this are not reported
_FIRST_S = 1.0
_EVERY_S = 1.0


class BlobContent(msgspec.Struct, frozen=True):
    """The content of one blob.

    Args:
        size: Size in bytes.
        load: Returns the bytes, the same on each call.
        digest: Their digest, if it is known already.
    """

    size: int
    load: Callable[[], memoryview]
    digest: str = ""


def pieces_of(path: Path | str, size: int) -> Iterator[BlobContent]:
    """Yield the pieces of a file.

    Args:
        path: Path of the file.
        size: Its size in bytes.
    """
    for begin in range(0, size, PIECE_BYTES):
        part = min(PIECE_BYTES, size - begin)
        yield BlobContent(part, lambda begin=begin, part=part: _read(path, begin, part))


class BlobSender:
    """Sends pieces to a pool, one upload at a time.

    Args:
        link: The link to the pool.
        on_progress: Called with the number of bytes that the pool has, sent now or earlier; from time to time also
            while the pool does not answer.

    Attributes:
        sent_bytes: Bytes of chunks sent over the link.
    """

    def __init__(self, link: PoolLink, on_progress: Callable[[int], None] | None = None) -> None:
        self._link = link
        self._on_progress = on_progress
        self._there = 0
        self._window = _FIRST_WINDOW
        self.sent_bytes = 0

    def send(self, pieces: Iterable[BlobContent]) -> list[str]:
        """Send the pieces that the pool lacks and return the digests of all pieces in order.

        A thread hashes ahead, on all cores, while missing pieces are sent.

        Raises:
            UsageError: The pool has not enough space.
            PoolLost: The pool ended.
            SerializationError: A file can't be read.
        """
        digests: list[str] = []
        # two equal files in one request are both reported as missing
        sent: set[str] = set()
        hashing: deque[tuple[BlobContent, Future[str]]] = deque()
        waiting = iter(pieces)
        with ThreadPoolExecutor(1, "sgpu-hash") as threads:
            try:
                while True:
                    while len(hashing) < _HASHED_AHEAD and (piece := next(waiting, None)) is not None:
                        hashing.append((piece, threads.submit(_digest, piece)))
                    if not hashing:
                        return digests
                    # ask for all that have been hashed so far together
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
                raise SerializationError(
                    f"what the run ships can't be read: {error}. Run the cell again; if that fails too, remove "
                    f"{error.filename or 'the file'}, which is then created again."
                ) from error
            finally:
                # cancel the remaining hashing, also on an interrupt
                threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ internals

    def _send_piece(self, piece: BlobContent, digest: str, held: int) -> None:
        data: memoryview | None = None
        while held < piece.size:
            data = piece.load() if data is None else data
            if (held := self._send_rest(data, digest, held)) < piece.size:
                # a reply was lost with the link, or another client is sending the same blob
                (held,) = self._ask([(digest, piece.size)])
        self._there += piece.size
        self._report(0)

    def _send_rest(self, data: memoryview, digest: str, begin: int) -> int:
        """Send everything from `begin` on; return how many bytes the pool has, not all if it stopped answering."""
        under_way: deque[tuple[Answer, int, float]] = deque()
        taken = at = begin
        try:
            while taken < data.nbytes:
                while at < data.nbytes and len(under_way) < self._window:
                    # send larger chunks only after fast replies have grown the window
                    most = self._link.transport.chunk_bytes if self._window > _FIRST_WINDOW else CHUNK_BYTES
                    # a memoryview, since `bytes` would be a copy
                    chunk = cast("bytes", data[at : at + most])
                    order = PutBlob(request=0, digest=digest, size=data.nbytes, offset=at)
                    at += len(chunk)
                    under_way.append((self._link.ask(order, [chunk]), at, time.monotonic()))
                    self.sent_bytes += len(chunk)
                answer, end, sent_at = under_way[0]
                found = _wait_for_answer(answer, BlobTaken)
                if found is None or found.up_to < end:
                    return taken
                under_way.popleft()
                taken = end
                self._report(taken)
                slow = time.monotonic() - sent_at > _SLOW_S
                self._window = max(1, self._window - 1) if slow else min(WINDOW, self._window + 1)
            return taken
        finally:
            for answer, *_ in under_way:
                answer.give_up()

    def _ask(self, blobs: Sequence[tuple[str, int]]) -> Sequence[int]:
        while True:
            with self._link.ask(AskBlobs(request=0, blobs=tuple(blobs))) as answer:
                found = _wait_for_answer(answer, BlobsHeld)
            if found is not None and len(found.bytes) == len(blobs):
                return found.bytes
            self._report(0)

    def _report(self, of_this_piece: int) -> None:
        if self._on_progress is not None:
            self._on_progress(self._there + of_this_piece)


def _wait_for_answer(answer: Answer, kind: type[A]) -> A | None:
    """Return the pool's reply, None on timeout: the link may be broken and reconnect."""
    with contextlib.suppress(TimeoutError):
        return answer.wait(kind, _ANSWER_TIMEOUT_S)
    return None


def _digest(piece: BlobContent) -> str:
    return piece.digest or blob_digest(piece.load())


def _read(path: Path | str, begin: int, size: int) -> memoryview:
    with open(path, "rb") as file:
        data = os.pread(file.fileno(), size, begin)
    if len(data) != size:
        raise OSError(f"{path} has become shorter")
    return memoryview(data)


class Sending:
    """Reports the progress of one run's uploads; a context manager that clears the report on exit.

    Args:
        pool: The pool's name.
        link: The link to it.
        on_notice: Called with a sentence about once a second, and with "" at the end if there was one; None for no
            reports.
    """

    def __init__(self, pool: str, link: PoolLink, on_notice: OnNotice | None) -> None:
        self._pool = pool
        self._link = link
        self._on_notice = on_notice
        self._due = time.monotonic() + _FIRST_S
        self._announced = False

    def __enter__(self) -> Sending:
        return self

    def __exit__(self, *_: object) -> None:
        if self._announced and self._on_notice is not None:
            self._on_notice("")

    def part(self, what: str, total: int) -> Callable[[int], None]:
        """Return a callback that takes the number of bytes of one part that the pool has.

        Args:
            what: The part, such as `variables`.
            total: Size of the part in bytes.
        """
        transport = self._link.transport

        def progress(there: int) -> None:
            now = time.monotonic()
            if self._on_notice is None or now < self._due:
                return
            self._due, self._announced = now + _EVERY_S, True
            sent = f"sending {what} to {self._pool}: {format_bytes(there)} of {format_bytes(total)} sent"
            if transport.silent_s:
                sent += f"; the link has been silent for {transport.silent_s:.0f} s, sending continues when it is back"
            self._on_notice(f"{sent}; it takes the slower way: {transport.slow_why}" if transport.slow_why else sent)

        return progress


def send_packed(packed: Packed, link: PoolLink, sending: Sending) -> StoredPayload:
    """Send a remote pool the regions of a payload that it lacks."""
    regions = list(regions_of(packed))
    sender = BlobSender(link, sending.part("variables", packed.total_bytes))
    digests = sender.send(BlobContent(region.size, region.load) for region in regions)
    parts = (
        StoredPart(digest=digest, offset=region.offset, size=region.size)
        for digest, region in zip(digests, regions, strict=True)
    )
    return StoredPayload(parts=tuple(parts), size=packed.total_bytes)
