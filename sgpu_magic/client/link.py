"""The link to one pool: a thread owns the socket; everybody else hands messages over and waits for answers.

How messages get to the pool is the wire's affair. A wire over a network may lose some with a connection that breaks:
what is missing of a run's events shows in their numbers, and is asked for again.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic import errors
from sgpu_magic.client.this_process import this_hello
from sgpu_magic.client.wires import Answer, EventQueue, FilePart, LocalWire, Outgoing, Parcel, Reply
from sgpu_magic.errors import PoolError, UsageError
from sgpu_magic.system.secure_sockets import MAX_FRAME_BYTES
from sgpu_magic.wire import codec
from sgpu_magic.wire.client import Attach, Attached, Notice, Pong, PoolMessage, Refused, Unfollow
from sgpu_magic.wire.events import Event, PayloadReleased
from sgpu_magic.wire.files import (
    RunFileRead,
    StreamClosed,
    StreamData,
    StreamEnded,
    StreamMessage,
    StreamOpened,
    StreamTaken,
)
from sgpu_magic.wire.pool_status import Welcome
from sgpu_magic.wire.record import Record

if TYPE_CHECKING:
    from sgpu_magic.client.remote_wire import RemoteWire

_HELLO_TIMEOUT_S = 10.0


class PoolLost(PoolError):
    """The pool's process ended, or the link to it, while something was asked of it."""


