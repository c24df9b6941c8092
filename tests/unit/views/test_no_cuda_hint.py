"""The hint for errors from missing CUDA: torch words them in many ways, each where some user code fails first."""

from __future__ import annotations

import pytest
from lazy_modules import torch

from sgpu_magic.views.remote_error import no_cuda_hint
from sgpu_magic.wire.base import FailureKind
from sgpu_magic.wire.rank_events import Failure

FIRST_LINES = {
    "to": lambda: torch.zeros(1).to("cuda"),
    "cuda": lambda: torch.nn.Linear(1, 1).cuda(),
    "factory": lambda: torch.zeros(1, device="cuda"),
    "set_device": lambda: torch.cuda.set_device(0),
    "current_device": lambda: torch.cuda.current_device(),
    "synchronize": lambda: torch.cuda.synchronize(),
    "generator": lambda: torch.Generator("cuda"),
    "event": lambda: torch.cuda.Event(),
    "stream": lambda: torch.cuda.Stream(),
    "pin_memory": lambda: torch.zeros(1).pin_memory(),
    "nvtx": lambda: torch.cuda.nvtx.range_push("step"),
}


def failure(message: str, rank: int | None = 0) -> Failure:
    return Failure(kind=FailureKind.USER_CODE, message=message, rank=rank)


@pytest.mark.parametrize("name", FIRST_LINES)
def test_the_first_line_that_needs_cuda_has_the_hint(name: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("code for cuda runs here")
    with pytest.raises((RuntimeError, AssertionError, AttributeError)) as raised:
        FIRST_LINES[name]()
    assert "SGPU_STAND_IN=cpu,cuda" in no_cuda_hint(failure(str(raised.value)))


def test_other_errors_have_none() -> None:
    assert no_cuda_hint(failure("CUDA error: out of memory")) == ""
    assert no_cuda_hint(failure("Torch not compiled with CUDA enabled", rank=None)) == ""
