"""This machine's agent process and the connection to it: one that an earlier service left, or a new one."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec

from sgpu_magic.agent.runs import ray_place
from sgpu_magic.config import Settings
from sgpu_magic.system import child_process, processes
from sgpu_magic.system.message_stream import MessageStream
from sgpu_magic.wire import codec
from sgpu_magic.wire.client import Warm
from sgpu_magic.wire.node import EndAgent, FromAgent, WarmZygote
from sgpu_magic.wire.pool_status import agent_socket_file
from sgpu_magic.wire.record import Record

_CONNECT_S = 1.0
_END_S = 10.0


class LocalAgent:
    """An agent process and the stream to it.

    Args:
        settings: The pool's settings.
        warm: The interpreter that a new agent warms first, None for none.
        look: Look for an agent that outlived a killed service.
    """

    def __init__(self, settings: Settings, warm: Warm | None = None, *, look: bool = True) -> None:
        self._settings = settings
        found = _find(settings) if look else None
        self._stream: MessageStream[FromAgent] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        if found is None:
            self._socket, self._child = _start(settings)
            self.pid = self._child.pid
            if warm is not None:
                self._socket.sendall(codec.frame(WarmZygote(interpreter=warm.interpreter, ranks=warm.ranks)))
        else:
            self._socket, self.pid = found

    def listen(self, said: Callable[[FromAgent, Sequence[bytes]], None], lost: Callable[[], None]) -> None:
        """From now on call back. Needs a running loop."""
        self._stream = MessageStream[FromAgent](self._socket, codec.from_agent, said, lost)

    def send(self, message: Record, frames: Sequence[bytes] = (), descriptors: Sequence[int] = ()) -> None:
        if self._stream is not None:
            self._stream.send(message, frames, descriptors)

    def take_descriptors(self, count: int) -> list[int]:
        """Return what came along with the message that is being handled."""
        return self._stream.take_descriptors(count) if self._stream is not None else []

    def end(self) -> None:
        """Tell it to end its ranks and itself, and wait for it."""
        watch = _watch(self.pid)
        if self._stream is not None:
            self._stream.send(EndAgent())
            self._stream.close()
        else:
            with contextlib.suppress(OSError):
                self._socket.sendall(codec.frame(EndAgent()))
        self._socket.close()
        if self._child is None:
            _wait(watch)
        else:
            child_process.wait_or_kill(self._child, _END_S)
        if watch >= 0:
            os.close(watch)

    def clean_up_after(self) -> None:
        """It died: kill and reap what it left below this process."""
        if self._child is not None:
            processes.kill_descendants()
            # reaped with the rest; without this its end is reported as lost
            self._child.poll()
            # what was below it is dead, and so are its runs
            ray_place.sweep(self._settings, ())


def _find(settings: Settings) -> tuple[socket.socket, int] | None:
    path = agent_socket_file(settings.runtime_path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_CONNECT_S)
    try:
        connection.connect(str(path))
    except OSError:
        # nobody listens there any more
        connection.close()
        path.unlink(missing_ok=True)
        return None
    peer = processes.peer_of(connection)
    return connection, peer.pid if peer is not None else 0


def _start(settings: Settings) -> child_process.Started:
    # an address in its settings may have a password
    return child_process.start([sys.executable, "-m", "sgpu_magic.agent"], order=msgspec.json.encode(settings))


def _watch(pid: int) -> int:
    """A descriptor that is readable once the process has ended, -1 where there is none."""
    if pid and hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return -1


def _wait(watch: int) -> None:
    if watch < 0:
        return
    ready, _, _ = select.select([watch], [], [], _END_S)
    if not ready:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(watch, signal.SIGKILL)
