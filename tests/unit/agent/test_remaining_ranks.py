"""Killed ranks that do not end at once: the run keeps its lease until they have, and names them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_process import AgentProcess
from lasting_ranks import Lasting
from process_table import is_alive
from waiting import eventually

from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.events import Noted, RanksRestarted, RunEnded
from sgpu_magic.wire.rank_events import OutputWritten

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ptrace holds the processes")

FOREVER = "while True:\n    try: time.sleep(60)\n    except KeyboardInterrupt: pass\n"


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    made = AgentProcess()
    yield made
    made.close()


@pytest.fixture
def lasting(tmp_path: Path) -> Iterator[Lasting]:
    made = Lasting(tmp_path)
    yield made
    made.release()


def pid_of(agent: AgentProcess, run_id: str, rank: int) -> int:
    """Return the pid of a rank that outlives SIGKILL."""
    agent.wait_for(run_id, OutputWritten, 2)
    return int(agent.printed(run_id)[rank].split()[1])


def remaining(agent: AgentProcess, run_id: str) -> Noted:
    found: list[Noted] = []
    count = 0
    while not found:
        count += 1
        note = agent.wait_for(run_id, Noted, count)
        found = [note] if note.remaining else []
    return found[0]


def fields_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def zygote_of(rank: int) -> int:
    return int(fields_of(rank)[1])


def used_s(rank: int, agent: AgentProcess) -> float:
    """Return the CPU seconds that the agent and the rank's zygote have used."""
    stats = [fields_of(pid) for pid in (agent.process.pid, zygote_of(rank))]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_a_run_keeps_its_lease_until_a_killed_rank_has_ended(agent: AgentProcess, lasting: Lasting) -> None:
    run_id = agent.launch(lasting.code((1,), FOREVER), ranks=2, grace_s=0.0)
    pid = pid_of(agent, run_id, 1)
    used, began = used_s(pid, agent), time.monotonic()
    agent.end_run(run_id)
    assert agent.wait_for(run_id, RunEnded).state is RunState.CANCELLED
    note = remaining(agent, run_id)
    assert [(each.rank, each.pid) for each in note.remaining] == [(1, pid)]
    assert f"rank 1 (process {pid}) was killed" in note.text
    assert is_alive(pid)
    assert run_id not in agent.gone
    # no busy polling for its end
    assert used_s(pid, agent) - used < 0.5 * (time.monotonic() - began)
    other = agent.launch("print('other')", ranks=1)
    agent.wait_until_gone(other)
    assert run_id not in agent.gone
    lasting.release()
    agent.wait_until_gone(run_id)
    assert not is_alive(pid)


@pytest.mark.slow
def test_ranks_that_outlive_their_zygote_keep_the_lease(agent: AgentProcess, lasting: Lasting) -> None:
    run_id = agent.launch(lasting.code((0,), FOREVER), ranks=2)
    pid = pid_of(agent, run_id, 0)
    os.kill(zygote_of(pid), signal.SIGKILL)
    assert agent.wait_for(run_id, RunEnded).state is RunState.FAILED
    assert [each.pid for each in remaining(agent, run_id).remaining] == [pid]
    assert is_alive(pid)
    assert run_id not in agent.gone
    lasting.release()
    agent.wait_until_gone(run_id)
    eventually(lambda: not is_alive(pid), what="the rank's end")


@pytest.mark.slow
def test_a_killed_rank_of_a_session_is_replaced_once_it_has_ended(agent: AgentProcess, lasting: Lasting) -> None:
    session = agent.connect(2)
    cell = session.begin(lasting.code((1,), "if rank == 1:\n    " + FOREVER.replace("\n", "\n    ")))
    pid = pid_of(agent, cell, 1)
    agent.end_run(cell)
    assert agent.wait_for(cell, RunEnded).unstopped == (1,)
    agent.kill_ranks(cell)
    assert [each.pid for each in remaining(agent, cell).remaining] == [pid]
    assert cell not in agent.gone
    lasting.release()
    agent.wait_until_gone(cell)
    assert agent.restart(session.run_id, (1,)) is None
    assert agent.wait_for(session.run_id, RanksRestarted).ranks == (1,)
    assert session.run("print(rank)")[1] == {0: "0\n", 1: "1\n"}
