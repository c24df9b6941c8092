"""`--profile` on a GPU: the trace has the kernels that ran there."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from kernels import Kernel, eventually

pytestmark = pytest.mark.needs_gpu

WORK = """import torch
x = torch.randn(512, 512, device=device)
for _ in range(20):
    x = (x @ x).tanh()
total = x.sum().item()
"""


def events(kernel: Kernel) -> list[dict[str, Any]]:
    """What the newest run's trace has."""
    path = kernel.home.run_dir(kernel.home.runs[-1]) / "profile" / "rank-0.pt.trace.json.gz"
    eventually(path.exists, 30, "the trace")
    found: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return found


def check(kernel: Kernel) -> None:
    found = events(kernel)
    categories = {event.get("cat", "") for event in found}
    assert {"kernel", "cuda_runtime", "cpu_op"} <= categories, sorted(categories)
    kernels = [event for event in found if event.get("cat") == "kernel"]
    assert len(kernels) >= 40
    assert all(event["dur"] > 0 for event in kernels)
    assert any("tanh" in event["name"] for event in kernels)


def test_the_trace_of_a_run_has_its_cuda_kernels(kernel: Kernel):
    reply = kernel.check(f"%%distributed -n 1 --profile\n{WORK}", 120)
    check(kernel)
    # no output of the profiler itself
    assert reply.lines(0) == []


def test_cells_of_a_session_have_theirs(session: Kernel):
    for _ in range(2):
        session.check(f"%%distributed --profile\n{WORK}", 120)
        check(session)


def test_a_run_after_one_with_a_trace_has_none(kernel: Kernel):
    kernel.check(f"%%distributed -n 1 --profile\n{WORK}", 120)
    kernel.check(f"%%distributed -n 1\n{WORK}", 60)
    assert not (kernel.home.run_dir(kernel.home.runs[-1]) / "profile").exists()
