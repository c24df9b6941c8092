"""One thread for reading and writing files, in the order in which it was asked: the loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class FileThread:
    """Started when it is first needed. Used from the loop's thread only.

    Args:
        name: The thread's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, call: Callable[[], T], done: Callable[[T], None], failed: Callable[[OSError], None]) -> None:
        """Make a call there, and one of the other two in the loop when it is over.

        Args:
            call: What to do.
            done: Gets what it returned.
            failed: Gets the OSError that it raised; a fault of ours is logged and comes as one.
        """
        loop = asyncio.get_running_loop()

        def work() -> None:
            try:
                result = call()
            except OSError as error:
                _tell(loop, failed, error)
            except Exception as error:  # noqa: BLE001
                # the thread goes on with what others have asked for
                with contextlib.suppress(OSError):
                    sys.stderr.write(f"a fault in thread {self._name}: {''.join(traceback.format_exception(error))}")
                _tell(loop, failed, OSError(f"{type(error).__name__}: {error}"))
            else:
                _tell(loop, done, result)

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._work.put(work)

    def close(self) -> None:
        """Finish what was asked for, and end."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[T], None], value: T) -> None:
    # the loop is closed when the program ends
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, value)
