"""The event loop of a rank's cells, which also exists without an `await`, as in a notebook.

ipykernel runs cells within its loop, so `asyncio.create_task` and `get_running_loop` work in any cell. A rank has a
loop of its own. While a cell without `await` runs, it is set as the running loop. `asyncio.run` and other loops, which
a notebook refuses in a cell, work on ranks as well: the cell's loop is unset meanwhile.

Tasks continue while a later cell awaits something, and in a session also between cells. Those that remain at the end of
a run or a session are cancelled, as `asyncio.run` does.
"""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import contextlib
import functools
from asyncio import base_events, events, runners
from collections.abc import Callable, Generator
from queue import SimpleQueue
from typing import Any

from IPython.core import async_helpers

_MOST_NAMED = 4


class _CellLoop:
    """The loop of this process.

    Attributes:
        loop: The loop; None before `make`.
        wake: Ends `run_until_order`, from any thread; does nothing otherwise.
    """

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.wake: Callable[[], None] = lambda: None

    def make(self) -> None:
        """Make the loop, which is also the one in which IPython runs cells that await something."""
        self.loop = async_helpers.get_asyncio_loop()

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Return the tasks that have not ended."""
        loop = self.loop
        return [] if loop is None or loop.is_closed() else list(asyncio.all_tasks(loop))

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Set the loop as the running one during the block, unless another one runs."""
        if events._get_running_loop() is not None:
            yield
            return
        if self.loop is None or self.loop.is_closed():
            self.make()
        events._set_running_loop(self.loop)
        try:
            yield
        finally:
            events._set_running_loop(None)

    @contextlib.contextmanager
    def aside(self) -> Generator[None]:
        """Unset the loop if it is only set and not running, so that another loop can run."""
        current = events._get_running_loop()
        if current is None or current is not self.loop or current.is_running():
            yield
            return
        events._set_running_loop(None)
        try:
            yield
        finally:
            events._set_running_loop(current)

    def run_until_order(self, orders: SimpleQueue[Any]) -> None:
        """Run tasks, if there are any, until an order arrives."""
        if not self.tasks() or self.loop is None:
            return
        loop, arrived = self.loop, asyncio.Event()

        def wake() -> None:
            # a task may have closed the loop
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(arrived.set)

        self.wake = wake
        try:
            if orders.empty():
                loop.run_until_complete(arrived.wait())
        except (SystemExit, KeyboardInterrupt):
            # raised by a task, and ignored between cells
            pass
        finally:
            self.wake = lambda: None

    def finish(self) -> list[str]:
        """Cancel the tasks that are left and end the loop's generators and executor, as `asyncio.run` does.

        Returns:
            The names of the cancelled tasks' coroutines.
        """
        loop = self.loop
        if loop is None or not self.tasks():
            return []
        # let tasks that were just created start before they are cancelled
        loop.run_until_complete(asyncio.sleep(0))
        left = [_name_of(task) for task in self.tasks()]
        runners._cancel_all_tasks(loop)  # pyright: ignore[reportAttributeAccessIssue]
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        return left


cell_loop = _CellLoop()


def cancelled_note(names: list[str]) -> str:
    """Return a sentence about tasks that were cancelled at the end."""
    listed = ", ".join(names[:_MOST_NAMED]) + (
        f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    )
    return (
        f"tasks that were started and not awaited were cancelled at the end, as asyncio.run() does: {listed}. Await "
        "them in the cell, or run it in a session, whose ranks go on with them"
    )


def _name_of(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    return str(getattr(coroutine, "__qualname__", task.get_name()))


def run_other_loops() -> None:
    """Let `asyncio.run` and `run_until_complete` work in cells whose loop is only set. Called by the zygote."""
    asyncio.run = runners.run = _aside(runners.run)
    runners.Runner.run = _aside(runners.Runner.run)
    base_events.BaseEventLoop.run_forever = _aside(base_events.BaseEventLoop.run_forever)
    base_events.BaseEventLoop.run_until_complete = _aside(base_events.BaseEventLoop.run_until_complete)


def _aside(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with cell_loop.aside():
            return function(*args, **kwargs)

    return call
