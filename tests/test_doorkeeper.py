"""Connections that are too many are ended: of strangers the oldest, and none of who has said hello."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import zmq
from strangers import has_ended

from sgpu_magic.pool.doorkeeper import Doorkeeper

PATIENCE_S = 10.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def at_a_door(check: Callable[..., object], **limits: int) -> None:
    """Call `check(doorkeeper, connect)` in a loop, with a socket that has no time-outs of its own."""

    async def work() -> None:
        context = zmq.Context()
        listening = context.socket(zmq.ROUTER)
        listening.linger = 0
        listening.setsockopt(zmq.HANDSHAKE_IVL, 0)
        keeper = Doorkeeper(listening, **limits)
        port = listening.bind_to_random_port("tcp://127.0.0.1")
        made: list[socket.socket] = []

        def connect() -> socket.socket:
            made.append(socket.create_connection(("127.0.0.1", port)))
            return made[-1]

        try:
            await check(keeper, connect)  # type: ignore[misc]
        finally:
            for each in made:
                each.close()
            keeper.close()
            listening.close()
            context.term()

    asyncio.run(work())


def test_the_oldest_strangers_go_when_they_are_too_many():
    async def check(keeper: Doorkeeper, connect: Callable[[], socket.socket]) -> None:
        crowd = [connect() for _ in range(10)]
        await until(lambda: sum(map(has_ended, crowd)) == 7)
        assert [has_ended(each) for each in crowd] == [True] * 7 + [False] * 3
        # one that goes by itself makes room
        crowd[-1].close()
        await until(lambda: keeper.strangers == 2)
        later = connect()
        await until(lambda: keeper.strangers == 3)
        assert not any(map(has_ended, [*crowd[7:9], later]))

    at_a_door(check, most_strangers=3)


def test_who_has_said_hello_stays():
    async def check(keeper: Doorkeeper, connect: Callable[[], socket.socket]) -> None:
        guest = connect()
        await until(lambda: keeper.strangers == 1)
        keeper.knows(next(iter(keeper.descriptors)))
        assert keeper.strangers == 0
        crowd = [connect() for _ in range(10)]
        # the limit is of all together
        await until(lambda: sum(map(has_ended, crowd)) == 8)
        assert not has_ended(guest)
        assert [has_ended(each) for each in crowd] == [True] * 8 + [False] * 2

    at_a_door(check, most=3, most_strangers=5)
