"""Work that is done one after the other in a thread of its own, which is there only while there is some."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

_JOIN_S = 2.0


class Lane:
    """Takes work from any thread.

    Args:
        name: The thread's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def is_idle(self) -> bool:
        """Nothing is done, and nothing waits."""
        with self._lock:
            return self._thread is None

    def put(self, work: Callable[[], None]) -> None:
        """Have it done; it must not raise."""
        with self._lock:
            if self._closed:
                return
            self._waiting.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Do nothing more; what is being done is waited for a moment."""
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
                    # in one step: who has work from now on starts the next thread
                    self._thread = None
                    return
                work = self._waiting.popleft()
            work()
