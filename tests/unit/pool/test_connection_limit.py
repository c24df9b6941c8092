"""Connections that are too many are ended: of unknown ones the oldest, and none that has said hello.

A user's clients that are too many are refused with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from file_pool import STORE, FilePool
from strangers import has_ended

from sgpu_magic.client.blob_sender import BlobContent, BlobSender
from sgpu_magic.errors import PoolError
from sgpu_magic.pool import remote_clients
from sgpu_magic.pool.remote_clients import ConnectionLimit

PATIENCE_S = 10.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def with_limit(check: Callable[..., object], **limits: int) -> None:
    """Call `check(limit, connect)` in a loop, with a socket that has no time-outs of its own."""

    async def work() -> None:
        context = zmq.Context()
        listening = context.socket(zmq.ROUTER)
        listening.linger = 0
        listening.setsockopt(zmq.HANDSHAKE_IVL, 0)
        limit = ConnectionLimit(listening, **limits)
        port = listening.bind_to_random_port("tcp://127.0.0.1")
        made: list[socket.socket] = []

        def connect() -> socket.socket:
            made.append(socket.create_connection(("127.0.0.1", port)))
            return made[-1]

        try:
            await check(limit, connect)  # type: ignore[misc]
        finally:
            for each in made:
                each.close()
            limit.close()
            listening.close()
            context.term()

    asyncio.run(work())


def test_the_oldest_unknown_connections_go_when_they_are_too_many():
    async def check(limit: ConnectionLimit, connect: Callable[[], socket.socket]) -> None:
        crowd = [connect() for _ in range(10)]
        await until(lambda: sum(map(has_ended, crowd)) == 7)
        assert [has_ended(each) for each in crowd] == [True] * 7 + [False] * 3
        # a connection that closes by itself makes room
        crowd[-1].close()
        await until(lambda: len(limit.unknown) == 2)
        later = connect()
        await until(lambda: len(limit.unknown) == 3)
        assert not any(map(has_ended, [*crowd[7:9], later]))

    with_limit(check, most_unknown=3)


def test_who_has_said_hello_stays():
    async def check(limit: ConnectionLimit, connect: Callable[[], socket.socket]) -> None:
        guest = connect()
        await until(lambda: len(limit.unknown) == 1)
        limit.knows(next(iter(limit.unknown)))
        assert len(limit.unknown) == 0
        crowd = [connect() for _ in range(10)]
        # the limit applies to all connections together
        await until(lambda: sum(map(has_ended, crowd)) == 8)
        assert not has_ended(guest)
        assert [has_ended(each) for each in crowd] == [True] * 8 + [False] * 2

    with_limit(check, most=3, most_unknown=5)


def test_a_client_too_many_of_a_user_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_clients, "MOST_OF_A_USER", 2)
    with contextlib.closing(FilePool(tmp_path)) as pool, contextlib.ExitStack() as links:
        first = pool.link()
        for link in (first, pool.link()):
            links.callback(link.close)
        with pytest.raises(PoolError, match=f"User {STORE} has 2 notebooks and commands connected"):
            pool.link()
        # existing clients are not affected, nor is a new one once there is room again
        assert BlobSender(first).send([BlobContent(4, lambda: memoryview(b"data"))])
        pool.do(lambda: pool.remote.drop(pool.remote.clients[-1]))
        links.callback(pool.link().close)
