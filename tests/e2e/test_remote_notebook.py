"""A notebook and a pool of another machine: cells, a line that breaks, a kernel that is restarted."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from kernels import Kernel, eventually
from served_pools import RemoteUser, ServedPool
from tcp_proxy import Proxy


@pytest.fixture(scope="module")
def line(served: ServedPool) -> Iterator[Proxy]:
    made = Proxy(served.port)
    yield made
    made.close()


@pytest.fixture(scope="module")
def ann(served: ServedPool, line: Proxy) -> RemoteUser:
    return served.user("ann", address=line.address)


@pytest.fixture
def kernel(ann: RemoteUser) -> Iterator[Kernel]:
    made = Kernel(ann.home)
    yield made
    made.close()


@pytest.mark.slow
def test_a_cell_goes_on_while_the_line_is_cut_and_is_shown_whole(served: ServedPool, line: Proxy, kernel: Kernel):
    kernel.check("x = 20")
    cell = kernel.start(
        "%%distributed -n 2 --pool team --out y\nimport time\n"
        "for number in range(150):\n    print(number, flush=True)\n    time.sleep(0.02)\ny = x + rank + world_size"
    )
    cell.until_shown("[1] 10")
    line.cut()
    run_id = served.home.runs[-1]
    eventually(lambda: "120\n" in served.home.log(run_id, 0), 20, "the run does not go on")
    line.mend()
    reply = cell.wait()
    assert reply.status == "ok", reply.story
    for rank in (0, 1):
        assert reply.lines(rank) == [str(number) for number in range(150)]
    assert kernel.value("y") == 22
    assert served.home.ledger()[run_id].state == "succeeded"


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_gap_that_is_longer_than_the_wait_for_an_answer(
    ann: RemoteUser, line: Proxy, kernel: Kernel
):
    kernel.check(
        "import os, time, sgpu_magic\n"
        "def items():\n"
        "    for item in range(4):\n"
        "        if item == 2:\n"
        "            open('at', 'w').close()\n"
        "            while not os.path.exists('cut'): time.sleep(0.01)\n"
        "        yield -item"
    )
    cell = kernel.start("sweep = sgpu_magic.map(abs, items(), pool='team', gpu_type='cpu', at_once=1)")
    cell.until((ann.home.work / "at").exists)
    line.cut()
    (ann.home.work / "cut").touch()
    cell.until_shown("the pool does not answer; further items wait", 30)
    line.mend()
    reply = cell.wait(90)
    assert reply.status == "ok", reply.story
    assert kernel.value("sweep.results") == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_detached_run_outlives_its_kernel_and_is_attached_to(served: ServedPool, kernel: Kernel):
    kernel.check(
        "%%distributed -n 1 --pool team --detach --out z\nimport time, pathlib\n"
        f"while not pathlib.Path({str(served.home.work / 'go')!r}).exists(): time.sleep(0.01)\nz = 7"
    )
    run_id = served.home.runs[-1]
    kernel.restart()
    assert served.home.ledger()[run_id].state in ("starting", "running")
    (served.home.work / "go").touch()
    reply = kernel.check(f"%load_ext sgpu_magic\n%sgpu_attach {run_id}")
    assert kernel.value("z") == 7, reply.story


@pytest.mark.slow
def test_a_kernel_that_is_restarted_ends_its_run(served: ServedPool, kernel: Kernel):
    cell = kernel.start(
        "%%distributed -n 1 --pool team\nimport time\nprint('begun', flush=True)\nwhile True: time.sleep(0.01)"
    )
    cell.until_shown("[0] begun")
    run_id = served.home.runs[-1]
    kernel.restart()
    eventually(lambda: served.home.ledger()[run_id].state == "cancelled", 20, "it goes on")


@pytest.mark.slow
def test_a_user_who_is_not_let_in_is_told_in_the_cell(served: ServedPool):
    mallory = served.user("mallory", listed=False)
    kernel = Kernel(mallory.home)
    try:
        reply = kernel.run("%%distributed -n 1 --pool team\nprint('never')")
        assert (reply.status, reply.ename) == ("error", "KeyRefused"), reply.story
        assert mallory.keys.public in reply.evalue
    finally:
        kernel.close()


@pytest.mark.slow
def test_a_user_whose_key_is_revoked_is_told_that_at_once(served: ServedPool):
    eve = served.user("eve")
    kernel = Kernel(eve.home)
    try:
        cell = kernel.start(
            "%%distributed -n 1 --pool team\nimport time\nprint('begun', flush=True)\nwhile True: time.sleep(0.01)"
        )
        cell.until_shown("[0] begun")
        served.command("revoke", "eve")
        reply = cell.wait(10)
        assert (reply.status, reply.ename) == ("error", "NodeLost"), reply.story
        assert "this notebook can no longer follow the run" in reply.evalue
        assert "does not admit your key" in reply.evalue
    finally:
        served.command("authorize", "eve", eve.keys.public)
        eve.client.pool.cancel(served.home.runs[-1], "test")
        kernel.close()


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(900)
def test_ten_minutes_without_a_line_cost_time_only():
    """With the default patience of both sides."""
    served = ServedPool({"SGPU_LINK_TIMEOUT_S": "900"})
    line = Proxy(served.port, keeps=False)
    kernel = Kernel(served.user("ann", address=line.address).home)
    try:
        cell = kernel.start(
            "%%distributed --gpus 2 --pool team --out total:all\n"
            "import time\n"
            "total = 0\n"
            "for n in range(620):\n"
            "    print('line', n)\n"
            "    total += 1\n"
            "    time.sleep(1)\n"
        )
        cell.until_shown("line 5")
        line.cut()
        cut_at = time.monotonic()
        cell.until_shown("has been silent since", 400)
        cell.until(lambda: time.monotonic() - cut_at > 600, 700, "ten minutes")
        line.mend()
        cell.until_shown("line 590", 30)
        assert cell.wait().status == "ok", cell.reply.story
        assert kernel.value("total") == [620, 620]
        kernel.check("%sgpu_status")
    finally:
        kernel.close()
        line.close()
        served.close()
