"""The link to one pool: a thread owns the socket; everybody else hands messages over and waits for answers.

ZeroMQ hides a peer's death, so the thread watches a pidfd of the pool too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec
import zmq

from sgpu_magic import __version__, errors
from sgpu_magic.errors import PoolError
from sgpu_magic.protocol import codec
from sgpu_magic.protocol.events import Event, PayloadReleased
from sgpu_magic.protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Attached,
    Hello,
    Notice,
    PoolMessage,
    PoolStatus,
    Refused,
    Stacks,
    Welcome,
)
from sgpu_magic.protocol.record import Record
from sgpu_magic.protocol.session_messages import RankAnswered

Reply = Accepted | Attached | Stacks | RankAnswered | PoolStatus
EventItem = tuple[Event, Sequence[bytes]]
_HELLO_TIMEOUT_S = 10.0


class EventQueue(queue.SimpleQueue["EventItem | None"]):
    """A run's events on their way from the link's thread; None means that the pool is lost.

    Attributes:
        woken: Called in the link's thread after each of them; for who takes the events of several runs.
    """

    woken: Callable[[], None] | None = None

    def put(self, item: EventItem | None, block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        woken = self.woken
        if woken is not None:
            woken()


class PoolLost(PoolError):
    """The pool's process ended while something was asked of it."""


