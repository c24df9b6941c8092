"""Connections that clients forward to ports of their runs: passed on between the client's link and the node's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from sgpu_magic.nodes.engine import Engine
from sgpu_magic.pool.pool_run import PoolRun
from sgpu_magic.pool.server import ConnectedClient, Server
from sgpu_magic.wire.files import OpenStream, StreamClosed, StreamEnded, StreamMessage, StreamOpened
from sgpu_magic.wire.ids import short
from sgpu_magic.wire.states import RunState

_MOST_OF_CLIENT = 256


@dataclass(slots=True, eq=False)
class _Forwarded:
    """A stream that is open, or being opened.

    Args:
        client: Whose.
        stream: Its number there.
        run_id: Of the run that it leads to.
        ranks_of: Whose ranks that has: a cell in a session runs in the session's.
        rank: On whose node.
        watches: It only waits for the run's end.
        ended: How many of its directions have ended.
    """

    client: ConnectedClient
    stream: int
    run_id: str
    ranks_of: str
    rank: int
    watches: bool
    ended: int = 0


class Forwarding:
    """Passes streams on. It never looks into them.

    Args:
        server: Where the clients are connected.
        engine: Where the ranks are.
        find: Finds the run of a prefix that goes on and is this client's; else the sentence that says why not.
    """

    def __init__(self, server: Server, engine: Engine, find: Callable[[ConnectedClient, str], PoolRun | str]) -> None:
        self._server = server
        self._engine = engine
        self._find = find
        self._number = 0
        # by the number that they have towards the nodes
        self._streams: dict[int, _Forwarded] = {}
        self._by_client: dict[tuple[bytes, int], int] = {}

    # ------------------------------------------------------------ from clients

    def opens(self, client: ConnectedClient, message: OpenStream) -> None:
        """Have a stream opened, unless the run is none of the client's or has no such rank."""
        run = self._find(client, message.run)
        problem = run if isinstance(run, str) else self._why_not(client, run, message)
        if problem or isinstance(run, str):
            self._server.send(client, StreamClosed(stream=message.stream, problem=problem))
            return
        self._number += 1
        ranks_of = run.spec.session if run.spec.in_session else run.run_id
        forwarded = _Forwarded(client, message.stream, run.run_id, ranks_of, message.rank, message.watches)
        self._streams[self._number] = forwarded
        self._by_client[client.identity, message.stream] = self._number
        order = msgspec.structs.replace(message, stream=self._number, run=ranks_of)
        self._engine.forward(ranks_of, message.rank, order, ())

    def from_client(self, client: ConnectedClient, message: StreamMessage, frames: Sequence[bytes]) -> None:
        """Pass on what a client says of one of its streams."""
        number = self._by_client.get((client.identity, message.stream))
        if number is None:
            return
        forwarded = self._streams[number]
        if not forwarded.watches:
            self._to_node(number, forwarded, message, frames)
        self._count_end(number, forwarded, message)

    def client_gone(self, client: ConnectedClient) -> None:
        """Its streams end at their other end too."""
        for number, forwarded in list(self._streams.items()):
            if forwarded.client is client:
                self._drop(number, forwarded)
                if not forwarded.watches:
                    self._to_node(number, forwarded, StreamClosed(stream=number, problem="its client is gone"), ())

    # ------------------------------------------------------------ from the engine

    def from_node(self, message: StreamOpened | StreamMessage, frames: Sequence[bytes]) -> None:
        """Pass on what a node says of a stream."""
        forwarded = self._streams.get(message.stream)
        if forwarded is None:
            return
        number = message.stream
        passed = msgspec.structs.replace(message, stream=forwarded.stream)
        if isinstance(passed, StreamOpened):
            passed = msgspec.structs.replace(passed, run_id=forwarded.run_id)
        self._server.send(forwarded.client, passed, frames)
        if not isinstance(message, StreamOpened):
            self._count_end(number, forwarded, message)

    def run_gone(self, run_id: str, problem: str = "") -> None:
        """Its ranks are gone, and what listened there."""
        for number, forwarded in list(self._streams.items()):
            if run_id in (forwarded.run_id, forwarded.ranks_of):
                self._drop(number, forwarded)
                text = problem or f"run {short(run_id)} has ended"
                self._server.send(forwarded.client, StreamClosed(stream=forwarded.stream, problem=text))

    # ------------------------------------------------------------ within

    def _why_not(self, client: ConnectedClient, run: PoolRun, message: OpenStream) -> str:
        ranks = run.spec.placement.ranks
        if not 0 <= message.rank < ranks:
            return f"run {short(run.run_id)} has no rank {message.rank}: it has {ranks}."
        if run.placed_at is None or run.state in (RunState.QUEUED, RunState.PREPARING):
            return f"run {short(run.run_id)} has no ranks yet: it is {run.state}."
        if run.ended:
            return f"run {short(run.run_id)} has ended."
        if (client.identity, message.stream) in self._by_client:
            return f"the stream {message.stream} is open already."
        if sum(forwarded.client is client for forwarded in self._streams.values()) >= _MOST_OF_CLIENT:
            return f"this client has {_MOST_OF_CLIENT} connections open, which is the most."
        return ""

    def _to_node(self, number: int, forwarded: _Forwarded, message: StreamMessage, frames: Sequence[bytes]) -> None:
        passed = msgspec.structs.replace(message, stream=number)
        self._engine.forward(forwarded.ranks_of, forwarded.rank, passed, frames)

    def _count_end(self, number: int, forwarded: _Forwarded, message: StreamMessage) -> None:
        if isinstance(message, StreamEnded):
            forwarded.ended += 1
        # after both ends only words about what was taken are under way
        if isinstance(message, StreamClosed) or forwarded.ended == 2:
            self._drop(number, forwarded)

    def _drop(self, number: int, forwarded: _Forwarded) -> None:
        self._streams.pop(number, None)
        self._by_client.pop((forwarded.client.identity, forwarded.stream), None)
