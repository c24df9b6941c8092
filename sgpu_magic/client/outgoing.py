"""Messages on their way to a link's thread, which owns the socket."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parcel:
    """One message as it goes on the wire.

    Args:
        request: Its number when it is answered, else 0.
        parts: The encoded message, then its raw frames.
    """

    request: int
    parts: Sequence[bytes]


class Outgoing:
    """A queue that any thread puts into and one thread can poll."""

    def __init__(self) -> None:
        self._parcels: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self.closed = False

    # ------------------------------------------------------------ for any thread

    def put(self, parcel: Parcel) -> None:
        self._parcels.put(parcel)
        self._wake()

    def end(self) -> None:
        """Nothing comes after what was put in before."""
        self._parcels.put(None)
        self._wake()

    # ------------------------------------------------------------ for the link's thread

    def fileno(self) -> int:
        return self._reader.fileno()

    def take(self) -> Iterator[Parcel]:
        """Yield what is there; `closed` is set when that was the end."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)
        while not self.closed:
            try:
                parcel = self._parcels.get_nowait()
            except queue.Empty:
                return
            if parcel is None:
                self.closed = True
            else:
                yield parcel

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.send(b"x")
