"""The user's command that is run when a run has ended."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import eventually

from sgpu_magic.system.notify_command import EndedRun, run_notify_command
from sgpu_magic.system.processes import is_alive
from sgpu_magic.wire.base import RunState

ENDED = EndedRun(
    run_id="0000abcd",
    name="train_digits",
    state=RunState.FAILED,
    seconds=720.04,
    reason="rank 3: ValueError: $(bad) `batch`; 'x'\0",
    pool="team",
    notebook="/home/ann/train.ipynb",
)


def python(code: str, *arguments: str) -> str:
    """Return a command line that runs Python code."""
    return shlex.join([sys.executable, "-c", code, *arguments])


def test_it_gets_the_runs_facts_and_no_shell_reads_it(tmp_path: Path):
    out = tmp_path / "out.json"
    code = "import json, os, sys; json.dump([sys.argv[2:], dict(os.environ)], open(sys.argv[1], 'w'))"
    assert run_notify_command(python(code, str(out), "a b", "$HOME;*"), ENDED) == ""
    arguments, variables = json.loads(out.read_text())
    assert arguments == ["a b", "$HOME;*"]
    assert {name: value for name, value in variables.items() if name.startswith("SGPU_ENDED_")} == {
        "SGPU_ENDED_ID": "0000abcd",
        "SGPU_ENDED_NAME": "train_digits",
        "SGPU_ENDED_STATE": "failed",
        "SGPU_ENDED_SECONDS": "720.0",
        "SGPU_ENDED_REASON": "rank 3: ValueError: $(bad) `batch`; 'x'",
        "SGPU_ENDED_POOL": "team",
        "SGPU_ENDED_NOTEBOOK": "/home/ann/train.ipynb",
    }
    # agents end the processes that have a run's id in this variable
    assert "SGPU_RUN_ID" not in variables


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("/nowhere/notify --now", "it can't be started: No such file or directory: /nowhere/notify"),
        (python("import sys; sys.stderr.write('first\\nno route\\n'); sys.exit(3)"), "it exited with code 3: no route"),
        (python("import os; os.kill(os.getpid(), 9)"), "it was killed by signal 9"),
    ],
)
def test_its_failure_is_told(command: str, problem: str):
    assert run_notify_command(command, ENDED) == problem


LEAVES_A_CHILD = (
    "import pathlib, subprocess, sys, time\n"
    "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    "pathlib.Path(sys.argv[1]).write_text(str(child.pid))\n"
    "time.sleep(float(sys.argv[2]))"
)


@pytest.mark.skipif(sys.platform != "linux", reason="subreapers")
@pytest.mark.parametrize(("sleeps_s", "problem"), [("0", ""), ("600", "it took longer than 2 s")])
def test_nothing_that_it_starts_is_left_behind(tmp_path: Path, sleeps_s: str, problem: str):
    pid = tmp_path / "pid"
    began = time.monotonic()
    assert run_notify_command(python(LEAVES_A_CHILD, str(pid), sleeps_s), ENDED, limit_s=2.0) == problem
    assert time.monotonic() - began < 30
    assert not is_alive(int(pid.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_it_ends_with_the_process_that_runs_it(tmp_path: Path):
    pid = tmp_path / "pid"
    code = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
    caller = (
        "import sys; from sgpu_magic.system.notify_command import *; from sgpu_magic.wire.base import RunState\n"
        "facts = dict.fromkeys(('run_id', 'name', 'reason', 'pool', 'notebook'), '')\n"
        "run_notify_command(sys.argv[1], EndedRun(state=RunState.FAILED, seconds=1.0, **facts), 600.0)"
    )
    process = subprocess.Popen([sys.executable, "-c", caller, python(code, str(pid))])
    try:
        command = int(eventually(lambda: pid.is_file() and pid.read_text(), 30, "the command does not start"))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    eventually(lambda: not is_alive(command), 10, "the command goes on")
