"""A connection to a pool's socket on this machine, which ends when the pool's process exits.

ZeroMQ hides a peer's death and would silently connect to the next pool at the path, so the connection also watches its
monitor, which reports the end.
"""

from __future__ import annotations

from pathlib import Path

import zmq


class PoolSocket:
    """A connection. Use it from one thread; a context manager that closes it.

    Args:
        path: The pool's socket.
        linger_ms: Milliseconds for which unsent messages are still sent when it is closed.

    Attributes:
        dealer: Sends and receives messages; without a limit on what is queued to be sent.
        ended: Readable once the connection has ended.
    """

    def __init__(self, path: Path, linger_ms: int) -> None:
        self._context = zmq.Context()
        self.dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.dealer.linger = linger_ms
        self.dealer.sndhwm = 0
        self.ended: zmq.Socket[bytes] = self.dealer.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        )
        self._path = path

    def connect(self) -> None:
        """Connect in the background; a connection that is refused counts as ended."""
        self.dealer.connect(f"ipc://{self._path}")

    def __enter__(self) -> PoolSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.dealer.disable_monitor()
        self.ended.close(0)
        self.dealer.close()
        self._context.term()
