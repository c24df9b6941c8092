"""The setting `notify`: its command is run once for each run, by the kernel, or by the pool for a detached run."""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path

from headless_notebooks import notebook
from kernels import Home
from lazy_modules import nbclient
from waiting import eventually

CALLS = Path(tempfile.mkdtemp()) / "calls"
APPEND = (
    "import os, sys\n"
    "facts = [os.environ['SGPU_ENDED_' + name] for name in ('NAME', 'STATE', 'REASON')]\n"
    "print(*facts, sep='|', file=open(sys.argv[1], 'a'))"
)
HOME_VARIABLES = {
    "SGPU_NOTIFY": shlex.join([sys.executable, "-c", APPEND, str(CALLS)]),
    "SGPU_NOTIFY_AFTER_S": "0",
}


def lines() -> list[str]:
    return sorted(CALLS.read_text().splitlines()) if CALLS.is_file() else []


def test_each_run_is_told_once(environment: Home):
    made = notebook(
        "%load_ext sgpu_magic",
        "%%distributed -n 2 --name good\nrank",
        "%%distributed -n 1 --name behind --detach\nprint('behind')",
        "%%distributed -n 2 --name bad\nif rank == 1: raise ValueError('bad batch')",
    )
    client = nbclient.NotebookClient(
        made, timeout=60, allow_errors=True, resources={"metadata": {"path": str(environment.work)}}
    )
    client.execute()
    # the kernel has ended, and the detached run ends without it
    eventually(lambda: len(lines()) >= 3, 60, lambda: f"told: {lines()}")
    assert lines() == ["bad|failed|rank 1: ValueError: bad batch", "behind|succeeded|", "good|succeeded|"]
    error = made.cells[3].outputs[-1]
    assert (error.output_type, error.ename) == ("error", "ValueError")
