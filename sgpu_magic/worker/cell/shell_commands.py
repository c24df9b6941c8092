"""`!command` on a rank: like IPython's, on a terminal, but without a keyboard.

IPython runs the command on a pseudo-terminal that gets no input, so a command that prompts would wait forever. Here
its stdin is empty and it has no controlling terminal: it gets the end of file at once.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios

_CHUNK_BYTES = 1 << 16
_ROWS, _COLUMNS = 24, 80
# time for a command to end after each signal
_INTERRUPTED_S = 0.2
_OUTPUT_FLAGS = 1


def run_command(command: str) -> int:
    """Run a command with the user's shell and print its output as it arrives.

    An interrupt ends the command and is not raised, as in IPython.

    Returns:
        Its exit status, negative for a signal.
    """
    output, its_end = pty.openpty()
    try:
        # don't translate line endings
        attributes = termios.tcgetattr(its_end)
        attributes[_OUTPUT_FLAGS] &= ~termios.OPOST
        termios.tcsetattr(its_end, termios.TCSANOW, attributes)
        termios.tcsetwinsize(its_end, (_ROWS, _COLUMNS))
        shell = shutil.which(os.environ.get("SHELL") or "sh") or "/bin/sh"
        process = subprocess.Popen(
            [shell, "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=its_end,
            stderr=its_end,
            # in the rank's process group, the command would be interrupted twice
            start_new_session=True,
        )
    except BaseException:
        os.close(output)
        raise
    finally:
        os.close(its_end)
    try:
        _print(output)
        return _status_of(process.wait())
    except KeyboardInterrupt:
        return _status_of(_end(process))
    finally:
        os.close(output)


def _print(output: int) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        try:
            data = os.read(output, _CHUNK_BYTES)
        except OSError:
            # all processes that had the terminal open have ended
            data = b""
        sys.stdout.write(decoder.decode(data, final=not data))
        sys.stdout.flush()
        if not data:
            return


def _end(process: subprocess.Popen[bytes]) -> int:
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            return process.wait(_INTERRUPTED_S)
    return process.wait()


def _status_of(status: int) -> int:
    # the shell reports signal N as status 128 + N
    return 128 - status if status > 128 else status
