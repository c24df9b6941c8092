"""Queues to and from the thread that owns a connection."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

import msgspec

from sgpu_magic.errors import PoolError
from sgpu_magic.wire.client import Accepted, Attached, LineOpened, RankAnswered, Stacks
from sgpu_magic.wire.events import Event
from sgpu_magic.wire.files import BlobsHeld, BlobTaken, RunFileRead, RunFiles
from sgpu_magic.wire.pool_status import PoolStatus

EventItem = tuple[Event, Sequence[bytes]]


class OutboundMessage(msgspec.Struct, frozen=True):
    """One encoded message.

    Args:
        request: Its request number if a reply is expected, else 0.
        parts: The encoded message, then its raw frames.
        is_bulk: Whether it belongs on a connection for file data, where there is one.
    """

    request: int
    parts: Sequence[bytes]
    is_bulk: bool = False


class SendQueue:
    """A queue that any thread can put into and one thread can poll, through `fileno`."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[OutboundMessage | None] = queue.SimpleQueue()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self.closed = False

    # ------------------------------------------------------------ for any thread

    def put(self, message: OutboundMessage | None) -> None:
        """Queue a message; None marks the end of the queue."""
        self._messages.put(message)
        # a full buffer also wakes the reader
        with contextlib.suppress(OSError):
            self._writer.send(b"x")

    # ------------------------------------------------------------ for the link's thread

    def fileno(self) -> int:
        return self._reader.fileno()

    def drain(self) -> Iterator[OutboundMessage]:
        """Yield the queued messages; set `closed` when the end is reached."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)
        with contextlib.suppress(queue.Empty):
            while not self.closed:
                message = self._messages.get_nowait()
                if message is None:
                    self.closed = True
                else:
                    yield message

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class FilePart(NamedTuple):
    """A part of a run's file."""

    about: RunFileRead
    data: bytes


class EventQueue(queue.SimpleQueue["EventItem | None"]):
    """Events in order; None means that the pool is lost.

    Attributes:
        last_seq: Sequence number of the last event put in, or of the last one that the caller already had.
        is_refused: Whether a None means that the run was not started, and has to be submitted to the pool.
        woken: Called in the link's thread after each item; for consumers of several queues.
    """

    woken: Callable[[], None] | None = None
    last_seq: int = 0
    is_refused: bool = False

    def put(self, item: EventItem | None, block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        if item is not None:
            self.last_seq = item[0].seq
        if self.woken is not None:
            self.woken()


Reply = (
    Accepted | Attached | Stacks | RankAnswered | LineOpened | PoolStatus | BlobsHeld | BlobTaken | RunFiles | FilePart
)
A = TypeVar("A", bound=Reply)


class Answer:
    """The pending reply to a request; a context manager that abandons the request on exit.

    Args:
        reply: The future that the link's thread resolves.
        give_up: Called when the request is abandoned.
        misfit: Error message for a reply of the wrong type.
    """

    def __init__(self, reply: Future[Reply], give_up: Callable[[], None], misfit: str) -> None:
        self._reply = reply
        self._misfit = misfit
        self.give_up = give_up

    def wait(self, kind: type[A], timeout_s: float) -> A:
        """Wait for the reply and return it.

        Args:
            kind: Type that the reply must have.
            timeout_s: Time to wait, in seconds.

        Raises:
            TimeoutError: No reply arrived in time.
            SgpuError: The pool refused the request or died, or the reply has another type.
        """
        answer = self._reply.result(timeout_s)
        if not isinstance(answer, kind):
            raise PoolError(self._misfit)
        return answer

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_up()