class PoolLink:
    """One connection to a pool service.

    Args:
        path: The pool's socket.
        pid: The pool's process.
        on_notice: Called in the link's thread with each sentence that the pool wants to be known, "" when none is.

    Raises:
        PoolError: The pool does not answer.
    """

    def __init__(self, path: Path, pid: int, on_notice: Callable[[str], None] | None = None) -> None:
        self.pid = pid
        self._on_notice = on_notice
        self.lost = threading.Event()
        self._requests = itertools.count(1)
        self._replies: dict[int, Future[Reply]] = {}
        # one run may be shown in several places at once
        self._followers: dict[str, list[queue.SimpleQueue[EventItem | None]]] = {}
        self._attached: dict[int, queue.SimpleQueue[EventItem | None]] = {}
        self._released: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self._outgoing: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._welcome: Future[Welcome] = Future()
        self._path = path
        self._thread = threading.Thread(target=self._work, name="sgpu-link", daemon=True)
        self._thread.start()
        self.send(Hello(protocol_version=PROTOCOL_VERSION, package_version=__version__, pid=os.getpid()))
        try:
            self.welcome = self._welcome.result(_HELLO_TIMEOUT_S)
        except (TimeoutError, PoolLost):
            self.close()
            raise PoolError(
                f"the local pool (process {pid}) does not answer. End it with `sgpu pool stop --force`; the next run "
                "starts a new one."
            ) from None
        except BaseException:
            # interrupted: nobody else knows of the thread
            self.close()
            raise

    # ------------------------------------------------------------ for any thread

    def send(self, message: Record, frames: Sequence[bytes] = ()) -> None:
        self._outgoing.put([codec.encode(message), *frames])
        self._wake()

    def new_request(self) -> tuple[int, Future[Reply]]:
        """Return a request number and the future of its reply."""
        number = next(self._requests)
        future: Future[Reply] = Future()
        with self._lock:
            if self.lost.is_set():
                future.set_exception(_lost(self.pid))
            self._replies[number] = future
        return number, future

    def give_up(self, request: int) -> None:
        """Nobody waits for the answer any more."""
        with self._lock:
            self._replies.pop(request, None)

    def follow(self, run_id: str) -> queue.SimpleQueue[EventItem | None]:
        """Return the queue that the run's events come into; None in it means that the pool is lost."""
        events: queue.SimpleQueue[EventItem | None] = EventQueue()
        with self._lock:
            self._followers.setdefault(run_id, []).append(events)
            self._released.setdefault(run_id, threading.Event())
            if self.lost.is_set():
                events.put(None)
        return events

    def attached(self, request: int, run_id: str) -> queue.SimpleQueue[EventItem | None]:
        """Return the queue of a run that the answer to `request` has told of: events may have come into it already."""
        with self._lock:
            events = self._attached.pop(request, None)
        return events if events is not None else self.follow(run_id)

    def unfollow(self, run_id: str, events: queue.SimpleQueue[EventItem | None]) -> bool:
        """Let the run's further events fall; that its memory is released is still noticed.

        Args:
            run_id: The run.
            events: The queue that they came into.

        Returns:
            Whether nobody else here follows the run.
        """
        with self._lock:
            followers = self._followers.get(run_id, [])
            if events in followers:
                followers.remove(events)
            if not followers:
                self._followers.pop(run_id, None)
            return not followers

    def payload_released(self, run_id: str) -> threading.Event:
        """Set once the pool no longer reads the run's memory file."""
        with self._lock:
            return self._released.get(run_id) or _SET

    def close(self) -> None:
        """Stop the thread and free the socket. The pool sees this process's death, not this."""
        self._outgoing.put(None)
        self._wake()
        self._thread.join(5.0)

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 200
        dealer.sndhwm = dealer.rcvhwm = 0
        dealer.connect(f"ipc://{self._path}")
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(self._wake_reader.fileno(), zmq.POLLIN)
        pidfd = -1
        try:
            if hasattr(os, "pidfd_open"):
                pidfd = os.pidfd_open(self.pid)
                poller.register(pidfd, zmq.POLLIN)
            while True:
                ready = dict(poller.poll(None if pidfd >= 0 else 1000))
                if pidfd in ready or (pidfd < 0 and not _lives(self.pid)):
                    self._receive(dealer)
                    return
                if self._wake_reader.fileno() in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_reader.recv(4096)
                    if not self._send_waiting(dealer):
                        return
                if dealer in ready:
                    self._receive(dealer)
        except OSError:
            return
        finally:
            self._end_all()
            if pidfd >= 0:
                os.close(pidfd)
            dealer.close()
            context.term()
            self._wake_reader.close()
            self._wake_writer.close()

    def _send_waiting(self, dealer: zmq.Socket[bytes]) -> bool:
        while True:
            try:
                parts = self._outgoing.get_nowait()
            except queue.Empty:
                return True
            if parts is None:
                return False
            dealer.send_multipart(parts, copy=True)

    def _receive(self, dealer: zmq.Socket[bytes]) -> None:
        while True:
            try:
                parts = dealer.recv_multipart(zmq.NOBLOCK, copy=True)
            except zmq.Again:
                return
            try:
                message = codec.pool_messages.decode(parts[0])
            except msgspec.DecodeError:
                # a pool of another version: its welcome is stable and has told so
                continue
            self._dispatch(message, parts[1:])

    def _dispatch(self, message: PoolMessage, frames: Sequence[bytes]) -> None:
        match message:
            case Event(run_id=run_id, body=body):
                with self._lock:
                    followers = tuple(self._followers.get(run_id, ()))
                    released = self._released.get(run_id)
                if isinstance(body, PayloadReleased) and released is not None:
                    released.set()
                for events in followers:
                    events.put((message, frames))
            case Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(message)
            case Refused(request=request):
                self._reply(request, exception=_refusal(message))
            case Attached(spec=spec):
                # its events follow at once: they must not find nobody
                events = self.follow(spec.run_id)
                with self._lock:
                    self._attached[message.request] = events
                self._reply(message.request, result=message)
            case Notice(text=text):
                if self._on_notice is not None:
                    self._on_notice(text)
            case _:
                self._reply(message.request, result=message)

    def _reply(self, request: int, result: Reply | None = None, exception: Exception | None = None) -> None:
        with self._lock:
            future = self._replies.pop(request, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if exception is not None:
            future.set_exception(exception)
        elif result is not None:
            future.set_result(result)

    def _end_all(self) -> None:
        with self._lock:
            self.lost.set()
            replies, self._replies = list(self._replies.values()), {}
            followers = [events for every in self._followers.values() for events in every]
        if not self._welcome.done():
            self._welcome.set_exception(_lost(self.pid))
        for future in replies:
            if not future.done():
                future.set_exception(_lost(self.pid))
        for events in followers:
            # what reads a payload's memory may outlive the pool, so nothing is released here
            events.put(None)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"x")


_SET = threading.Event()
_SET.set()


def _lost(pid: int) -> PoolLost:
    return PoolLost(
        f"the local pool (process {pid}) ended. Run the cell again: the next run starts a new pool; `sgpu doctor` "
        "looks for the reason."
    )


def _refusal(message: Refused) -> Exception:
    kind = getattr(errors, message.error, errors.PoolError)
    return kind(message.message)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
