"""Calls that may block for good, in threads that nobody waits for when the program ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def call_in_background(call: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Make a blocking call in a thread of its own.

    asyncio's executor waits for its threads when the loop ends: a driver that does not answer would keep the agent.

    Args:
        call: What to do there.
        name: The thread's.

    Returns:
        A future of the running loop with what it returns or raises.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # pyright: ignore[reportArgumentType]

    def work() -> None:
        result: T | None = None
        caught: BaseException | None = None
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001  a thread's top: it goes to who waits
            caught = error
        # the loop is closed when the program ends
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, caught)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future
