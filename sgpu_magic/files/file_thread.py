"""One thread for file I/O beside the event loop, in the order of the calls."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class FileThread:
    """A thread for file I/O, started at once so that a service's number of threads is constant.

    Use it from the loop's thread only.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str) -> None:
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
                    with contextlib.suppress(OSError):
                        trace = "".join(traceback.format_exception(error))
                        sys.stderr.write(f"a fault in thread {self._name}: {trace}")
                    failed(OSError(f"{type(error).__name__}: {error}"))

        asyncio.get_running_loop().run_in_executor(self._executor, call).add_done_callback(over)

    def close(self) -> None:
        """Finish pending calls and end the thread."""
        self._executor.shutdown()
