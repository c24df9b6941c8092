"""Threads that run tasks one after the other.

`SerialExecutor` has a thread only while there are tasks, and is for a kernel, whose exit must not wait for it as it
does for the threads of `concurrent.futures`. `FileThread` is for a service's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from sgpu_magic.system.processes import write_log

T = TypeVar("T")

_JOIN_S = 2.0


class SerialExecutor:
    """Runs tasks one after the other in a thread that exists only while there are tasks.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def is_idle(self) -> bool:
        """No task is running or waiting."""
        with self._lock:
            return self._thread is None

    def put(self, work: Callable[[], None]) -> None:
        """Add a task. An exception that it raises is logged, and the next task runs."""
        with self._lock:
            if self._closed:
                return
            self._waiting.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def drop(self) -> None:
        """Drop waiting tasks."""
        with self._lock:
            self._waiting.clear()

    def close(self) -> None:
        """Drop waiting tasks, take no further ones, and wait at most 2 s for the running one."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    # under the lock: a task that is added from now on starts a new thread
                    self._thread = None
                    return
                work = self._waiting.popleft()
            try:
                work()
            except Exception:
                # a thread's top: the task's fault must not keep the tasks behind it from running
                logging.getLogger("sgpu_magic").exception("a fault in thread %s", self._name)


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

        def on_done(future: asyncio.Future[T]) -> None:
            match future.exception():
                case None:
                    done(future.result())
                case OSError() as error:
                    failed(error)
                case error:
                    write_log(f"a fault in thread {self._name}: ", error)
                    failed(OSError(f"{type(error).__name__}: {error}"))

        asyncio.get_running_loop().run_in_executor(self._executor, call).add_done_callback(on_done)

    def close(self) -> None:
        """Finish pending calls and end the thread."""
        self._executor.shutdown()
