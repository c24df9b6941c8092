"""The link to one pool: one thread owns the socket; other threads queue messages and wait for replies.

A transport carries the messages. One over a network may lose some when its connection breaks: gaps in the sequence
numbers of a run's events show which are missing, and the link requests them again.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

import msgspec

from sgpu_magic import errors
from sgpu_magic.client.send_queue import Answer, EventQueue, FilePart, OutboundMessage, Reply, SendQueue
from sgpu_magic.client.this_machine import this_hello
from sgpu_magic.client.transport import Transport
from sgpu_magic.errors import PoolError, UsageError
from sgpu_magic.system.secure_sockets import MAX_FRAME_BYTES
from sgpu_magic.wire import codec
from sgpu_magic.wire.base import ErrorKind, Record
from sgpu_magic.wire.client import Attach, Attached, Notice, Pong, PoolMessage, Refused, Unfollow
from sgpu_magic.wire.events import Event, PayloadReleased
from sgpu_magic.wire.files import FileRequest, RunFileRead, StreamMessage
from sgpu_magic.wire.pool_status import BulkOffered, Welcome
from sgpu_magic.wire.streams import StreamClosed, StreamData, StreamEnded, StreamOpened, StreamTaken

OnNotice = Callable[[str], None]
"""Takes a sentence for the user, "" to withdraw the last one."""

_SET = threading.Event()
_ERRORS: dict[ErrorKind, type[errors.SgpuError]] = {
    ErrorKind.USAGE: errors.UsageError,
    ErrorKind.CAPACITY: errors.CapacityError,
    ErrorKind.SESSION: errors.SessionError,
    ErrorKind.ENVIRONMENT: errors.EnvironmentFailed,
    ErrorKind.SERIALIZATION: errors.SerializationError,
    ErrorKind.RUN_UNKNOWN: errors.RunUnknown,
    ErrorKind.RUN_FILE_UNKNOWN: errors.RunFileUnknown,
    ErrorKind.POOL: errors.PoolError,
    ErrorKind.INTERNAL: errors.InternalError,
}


class PoolLost(PoolError):
    """The pool's process or the link to it ended while a request was pending."""


