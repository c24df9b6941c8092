"""The user's command that is run when a run has ended: the setting `notify`.

A separate supervisor process runs it, and ends the processes that the command leaves behind, even if the caller is
killed meanwhile.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import msgspec

from sgpu_magic.system import processes
from sgpu_magic.system.child_process import popen, start_error
from sgpu_magic.wire.base import RunState

LIMIT_S = 10.0
"""Time limit of the command in seconds."""

# additional time for the supervisor to start, and to end the processes of the command
_SUPERVISOR_S = 10.0
_MAX_ERROR_BYTES = 4096
_MAX_ERROR_CHARS = 200


class EndedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about an ended run that are passed to the command.

    Args:
        run_id: Its id.
        name: Its name.
        state: Its final state.
        seconds: Time from its submission to its end.
        reason: Why it failed or was cancelled, in one line; "" for no reason.
        pool: Its pool's name.
        notebook: The notebook's file, "" for none.
    """

    run_id: str
    name: str
    state: RunState
    seconds: float
    reason: str
    pool: str
    notebook: str

    def variables(self) -> dict[str, str]:
        """Return the command's environment variables.

        Their names don't begin with `SGPU_RUN_`, because agents find the processes of a run by `SGPU_RUN_ID`.
        """
        return {
            "SGPU_ENDED_ID": self.run_id,
            "SGPU_ENDED_NAME": self.name,
            "SGPU_ENDED_STATE": self.state.value,
            "SGPU_ENDED_SECONDS": f"{self.seconds:.1f}",
            "SGPU_ENDED_REASON": self.reason,
            "SGPU_ENDED_POOL": self.pool,
            "SGPU_ENDED_NOTEBOOK": self.notebook,
        }


def run_notify_command(command: str, ended: EndedRun, limit_s: float = LIMIT_S) -> str:
    """Run the command without a shell, and end the processes that it leaves behind. Blocks.

    Args:
        command: A command line, with quotes as in a shell.
        ended: The run, whose facts are in the command's environment.
        limit_s: Time limit in seconds.

    Returns:
        Why it failed, for the middle of a sentence; "" if it did not.
    """
    supervisor = [sys.executable, "-m", "sgpu_magic.system.notify_command", str(os.getpid()), str(limit_s)]
    # a variable's value can't contain a zero byte
    variables = {name: value.replace("\0", "") for name, value in ended.variables().items()}
    try:
        process = popen(
            [*supervisor, *shlex.split(command)],
            env={**os.environ, **variables, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        return f"it can't be started: {start_error(error)}"
    with process:
        try:
            output, _ = process.communicate(timeout=limit_s + _SUPERVISOR_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"it took longer than {limit_s:g} s"
    if process.returncode:
        return f"the process that runs it exited with code {process.returncode}"
    return output.decode("utf-8", "replace")


def _supervise(command: Sequence[str], limit_s: float) -> str:
    """Run the command, end everything that it has started, and return why it failed; "" if it did not."""
    processes.become_subreaper()
    own = os.getpid()
    with tempfile.TemporaryFile() as errors:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
                # safe: this process is single-threaded
                preexec_fn=lambda: processes.die_with_parent(own),
            )
        except OSError as error:
            return f"it can't be started: {start_error(error)}"
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return f"it took longer than {limit_s:g} s"
        finally:
            processes.end_children()
        if code == 0:
            return ""
        how = f"it was killed by signal {-code}" if code < 0 else f"it exited with code {code}"
        size = errors.seek(0, os.SEEK_END)
        errors.seek(max(0, size - _MAX_ERROR_BYTES))
        last = errors.read().decode("utf-8", "replace").strip().splitlines()[-1:]
        return ": ".join([how, *(line.strip()[:_MAX_ERROR_CHARS] for line in last)])


def main(arguments: Sequence[str]) -> None:
    """Run a command for the parent process, and print why it failed.

    Args:
        arguments: The parent's pid, the time limit in seconds, and the command.
    """
    parent, limit_s, *command = arguments
    processes.die_with_parent(int(parent))
    # the command finds its modules as if it had been started from a shell
    os.environ.pop("PYTHONSAFEPATH", None)
    sys.stdout.write(_supervise(command, float(limit_s)))


if __name__ == "__main__":
    main(sys.argv[1:])
