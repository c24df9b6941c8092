"""Child processes that speak over a socket: started, listened to, and started again when they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from sgpu_magic.system.message_stream import MessageStream
from sgpu_magic.wire.codec import Decoder
from sgpu_magic.wire.record import Record

M = TypeVar("M")
Started = tuple[socket.socket, subprocess.Popen[bytes]]
_REAP_S = 0.05


def start(
    command: Sequence[str],
    arguments: Sequence[str] = (),
    *,
    environ: Mapping[str, str] = os.environ,
    log: Path | None = None,
    order: bytes | None = None,
    descriptors: Sequence[int] = (),
) -> Started:
    """Start a program in a session of its own; return our end of a socket pair, and the process.

    Args:
        command: What to execute; the number of the program's end of the pair follows.
        arguments: What follows that.
        environ: Its variables.
        log: The file that its output goes to; None leaves its errors to those of this process.
        order: What it reads on its standard input: everybody on the machine can read a command line.
        descriptors: Further ones that it inherits.

    Raises:
        OSError: It can't be started.
    """
    ours, theirs = socket.socketpair()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(theirs)
            words = None if log is None else stack.enter_context(open(log, "ab", opener=private))
            child = subprocess.Popen(
                [*command, str(theirs.fileno()), *arguments],
                # keeps the working directory out of the import path; needs no switch of the interpreter
                env={**environ, "PYTHONSAFEPATH": "1"},
                stdin=subprocess.DEVNULL if order is None else subprocess.PIPE,
                stdout=subprocess.DEVNULL if words is None else words,
                stderr=words,
                pass_fds=(theirs.fileno(), *descriptors),
                cwd="/",
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        raise
    if child.stdin is not None:
        # one that has died already is noticed by its socket
        with child.stdin, contextlib.suppress(BrokenPipeError):
            child.stdin.write(order or b"")
    return ours, child


def private(path: str, flags: int) -> int:
    """Open a file of mode 0600."""
    return os.open(path, flags, 0o600)


class ChildProcess(Generic[M]):
    """One process at a time and the stream to it. Used from the loop's thread only.

    Args:
        start: Starts it.
        decoder: The decoder of what it says.
        said: Called with each message.
        pauses_s: Before it is started again, by how often it has ended since it was well; the last for all that follow.
        wanted: Whether it is started again when it has ended.
        begun: Called when it has been started.

    Attributes:
        ends: How often it has ended since it was well.
    """

    def __init__(
        self,
        start: Callable[[], Started],
        decoder: Decoder[M] | msgspec.msgpack.Decoder[M],
        said: Callable[[M], None],
        *,
        pauses_s: Sequence[float],
        wanted: Callable[[], bool] = lambda: True,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        self.ends = 0
        self._start_one = start
        self._decoder = decoder
        self._said = said
        self._pauses_s = pauses_s
        self._wanted = wanted
        self._begun = begun
        self._loop = asyncio.get_running_loop()
        self._child: subprocess.Popen[bytes] | None = None
        self._stream: MessageStream[M] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """The process's, None while there is none."""
        return None if self._child is None else self._child.pid

    def begin(self) -> None:
        """Start it, unless it is there, or about to be started.

        Raises:
            OSError: It can't be started.
        """
        if self._stream is None and self._timer is None:
            self._start()

    def begin_again(self) -> None:
        """Put a new one in its place now."""
        self._stop()
        self._start()

    def send(self, message: Record) -> None:
        """Send, or do nothing while there is no process."""
        if self._stream is not None:
            self._stream.send(message)

    def well(self) -> None:
        """It does what it is for: should it end, the next one comes soon."""
        self.ends = 0

    def end(self, word: Record, wait_s: float) -> None:
        """Say a last word and wait for its end; it is killed when that takes too long. The loop need not run."""
        stream, child = self._taken()
        if stream is not None:
            stream.send(word)
            stream.send_all(wait_s)
        if child is not None:
            wait_or_kill(child, wait_s)
        if stream is not None:
            stream.close()

    # ------------------------------------------------------------ within

    def _start(self) -> None:
        self._timer = None
        sock, self._child = self._start_one()
        self._stream = MessageStream[M](sock, self._decoder, lambda message, _: self._said(message), self._lost)
        self._begun()

    def _lost(self) -> None:
        self._stop()
        if self._wanted():
            pause_s = self._pauses_s[min(self.ends, len(self._pauses_s) - 1)]
            self.ends += 1
            self._timer = self._loop.call_later(pause_s, self._start)

    def _stop(self) -> None:
        stream, child = self._taken()
        if stream is not None:
            stream.close()
        if child is not None:
            child.kill()
            self._reap(child)

    def _taken(self) -> tuple[MessageStream[M] | None, subprocess.Popen[bytes] | None]:
        """What there was of a process: from now on there is none, and none is on its way."""
        if self._timer is not None:
            self._timer.cancel()
        taken = self._stream, self._child
        self._timer = self._stream = self._child = None
        return taken

    def _reap(self, child: subprocess.Popen[bytes]) -> None:
        if child.poll() is None:
            self._loop.call_later(_REAP_S, self._reap, child)


def wait_or_kill(child: subprocess.Popen[bytes], wait_s: float) -> None:
    """Wait for a process that has been told to end, and kill it when that takes too long."""
    try:
        child.wait(wait_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
