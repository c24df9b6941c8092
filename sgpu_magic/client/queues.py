"""Messages on their way to a link's thread, which owns the socket, and a run's events on their way from it."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sgpu_magic.wire.events import Event
from sgpu_magic.wire.files import RunFileRead

EventItem = tuple[Event, Sequence[bytes]]


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


class FilePart(NamedTuple):
    """A part of a run's file."""

    about: RunFileRead
    data: bytes


class EventQueue(queue.SimpleQueue["EventItem | None"]):
    """Events in their order; None means that the pool is lost.

    Attributes:
        last_seq: Number of the last event that was put in, or that was there before.
        woken: Called in the link's thread after each of them; for who takes the events of several runs.
    """

    woken: Callable[[], None] | None = None
    last_seq: int = 0

    def put(self, item: EventItem | None, block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        if item is not None:
            self.last_seq = item[0].seq
        woken = self.woken
        if woken is not None:
            woken()
