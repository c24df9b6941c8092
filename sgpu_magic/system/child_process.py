"""What works beside an event loop: child processes that exchange messages over a socket, and a thread for file I/O."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from sgpu_magic.system.message_stream import MessageStream
from sgpu_magic.system.processes import write_log
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.codec import Decoder

M = TypeVar("M")
T = TypeVar("T")
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
    """Start a program in a new session (setsid). Returns this end of a socket pair, and the process.

    Args:
        command: The command; the descriptor number of the program's end of the pair is appended.
        arguments: Arguments after that number.
        environ: The program's environment.
        log: The file for its output; None discards stdout and inherits stderr.
        order: Data for its standard input, for what must not appear in a command line, which all users can read.
        descriptors: Additional file descriptors that it inherits.

    Raises:
        OSError: The program can't be started.
    """
    ours, theirs = socket.socketpair()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(theirs)
            words = None if log is None else stack.enter_context(open(log, "ab", opener=private))
            child = subprocess.Popen(
                [*command, str(theirs.fileno()), *arguments],
                # keeps the working directory out of the import path, without an interpreter option
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
        # a process that has died already is detected by its socket
        with child.stdin, contextlib.suppress(BrokenPipeError):
            child.stdin.write(order or b"")
    return ours, child


def private(path: str, flags: int) -> int:
    """An `opener` for `open` that creates files with mode 0600."""
    return os.open(path, flags, 0o600)


@dataclass(eq=False)
class ChildProcess(Generic[M]):
    """A child process and the stream to it, restarted when it exits. Use it from the loop's thread only.

    Args:
        start: Starts the process.
        decoder: The decoder of its messages.
        said: Called with each message.
        pauses_s: Seconds before each restart, by the number of exits since `well`; the last applies to all later ones.
        wanted: Whether to restart the process after its exit.
        begun: Called after each start.

    Attributes:
        ends: The number of exits since `well` was last called.
    """

    start: Callable[[], Started]
    decoder: Decoder[M] | msgspec.msgpack.Decoder[M]
    said: Callable[[M], None]
    pauses_s: Sequence[float]
    wanted: Callable[[], bool] = lambda: True
    begun: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.ends = 0
        self._loop = asyncio.get_running_loop()
        self._child: subprocess.Popen[bytes] | None = None
        self._stream: MessageStream[M] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """The pid of the process, None while there is none."""
        return None if self._child is None else self._child.pid

    def begin(self) -> None:
        """Start the process, unless it runs or a restart is scheduled.

        Raises:
            OSError: The process can't be started.
        """
        if self._stream is None and self._timer is None:
            self._start()

    def begin_again(self) -> None:
        """Kill the process and start a new one now."""
        self._stop()
        self._start()

    def send(self, message: Record) -> None:
        """Send a message, or do nothing while there is no process."""
        if self._stream is not None:
            self._stream.send(message)

    def well(self) -> None:
        """Record that the process works, so that the next restart is fast again."""
        self.ends = 0

    def end(self, word: Record, wait_s: float) -> None:
        """Send a final message and wait for the exit; kill the process after `wait_s`. Needs no running loop."""
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
        sock, self._child = self.start()
        self._stream = MessageStream[M](sock, self.decoder, lambda message, _: self.said(message), self._lost)
        self.begun()

    def _lost(self) -> None:
        self._stop()
        if self.wanted():
            pause_s = self.pauses_s[min(self.ends, len(self.pauses_s) - 1)]
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
        """Detach the current stream and process, and cancel a scheduled restart."""
        if self._timer is not None:
            self._timer.cancel()
        taken = self._stream, self._child
        self._timer = self._stream = self._child = None
        return taken

    def _reap(self, child: subprocess.Popen[bytes]) -> None:
        if child.poll() is None:
            self._loop.call_later(_REAP_S, self._reap, child)


def wait_or_kill(child: subprocess.Popen[bytes], wait_s: float) -> None:
    """Wait for the exit of a process that was told to end; kill it after `wait_s`."""
    try:
        child.wait(wait_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


# ---------------------------------------------------------------- a thread


class FileThread:
    """A thread for file I/O, started at once so that a service's number of threads is constant.

    Use it from the loop's thread only.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str) -> None:
        # of the processes that import this module, few need a thread
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
