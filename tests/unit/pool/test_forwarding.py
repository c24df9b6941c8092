"""Streams to ports of runs: counting, and which side closes them; tests/e2e/test_port_forward.py sends data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from sgpu_magic.nodes.engine import Engine
from sgpu_magic.pool.clients import ConnectedClient
from sgpu_magic.pool.rank_requests import Forwarding
from sgpu_magic.pool.server import Server
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.streams import OpenStream, StreamClosed

RUN = "aaaa0000"


class Pool:
    """Stands in for a pool and records what it sends to clients and nodes."""

    def __init__(self) -> None:
        self.reported: list[object] = []
        self.ordered: list[object] = []
        server = SimpleNamespace(send=lambda _client, message, *_: self.reported.append(message))
        engine = SimpleNamespace(forward=lambda _run, _rank, message, _frames: self.ordered.append(message))
        run: Any = SimpleNamespace(
            run_id=RUN, state=RunState.RUNNING, placed_at=1.0, ended=False,
            spec=SimpleNamespace(session="", in_session=False, placement=SimpleNamespace(ranks=1)),
        )  # fmt: skip
        self.forwarding = Forwarding(
            server=cast("Server", server), engine=cast("Engine", engine), find=lambda _client, _run: run
        )

    @property
    def refused(self) -> list[str]:
        return [message.problem for message in self.reported if isinstance(message, StreamClosed) and message.problem]


def test_connections_of_a_client_that_reconnects_are_closed_and_never_used_up() -> None:
    pool = Pool()
    client = ConnectedClient(b"first", 0, same_host=False)
    for number in range(1000):
        pool.forwarding.from_client(client, OpenStream(stream=number, run=RUN, rank=0, port=80), ())
        # the link breaks: the client closes its streams over the new link
        client.identity = f"link {number}".encode("ascii")
        pool.forwarding.from_client(client, StreamClosed(stream=number), ())
    assert pool.refused == []
    assert sum(isinstance(order, StreamClosed) for order in pool.ordered) == 1000


def test_connections_of_two_clients_with_the_same_numbers_are_not_mixed_up() -> None:
    pool = Pool()
    first, second = ConnectedClient(b"1", 0, same_host=False), ConnectedClient(b"2", 0, same_host=False)
    for client in (first, second):
        pool.forwarding.from_client(client, OpenStream(stream=1, run=RUN, rank=0, port=80), ())
    pool.forwarding.on_client_disconnect(first)
    assert [order.stream for order in pool.ordered if isinstance(order, StreamClosed)] == [1]
    pool.forwarding.from_client(second, StreamClosed(stream=1), ())
    assert [order.stream for order in pool.ordered if isinstance(order, StreamClosed)] == [1, 2]
