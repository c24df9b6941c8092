"""The stop button: the cell is free within 3 s, the ranks are gone, the next cell runs."""

from __future__ import annotations

import os
import signal
import time

import pytest
from kernels import Kernel, eventually
from time_limits import GRACE_S

HUNG_BARRIER = "import torch.distributed as dist\nif rank == 0: dist.barrier()\nelse:\n    import time; time.sleep(600)"
BUSY_LOOP = "while True: pass"
DEAF = (
    "import signal, time\n"
    "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "while True: time.sleep(1)"
)
IN_C = "import torch\nwhile True: torch.mm(torch.ones(600, 600), torch.ones(600, 600))"


@pytest.mark.parametrize("body", [HUNG_BARRIER, BUSY_LOOP, IN_C], ids=["barrier", "busy loop", "C code"])
def test_interrupt_frees_the_cell_and_ends_the_ranks(kernel: Kernel, body: str):
    cell = kernel.start(f"%%distributed -n 2\nprint('up', flush=True)\n{body}")
    cell.until_shown("[0] up")
    cell.until_shown("[1] up")
    pids = kernel.home.rank_pids()
    assert len(pids) == 2
    pressed = time.monotonic()
    kernel.interrupt()
    reply = cell.wait(10)
    assert time.monotonic() - pressed < GRACE_S
    assert reply.status == "error"
    assert "sgpu_magic/" not in reply.traceback
    assert "cancelled" in reply.text + reply.evalue
    eventually(lambda: not set(pids) & set(kernel.home.processes()), 8, "the ranks are gone")
    assert kernel.check("%%distributed -n 2\nprint('next')").lines(1) == ["next"]


def test_interrupted_cell_is_a_keyboard_interrupt(kernel: Kernel):
    body = "print(1, flush=True)\nwhile True: pass"
    cell = kernel.start(
        "try:\n"
        f"    get_ipython().run_cell_magic('distributed', '-n 2', {body!r})\n"
        "except KeyboardInterrupt as error:\n"
        "    print('caught', type(error).__name__, len(error.run_id))"
    )
    cell.until_shown("[0] 1")
    kernel.interrupt()
    assert "caught RunCancelled" in cell.wait(10).text


def test_ranks_see_keyboard_interrupt_and_can_save(kernel: Kernel):
    cell = kernel.start(
        "%%distributed -n 2\n"
        "import time\n"
        "try:\n"
        "    print('up', flush=True)\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    open(f'saved-{rank}', 'w').write('x')\n"
        "    raise"
    )
    cell.until_shown("[0] up")
    cell.until_shown("[1] up")
    kernel.interrupt()
    assert cell.wait(10).status == "error"
    saved = [kernel.home.work / f"saved-{rank}" for rank in (0, 1)]
    eventually(lambda: all(path.exists() for path in saved), 5, "both ranks have saved")
    for path in saved:
        path.unlink()


@pytest.mark.slow
def test_ranks_that_ignore_signals_free_the_cell_too(kernel: Kernel):
    cell = kernel.start(f"%%distributed -n 2\nprint('up', flush=True)\n{DEAF}")
    cell.until_shown("[0] up")
    pressed = time.monotonic()
    kernel.interrupt()
    assert cell.wait(10).status == "error"
    assert time.monotonic() - pressed < GRACE_S
    # they hold their lease until the grace of 5 s is over; the next run need not wait for that
    assert kernel.check("%%distributed -n 2\nprint('next')").lines(0) == ["next"]


def test_interrupt_frees_the_cell_when_nobody_answers(kernel: Kernel):
    """The agent itself hangs: the cell is free all the same."""
    cell = kernel.start("%%distributed -n 2\nprint('up', flush=True)\nwhile True: pass")
    cell.until_shown("[1] up")
    (agent,) = kernel.home.agent_pids()
    os.kill(agent, signal.SIGSTOP)
    try:
        pressed = time.monotonic()
        kernel.interrupt()
        reply = cell.wait(15)
        assert time.monotonic() - pressed < GRACE_S
        assert reply.ename == "RunCancelled"
        assert "being stopped" in reply.evalue
    finally:
        os.kill(agent, signal.SIGCONT)
    assert kernel.check("%%distributed -n 2\nprint('next')").lines(1) == ["next"]


def test_ranks_that_are_forked_after_their_grace_are_killed_at_once(kernel: Kernel):
    """500 ranks on a busy machine take longer to fork than the grace of a run that is stopped meanwhile."""
    kernel.check("%%distributed -n 1\npass")
    # an earlier module in the same home may have left zygotes of other environments
    zygotes = kernel.home.zygote_pids()
    for zygote in zygotes:
        os.kill(zygote, signal.SIGSTOP)
    try:
        cell = kernel.start("%%distributed -n 3 --grace 100ms\nimport time\ntime.sleep(600)")
        cell.until_shown("starting 3 ranks")
        kernel.interrupt()
        assert cell.wait(10).status == "error"
        time.sleep(1)  # its grace is over
    finally:
        for zygote in zygotes:
            os.kill(zygote, signal.SIGCONT)
    eventually(lambda: " CPU ranks ·" in kernel.check("%sgpu_status").text, 8, "all slots are free")


def test_second_interrupt_does_not_wait(kernel: Kernel):
    cell = kernel.start("%%distributed -n 2\nprint('up', flush=True)\nwhile True: pass")
    cell.until_shown("[0] up")
    (agent,) = kernel.home.agent_pids()
    os.kill(agent, signal.SIGSTOP)
    try:
        kernel.interrupt()
        time.sleep(0.1)  # the user presses again
        pressed = time.monotonic()
        kernel.interrupt()
        assert cell.wait(15).status == "error"
        # without the second, the cell would wait for 2.5 s
        assert time.monotonic() - pressed < 2
    finally:
        os.kill(agent, signal.SIGCONT)


def test_cells_queued_behind_are_aborted_and_later_ones_run(kernel: Kernel):
    cell = kernel.start("%%distributed -n 2\nprint('up', flush=True)\nwhile True: pass")
    queued = [kernel.start(f"ran_{i} = True") for i in range(2)]
    cell.until_shown("[0] up")
    kernel.interrupt()
    assert cell.wait(10).status == "error"
    assert [other.wait(10).status for other in queued] == ["aborted", "aborted"]
    assert kernel.value("'ran_0' in globals()") is False
    kernel.check("%%distributed -n 2\npass")


def test_interrupt_at_any_moment_leaves_nothing(kernel: Kernel):
    """While it is captured, submitted, started or running: the check after the test finds what stays."""
    for delay_ms in (0, 2, 5, 10, 20, 40, 80, 160):
        cell = kernel.start(
            "print('begun')\n"
            "get_ipython().run_cell_magic('distributed', '-n 2 --ui none', 'import time; time.sleep(600)')"
        )
        cell.until_shown("begun")
        # tests the exact moment, so it does not wait for a condition
        time.sleep(delay_ms / 1000)
        kernel.interrupt()
        assert cell.wait(10).status == "error", f"interrupted after {delay_ms} ms"
    kernel.check("%%distributed -n 2\npass")
