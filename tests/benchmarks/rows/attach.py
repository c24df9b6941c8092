"""Attaching to a run that has printed a million lines: until its last line is on the screen."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

from tests.benchmarks.environment import Bench
from tests.benchmarks.kernel import BenchKernel
from tests.benchmarks.measure import MeasurementFailed, Row, at_most, collect

LINES = 1_000_000
_LAST = f"line {LINES - 1:07d}"
_BODY = f"""
import os, time
for number in range({LINES}):
    print(f"line {{number:07d}}")
while not os.path.exists(ends):
    time.sleep(0.01)
"""
# the lines are shown long before
_ENDS_AFTER_S = 4.0
_PATIENCE_S = 60.0
_REST_S = 0.5


def million_lines(bench: Bench) -> Row:
    row = Row("attach to a run that has printed 1,000,000 lines")
    row.notes.append(
        "One rank, a detached run that still runs. From the request of `%sgpu_attach` until the run's last line is in "
        "a message to the client."
    )
    with row.attempt(), bench.our_kernel() as kernel:
        row.ours = [collect("until the last line", lambda: _sample(kernel), bench.count(7, 1))]
    row.checks = [at_most(row.series(0), 0.1)]
    return row


def _sample(kernel: BenchKernel) -> float:
    ends = kernel.folder / "ends"
    ends.unlink(missing_ok=True)
    kernel.check(f"ends = {str(ends)!r}")
    started = kernel.check(f"%%distributed -n 1 --detach\n{_BODY}")
    found = re.search(r"%sgpu_attach (\w+)", started.text)
    if found is None:
        raise MeasurementFailed(f"it is not detached: {started.text[-200:]!r}")
    run = found[1]
    until = time.monotonic() + _PATIENCE_S
    while not any(_is_whole(log) for log in kernel.folder.glob(f"state/**/runs/{run}*/rank-0.log")):
        if time.monotonic() > until:
            raise MeasurementFailed("the lines do not come")
        time.sleep(0.05)
    time.sleep(_REST_S)
    timer = threading.Timer(_ENDS_AFTER_S, ends.touch)
    timer.start()
    try:
        reply = kernel.execute(f"%sgpu_attach {run}", watch_for=_LAST, timeout_s=60)
    finally:
        timer.cancel()
        ends.touch()
    if reply.watched_s is None:
        raise MeasurementFailed(f"the last line did not come: {reply.status} {reply.error[:200]}")
    return reply.watched_s


def _is_whole(log: Path) -> bool:
    return log.stat().st_size >= LINES * len(f"{_LAST}\n")
