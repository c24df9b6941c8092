"""The child process of an agent that builds one environment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from sgpu_magic.agent import faults
from sgpu_magic.packages.node.store import BuildNews, BuildOrder, decode_news, encode
from sgpu_magic.system.child_process import private

# what was begun is removed within this
_END_S = 5.0
_MOST_BYTES = 1 << 20


class Building:
    """One build; over at the end of the process's output.

    Args:
        order: What to build.
        log: Where a fault of the process can be read.
        told: Hears what it says.
        ended: Hears of its end, whatever it has said.

    Raises:
        OSError: The process can't be started.
    """

    def __init__(
        self, order: BuildOrder, log: Path, told: Callable[[BuildNews], None], ended: Callable[[], None]
    ) -> None:
        self.alive = True
        self._told: Callable[[BuildNews], None] | None = faults.bound(told)
        self._ended = ended
        ours, theirs = socket.socketpair()
        try:
            with theirs, open(log, "ab", opener=private) as errors:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "sgpu_magic.packages.node", str(os.getpid())],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=errors,
                    cwd="/",
                    start_new_session=True,
                    env={**os.environ, "PYTHONSAFEPATH": "1"},
                )
        except BaseException:
            ours.close()
            raise
        self._talk = faults.in_background(self._listen(ours, encode(order)))

    def end(self) -> None:
        """Nobody wants it any more: it removes what it has begun. What it says from now on is not heard."""
        self._told = None
        self._signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(_END_S, self._signal, signal.SIGKILL)

    def close(self) -> None:
        """The agent ends: kill it at once, with uv and all else that it has started."""
        self._signal(signal.SIGKILL)
        self._over()
        self._talk.cancel()

    async def _listen(self, sock: socket.socket, order: bytes) -> None:
        reader, writer = await asyncio.open_connection(sock=sock, limit=_MOST_BYTES)
        try:
            # one that has died says so by the end of its output
            with contextlib.suppress(ConnectionError):
                writer.write(order)
                writer.write_eof()
                async for line in reader:
                    # a killed process may leave half a line, and nothing else
                    with contextlib.suppress(msgspec.DecodeError):
                        news = decode_news(line)
                        if self._told is not None:
                            self._told(news)
        finally:
            writer.close()
        self._over()
        self._ended()

    def _over(self) -> None:
        self.alive = False
        # reaped with all other children
        if self._process.poll() is None:
            self._process.returncode = 0

    def _signal(self, number: signal.Signals) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
