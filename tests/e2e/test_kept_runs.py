"""Run directories of a real pool stay within the budget of its settings."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Callable

import pytest
from kernels import Home, Kernel, eventually

from sgpu_magic.wire.run import UNDER_WAY

pytestmark = pytest.mark.slow

DAY_S = 24 * 3600.0


def age(home: Home, run_id: str, days: float) -> None:
    """Let a run have ended so long ago."""
    directory = home.run_dir(run_id)
    then = time.time() - days * DAY_S
    for path in (*directory.rglob("*"), directory):
        os.utime(path, (then, then))


def is_over(home: Home, run_id: str) -> bool:
    """Nothing is written into its directory any more."""
    if not (home.run_dir(run_id) / "requirements.txt").exists():
        return False
    record = json.loads((home.run_dir(run_id) / "run.json").read_bytes())
    return record["state"] == "succeeded" and record["payload_note"] != UNDER_WAY


def changes(home: Home) -> dict[str, float]:
    """When each file that there is has last changed, seconds since the epoch."""
    runs = home.state / "runs"
    return {str(path.relative_to(runs)): path.stat().st_mtime for path in runs.rglob("*")}


def test_oldest_ended_runs_go_and_one_that_goes_on_stays(new_home: Callable[..., Home]):
    home = new_home({"SGPU_KEEP_RUNS": "2"})
    # left by a pool that is killed while it removes a run's directory
    half_removed = home.run_dir(".removing-0123abcd")
    kernel = Kernel(home)
    try:
        for number in range(4):
            kernel.check(f"%%distributed -n 1 --ui none\nprint('run', {number})")
        ended = home.runs
        half_removed.mkdir()
        kernel.check("%%distributed -n 1 --ui none --detach\nimport time; time.sleep(600)")
        (going,) = set(home.runs) - set(ended)
        eventually(lambda: home.rank_pids(), 10, "the rank that goes on")
        eventually(lambda: all(is_over(home, run_id) for run_id in ended), 10, "their last word is written down")
        # otherwise a cleanup at this moment could see some of these runs as old and others as new
        eventually(lambda: not half_removed.exists(), 30, "the pool has looked at the disk once")
        for days, run_id in zip((4, 3, 2, 1), ended, strict=True):
            age(home, run_id, days)
        age(home, going, 100)
        changed = home.state / "ledger.sqlite3-wal"
        with contextlib.closing(sqlite3.connect(home.state / "ledger.sqlite3", isolation_level=None)) as ledger:
            ledger.execute("PRAGMA synchronous = OFF")
            while changed.stat().st_size < 2 << 20:
                ledger.execute("UPDATE runs SET owner_pid = owner_pid + 1 WHERE run_id = ?", (ended[0],))
        kernel.check("%%distributed -n 1 --ui none\nprint('last')")
        (last,) = set(home.runs) - {*ended, going}
        # the run that has just ended counts
        eventually(lambda: len(home.runs) <= 3, 30, lambda: f"the oldest three are removed; there are {home.runs}")
        assert set(home.runs) == {ended[3], going, last}, [ended, going, last, changes(home)]
        rows = kernel.check("%sgpu_status").text
        assert ended[0][:4] in rows, "what ran is still known"
        reply = kernel.run(f"%sgpu_attach {ended[0]}")
        assert reply.ename == "RunUnknown", reply.story
        assert "no longer kept" in reply.evalue
        log = (home.state / "pool.log").read_text()
        assert f"the directory of run {ended[0][:4]} was removed: it exceeds keep_runs" in log
        # when the next rows are written, even during a run
        writes_rows = "%%distributed -n 1 --ui none\npass"
        eventually(lambda: kernel.check(writes_rows) and changed.stat().st_size <= 1 << 20, 30, "its log is small")
    finally:
        kernel.close()
