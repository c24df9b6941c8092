"""Which devices functions and sweeps get: types, pools, a session's lease."""

from __future__ import annotations

import pytest
from kernels import Kernel

pytestmark = pytest.mark.slow

HOME_VARIABLES = {"SGPU_SIMULATE": "a10:4,h100:2", "SGPU_PRICES": "a10=1.20"}

SETUP = """
import enum, os, time
import sgpu_magic
from sgpu_magic import connect, distributed
class GPUType(enum.Enum):
    H100 = "H100"
@distributed(ui="none")
def where(rank):
    return rank
def lease(function):
    run = function.distributed.submit()
    run.result(timeout=30)
    return run._followed.view.lease.device_type, run._followed.run.spec.placement.ranks
"""


@pytest.fixture(autouse=True)
def with_names(kernel: Kernel):
    if not kernel.value("'distributed' in globals()"):
        kernel.check(SETUP)


@pytest.mark.slow
def test_the_type_is_a_text_or_an_enums_member(kernel: Kernel):
    assert kernel.value("lease(where.options(gpus=2, gpu_type='A10G'))") == ["a10", 2]
    assert kernel.value("lease(where.options(gpus=1, gpu_type=GPUType.H100))") == ["h100", 1]
    assert kernel.value("lease(where.options(gpu_type='h100', remote=True))") == ["h100", 2]


def test_without_a_number_and_a_type_it_takes_all_of_the_smallest(kernel: Kernel):
    assert kernel.value("lease(where)") == ["a10", 4]


def test_a_pool_that_is_not_there_is_named_in_pythons_words(kernel: Kernel):
    reply = kernel.run("where.options(gpus=1, pool='team').distributed()")
    assert "there is no pool named `team`" in reply.traceback
    assert "--" not in reply.traceback


def test_a_type_that_the_pool_lacks_is_refused_at_once(kernel: Kernel):
    reply = kernel.run("where.options(gpus=1, gpu_type='b200').distributed()")
    assert reply.ename in ("UsageError", "CapacityError")
    assert "this pool has no B200" in reply.traceback
    assert "leave gpu_type out" in reply.traceback.lower()
    assert "--" not in reply.traceback


def test_a_sweep_uses_all_devices_of_its_type_at_once(kernel: Kernel):
    kernel.check(
        "def meet(i):\n"
        "    open(f'sweep-{i}', 'w').close()\n"
        "    end = time.monotonic() + 20\n"
        "    while sum(os.path.exists(f'sweep-{n}') for n in range(4)) < 4 and time.monotonic() < end:\n"
        "        time.sleep(0.01)\n"
        "    return sum(os.path.exists(f'sweep-{n}') for n in range(4))\n"
        "sweep = sgpu_magic.map(meet, range(4), gpu_type='a10', ui='none')"
    )
    assert kernel.value("sweep.results") == [4, 4, 4, 4]
    assert kernel.value("sorted({run._followed.view.lease.uuids[0] for run in sweep.runs})") == [
        "SIM-a10-0",
        "SIM-a10-1",
        "SIM-a10-2",
        "SIM-a10-3",
    ]
    kernel.check("for n in range(4): os.unlink(f'sweep-{n}')")


def test_a_session_lends_its_devices_to_calls_of_its_type_and_size(kernel: Kernel):
    kernel.check("session = connect(2, 'a10').wait()")
    try:
        inside = (
            "(lambda run: run.result(30) and run._followed.run.spec.session == session.run_id)({}.distributed.submit())"
        )
        assert kernel.value(inside.format("where.options(gpus=2, gpu_type='a10')")) is True
        assert kernel.value(inside.format("where.options(gpus=1)")) is True
        assert kernel.value(inside.format("where")) is True
        # a different type
        assert kernel.value(inside.format("where.options(gpus=1, gpu_type='h100')")) is False
        # a sweep uses the whole pool, not only one session's devices
        kernel.check("sweep = sgpu_magic.map(lambda i: i, range(2), gpu_type='a10', ui='none')")
        assert kernel.value("[run._followed.run.spec.session for run in sweep.runs]") == ["", ""]
        assert kernel.value("sweep.runs[0]._followed.view.lease.uuids") == ["SIM-a10-2"]
        # the session's ranks are requested explicitly
        assert kernel.value("where.options(session=session).distributed()") == [0, 1]
        reply = kernel.run("where.options(session=session, gpus=1).distributed()")
        assert "has 2 ranks on A10, and the options ask for 1 on A10" in reply.traceback
    finally:
        kernel.check("session.close()")
    assert kernel.value("lease(where.options(gpus=1, gpu_type='a10'))") == ["a10", 1]
