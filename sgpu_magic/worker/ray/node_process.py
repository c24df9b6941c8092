"""The node program as its rank holds it: started, waited for, watched, ended."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping

from sgpu_magic.errors import EnvironmentFailed
from sgpu_magic.worker.ray.words import (
    LineReader,
    NodeStarted,
    NodeTroubled,
    StartNode,
    line_of,
    node_words,
)

# Ray's own limits add up to less, also on a machine that swaps
_START_S = 240.0
_STOP_S = 10.0
_PROGRAM = "sgpu_magic.worker.ray.node"
_CHUNK_BYTES = 1 << 16


class NodeProcess:
    """Ray's processes on this node, as the child of the rank that leads here.

    Args:
        order: What is to be started.
        environ: Their environment.

    Raises:
        OSError: The system has no process or descriptor left.
    """

    def __init__(self, order: StartNode, environ: Mapping[str, str]) -> None:
        # in the rank's own session: the agent finds all that is left of it there
        self._process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, bufsize=0
        )
        self._reader = LineReader(node_words)
        self._ending = False
        if self._process.stdin is not None:
            # one that died at once is told of by its end
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(line_of(order))

    def fileno(self) -> int:
        """Readable when the program has something to say."""
        return self._process.stdout.fileno() if self._process.stdout is not None else -1

    def started(self) -> NodeStarted:
        """Wait until Ray is up here.

        Raises:
            EnvironmentFailed: It can't be started.
        """
        until = time.monotonic() + _START_S
        while True:
            if not select.select([self], [], [], max(0.0, until - time.monotonic()))[0]:
                raise EnvironmentFailed(
                    f"Ray was not up on the rank's node after {_START_S:.0f} s. Its logs are in the run's output; a "
                    "node with more memory or fewer other programs may do."
                )
            word = self.heard()
            if isinstance(word, NodeStarted):
                return word
            if word is not None:
                raise EnvironmentFailed(_why_not(word))

    def heard(self) -> NodeStarted | NodeTroubled | None:
        """Read what the program has said; None for half a word. To be called when there is something to read."""
        data = os.read(self.fileno(), _CHUNK_BYTES)
        if not data:
            status = self._process.wait()
            return NodeTroubled(text=f"the program that holds Ray's processes ended with status {status}")
        words = self._reader.feed(data)
        return words[0] if words else None

    def watch(self, troubled: Callable[[NodeTroubled], None]) -> None:
        """Have it told, in a thread, when one of Ray's processes dies."""

        def listen() -> None:
            with contextlib.suppress(OSError, ValueError):
                while not self._ending:
                    word = self.heard()
                    if isinstance(word, NodeTroubled):
                        if not self._ending:
                            troubled(word)
                        return

        threading.Thread(target=listen, name="sgpu-ray-node", daemon=True).start()

    def stop(self) -> None:
        """End all of Ray's processes here; return when they are gone."""
        self._ending = True
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            # what it leaves the agent finds by the run's mark
            self._process.kill()
            self._process.wait()


def _why_not(word: NodeTroubled) -> str:
    if word.missing:
        return (
            f"the ranks' Python ({sys.executable}) has no Ray: {word.text}. Install it in the notebook with "
            '%pip install "ray[default]" and run the cell again, or name an environment that has it with --env-version.'
        )
    log = f"\n{word.log}" if word.log else ""
    return f"Ray does not start in the ranks' Python ({sys.executable}): {word.text}.{log}"
