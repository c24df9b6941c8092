"""Messages with file descriptors over a Unix stream socket, for asyncio and blocking; a table of pending requests."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from sgpu_magic.wire.base import Record
from sgpu_magic.wire.codec import MAX_MESSAGE_BYTES, Decoder, FrameReader, frame
from sgpu_magic.wire.decoding import MsgpackDecoder

M = TypeVar("M")
_Descriptors = deque[int | None]
"""Received descriptors in the order of arrival; a None stands for all of one call that did not fit (EMFILE)."""
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
_CHUNK_BYTES = 1 << 18
# SCM_MAX_FD: the kernel's limit per sendmsg call
_MAX_DESCRIPTORS = 253
# maximum number of descriptors with one message to a rank or zygote, of which up to 128 are mapped parts of a payload
_MOST_TO_A_RANK = 144
# messages larger than this are not joined: they fill a socket's buffer by themselves
_JOINED_BYTES = 1 << 17


class Limits(msgspec.Struct, frozen=True):
    """What one end of a stream accepts.

    Args:
        message_bytes: Bytes of one message with its frames.
        descriptors: Number of received descriptors that no handled message has taken.
    """

    message_bytes: int = MAX_MESSAGE_BYTES
    descriptors: int = 1 << 16


class MessageStream(Generic[M]):
    """Calls back for every message, and once when the peer closes. Use it from the loop's thread only.

    A message that can't be decoded, or whose callback raises, is reported to the loop's exception handler; the stream
    continues with the next one.

    Args:
        sock: A connected Unix stream socket; the stream owns it.
        decoder: The decoder of incoming messages.
        on_message: Called with each message and its raw frames.
        on_closed: Called once at end of file or error, not after `close`, and never from within `send`.
        gathers: Send the messages of one callback together when it returns: fewer wake-ups of the reader.
        limits: What the peer may send at most; beyond it, the stream is damaged.
        on_damaged: Called once, before `on_closed`, when the peer's data can't be parsed any further. It gets the
            reason, a clause; without it, the loop's exception handler does.
    """

    def __init__(
        self,
        sock: socket.socket,
        decoder: Decoder[M] | MsgpackDecoder[M],
        on_message: Callable[[M, Sequence[bytes]], None],
        on_closed: Callable[[], None],
        *,
        gathers: bool = False,
        limits: Limits | None = None,
        on_damaged: Callable[[str], None] | None = None,
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._limits = limits or Limits()
        self._reader = FrameReader(decoder, self._limits.message_bytes)
        self._on_damaged = on_damaged
        self._on_message = on_message
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._descriptors: _Descriptors = deque()
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._closed = False
        self._write_failed = False
        self._gathers = gathers
        # deferred writes run in the context of the stream's creator, not in that of a sender
        self._context = contextvars.copy_context()
        self._loop.add_reader(sock, self._readable)

    def send(self, message: Record, blobs: Iterable[bytes] = (), descriptors: Sequence[int] = ()) -> None:
        """Send one message, now or when the socket is writable. The caller keeps its descriptors: copies are sent."""
        if self._closed or self._write_failed:
            return
        was_empty = not self._unsent
        data = memoryview(frame(message, blobs))
        copies = _copies(descriptors)
        while len(copies) > _MAX_DESCRIPTORS:
            self._unsent.append((data[:1], copies[:_MAX_DESCRIPTORS]))
            data, copies = data[1:], copies[_MAX_DESCRIPTORS:]
        self._unsent.append((data, copies))
        if was_empty and self._gathers:
            self._loop.call_soon(self._write, context=self._context.copy())
        elif was_empty:
            self._write()

    def send_all(self, within_s: float) -> None:
        """Send all queued messages now, blocking: for shutdown, when the loop may not run any more."""
        if not self._closed:
            self._socket.settimeout(within_s)
            self._write()

    def take_descriptors(self, count: int) -> list[int]:
        """Return the next `count` received descriptors; the caller owns them.

        Raises:
            OSError: They exceeded this process's limit of open files (EMFILE). Those of other messages did not.
        """
        return _pop_descriptors(self._descriptors, count)

    def close(self) -> None:
        """Close the socket. Unsent messages are lost; gathered ones are sent first if the socket is writable."""
        if self._closed:
            return
        if self._gathers:
            self._write()
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        _close_all(self._descriptors)
        self._descriptors.clear()
        self._drop_unsent()

    def _drop_unsent(self) -> None:
        for _, copies in self._unsent:
            _close_all(copies)
        self._unsent.clear()

    def _end_writing(self) -> None:
        """Stop sending after a write error; data received before is still read, up to the end of file."""
        self._write_failed = True
        self._loop.remove_writer(self._socket)
        self._drop_unsent()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        if self._closed or self._write_failed:
            return
        while self._unsent:
            self._join_first()
            data, descriptors = self._unsent[0]
            try:
                sent = socket.send_fds(self._socket, [data], descriptors) if descriptors else self._socket.send(data)
            except BlockingIOError:
                self._context.copy().run(self._loop.add_writer, self._socket, self._write)
                return
            except OSError:
                self._end_writing()
                return
            _close_all(descriptors)
            if sent < len(data):
                self._unsent[0] = (data[sent:], ())
            else:
                self._unsent.popleft()
        self._loop.remove_writer(self._socket)

    def _join_first(self) -> None:
        """Join queued small messages without descriptors into one, to send them with one call."""
        plain = size = 0
        while plain < len(self._unsent) and not self._unsent[plain][1] and size < _JOINED_BYTES:
            size += len(self._unsent[plain][0])
            plain += 1
        if plain > 1:
            joined = b"".join(self._unsent.popleft()[0] for _ in range(plain))
            self._unsent.appendleft((memoryview(joined), ()))

    def _readable(self) -> None:
        try:
            data = _received(self._socket, self._descriptors, _MAX_DESCRIPTORS)
        except BlockingIOError:
            return
        except OSError:
            self._on_lost()
            return
        if not data:
            self._on_lost()
            return
        while not self._closed:
            try:
                for message, frames in self._reader.feed(data):
                    if self._closed:
                        return
                    try:
                        self._on_message(message, frames)
                    except Exception as error:  # noqa: BLE001  a failing callback must not stop the messages after it
                        self._report("The callback of a message raised an exception", error)
                if len(self._descriptors) > self._limits.descriptors:
                    raise ValueError(f"more than {self._limits.descriptors} open files that belong to no message")
                return
            except msgspec.DecodeError as error:
                self._report("A message can't be decoded", error)
                data = b""
            except ValueError as error:
                self._damaged(error)

    def _damaged(self, error: ValueError) -> None:
        if self._closed:
            return
        if self._on_damaged is None:
            self._report("The stream is damaged", error)
        else:
            self._on_damaged(str(error))
        self._on_lost()

    def _report(self, text: str, error: Exception) -> None:
        self._loop.call_exception_handler({"message": text, "exception": error})

    def _on_lost(self) -> None:
        if not self._closed:
            # the peer does not read any more: don't flush
            self._gathers = False
            self.close()
            self._on_closed()


def _copies(descriptors: Sequence[int]) -> tuple[int, ...]:
    copies: list[int] = []
    try:
        for descriptor in descriptors:
            copies.append(os.dup(descriptor))
    except OSError:
        _close_all(copies)
        raise
    return tuple(copies)


def _close_all(descriptors: Iterable[int | None]) -> None:
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)


def _received(sock: socket.socket, descriptors: _Descriptors, most: int) -> bytes:
    """Receive bytes, and append the descriptors that came with them.

    The kernel ends a call's data with those that the descriptors were sent with, so one call never gets the descriptors
    of two `sendmsg` calls. If some do not fit (MSG_CTRUNC), as beyond the limit of open files, none of them is used.
    """
    data, arrived, flags, _ = socket.recv_fds(sock, _CHUNK_BYTES, most)
    if flags & socket.MSG_CTRUNC:
        _close_all(arrived)
        descriptors.append(None)
    else:
        descriptors.extend(arrived)
    return data


def _pop_descriptors(descriptors: _Descriptors, count: int) -> list[int]:
    """Take the descriptors of one message, which were sent in groups of at most `_MAX_DESCRIPTORS`."""
    taken: list[int] = []
    complete = True
    while count:
        group = min(count, _MAX_DESCRIPTORS)
        count -= group
        if not descriptors or descriptors[0] is None:
            complete = False
            if descriptors:
                descriptors.popleft()
            continue
        for _ in range(min(group, len(descriptors))):
            if (descriptor := descriptors.popleft()) is not None:
                taken.append(descriptor)
                group -= 1
        complete = complete and not group
    if not complete:
        _close_all(taken)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return taken


# ---------------------------------------------------------------- blocking


class StreamConnection(Generic[M]):
    """A blocking end of a socketpair. Call `send` from any thread, `receive` from one only.

    Args:
        sock: A connected Unix stream socket; the link owns it.
        decoder: The decoder of incoming messages.
    """

    def __init__(self, sock: socket.socket, decoder: Decoder[M]) -> None:
        self._socket = sock
        self._reader = FrameReader(decoder)
        self._arrived: deque[tuple[M, Sequence[bytes]]] = deque()
        self._descriptors: _Descriptors = deque()
        self._send_lock = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def has_message(self) -> bool:
        """Whether `receive` would return without reading the socket."""
        return bool(self._arrived)

    def send(self, message: Record, blobs: Iterable[bytes] = (), descriptors: Sequence[int] = ()) -> None:
        """Send one message; the descriptors stay open here.

        Raises:
            OSError: The peer has closed.
        """
        self.send_frame(frame(message, blobs), descriptors)

    def send_frame(self, framed: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send one message as `codec.frame` returns it; errors as for `send`."""
        data = memoryview(framed)
        with self._send_lock:
            if descriptors:
                data = data[socket.send_fds(self._socket, [data], descriptors) :]
            self._socket.sendall(data)

    def receive(self) -> tuple[M, Sequence[bytes]] | None:
        """Return the next message and its raw frames, None when the peer has closed."""
        while not self._arrived:
            try:
                data = _received(self._socket, self._descriptors, _MOST_TO_A_RANK)
            except ConnectionError:
                return None
            if not data:
                return None
            self._arrived.extend(self._reader.feed(data))
        return self._arrived.popleft()

    def take_descriptors(self, count: int) -> list[int]:
        """Return the next `count` received descriptors; the caller owns them.

        Raises:
            OSError: As for `MessageStream.take_descriptors`.
        """
        return _pop_descriptors(self._descriptors, count)

    def close(self) -> None:
        self._socket.close()
        _close_all(self._descriptors)
        self._descriptors.clear()


class Pending(dict[K, V]):
    """Pending requests by key, in the order of their arrival."""

    def take_all(self, which: Callable[[V], bool]) -> list[V]:
        """Remove and return the requests for which `which` is true."""
        keys = [key for key, request in self.items() if which(request)]
        return [self.pop(key) for key in keys]
