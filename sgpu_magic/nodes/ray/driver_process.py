"""The child process that speaks to Ray: started, listened to, and started again when it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sgpu_magic.nodes.ray.driver_messages import EndAll, FromCluster, ToCluster, from_cluster
from sgpu_magic.system import child_process

_AGAIN_S = (1.0, 2.0, 5.0, 10.0)
_END_S = 40.0


class DriverProcess:
    """Used from the loop's thread only.

    Args:
        arguments: Of the process: Ray's address, the namespace, the prefix of names.
        log: Where Ray's words go.
        on_message: Called with what it says.
    """

    def __init__(self, arguments: Sequence[str], log: Path, on_message: Callable[[FromCluster], None]) -> None:
        self._arguments = tuple(arguments)
        self._log = log
        self._child = child_process.ChildProcess(self._start, from_cluster, on_message, pauses_s=_AGAIN_S)
        self._child.begin()

    @property
    def pid(self) -> int:
        """The process's, 0 while there is none."""
        return self._child.pid or 0

    def send(self, message: ToCluster) -> None:
        """Send; while there is no process nothing is sent: what is wanted is said again when it has connected."""
        self._child.send(message)

    def well(self) -> None:
        """It has connected: should it end, the next one comes soon."""
        self._child.well()

    def end(self) -> None:
        """Have it end all actors and placement groups of the pool, and wait for it."""
        self._child.end(EndAll(), _END_S)

    def _start(self) -> child_process.Started:
        # neither telling the makers of Ray about the cluster's users nor advice about imports is our affair
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
        command = [sys.executable, "-m", "sgpu_magic.nodes.ray"]
        return child_process.start(command, self._arguments, environ={**quiet, **os.environ}, log=self._log)
