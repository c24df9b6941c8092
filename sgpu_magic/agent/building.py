"""The child process of an agent that builds one environment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from sgpu_magic.agent.background_call import call_in_background
from sgpu_magic.packages.node.build_order import BuildNews, BuildOrder, decode_news, encode

_CHUNK_BYTES = 1 << 16
# what was begun is removed within this
_END_S = 5.0


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
        self._told: Callable[[BuildNews], None] | None = told
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._text = b""
        with open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sgpu_magic.packages.node.build", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd="/",
                start_new_session=True,
                env={**os.environ, "PYTHONSAFEPATH": "1"},
            )
        if self._process.stdin is None or self._process.stdout is None:
            raise OSError("the process was started without pipes")
        self._input = self._process.stdin
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._loop.add_reader(self._output.fileno(), self._read)
        # it reads when it has started, and an order may be larger than a pipe
        call_in_background(lambda: self._send(encode(order)), "sgpu-build-order")

    @property
    def alive(self) -> bool:
        return not self._output.closed

    def end(self) -> None:
        """Nobody wants it any more: it removes what it has begun. What it says from now on is not heard."""
        self._told = None
        self._signal(signal.SIGTERM)
        self._loop.call_later(_END_S, self.kill)

    def kill(self) -> None:
        """At once, with uv and all else that it has started."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """The agent ends."""
        self.kill()
        self._close()

    def _send(self, order: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._input.write(order)
        with contextlib.suppress(BrokenPipeError):
            self._input.close()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._output.fileno(), _CHUNK_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._close()
                self._ended()
                return
            *lines, self._text = (self._text + data).split(b"\n")
            for line in lines:
                if self._told is not None:
                    # a killed process may leave half a line, and nothing else
                    with contextlib.suppress(msgspec.DecodeError):
                        self._told(decode_news(line))

    def _close(self) -> None:
        if self.alive:
            self._loop.remove_reader(self._output.fileno())
            self._output.close()
            # reaped with all other children
            self._process.poll()
            if self._process.returncode is None:
                self._process.returncode = 0

    def _signal(self, number: signal.Signals) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
