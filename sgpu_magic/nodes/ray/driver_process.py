"""The child process that speaks to Ray: started, listened to, and started again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sgpu_magic.nodes.ray.driver_messages import EndAll, FromCluster, ToCluster, from_cluster
from sgpu_magic.system.message_stream import MessageStream
from sgpu_magic.wire import codec

_AGAIN_S = (1.0, 2.0, 5.0, 10.0)
_END_S = 40.0


class DriverProcess:
    """Used from the loop's thread only.

    Args:
        arguments: Of the process: Ray's address, the namespace, the prefix of names.
        log: Where Ray's words go.
        on_message: Called with what it says.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        on_message: Callable[[FromCluster], None],
    ) -> None:
        self._arguments = tuple(arguments)
        self._log = log
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._times = 0
        self._timer: asyncio.TimerHandle | None = None
        self._stream: MessageStream[FromCluster] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._start()

    @property
    def pid(self) -> int:
        """The process's, 0 while there is none."""
        return self._child.pid if self._child is not None else 0

    def send(self, message: ToCluster) -> None:
        """Send; while there is no process nothing is sent: what is wanted is said again when it has connected."""
        if self._stream is not None:
            self._stream.send(message)

    def well(self) -> None:
        """It has connected: should it end, the next one comes soon."""
        self._times = 0

    def end(self) -> None:
        """Have it end all actors and placement groups of the pool, and wait for it."""
        if self._timer is not None:
            self._timer.cancel()
        stream, child = self._stream, self._child
        self._stream = self._child = None
        if stream is None or child is None:
            return
        # the loop does not run any more
        with contextlib.suppress(OSError):
            self._socket.setblocking(True)
            self._socket.sendall(codec.frame(EndAll()))
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        stream.close()

    def _start(self) -> None:
        self._timer = None
        ours, theirs = socket.socketpair()
        # neither telling the makers of Ray about the cluster's users nor advice about imports is our affair
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
        environ = {**quiet, **os.environ, "PYTHONSAFEPATH": "1"}
        with theirs, open(self._log, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as words:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "sgpu_magic.nodes.ray", str(theirs.fileno()), *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                pass_fds=(theirs.fileno(),),
                cwd="/",
                start_new_session=True,
                env=environ,
            )
        self._socket = ours
        self._stream = MessageStream[FromCluster](ours, from_cluster, self._said, self._lost)

    def _said(self, message: FromCluster, frames: Sequence[bytes]) -> None:
        self._on_message(message)

    def _lost(self) -> None:
        child, self._child, self._stream = self._child, None, None
        if child is not None:
            child.kill()
            child.wait()
        wait_s = _AGAIN_S[min(self._times, len(_AGAIN_S) - 1)]
        self._times += 1
        self._timer = self._loop.call_later(wait_s, self._start)
