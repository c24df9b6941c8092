"""A blocking message link over a Unix stream socket, with descriptors beside the messages."""

from __future__ import annotations

import array
import socket
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from sgpu_magic.wire.codec import Decoder, FrameReader, frame
from sgpu_magic.wire.record import Record

M = TypeVar("M")
_CHUNK_BYTES = 1 << 18
_MAX_DESCRIPTORS = 16


class Link(Generic[M]):
    """One end of a socketpair. `send` may be called by any thread, `receive` by one.

    Args:
        sock: A connected Unix stream socket; the link owns it.
        decoder: The decoder of what arrives.
    """

    def __init__(self, sock: socket.socket, decoder: Decoder[M]) -> None:
        self._socket = sock
        self._reader = FrameReader(decoder)
        self._arrived: deque[tuple[M, Sequence[bytes]]] = deque()
        self._descriptors: deque[int] = deque()
        self._send_lock = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def has_message(self) -> bool:
        """True when `receive` returns without reading the socket."""
        return bool(self._arrived)

    def send(self, message: Record, blobs: Iterable[bytes] = (), descriptors: Sequence[int] = ()) -> None:
        """Send one message; the descriptors stay open here.

        Raises:
            OSError: The other side is gone.
        """
        data = memoryview(frame(message, blobs))
        with self._send_lock:
            if descriptors:
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
                data = data[self._socket.sendmsg([data], ancillary) :]
            self._socket.sendall(data)

    def receive(self) -> tuple[M, Sequence[bytes]] | None:
        """Return the next message and its raw frames, None when the other side is gone."""
        while not self._arrived:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, _CHUNK_BYTES, _MAX_DESCRIPTORS)
            except ConnectionError:
                return None
            if not data:
                return None
            self._descriptors.extend(descriptors)
            self._arrived.extend(self._reader.feed(data))
        return self._arrived.popleft()

    def take_descriptors(self, count: int) -> list[int]:
        """Return the next `count` descriptors that came along; the caller owns them."""
        return [self._descriptors.popleft() for _ in range(count)]

    def close(self) -> None:
        self._socket.close()
        while self._descriptors:
            socket.close(self._descriptors.popleft())
