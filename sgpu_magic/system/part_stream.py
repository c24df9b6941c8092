"""Messages of several parts over a byte stream that never blocks.

A message is the number of its parts (u32), the size of each (u32), little-endian, then the parts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import cast

_COUNT = struct.Struct("<I")
# limit per turn for one stream, so that others get their turn
_TURN_BYTES = 1 << 20
# of a pipe, whose 64 KiB would mean many turns of both sides for one large message
_PIPE_BYTES = 1 << 18


class PartStream(ABC):
    """One end of a stream. Use it from one thread.

    Args:
        most_bytes: The largest part that is accepted; a larger one ends the stream before memory is allocated for it.
        most_parts: The most parts of a message that are accepted.

    Attributes:
        most_bytes: As given.
        unsent_bytes: The number of queued bytes that the stream has not accepted yet.
        urgent_bytes: How many of them belong to messages that can't wait.
    """

    def __init__(self, most_bytes: int, most_parts: int) -> None:
        self.most_bytes = most_bytes
        self._most_parts = most_parts
        self.unsent_bytes = self.urgent_bytes = 0
        # messages to send, those that can wait in the second queue; and what is left of the one that is being sent
        self._queued: tuple[deque[Sequence[bytes]], deque[Sequence[bytes]]] = (deque(), deque())
        self._sending: deque[memoryview] = deque()
        self._sending_urgent = False
        # sizes of the parts of the message being received, and the complete parts
        self._sizes: Sequence[int] | None = None
        self._parts: list[bytes] = []
        self._expect(_COUNT.size)

    @property
    def has_unsent(self) -> bool:
        """Whether a message is queued or partly sent."""
        return bool(self._sending or any(self._queued))

    def put(self, parts: Sequence[bytes], *, can_wait: bool = False) -> None:
        """Queue a message.

        Args:
            parts: Its parts.
            can_wait: Send messages that can't wait first, also those that are queued later.
        """
        self._queued[can_wait].append(parts)
        size = _COUNT.size * (len(parts) + 1) + sum(map(len, parts))
        self.unsent_bytes += size
        self.urgent_bytes += 0 if can_wait else size

    @abstractmethod
    def _write(self, data: memoryview) -> int:
        """Write what the stream accepts now, and return the number of bytes; raise what `send` lets through."""

    @abstractmethod
    def _read_into(self, data: memoryview) -> int:
        """Read what is there into `data`, and return the number of bytes, 0 at the end of the stream."""

    def _send(self) -> None:
        """Send queued messages until the stream raises that it accepts no more, within the limit of a turn."""
        sent = 0
        while sent < _TURN_BYTES and (self._sending or self._begin_next()):
            view = self._sending[0]
            count = self._write(view)
            sent += count
            self.unsent_bytes -= count
            self.urgent_bytes -= count if self._sending_urgent else 0
            if count == len(view):
                self._sending.popleft()
            else:
                self._sending[0] = view[count:]

    def _begin_next(self) -> bool:
        for queue in self._queued:
            if queue:
                self._sending_urgent = queue is self._queued[0]
                parts = queue.popleft()
                header = struct.pack(f"<I{len(parts)}I", len(parts), *map(len, parts))
                # join the header and the first part, so that a small message is one write
                self._sending.extend(memoryview(part) for part in (header + parts[0], *parts[1:]) if part)
                return True
        return False

    def _receive(self, messages: list[Sequence[bytes]], most: int) -> None:
        """Add complete messages until the stream raises that it has no more, within the limit of a turn.

        Raises:
            ConnectionResetError: The stream has ended.
            ConnectionError: It carries an invalid message.
        """
        got = 0
        while got < _TURN_BYTES and len(messages) < most:
            count = self._read_into(self._rest)
            if not count:
                raise ConnectionResetError("the other side closed it")
            got += count
            self._rest = self._rest[count:]
            if not self._rest:
                self._complete(messages)

    def _complete(self, messages: list[Sequence[bytes]]) -> None:
        """Handle the bytes that are complete now, and set how many to receive next."""
        whole = self._whole
        if self._sizes is None:
            if len(whole) == _COUNT.size:
                (count,) = _COUNT.unpack(whole)
                if not 1 <= count <= self._most_parts:
                    raise ConnectionError(f"a message of {count} parts")
                # next, receive the sizes after the count; together they are always longer than the count
                self._expect(_COUNT.size * (count + 1), whole)
                return
            self._sizes = [size for (size,) in _COUNT.iter_unpack(whole)][1:]
            if max(self._sizes) > self.most_bytes:
                raise ConnectionError(f"a message part of {max(self._sizes)} bytes")
        else:
            # no other reference to the bytearray exists, so it can stand in for `bytes` without a copy
            self._parts.append(cast("bytes", whole))
        while len(self._parts) < len(self._sizes):
            size = self._sizes[len(self._parts)]
            if size:
                self._expect(size)
                return
            self._parts.append(b"")
        messages.append(self._parts)
        self._sizes, self._parts = None, []
        self._expect(_COUNT.size)

    def _expect(self, size: int, begun: bytes | bytearray = b"") -> None:
        self._whole = bytearray(size)
        self._whole[: len(begun)] = begun
        self._rest = memoryview(self._whole)[len(begun) :]


class PipeStream(PartStream):
    """A stream over a pair of pipes, or one socket twice. It owns neither.

    Args:
        reading: Descriptor to read.
        writing: Descriptor to write.
        most_bytes: As in `PartStream`.
        most_parts: As in `PartStream`.
    """

    def __init__(self, reading: int, writing: int, most_bytes: int, most_parts: int) -> None:
        super().__init__(most_bytes, most_parts)
        self._reading, self._writing = reading, writing
        for descriptor in (reading, writing):
            os.set_blocking(descriptor, False)
            # not of a socket, or beyond this user's limit
            with contextlib.suppress(OSError, AttributeError):
                fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def send(self) -> None:
        """Send without blocking.

        Raises:
            OSError: The other side is gone.
        """
        try:
            self._send()
        except BlockingIOError:
            return

    def receive(self, most: int) -> list[Sequence[bytes]]:
        """Return the complete messages, at most `most`, without blocking.

        Raises:
            OSError: The stream has ended, or carries an invalid message.
        """
        messages: list[Sequence[bytes]] = []
        try:
            self._receive(messages, most)
        except BlockingIOError:
            return messages
        return messages

    def _write(self, data: memoryview) -> int:
        return os.write(self._writing, data)

    def _read_into(self, data: memoryview) -> int:
        return os.readv(self._reading, [data])
