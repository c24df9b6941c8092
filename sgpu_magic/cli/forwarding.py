"""`sgpu port-forward`: forwards a local loopback port to a port on a rank's node."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import Callable, Sequence

import msgspec

from sgpu_magic.cli.main import CommandParser, note, rank
from sgpu_magic.client.find_run import check_prefix, pool_of
from sgpu_magic.client.link import PoolLink
from sgpu_magic.config import load_settings
from sgpu_magic.errors import PoolError, RunUnknown, UsageError
from sgpu_magic.system.byte_stream import ByteStream
from sgpu_magic.system.message_stream import Pending
from sgpu_magic.wire.base import Record, short
from sgpu_magic.wire.files import StreamMessage
from sgpu_magic.wire.streams import OpenStream, StreamClosed, StreamOpened

_LOOPBACK = "127.0.0.1"
_PORTS = re.compile(r"(?:(?P<local>[0-9]{1,5}):)?(?P<remote>[0-9]{1,5})")
_MOST_PORT = 65535
_POLL_S = 0.5
_ANSWER_TIMEOUT_S = 15.0
_WATCH = 1


class Forwarder:
    """Accepts connections and forwards each, until the run ends. Use it from the thread of one event loop.

    Args:
        link: Link to the run's pool.
        run: A unique prefix of the run's id.
        rank: The rank whose node to connect to.
        port: Port on that node.
        say: Called with a message about a failed connection.
    """

    def __init__(self, link: PoolLink, run: str, rank: int, port: int, say: Callable[[str], None]) -> None:
        self._link = link
        self._order = OpenStream(stream=_WATCH, run=run, rank=rank, port=port, watches=True)
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._number = _WATCH
        self._streams: dict[int, ByteStream] = {}
        self._opening = Pending[int, asyncio.Future[StreamOpened | StreamClosed]]()
        self._ended: asyncio.Future[str | None] = self._loop.create_future()
        self._server: asyncio.Server | None = None
        link.on_stream = lambda message, frames: self._from_link(self._on_message, message, frames)
        link.on_gap = lambda: self._from_link(self._gap)

    async def begin(self, local: int | None) -> tuple[str, int, str | None]:
        """Find the run and start listening.

        Args:
            local: Local port; None for the remote port's number, 0 for any free port.

        Returns:
            The run's id, the local port, and why connections can't be made yet (None if they can).

        Raises:
            RunUnknown: This user has no such active run, or it has no such rank.
            UsageError: The local port is taken.
            PoolError: The pool does not answer.
        """
        answer = await self._open(self._order)
        if isinstance(answer, StreamClosed):
            raise RunUnknown(_as_sentence(answer))
        wanted = self._order.port if local is None else local
        try:
            self._server = await asyncio.start_server(self._connected, _LOOPBACK, wanted)
        except OSError as error:
            raise UsageError(
                f"can't listen on port {wanted} of this machine: {error.strerror}. Choose another, or 0 for any free "
                f"port: `sgpu port-forward {self._order.run} 0:{self._order.port}`."
            ) from None
        return answer.run_id, int(self._server.sockets[0].getsockname()[1]), answer.problem

    def stop(self) -> None:
        """Stop forwarding."""
        if not self._ended.done():
            self._ended.set_result(None)

    async def serve(self) -> str | None:
        """Forward until the run ends and return a message about its end; None after `stop`."""
        while not self._ended.done():
            await asyncio.wait((self._ended,), timeout=_POLL_S)
            if self._link.lost.is_set():
                return f"{self._link.title} has ended"
        return self._ended.result()

    async def close(self) -> None:
        """Close all connections and the port."""
        self._link.on_stream = self._link.on_gap = None
        if self._server is not None:
            self._server.close()
        for stream in list(self._streams.values()):
            stream.close()
        self._send(StreamClosed(stream=_WATCH), ())
        # let pending writes to local sockets finish
        await asyncio.sleep(0)

    # ------------------------------------------------------------ connections

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._number += 1
        number = self._number
        try:
            answer = await self._open(msgspec.structs.replace(self._order, stream=number, watches=False))
        except PoolError as error:
            answer = StreamClosed(stream=number, problem=error.message.rstrip("."))
        if isinstance(answer, StreamClosed):
            self._say(f"a connection was refused: {_as_sentence(answer)}")
            with contextlib.suppress(RuntimeError):
                writer.transport.abort()
            return
        self._streams[number] = ByteStream(
            number, reader, writer, self._send, lambda problem: self._on_closed(number, problem)
        )

    async def _open(self, order: OpenStream) -> StreamOpened | StreamClosed:
        answer: asyncio.Future[StreamOpened | StreamClosed] = self._loop.create_future()
        self._opening[order.stream] = answer
        self._send(order, ())
        try:
            return await asyncio.wait_for(answer, _ANSWER_TIMEOUT_S)
        except TimeoutError:
            # the stream may be open at the pool if the reply was lost
            self._send(StreamClosed(stream=order.stream), ())
            raise PoolError(f"{self._link.title} did not answer within {_ANSWER_TIMEOUT_S:.0f} s.") from None
        finally:
            self._opening.pop(order.stream, None)

    def _on_closed(self, number: int, problem: str | None) -> None:
        self._streams.pop(number, None)
        if problem and not self._ended.done():
            self._say(f"a connection was ended: {problem.rstrip('.')}.")

    # ------------------------------------------------------------ the link

    def _send(self, message: Record, frames: Sequence[bytes]) -> None:
        if not self._link.lost.is_set():
            self._link.send(message, frames)

    def _from_link(self, call: Callable[..., None], *arguments: object) -> None:
        # the loop is closed when the command ends
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    def _on_message(self, message: StreamOpened | StreamMessage, frames: Sequence[bytes]) -> None:
        waiting = self._opening.get(message.stream)
        if isinstance(message, StreamOpened | StreamClosed) and waiting is not None:
            if not waiting.done():
                waiting.set_result(message)
        elif message.stream == _WATCH:
            # it is opened again after a gap, without a request that waits
            if isinstance(message, StreamClosed) and not self._ended.done():
                self._ended.set_result(message.problem)
        elif isinstance(message, StreamOpened):
            # the request has timed out
            self._send(StreamClosed(stream=message.stream), ())
        elif (stream := self._streams.get(message.stream)) is not None:
            stream.on_message(message, frames)

    def _gap(self) -> None:
        """Close all connections after a reconnect of the link: data in transit was lost."""
        for stream in list(self._streams.values()):
            stream.close("the link to the pool was broken")
        self._send(StreamClosed(stream=_WATCH), ())
        self._send(self._order, ())


# ---------------------------------------------------------------- the command


async def _forward(link: PoolLink, run: str, rank: int, local: int | None, remote: int) -> int:
    """Forward a port until the run ends or the command is interrupted. Returns 1 if the pool ended, else 0."""
    forwarder = Forwarder(link, run, rank, remote, note)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, forwarder.stop)
    try:
        run_id, here, problem = await forwarder.begin(local)
        sys.stdout.write(f"http://{_LOOPBACK}:{here} leads to port {remote} of rank {rank} of run {short(run_id)}\n")
        sys.stdout.flush()
        if problem:
            note(f"{problem} yet; connections are made as soon as something does.")
        ended = await forwarder.serve()
        if ended is not None:
            note(f"{ended.rstrip('.')}: port {here} is free again.")
        return 1 if ended is not None and link.lost.is_set() else 0
    finally:
        await forwarder.close()


def _as_sentence(closed: StreamClosed) -> str:
    return f"{(closed.problem or 'the connection was closed').rstrip('.')}."


def _read_ports(text: str) -> tuple[int | None, int]:
    """Parse `[LOCAL:]PORT`. The local port is None if omitted, 0 for any free port.

    Raises:
        UsageError: The text has no valid ports.
    """
    found = _PORTS.fullmatch(text)
    if found is None or not 0 < int(found["remote"]) <= _MOST_PORT or int(found["local"] or 0) > _MOST_PORT:
        raise UsageError(
            f"{text!r} is not a port: write the port in the run, as in 8265, or LOCAL:PORT, as in 9000:8265."
        )
    return (int(found["local"]) if found["local"] else None), int(found["remote"])


def _options(parser: CommandParser) -> None:
    parser.add_argument("run", metavar="RUN", help="ID of the run, or its first digits")
    parser.add_argument("ports", metavar="[LOCAL:]PORT", help="port in the run, and the local port if it differs")
    parser.add_argument("--rank", type=rank, default=0, metavar="N", help="rank whose node has the port (default: 0)")
    parser.does(_do)


def _do(options: argparse.Namespace) -> int:
    with pool_of(load_settings(), options.run, "whose ports could be reached") as pool:
        local, remote = _read_ports(options.ports)
        return asyncio.run(_forward(pool.link(), check_prefix(options.run), options.rank, local, remote))


COMMANDS = {"port-forward": _options}
