"""`--profile`: a trace of torch's profiler for each rank, whatever becomes of the cell."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from kernels import Kernel, eventually

# a rank that is stopped before its cell has begun leaves no trace, so the ranks meet first
WORK = "import torch\nfor _ in range(20):\n    torch.ones(64, 64) @ torch.ones(64, 64)\ntorch.distributed.barrier()\n"


def traces(kernel: Kernel, run_id: str) -> dict[str, set[str]]:
    """The names of what each trace in the run's directory has."""
    found: dict[str, set[str]] = {}
    for path in sorted((kernel.home.run_dir(run_id) / "profile").glob("*.gz")):
        events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        found[path.name] = {event.get("name", "") for event in events}
    return found


def check(kernel: Kernel, ranks: int = 2) -> None:
    run_id = kernel.home.runs[-1]
    # the error is shown at once, while other ranks may still write their traces
    there = lambda: len(list((kernel.home.run_dir(run_id) / "profile").glob("*.gz"))) == ranks  # noqa: E731
    eventually(there, 20, f"{ranks} traces of run {run_id}")
    found = traces(kernel, run_id)
    assert list(found) == [f"rank-{rank}.pt.trace.json.gz" for rank in range(ranks)]
    assert all("aten::matmul" in names for names in found.values())


def test_each_rank_leaves_a_trace_and_the_view_says_where(kernel: Kernel):
    reply = kernel.check(f"%%distributed -n 2 --profile\n{WORK}")
    check(kernel)
    directory = kernel.home.run_dir(kernel.home.runs[-1])
    assert reply.text.count(f"{directory}/profile") == 1
    # no output of the profiler itself
    assert reply.lines(0) == reply.lines(1) == []
    # only when it is requested
    kernel.check(f"%%distributed -n 2\n{WORK}")
    assert not (kernel.home.run_dir(kernel.home.runs[-1]) / "profile").exists()


@pytest.mark.slow
def test_a_cell_that_fails_leaves_its_trace(kernel: Kernel):
    reply = kernel.run(f"%%distributed -n 2 --profile\n{WORK}1 / 0")
    assert reply.ename == "ZeroDivisionError"
    check(kernel)


@pytest.mark.slow
def test_a_cell_that_is_interrupted_leaves_its_trace(kernel: Kernel):
    # like a rank of a busy machine that gets the interrupt late
    late = "end = time.monotonic() + 1\n    while time.monotonic() < end: pass"
    cell = kernel.start(
        f"%%distributed -n 2 --profile\nimport time\n{WORK}"
        f"try:\n    print('there', flush=True)\n    time.sleep(60)\nfinally:\n    {late}"
    )
    cell.until_shown("[1] there")
    kernel.interrupt()
    reply = cell.wait()
    assert reply.ename == "RunCancelled"
    check(kernel)


@pytest.mark.slow
def test_cells_of_a_session_leave_theirs(kernel: Kernel):
    kernel.check("%sgpu_connect -n 2", 90)
    try:
        kernel.check(f"%%distributed --profile\n{WORK}")
        check(kernel)
        kernel.check(f"%%distributed --profile\n{WORK}")
        check(kernel)
    finally:
        kernel.check("%sgpu_disconnect")


@pytest.mark.slow
def test_a_long_cell_is_traced_at_its_beginning(kernel: Kernel):
    body = (
        "from sgpu_magic.worker.cell import cell_trace\n"
        # this cell configures the next one, on the same ranks
        "cell_trace.LONGEST_TRACE_S = 0.5"
    )
    kernel.check("%sgpu_connect -n 2", 90)
    try:
        kernel.check(f"%%distributed\n{body}")
        late = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end:\n    pass\n"
        late += "torch.cumsum(torch.ones(9), 0)"
        reply = kernel.check(f"%%distributed --profile\n{WORK}{late}")
        check(kernel)
        assert all("aten::cumsum" not in names for names in traces(kernel, kernel.home.runs[-1]).values())
        assert "what the cell did later is not in them" in reply.text
    finally:
        kernel.check("%sgpu_disconnect")
