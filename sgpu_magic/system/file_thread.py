"""A thread that does file I/O in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from sgpu_magic.system.processes import write_log

T = TypeVar("T")


class FileThread:
    """A thread for file I/O, started at once so that a service's number of threads is constant.

    Use it from the loop's thread only.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str) -> None:
        # imported late: few of the processes that import this module need a thread
        from concurrent.futures import ThreadPoolExecutor

        self._name = name
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._executor.submit(bool)

    def do(self, call: Callable[[], T], done: Callable[[T], None], failed: Callable[[OSError], None]) -> None:
        """Run `call` in the thread, then one of the callbacks in the loop.

        Args:
            call: The function to run.
            done: Called with its result.
            failed: Called with the OSError that it raised; any other exception is logged and converted to one.
        """

        def over(future: asyncio.Future[T]) -> None:
            match future.exception():
                case None:
                    done(future.result())
                case OSError() as error:
                    failed(error)
                case error:
                    write_log(f"a fault in thread {self._name}: ", error)
                    failed(OSError(f"{type(error).__name__}: {error}"))

        asyncio.get_running_loop().run_in_executor(self._executor, call).add_done_callback(over)

    def close(self) -> None:
        """Finish pending calls and end the thread."""
        self._executor.shutdown()
