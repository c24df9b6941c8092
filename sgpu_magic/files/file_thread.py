"""One thread for reading and writing files, in the order in which it was asked: the loop goes on meanwhile."""

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
    """Used from the loop's thread only. It is there from the start: how many threads a service has stays the same.

    Args:
        name: The thread's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._executor.submit(bool)

    def do(self, call: Callable[[], T], done: Callable[[T], None], failed: Callable[[OSError], None]) -> None:
        """Make a call there, and one of the other two in the loop when it is over.

        Args:
            call: What to do.
            done: Gets what it returned.
            failed: Gets the OSError that it raised; a fault of ours is logged and comes as one.
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
        """Finish what was asked for, and end."""
        self._executor.shutdown()