class PoolLink:
    """One connection to a pool service; over a broken line it is made again.

    Args:
        wire: The way to the pool.
        on_notice: Called in the link's thread with each sentence that the pool wants to be known, "" when none is.

    Attributes:
        lost: Set when this pool service is gone for good.
        title: The pool as sentences name it.

    Raises:
        PoolError: The pool does not answer, or does not admit us.
    """

    def __init__(self, wire: LocalWire | RemoteWire, on_notice: Callable[[str], None] | None = None) -> None:
        self._wire = wire
        self.title = wire.title
        self._on_notice = on_notice
        self.lost = threading.Event()
        # of who forwards ports: both are called in the link's thread
        self.on_stream: Callable[[StreamOpened | StreamMessage, Sequence[bytes]], None] | None = None
        self.on_gap: Callable[[], None] | None = None
        self._requests = itertools.count(1)
        self._replies: dict[int, Future[Reply]] = {}
        # one run may be shown in several places at once
        self._followers: dict[str, list[EventQueue]] = {}
        self._attached: dict[int, tuple[str, EventQueue | None]] = {}
        # numbers of the events that are there already, by the request that asks for more
        self._after: dict[int, int] = {}
        # runs of which events are asked for again, by the request
        self._catching_up: dict[int, str] = {}
        self._released: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self._outgoing = Outgoing()
        self._welcome: Future[Welcome] = Future()
        self._thread = threading.Thread(target=self._work, name="sgpu-link", daemon=True)
        self._thread.start()
        if not wire.says_hello:
            self.send(this_hello())
        try:
            self.welcome = self._welcome.result(_HELLO_TIMEOUT_S)
        except (TimeoutError, PoolLost):
            self.close()
            raise wire.mute() from None
        except BaseException:
            # interrupted, or refused: nobody else knows of the thread
            self.close()
            raise
        self.pid = self.welcome.pid

    # ------------------------------------------------------------ for any thread

    @property
    def silent_s(self) -> float:
        """Seconds since a pool of another machine was heard; 0 as long as that is no cause for a word."""
        return self._wire.silent_s

    @property
    def is_used(self) -> bool:
        """Whether an answer is awaited, a run followed or a port forwarded."""
        with self._lock:
            return bool(self._replies or self._followers) or self.on_stream is not None

    def send(self, message: Record, frames: Sequence[bytes] = ()) -> None:
        """Send a message.

        Raises:
            UsageError: It is larger than what goes over a link between machines.
        """
        parts = [codec.encode(message), *frames]
        if self._wire.says_hello and max(map(len, parts)) > MAX_FRAME_BYTES:
            raise UsageError(
                f"what was to be sent to {self.title} at once is {max(map(len, parts)) >> 20} MB, and "
                f"{MAX_FRAME_BYTES >> 20} MB may be. Put what is large into a variable or a file."
            )
        request = getattr(message, "request", 0)
        if isinstance(message, Attach):
            with self._lock:
                self._after[request] = message.after
        self._outgoing.put(Parcel(request, parts))

    def ask(self, question: Record, frames: Sequence[bytes] = ()) -> Answer:
        """Send a question, or an order that is answered; its `request` becomes a number of its own."""
        request, reply = self.new_request()
        try:
            self.send(msgspec.structs.replace(question, request=request), frames)
        except UsageError:
            self.give_up(request)
            raise
        restart = "Have its operator restart it." if self._wire.says_hello else "Restart it: `sgpu pool stop`."
        misfit = f"{self.title} gave an answer that fits no question. {restart}"
        return Answer(reply, functools.partial(self.give_up, request), misfit)

    def new_request(self) -> tuple[int, Future[Reply]]:
        """Return a request number and the future of its reply."""
        number = next(self._requests)
        future: Future[Reply] = Future()
        with self._lock:
            if self.lost.is_set():
                future.set_exception(PoolLost(self._wire.lost()))
            self._replies[number] = future
        return number, future

    def give_up(self, request: int) -> None:
        """Nobody waits for the answer any more, nor for the events of a run that it tells of."""
        with self._lock:
            self._replies.pop(request, None)
            run_id, events = self._attached.pop(request, ("", None))
        if events is not None and self.unfollow(run_id, events):
            self.send(Unfollow(run_id=run_id))

    def follow(self, run_id: str, after: int = 0) -> EventQueue:
        """Return the queue that the run's events come into; None in it means that the pool is lost.

        Args:
            run_id: The run.
            after: Number of the last event that is there already.
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
        """Return the queue of a run that the answer to `request` has told of: events may have come into it already."""
        with self._lock:
            _, events = self._attached.pop(request, ("", None))
        return events if events is not None else self.follow(run_id)

    def unfollow(self, run_id: str, events: EventQueue) -> bool:
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
        """Stop the thread and free the socket. A pool of this machine sees the process's death, not this."""
        self._outgoing.end()
        self._thread.join(5.0)

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        try:
            self._wire.carry(self._outgoing, self)
        finally:
            self._end_all()
            self._outgoing.close()

    def received(self, parts: Sequence[bytes]) -> PoolMessage | None:
        """Take a message and its raw frames from the wire; return it, None when it could not be read."""
        try:
            message = codec.pool_messages.decode(parts[0])
        except msgspec.DecodeError:
            # a pool of another version: its welcome is stable and has told so
            return None
        self._dispatch(message, parts[1:])
        return message

    def failed(self, error: PoolError) -> None:
        """Say why the pool can't be reached, to whoever waits for its welcome."""
        if not self._welcome.done():
            self._welcome.set_exception(error)

    def awaited(self) -> Collection[int]:
        """Return the requests that somebody waits for."""
        with self._lock:
            return set(self._replies)

    def questions_after_gap(self) -> Sequence[Record]:
        """Return what makes the pool send again what may have been lost."""
        if self.on_gap is not None:
            self.on_gap()
        with self._lock:
            self._catching_up.clear()
            return [self._question_about(run_id) for run_id in self._followers]

    def _question_about(self, run_id: str) -> Attach:
        """Ask for all events after those that every follower has."""
        number = next(self._requests)
        self._catching_up[number] = run_id
        return Attach(request=number, run=run_id, after=min(events.last_seq for events in self._followers[run_id]))

    def _dispatch(self, message: PoolMessage, frames: Sequence[bytes]) -> None:
        match message:
            case Event():
                self._happened(message, frames)
            case Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(message)
            case Pong():
                pass
            case Notice(text=text):
                if self._on_notice is not None:
                    self._on_notice(text)
            case Refused(request=request):
                self._reply(request, exception=_refusal(message))
            case Attached(spec=spec, request=request):
                with self._lock:
                    asked_again = self._catching_up.pop(request, "")
                    after = self._after.pop(request, 0)
                    awaited = request in self._replies
                    followed = spec.run_id in self._followers
                if not asked_again and not awaited:
                    # who asked was interrupted
                    if not followed:
                        self._outgoing.put(Parcel(0, [codec.encode(Unfollow(run_id=spec.run_id))]))
                elif not asked_again:
                    # its events follow at once: they must not find nobody
                    events = self.follow(spec.run_id, after)
                    with self._lock:
                        self._attached[request] = (spec.run_id, events)
                        given_up = request not in self._replies
                    if given_up:
                        self.give_up(request)
                    self._reply(request, result=message)
            case StreamOpened() | StreamData() | StreamTaken() | StreamEnded() | StreamClosed():
                if self.on_stream is not None:
                    self.on_stream(message, frames)
            case RunFileRead(request=request):
                self._reply(request, result=FilePart(message, frames[0] if frames else b""))
            case _:
                self._reply(message.request, result=message)

    def _happened(self, event: Event, frames: Sequence[bytes]) -> None:
        run_id = event.run_id
        with self._lock:
            followers = tuple(self._followers.get(run_id, ()))
            released = self._released.get(run_id)
        if isinstance(event.body, PayloadReleased) and released is not None:
            released.set()
        missing = False
        for events in followers:
            if not self._wire.says_hello or event.seq == events.last_seq + 1:
                events.put((event, frames))
            elif event.seq > events.last_seq:
                missing = True
        if missing:
            # lost on the way: they come again with this one, in their order
            with self._lock:
                asks = run_id not in self._catching_up.values() and run_id in self._followers
                question = self._question_about(run_id) if asks else None
            if question is not None:
                self._outgoing.put(Parcel(0, [codec.encode(question)]))

    def _reply(self, request: int, result: Reply | None = None, exception: Exception | None = None) -> None:
        self._wire.answered(request)
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
            self._welcome.set_exception(PoolLost(self._wire.lost()))
        for future in replies:
            if not future.done():
                future.set_exception(PoolLost(self._wire.lost()))
        for events in followers:
            # what reads a payload's memory may outlive the pool, so nothing is released here
            events.put(None)


_SET = threading.Event()
_SET.set()


def _refusal(message: Refused) -> Exception:
    kind = getattr(errors, message.error, errors.PoolError)
    return kind(message.message)
