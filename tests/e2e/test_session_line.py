"""Cells that go over their session's line: they need no pool service, and the pool has them all afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from homes import Home
from kernels import Kernel
from strikes import events_of, pid_of
from waiting import eventually

from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.events import Placed, RanksStarted, RunEnded, StateChanged, Submitted
from sgpu_magic.wire.rank_events import OutputWritten

CONNECT = "session = %sgpu_connect -n 2 --type cpu"
# how long the next pool service waits for the notebooks of runs
ADOPT_S = 2
HOME_VARIABLES = {"SGPU_ADOPT_TIMEOUT_S": str(ADOPT_S)}


@pytest.fixture
def connected(kernel: Kernel) -> Iterator[Kernel]:
    """A kernel with a session that has executed a cell."""
    kernel.check("%load_ext sgpu_magic")
    kernel.check(CONNECT)
    kernel.check("%%distributed\nsteps = 0")
    yield kernel
    kernel.check("%sgpu_disconnect")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def ended(home: Home, name: str) -> str:
    """Wait until the ledger has the end of the run of this name, and return its id."""

    def has_ended() -> bool:
        row = next((row for row in home.ledger().values() if row.name == name), None)
        return row is not None and RunState(row.state).is_final

    eventually(has_ended, 10, f"the end of {name} in the ledger")
    return home.run_named(name)


def test_a_cell_needs_no_pool_service_and_the_pool_has_it_afterwards(connected: Kernel, home: Home):
    with stopped(pid_of(home, "pool")):
        for number in range(1, 4):
            body = "steps += 1\nprint('step', steps, rank)\nseen = steps"
            reply = connected.check(f"%%distributed --name alone{number} --out seen:all\n{body}", 10)
            assert f"step {number} 1" in reply.text
            assert connected.value("seen") == [number, number]
    for number in range(1, 4):
        run_id = ended(home, f"alone{number}")
        bodies = events_of(home, run_id)
        kinds = [type(body) for body in bodies if not isinstance(body, OutputWritten)]
        assert kinds[:4] == [Submitted, Placed, RanksStarted, StateChanged], bodies
        (end,) = (body for body in bodies if isinstance(body, RunEnded))
        assert (end.state, end.gpu_s) == (RunState.SUCCEEDED, None)
        assert 0 < end.running_s <= end.total_s < 10
        text = "".join(body.text for body in bodies if isinstance(body, OutputWritten))
        assert sorted(text.split("\n"))[1:] == [f"step {number} 0", f"step {number} 1"]
        assert home.log(run_id, 1) == f"step {number} 1\n"


def test_the_log_of_a_cell_does_not_depend_on_its_way(connected: Kernel, home: Home):
    connected.check("%%distributed --name over\nprint('a line')")
    # a cell that nobody waits for goes through the pool
    connected.check("%%distributed --name through --nowait\nprint('a line')")
    kinds = [
        [(type(body), getattr(body, "state", None)) for body in events_of(home, ended(home, name))]
        for name in ("over", "through")
    ]
    assert kinds[0] == kinds[1]


def test_the_session_goes_on_when_its_pool_service_dies(connected: Kernel, home: Home):
    cell = connected.start(
        "%%distributed --name survives\nimport pathlib, time\nprint('begun', flush=True)\n"
        f"time.sleep({2 * ADOPT_S})\nprint('done')"
    )
    cell.until_shown("[1] begun")
    os.kill(pid_of(home, "pool"), signal.SIGKILL)
    reply = cell.wait(10)
    assert reply.status == "ok", reply.story
    assert "[1] done" in reply.text
    for number in range(3):
        connected.check(f"%%distributed --name next{number}\nsteps += 1", 20)
    for name in ("survives", *(f"next{number}" for number in range(3))):
        ended(home, name)
        assert next(row for row in home.ledger().values() if row.name == name).state == "succeeded"
    # no cell was executed twice
    connected.check("%%distributed --out steps\npass")
    assert connected.value("steps") == 3


def test_cells_run_in_the_order_in_which_they_were_started(connected: Kernel, home: Home):
    connected.check("%%distributed\norder = []")
    for number in range(12):
        waits = "" if number % 3 else "--nowait"
        connected.check(
            f"%%distributed {waits}\nimport time\ntime.sleep(0.02 * (not {number} % 3))\norder.append({number})"
        )
    connected.check("%%distributed --out order:all\npass")
    assert connected.value("order") == [list(range(12))] * 2


def test_a_cell_of_another_thread_waits_for_the_running_one(connected: Kernel, home: Home):
    reply = connected.check(
        "import threading\n"
        "session.run('at = []')\n"
        "def run(number):\n"
        "    session.run(f'import time; time.sleep(0.05); at.append({number})', ui='none')\n"
        "threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "print(sorted(session.pull('at')), session.pull('at:all')[0] == session.pull('at:all')[1])"
    )
    assert "[0, 1, 2, 3, 4, 5] True" in reply.text


def test_an_agent_that_dies_in_a_cell_is_named_and_nothing_hangs(connected: Kernel, home: Home):
    cell = connected.start("%%distributed\nimport time\nprint('begun', flush=True)\ntime.sleep(600)")
    cell.until_shown("[1] begun")
    os.kill(pid_of(home, "agent"), signal.SIGKILL)
    reply = cell.wait(10)
    assert reply.ename == "NodeLost", reply.story
    assert "the agent on this machine ended unexpectedly" in reply.evalue
    later = connected.run("%%distributed\npass", 10)
    assert later.ename == "SessionError", later.story
    connected.check(CONNECT)
    assert "[1] again" in connected.check("%%distributed\nprint('again')").text


def test_an_interrupt_reaches_a_cell_before_the_pool_knows_it(connected: Kernel, home: Home):
    with stopped(pid_of(home, "pool")):
        cell = connected.start("%%distributed --name stops\nimport time\nprint('begun', flush=True)\ntime.sleep(600)")
        cell.until_shown("[1] begun")
        connected.interrupt()
        reply = cell.wait(10)
        assert reply.ename == "RunCancelled", reply.story
        assert "interrupted" in reply.evalue
        assert "[0] 7" in connected.check("%%distributed\nprint(7)", 10).text
    ended(home, "stops")
    assert next(row for row in home.ledger().values() if row.name == "stops").state == "cancelled"


def test_an_unloaded_extension_leaves_no_line(connected: Kernel, home: Home):
    names = "[thread.name for thread in __import__('threading').enumerate()]"
    assert "sgpu-line" in connected.value(names)
    connected.check("%unload_ext sgpu_magic")
    assert "sgpu-line" not in connected.value(names)
    connected.check("%load_ext sgpu_magic")
    connected.check(CONNECT)
