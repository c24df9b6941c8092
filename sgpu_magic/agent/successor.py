"""Starts the next pool service when the last one was killed and no notebook is there that would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sgpu_magic.system import processes


class Successor:
    """Starts a service of this user, as a client does. Harmless when another one is first.

    Args:
        log: Where the service's own words go.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it unless it is on its way. It leaves this process's family, so that it does not end with it.

        Raises:
            OSError: No process can be started.
        """
        if self._process is not None:
            return
        # the service leaves by a second fork, and must not come back here as an orphan
        processes.become_subreaper(False)
        with open(self._log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sgpu_magic.pool"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )

    def reaped(self, pid: int) -> None:
        """A child of this process has ended: the starter does so as soon as the service is on its own."""
        if self._process is not None and self._process.pid == pid:
            self._process.returncode = 0
            self._process = None
            processes.become_subreaper()
