"""A command that runs in the background and ends with the process that started it, however that one ends.

A supervisor process of its own runs it: the pipe to the supervisor closes when the starting process closes it or dies.
The supervisor then ends the command and everything that it has started.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence

from sgpu_magic.system import processes
from sgpu_magic.system.child_process import popen

_GRACE_S = 3.0
# for the supervisor to end the command after its grace period
_END_S = _GRACE_S + 7.0
_POLL_S = 0.2
_MAX_OUTPUT_BYTES = 8192


class BackgroundCommand:
    """A running command. Thread-safe.

    Args:
        command: The program and its arguments.
        environ: Its environment.

    Raises:
        OSError: The supervisor can't be started.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
        self._ending = threading.Lock()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed by `end`
        try:
            self._supervisor = popen(
                [sys.executable, "-m", "sgpu_magic.system.background_command", *command],
                env={**environ, "PYTHONSAFEPATH": "1"},
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._output,
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            self._output.close()
            raise

    @property
    def is_running(self) -> bool:
        return self._supervisor.poll() is None

    def last_output(self) -> str:
        """Return the end of what the command has printed, "" after `end`."""
        if self._output.closed:
            return ""
        size = os.fstat(self._output.fileno()).st_size
        read = os.pread(self._output.fileno(), _MAX_OUTPUT_BYTES, max(0, size - _MAX_OUTPUT_BYTES))
        return read.decode("utf-8", "replace").strip()

    def end(self) -> None:
        """End the command and everything that it has started. Blocks for some seconds at most."""
        with self._ending:
            if self._supervisor.stdin is not None:
                self._supervisor.stdin.close()
            try:
                self._supervisor.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()
                self._supervisor.wait()
            self._output.close()


def _supervise(command: Sequence[str]) -> int:
    """Run the command until it exits or standard input is closed; return its exit code."""
    processes.become_subreaper()
    own = os.getpid()
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        # safe: this process is single-threaded
        preexec_fn=lambda: processes.die_with_parent(own),
    )
    try:
        while child.poll() is None:
            if select.select([sys.stdin], [], [], _POLL_S)[0]:
                _terminate(child)
                break
    finally:
        # without a subreaper, as on macOS, the group is what can be found
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        code = child.wait()
        processes.end_children()
    return code


def _terminate(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE_S)


if __name__ == "__main__":
    try:
        sys.exit(abs(_supervise(sys.argv[1:])))
    except OSError as error:
        sys.exit(str(error))
