"""Connections from clients to ports that a run's processes listen on, on this node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from sgpu_magic.agent import faults
from sgpu_magic.agent.background_call import call_in_background
from sgpu_magic.agent.ranks.listening import address_of
from sgpu_magic.agent.runs.node_run import NodeRun
from sgpu_magic.system.byte_stream import ByteStream, Send
from sgpu_magic.wire.forwarding import OpenStream, StreamClosed, StreamMessage, StreamOpened
from sgpu_magic.wire.ids import short

_CONNECT_S = 10.0


class Forwarding:
    """The open ones, by number. Used from the loop's thread only.

    Args:
        find: A run of this node by its id, None when there is none.
        send: Sends a message to the pool.
    """

    def __init__(self, find: Callable[[str], NodeRun | None], send: Send) -> None:
        self._find = find
        self._send = send
        self._streams: dict[int, ByteStream] = {}
        self._opening: dict[int, asyncio.Task[None]] = {}

    def opens(self, message: OpenStream) -> None:
        """Connect, if the port is the run's; the answer follows."""
        task = faults.in_background(self._open(message))
        self._opening[message.stream] = task
        task.add_done_callback(lambda _: self._opening.pop(message.stream, None))

    def heard(self, message: StreamMessage, frames: Sequence[bytes]) -> None:
        """Take what the client says of a stream."""
        stream = self._streams.get(message.stream)
        if stream is not None:
            stream.heard(message, frames)
        elif isinstance(message, StreamClosed) and (task := self._opening.get(message.stream)) is not None:
            task.cancel()

    def close(self) -> None:
        """The pool service is gone, and with it the clients; or this program ends."""
        for task in list(self._opening.values()):
            task.cancel()
        for stream in list(self._streams.values()):
            stream.close("the pool is gone")

    async def _open(self, message: OpenStream) -> None:
        number, run_id = message.stream, message.run
        run = self._find(run_id)
        if run is None or run.gone:
            self._send(StreamClosed(stream=number, problem=f"run {short(run_id)} has no ranks on this node"), ())
            return
        ranks = set(run.pids)
        address, problem = await call_in_background(lambda: address_of(run_id, ranks, message.port), "sgpu-ports")
        if message.watches:
            self._send(StreamOpened(stream=number, run_id=run_id, problem=problem), ())
            return
        if problem:
            self._send(StreamClosed(stream=number, problem=problem), ())
            return
        try:
            connecting = asyncio.open_connection(address, message.port)
            reader, writer = await asyncio.wait_for(connecting, _CONNECT_S)
        except OSError as error:
            why = error.strerror or "it does not answer"
            self._send(StreamClosed(stream=number, problem=f"port {message.port} can't be connected to: {why}"), ())
            return
        self._send(StreamOpened(stream=number, run_id=run_id), ())
        self._streams[number] = ByteStream(
            number, reader, writer, self._send, lambda _: self._streams.pop(number, None) and None
        )
