"""A port of this machine's loopback whose connections lead to a port on the node of a run's rank."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from sgpu_magic.client.link import PoolLink
from sgpu_magic.errors import PoolError, RunUnknown, UsageError
from sgpu_magic.system.byte_stream import ByteStream
from sgpu_magic.wire.files import OpenStream, StreamClosed, StreamMessage, StreamOpened
from sgpu_magic.wire.record import Record

LOOPBACK = "127.0.0.1"
_LOOK_S = 0.5
_ANSWER_S = 15.0
_WATCH = 1


class Forwarder:
    """Takes connections and forwards each, until the run ends. Used from one loop's thread.

    Args:
        link: To the run's pool.
        run: A unique prefix of the run's id.
        rank: On whose node.
        port: The port there.
        say: Called with a sentence about a connection that could not be made.
    """

    def __init__(self, link: PoolLink, run: str, rank: int, port: int, say: Callable[[str], None]) -> None:
        self._link = link
        self._run = run
        self._rank = rank
        self._port = port
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._number = _WATCH
        self._streams: dict[int, ByteStream] = {}
        self._opening: dict[int, asyncio.Future[StreamOpened | StreamClosed]] = {}
        self._over: asyncio.Future[str] = self._loop.create_future()
        self._server: asyncio.Server | None = None
        link.on_stream = lambda message, frames: self._from_link(self._heard, message, frames)
        link.on_gap = lambda: self._from_link(self._gap)

    async def begin(self, local: int | None) -> tuple[str, int, str]:
        """Ask for the run and listen.

        Args:
            local: The port here; None for the same, 0 for any that is free.

        Returns:
            The run's id, the port here, and why nobody can be connected yet ("" when one can).

        Raises:
            RunUnknown: No such run of this user goes on, or it has no such rank.
            UsageError: The port here is taken.
            PoolError: The pool does not answer.
        """
        answer = await self._opened(_WATCH, watches=True)
        if isinstance(answer, StreamClosed):
            raise RunUnknown(answer.problem if answer.problem.endswith(".") else f"{answer.problem}.")
        wanted = self._port if local is None else local
        try:
            self._server = await asyncio.start_server(self._connected, LOOPBACK, wanted)
        except OSError as error:
            raise UsageError(
                f"port {wanted} of this machine can't be listened on: {error.strerror}. Choose another, 0 for any that "
                f"is free: `sgpu port-forward {self._run} 0:{self._port}`."
            ) from None
        return answer.run_id, int(self._server.sockets[0].getsockname()[1]), answer.problem

    async def serve(self) -> str:
        """Forward until the run ends, and return a sentence about how it ended."""
        while not self._over.done():
            await asyncio.wait((self._over,), timeout=_LOOK_S)
            if self._link.lost.is_set():
                return f"{self._link.title} has ended"
        return self._over.result()

    async def close(self) -> None:
        """End every connection and free the port."""
        self._link.on_stream = self._link.on_gap = None
        if self._server is not None:
            self._server.close()
        for stream in list(self._streams.values()):
            stream.close()
        self._send(StreamClosed(stream=_WATCH), ())
        # what is still to be written to the sockets here
        await asyncio.sleep(0)

    # ------------------------------------------------------------ connections

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._number += 1
        number = self._number
        try:
            answer = await self._opened(number)
        except PoolError as error:
            answer = StreamClosed(stream=number, problem=error.message.rstrip("."))
        if isinstance(answer, StreamClosed):
            self._say(f"a connection was refused: {answer.problem.rstrip('.')}.")
            with contextlib.suppress(RuntimeError):
                writer.transport.abort()
            return
        self._streams[number] = ByteStream(
            number, reader, writer, self._send, lambda problem: self._gone(number, problem)
        )

    async def _opened(self, number: int, *, watches: bool = False) -> StreamOpened | StreamClosed:
        answer: asyncio.Future[StreamOpened | StreamClosed] = self._loop.create_future()
        self._opening[number] = answer
        order = OpenStream(stream=number, run=self._run, rank=self._rank, port=self._port, watches=watches)
        self._send(order, ())
        try:
            return await asyncio.wait_for(answer, _ANSWER_S)
        except TimeoutError:
            raise PoolError(f"{self._link.title} did not answer within {_ANSWER_S:.0f} s.") from None
        finally:
            self._opening.pop(number, None)

    def _gone(self, number: int, problem: str) -> None:
        self._streams.pop(number, None)
        if problem and not self._over.done():
            self._say(f"a connection was ended: {problem.rstrip('.')}.")

    # ------------------------------------------------------------ the link

    def _send(self, message: Record, frames: Sequence[bytes]) -> None:
        if not self._link.lost.is_set():
            self._link.send(message, frames)

    def _from_link(self, call: Callable[..., None], *arguments: object) -> None:
        # the loop is closed when the command ends
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    def _heard(self, message: StreamOpened | StreamMessage, frames: Sequence[bytes]) -> None:
        waiting = self._opening.get(message.stream)
        if isinstance(message, StreamOpened | StreamClosed) and waiting is not None:
            if not waiting.done():
                waiting.set_result(message)
        elif isinstance(message, StreamOpened):
            # nobody waits any more
            self._send(StreamClosed(stream=message.stream), ())
        elif message.stream == _WATCH:
            if isinstance(message, StreamClosed) and not self._over.done():
                self._over.set_result(message.problem)
        elif (stream := self._streams.get(message.stream)) is not None:
            stream.heard(message, frames)

    def _gap(self) -> None:
        """The link broke and is there again: what was under way is lost, so no connection can go on."""
        for stream in list(self._streams.values()):
            stream.close("the link to the pool was broken")
        self._send(StreamClosed(stream=_WATCH), ())
        self._send(OpenStream(stream=_WATCH, run=self._run, rank=self._rank, port=self._port, watches=True), ())
