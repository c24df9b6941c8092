"""uv as the kernel runs it: from any of its threads, interrupted with it, in nobody's way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgpu_magic.errors import EnvironmentFailed
from sgpu_magic.packages.secrets import without_url_credentials
from sgpu_magic.packages.uv_command import uv_path

# it must not take this kernel's environment, nor the notebook's own project, for what it works on
_NOT_INHERITED = ("VIRTUAL_ENV", "CONDA_PREFIX", "UV_PROJECT", "UV_PROJECT_ENVIRONMENT")


@dataclass(frozen=True, slots=True)
class Done:
    """How a call of uv ended.

    Args:
        status: Its exit status; negative after a signal.
        output: What it wrote to stdout.
        words: What it wrote to stderr, without credentials.
    """

    status: int
    output: str
    words: str


def call_uv(
    arguments: Sequence[str], variables: Mapping[str, str], timeout_s: float, *, stdin: str = "", gently: bool = False
) -> Done:
    """Run uv and wait; it and its children are killed when the wait is interrupted.

    Args:
        arguments: Of the command. Nothing secret: anybody on the machine can read them.
        variables: Beside those of this process.
        timeout_s: It is killed after so many seconds.
        stdin: What it reads.
        gently: At the lowest priority: nobody waits for it.

    Raises:
        EnvironmentFailed: There is no uv, or its time is over.
    """
    environ = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    environ |= {"UV_NO_PROGRESS": "1", "NO_COLOR": "1", "UV_PYTHON_DOWNLOADS": "never", **variables}
    try:
        command = [*(("nice", "-n", "19") if gently and shutil.which("nice") else ()), uv_path(), *arguments]
        return _called(command, environ, timeout_s, stdin)
    except OSError as error:
        raise EnvironmentFailed(
            f"uv, which makes lock files and wheels, can't be started: {error.strerror or error}. "
            "`pip install uv` in the notebook's environment brings it."
        ) from error
    except subprocess.TimeoutExpired:
        raise EnvironmentFailed(
            f"`uv {' '.join(arguments[:2])}` was ended after {timeout_s:g} s. Is the package index reachable from this "
            "machine? `uv pip install --dry-run six` tells."
        ) from None


def call_pip(arguments: Sequence[str], variables: Mapping[str, str], timeout_s: float) -> Done:
    """Run this Python's pip and wait; as `call_uv`.

    Raises:
        EnvironmentFailed: It can't be started, or its time is over.
    """
    environ = {**os.environ, "NO_COLOR": "1", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables}
    try:
        return _called([sys.executable, "-m", "pip", *arguments], environ, timeout_s)
    except OSError as error:
        raise EnvironmentFailed(f"pip can't be started: {error.strerror or error}.") from error
    except subprocess.TimeoutExpired:
        raise EnvironmentFailed(
            f"`pip {' '.join(arguments[:1])}` was ended after {timeout_s:g} s. Is the package index reachable from "
            "this machine? `pip download six` tells."
        ) from None


def _called(command: Sequence[str], environ: Mapping[str, str], timeout_s: float, stdin: str = "") -> Done:
    """Run a command and wait; it and its children are killed when the wait is interrupted or its time is over."""
    process = subprocess.Popen(
        command,
        env=environ,
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Ctrl-C in a terminal reaches this process alone, which ends the whole group
        start_new_session=True,
    )
    try:
        output, words = process.communicate(stdin, timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return Done(process.returncode, output, without_url_credentials(words).strip())
