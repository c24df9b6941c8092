"""Child processes that exchange messages over a socket with an event loop in this process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from sgpu_magic.system.message_stream import MessageStream
from sgpu_magic.system.processes import child_pids, command_of, kill_and_reap, may_signal, write_log
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.codec import Decoder
from sgpu_magic.wire.decoding import MsgpackDecoder

M = TypeVar("M")
Started = tuple[socket.socket, subprocess.Popen[bytes]]
_REAP_S = 0.05
# time after which killed processes that do not end are abandoned
_GIVE_UP_S = 5.0
_POLL_S = 0.005


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
            child = popen(
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
    except MemoryError as error:
        ours.close()
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error
    except BaseException:
        ours.close()
        raise
    if child.stdin is not None:
        # the death of the process is detected by its socket
        with child.stdin, contextlib.suppress(BrokenPipeError):
            child.stdin.write(order or b"")
    return ours, child


_started: set[int] = set()
_starting = threading.Lock()


def popen(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a child that this process, a subreaper, can tell from the orphans that it adopts (`adopted_children`).

    Raises:
        OSError: The program can't be started.
    """
    with _starting:
        child = cast("subprocess.Popen[bytes]", subprocess.Popen(command, **options))
        _started.add(child.pid)
        return child


def adopted_children() -> list[int]:
    """Pids of children that neither `popen` nor `start` has started: orphans of children that have ended."""
    with _starting:
        children = child_pids()
        # the pid of a reaped child may be reused by an orphan
        _started.intersection_update(children)
        return [pid for pid in children if pid not in _started]


def end_adopted(done: Callable[[], None]) -> None:
    """End the adopted children of this process, and everything below them, in the running loop; then call `done`.

    Those that can't be ended are named in the log: they run as another user, or wait in the system (state D).
    """
    _end_adopted(asyncio.get_running_loop().time() + _GIVE_UP_S, done)


def _end_adopted(give_up_at: float, done: Callable[[], None]) -> None:
    if adopted := adopted_children():
        left = kill_and_reap(adopted, _started)
        loop = asyncio.get_running_loop()
        if loop.time() < give_up_at and (not left or any(map(may_signal, left))):
            # the children of ended processes have been reparented to this process
            loop.call_later(_POLL_S if left else 0.0, _end_adopted, give_up_at, done)
            return
        write_log(f"processes that ranks have left can't be ended: {', '.join(map(command_of, left))}\n")
    done()


def start_error(error: OSError) -> str:
    """Return why a process can't be started, for the middle of a sentence."""
    words = error.strerror or str(error)
    return f"{words}: {error.filename}" if error.filename else words


def private(path: str, flags: int) -> int:
    """An `opener` for `open` that creates files with mode 0600."""
    return os.open(path, flags, 0o600)


@dataclass(eq=False)
class ChildProcess(Generic[M]):
    """A child process and the stream to it, restarted when it exits. Use it from the loop's thread only.

    Args:
        start: Starts the process.
        decoder: The decoder of its messages.
        on_message: Called with each message.
        pauses_s: Seconds before each restart, by the number of exits since `well`; the last applies to all later ones.
        wanted: Whether to restart the process after its exit.
        begun: Called after each start.
        failed: Called when the process can't be started. It is started again as after an exit, so a caller that reports
            the reason needs to do nothing else.

    Attributes:
        ends: The number of exits since `well` was last called.
    """

    start: Callable[[], Started]
    decoder: Decoder[M] | MsgpackDecoder[M]
    on_message: Callable[[M], None]
    pauses_s: Sequence[float]
    wanted: Callable[[], bool] = lambda: True
    begun: Callable[[], None] = lambda: None
    failed: Callable[[OSError], None] = lambda _error: None

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
        """Start the process, unless it runs or a restart is scheduled."""
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
        stream, child = self._detach()
        if stream is not None:
            stream.send(word)
            stream.send_all(wait_s)
        if child is not None:
            wait_or_kill(child, wait_s)
        if stream is not None:
            stream.close()

    # ------------------------------------------------------------ internals

    def _start(self) -> None:
        self._timer = None
        try:
            sock, self._child = self.start()
        except OSError as error:
            self.failed(error)
            self._start_again()
            return
        self._stream = MessageStream[M](sock, self.decoder, lambda message, _: self.on_message(message), self._on_lost)
        self.begun()

    def _on_lost(self) -> None:
        self._stop()
        self._start_again()

    def _start_again(self) -> None:
        if self.wanted():
            pause_s = self.pauses_s[min(self.ends, len(self.pauses_s) - 1)]
            self.ends += 1
            self._timer = self._loop.call_later(pause_s, self._start)

    def _stop(self) -> None:
        stream, child = self._detach()
        if stream is not None:
            stream.close()
        if child is not None:
            child.kill()
            self._reap(child)

    def _detach(self) -> tuple[MessageStream[M] | None, subprocess.Popen[bytes] | None]:
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
