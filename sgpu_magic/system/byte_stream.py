"""One end of a forwarded connection: a local TCP socket, and messages to the other end. Not thread-safe."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sgpu_magic.wire.base import Record
from sgpu_magic.wire.files import STREAM_CHUNK_BYTES, WINDOW_BYTES, StreamMessage
from sgpu_magic.wire.streams import StreamClosed, StreamData, StreamEnded, StreamTaken

# acknowledge after this many bytes: one acknowledgment per chunk would double the number of messages
_ACKNOWLEDGE_BYTES = WINDOW_BYTES // 4

Send = Callable[[Record, Sequence[bytes]], None]


@dataclass(eq=False)
class ByteStream:
    """Copies between a socket and messages until both directions have ended.

    Args:
        number: The stream's number.
        reader: The socket's reader.
        writer: The socket's writer; the stream owns it.
        send: Sends a message to the other end.
        on_over: Called once when this end is finished, with the problem as a sentence, None if there was none.
    """

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    send: Send
    on_over: Callable[[str | None], None]

    def __post_init__(self) -> None:
        self._sent = self._taken_there = 0
        self._room = asyncio.Event()
        self._room.set()
        self._received = self._taken = self._acknowledged = 0
        # bounded by the window, which `on_message` enforces
        self._incoming: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._ended = False
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._outwards()), loop.create_task(self._inwards())]
        for task in self._tasks:
            task.add_done_callback(self._on_task_done)

    def on_message(self, message: StreamMessage, frames: Sequence[bytes]) -> None:
        """Handle a message of the other end."""
        if self._ended:
            return
        match message:
            case StreamData(offset=offset):
                data = frames[0] if frames else b""
                if offset != self._received or self._received + len(data) - self._taken > WINDOW_BYTES:
                    self.close("bytes were lost in the connection")
                    return
                self._received += len(data)
                self._incoming.put_nowait(data)
            case StreamTaken(offset=offset):
                self._taken_there = max(self._taken_there, min(offset, self._sent))
                self._room.set()
            case StreamEnded(offset=offset):
                if offset != self._received:
                    self.close("bytes were lost in the connection")
                    return
                self._incoming.put_nowait(None)
            case StreamClosed(problem=problem):
                self._finish(problem)

    def close(self, problem: str | None = None) -> None:
        """Close both directions now and notify the other end."""
        if not self._ended:
            self.send(StreamClosed(stream=self.number, problem=problem), ())
            self._finish(problem)

    async def _outwards(self) -> None:
        """Copy from the socket to messages, within the other end's window."""
        while True:
            room = WINDOW_BYTES - (self._sent - self._taken_there)
            if room <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            data = await self.reader.read(min(room, STREAM_CHUNK_BYTES))
            if not data:
                break
            self.send(StreamData(stream=self.number, offset=self._sent), (data,))
            self._sent += len(data)
        self.send(StreamEnded(stream=self.number, offset=self._sent), ())

    async def _inwards(self) -> None:
        """Copy from messages to the socket; acknowledge only what was written to it."""
        while (data := await self._incoming.get()) is not None:
            self.writer.write(data)
            await self.writer.drain()
            self._taken += len(data)
            if self._taken - self._acknowledged >= _ACKNOWLEDGE_BYTES or self._incoming.empty():
                self._acknowledged = self._taken
                self.send(StreamTaken(stream=self.number, offset=self._taken), ())
        if self.writer.can_write_eof():
            self.writer.write_eof()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        match task.exception():
            case None:
                if all(each.done() for each in self._tasks):
                    self._finish(None)
            case OSError():
                self.close()
            case error:
                self.close("an internal error of sgpu-magic in the connection")
                raise error

    def _finish(self, problem: str | None) -> None:
        if self._ended:
            return
        self._ended = True
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(OSError, RuntimeError):
            if problem:
                self.writer.transport.abort()
            else:
                self.writer.close()
        self.on_over(problem)
