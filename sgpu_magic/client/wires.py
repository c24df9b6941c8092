"""A link's messages on their way: the queues of its thread, what carries them, and the way to the local pool's socket.

ZeroMQ hides a peer's death, so a pidfd of the local pool is watched too.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import zmq

from sgpu_magic.errors import PoolError
from sgpu_magic.wire.client import Accepted, Attached, RankAnswered, Stacks
from sgpu_magic.wire.events import Event
from sgpu_magic.wire.files import BlobsHeld, BlobTaken, RunFileRead, RunFiles
from sgpu_magic.wire.pool_status import PoolStatus

if TYPE_CHECKING:
    from sgpu_magic.client.link import PoolLink

_LINGER_MS = 200
_NO_PIDFD_POLL_MS = 1000

# ---------------------------------------------------------------- on their way to the link's thread, and from it

EventItem = tuple[Event, Sequence[bytes]]


class Parcel(msgspec.Struct, frozen=True):
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


Reply = Accepted | Attached | Stacks | RankAnswered | PoolStatus | BlobsHeld | BlobTaken | RunFiles | FilePart
A = TypeVar("A", bound=Reply)


class Answer:
    """What a question is answered with; a context, at whose end nobody waits for that any more.

    Args:
        reply: Comes from the link's thread.
        give_up: Tells the link that nobody waits.
        misfit: What is said of an answer that fits no question.
    """

    def __init__(self, reply: Future[Reply], give_up: Callable[[], None], misfit: str) -> None:
        self._reply = reply
        self._misfit = misfit
        self.give_up = give_up

    def of(self, kind: type[A], timeout_s: float) -> A:
        """Wait for it.

        Raises:
            TimeoutError: It has not come.
            SgpuError: The pool refused what was asked, or died.
        """
        answer = self._reply.result(timeout_s)
        if not isinstance(answer, kind):
            raise PoolError(self._misfit)
        return answer

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_up()


# ---------------------------------------------------------------- what carries them


class LocalWire:
    """Carries messages to a pool of this machine. `carry` runs in the link's thread; the rest may be asked by any.

    Args:
        path: The pool's socket.
        pid: The pool's process.

    Attributes:
        title: The pool as sentences name it.
        says_hello: It greets the pool itself, on each connection that it makes.
        silent_s: Seconds since the pool was heard, 0 as long as that is no cause for a word.
    """

    says_hello = False
    silent_s = 0.0

    def __init__(self, path: Path, pid: int) -> None:
        self._path = path
        self._pid = pid
        self.title = f"the local pool (process {pid})"

    def lost(self) -> str:
        """Say that the pool went away while something was asked of it."""
        return (
            f"{self.title} ended. Run the cell again: the next run starts a new pool; `sgpu doctor` "
            "looks for the reason."
        )

    def mute(self) -> PoolError:
        """Return the error that the pool does not answer at all."""
        return PoolError(
            f"{self.title} does not answer. End it with `sgpu pool stop --force`; the next run starts a new one."
        )

    def answered(self, request: int) -> None:
        """A request was answered; called in the link's thread. Nothing is kept to be sent again."""

    def carry(self, outgoing: Outgoing, link: PoolLink) -> None:
        """Carry messages until `outgoing` ends or the pool's process is gone for good."""
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger = _LINGER_MS
        dealer.sndhwm = dealer.rcvhwm = 0
        dealer.connect(f"ipc://{self._path}")
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(outgoing.fileno(), zmq.POLLIN)
        pidfd = -1
        try:
            if hasattr(os, "pidfd_open"):
                pidfd = os.pidfd_open(self._pid)
                poller.register(pidfd, zmq.POLLIN)
            while True:
                ready = dict(poller.poll(None if pidfd >= 0 else _NO_PIDFD_POLL_MS))
                if pidfd in ready or (pidfd < 0 and not _lives(self._pid)):
                    self._receive(dealer, link)
                    return
                if outgoing.fileno() in ready:
                    for parcel in outgoing.take():
                        dealer.send_multipart(parcel.parts, copy=True)
                    if outgoing.closed:
                        return
                if dealer in ready:
                    self._receive(dealer, link)
        except OSError:
            return
        finally:
            if pidfd >= 0:
                os.close(pidfd)
            dealer.close()
            context.term()

    def _receive(self, dealer: zmq.Socket[bytes], link: PoolLink) -> None:
        while True:
            try:
                parts = dealer.recv_multipart(zmq.NOBLOCK, copy=True)
            except zmq.Again:
                return
            link.received(parts)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