class PoolLink:
    """A link to one pool service; a remote transport reconnects after a broken connection.

    Args:
        transport: Carries messages to the pool.
        on_notice: Called in the link's thread with each notice of the pool, "" when a notice is withdrawn.

    Attributes:
        lost: Set when this pool service is gone for good.
        title: The pool's name for use in messages.
        transport: As given; it also has the size of chunks of file data.

    Raises:
        PoolError: The pool does not answer, or does not admit this user.
    """

    def __init__(self, transport: Transport, on_notice: OnNotice | None = None) -> None:
        self.transport = transport
        self.title = transport.title
        self._on_notice = on_notice
        self.lost = threading.Event()
        # set by port forwarding; both are called in the link's thread
        self.on_stream: Callable[[StreamOpened | StreamMessage, Sequence[bytes]], None] | None = None
        self.on_gap: Callable[[], None] | None = None
        self._requests = itertools.count(1)
        self._replies: dict[int, Future[Reply]] = {}
        # one run may be shown in several places at once
        self._followers: dict[str, list[EventQueue]] = {}
        self._attached: dict[int, tuple[str, EventQueue | None]] = {}
        # sequence number of the last event that the caller already has, by request for later ones
        self._after: dict[int, int] = {}
        # runs whose missing events were requested again, by request
        self._catching_up: dict[int, str] = {}
        self._released: dict[str, threading.Event] = {}
        self._lock = threading.RLock()
        self._outgoing = SendQueue()
        self._welcome: Future[Welcome] = Future()
        self._thread = threading.Thread(target=self._work, name="sgpu-link", daemon=True)
        self._thread.start()
        if not transport.is_network:
            self.send(this_hello())
        try:
            self.welcome = self._welcome.result(transport.hello_timeout_s)
        except (TimeoutError, PoolLost):
            self.close()
            raise transport.mute() from None
        except BaseException:
            # interrupted or refused: the caller gets no link with which to stop the thread
            self.close()
            raise

    # ------------------------------------------------------------ for any thread

    @property
    def is_used(self) -> bool:
        """Whether a reply is pending, a run is followed or a port is forwarded."""
        with self._lock:
            return bool(self._replies or self._followers) or self.on_stream is not None

    def send(self, message: Record, frames: Sequence[bytes] = ()) -> None:
        """Send a message.

        Raises:
            UsageError: It exceeds the size limit of a network link.
        """
        parts = [codec.encode(message), *frames]
        if self.transport.is_network and max(map(len, parts)) > MAX_FRAME_BYTES:
            raise UsageError(
                f"a message to {self.title} has {max(map(len, parts)) >> 20} MB, and at most "
                f"{MAX_FRAME_BYTES >> 20} MB are possible. Put large data into a variable or a file."
            )
        request = getattr(message, "request", 0)
        if isinstance(message, Attach):
            with self._lock:
                self._after[request] = message.after
        self._outgoing.put(OutboundMessage(request, parts, isinstance(message, FileRequest)))

    def ask(self, question: Record, frames: Sequence[bytes] = ()) -> Answer:
        """Send a request under a new request number and return its pending answer."""
        request, reply = self.new_request()
        try:
            self.send(msgspec.structs.replace(question, request=request), frames)
        except UsageError:
            self.give_up(request)
            raise
        restart = "Have its operator restart it." if self.transport.is_network else "Restart it: `sgpu pool stop`."
        misfit = f"{self.title} sent an answer that matches no request. {restart}"
        return Answer(reply, functools.partial(self.give_up, request), misfit)

    def new_request(self) -> tuple[int, Future[Reply]]:
        """Return a request number and the future of its reply."""
        number = next(self._requests)
        future: Future[Reply] = Future()
        with self._lock:
            if self.lost.is_set():
                future.set_exception(PoolLost(self.transport.lost_message()))
            self._replies[number] = future
        return number, future

    def give_up(self, request: int) -> None:
        """Abandon a request: drop its reply, and stop following a run that the reply attached to."""
        with self._lock:
            self._replies.pop(request, None)
            run_id, events = self._attached.pop(request, ("", None))
        if events is not None and self.unfollow(run_id, events):
            self.send(Unfollow(run_id=run_id))

    def follow(self, run_id: str, after: int = 0) -> EventQueue:
        """Return a new queue of the run's events; None in it means that the pool is lost.

        Args:
            run_id: The run's id.
            after: Sequence number of the last event that the caller already has.
        """
        events = EventQueue()
        events.last_seq = after
        with self._lock:
            self._followers.setdefault(run_id, []).append(events)
            self._released.setdefault(run_id, threading.Event())
            if self.lost.is_set():
                events.put(None)
        return events

    def attached(self, request: int, run_id: str) -> EventQueue:
        """Return the event queue of the run that the reply to `request` attached to; it may contain events already."""
        with self._lock:
            _, events = self._attached.pop(request, ("", None))
        return events if events is not None else self.follow(run_id)

    def unfollow(self, run_id: str, events: EventQueue) -> bool:
        """Stop putting the run's events into a queue; the release of its payload memory is still tracked.

        Args:
            run_id: The run's id.
            events: The queue.

        Returns:
            Whether that was the run's last queue.
        """
        with self._lock:
            followers = self._followers.get(run_id, [])
            if events in followers:
                followers.remove(events)
            if not followers:
                self._followers.pop(run_id, None)
            return not followers

    def payload_released(self, run_id: str) -> threading.Event:
        """Return an event that is set once the pool no longer reads the run's memory file."""
        with self._lock:
            return self._released.get(run_id) or _SET

    def close(self) -> None:
        """Stop the thread and free the socket. A local pool notices the process's exit, not the closed link."""
        self._outgoing.put(None)
        self._thread.join(5.0)

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        try:
            self.transport.carry(self._outgoing, self)
        finally:
            self._end_all()
            self._outgoing.close()

    def received(self, parts: Sequence[bytes]) -> PoolMessage | None:
        """Dispatch a message and its raw frames; return it, or None if it can't be decoded."""
        try:
            message = codec.pool_messages.decode(parts[0])
        except msgspec.DecodeError:
            # from a pool of another version; its welcome, whose format is stable, has reported that
            return None
        self._dispatch(message, parts[1:])
        return message

    def failed(self, error: PoolError) -> None:
        """Fail the pending welcome with the reason why the pool can't be reached."""
        if not self._welcome.done():
            self._welcome.set_exception(error)

    def awaited(self) -> Collection[int]:
        """Return the numbers of the pending requests."""
        with self._lock:
            return set(self._replies)

    def questions_after_gap(self) -> Sequence[Record]:
        """Return the requests that make the pool resend events that may have been lost."""
        if self.on_gap is not None:
            self.on_gap()
        with self._lock:
            self._catching_up.clear()
            return [self._question_about(run_id) for run_id in self._followers]

    def _question_about(self, run_id: str) -> Attach:
        """Return a request for all events that at least one follower lacks."""
        number = next(self._requests)
        self._catching_up[number] = run_id
        return Attach(request=number, run=run_id, after=min(events.last_seq for events in self._followers[run_id]))

    def _dispatch(self, message: PoolMessage, frames: Sequence[bytes]) -> None:
        match message:
            case Event():
                self._on_event(message, frames)
            case Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(message)
            case Pong() | BulkOffered():
                pass
            case Notice(text=text):
                if self._on_notice is not None:
                    self._on_notice(text)
            case Refused(request=request):
                self._reply(request, exception=_ERRORS[message.error](message.message))
            case Attached(spec=spec, request=request):
                with self._lock:
                    after = self._after.pop(request, 0)
                    if self._catching_up.pop(request, ""):
                        # requested again by this link
                        pass
                    elif request in self._replies:
                        # its events arrive right after this reply, so the queue must exist now
                        self._attached[request] = spec.run_id, self.follow(spec.run_id, after)
                    elif spec.run_id not in self._followers:
                        # the caller was interrupted
                        self._outgoing.put(OutboundMessage(0, [codec.encode(Unfollow(run_id=spec.run_id))]))
                self._reply(request, result=message)
            case StreamOpened() | StreamData() | StreamTaken() | StreamEnded() | StreamClosed():
                if self.on_stream is not None:
                    self.on_stream(message, frames)
            case RunFileRead(request=request):
                self._reply(request, result=FilePart(message, frames[0] if frames else b""))
            case _:
                self._reply(message.request, result=message)

    def _on_event(self, event: Event, frames: Sequence[bytes]) -> None:
        run_id = event.run_id
        with self._lock:
            followers = tuple(self._followers.get(run_id, ()))
            if isinstance(event.body, PayloadReleased) and run_id in self._released:
                self._released[run_id].set()
        missing = False
        for events in followers:
            if not self.transport.is_network or event.seq == events.last_seq + 1:
                events.put((event, frames))
            elif event.seq > events.last_seq:
                missing = True
        if missing:
            # some events were lost: request them again together with this one, in order
            with self._lock:
                if run_id not in self._catching_up.values() and run_id in self._followers:
                    self._outgoing.put(OutboundMessage(0, [codec.encode(self._question_about(run_id))]))

    def _reply(self, request: int, result: Reply | None = None, exception: Exception | None = None) -> None:
        self.transport.answered(request)
        with self._lock:
            self._after.pop(request, None)
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
            self._welcome.set_exception(PoolLost(self.transport.lost_message()))
        for future in replies:
            if not future.done():
                future.set_exception(PoolLost(self.transport.lost_message()))
        for events in followers:
            # ranks that read a payload's memory may outlive the pool, so nothing is released here
            events.put(None)


_SET.set()
