"""Processes of a benchmark: run to their end with a deadline, and none left behind, not even daemons."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.benchmarks.measure import MeasurementFailed

_PR_SET_CHILD_SUBREAPER = 36
_RESULT_MARK = "BENCH-RESULT "


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parents end, so that daemons can be ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_descendants(grace_s: float = 3.0) -> list[str]:
    """End every process that descends from this one.

    Args:
        grace_s: Seconds from TERM to KILL.

    Returns:
        The names of those that needed KILL.
    """
    stubborn: list[str] = []
    for _ in range(10):  # a process may start another one while it is being ended
        found = psutil.Process().children(recursive=True)
        if not found:
            break
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(found, timeout=grace_s)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                stubborn.append(process.name())
                process.kill()
        psutil.wait_procs(alive, timeout=grace_s)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return stubborn


def run(
    command: Sequence[str | Path],
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    stdout: Path | None = None,
    cwd: Path | None = None,
) -> tuple[int, str, str]:
    """Run a command to its end.

    Args:
        command: Program and arguments.
        timeout_s: Seconds after which it and its descendants are ended.
        environment: All its variables; this process's own when left out.
        stdout: File for its standard output; a pipe, read whole, when left out.
        cwd: Its directory.

    Returns:
        Exit status, standard output (empty with `stdout`) and standard error.

    Raises:
        MeasurementFailed: It ran past `timeout_s`.
    """
    with (
        tempfile.TemporaryFile("w+") as errors,
        stdout.open("w+") if stdout else tempfile.TemporaryFile("w+") as output,
    ):
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=dict(environment) if environment is not None else None,
            cwd=cwd,
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _end_tree(process)
            raise MeasurementFailed(f"no end within {timeout_s:g} s") from None
        errors.seek(0)
        if stdout is None:
            output.seek(0)
        return process.returncode, "" if stdout else output.read(), errors.read()


def _end_tree(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(tree, timeout=5)
    process.wait()


def run_script(command: Sequence[str | Path], *, timeout_s: float, environment: Mapping[str, str]) -> dict[str, object]:
    """Run one of `scripts/` and return the record that it printed.

    Raises:
        MeasurementFailed: It failed, ran past `timeout_s` seconds, or printed no record.
    """
    status, output, errors = run(command, timeout_s=timeout_s, environment=environment)
    records = [line for line in output.splitlines() if line.startswith(_RESULT_MARK)]
    if status != 0 or not records:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        raise MeasurementFailed(f"exit status {status}: {last[:200]}")
    return json.loads(records[-1].removeprefix(_RESULT_MARK))
