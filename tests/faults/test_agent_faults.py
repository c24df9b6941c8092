"""A fault in a callback of the agent costs at most the run that the callback works for."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from agent_process import AgentProcess
from homes import Home
from planted_faults import Callback, arm, at
from planted_table import (
    AFTER,
    ASKED,
    AT_ITS_END,
    CELLS,
    FAILING,
    FRESH,
    LINES,
    SESSIONS,
    SPARED,
    STACKS,
    TOLD,
    UNNAMED,
    WATCHING,
    WHILE_IT_GOES_ON,
)
from pool_client import PoolClient
from process_table import is_alive
from session_line_client import Line
from waiting import eventually

from sgpu_magic.agent.runs.session import NodeSession
from sgpu_magic.wire.base import FailureKind, RunKind, RunState, new_id
from sgpu_magic.wire.events import RanksStarted, RunEnded
from sgpu_magic.wire.run import OutputName, RankQuestion

BESIDE = """
import os, time
import torch, torch.distributed as dist
print('beside')
while not os.path.exists(over):
    time.sleep(0.05)
total = torch.ones(1)
dist.all_reduce(total)
print('whole', int(total))
"""
VICTIM = "import torch.distributed as dist\nprint('a line')\ndist.barrier()\nvalue = rank"
UNTIL_STRUCK = "import os, time\nwhile os.path.exists(armed): time.sleep(0.05)"
FAILS = "import torch.distributed as dist\nif rank == 0: 1 / 0\ndist.barrier()"


@pytest.fixture(scope="module")
def armed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planted") / "armed"


@pytest.fixture(scope="module")
def agent(armed: Path) -> Iterator[AgentProcess]:
    """An agent with one run that goes on beside all that happens, and ends right."""
    made = AgentProcess(armed)
    over = armed.with_name("over")
    beside = made.launch(BESIDE, ranks=2, names={"over": str(over)}, name="beside")
    made.wait_for(beside, RanksStarted)
    yield made
    over.touch()
    ended = made.wait_for(beside, RunEnded)
    assert ended.state is RunState.SUCCEEDED, ended
    assert made.printed(beside) == dict.fromkeys((0, 1), "beside\nwhole 2\n")
    assert {type(event).__name__ for event in made.events[beside]} <= {
        *("RanksStarted", "OutputWritten", "Sampled", "Stalled", "RunEnded", "PayloadReleased"),
    }
    made.close()
    eventually(lambda: not is_alive(made.process.pid), what="the agent's end")


@pytest.fixture
def strike(agent: AgentProcess, armed: Path) -> Iterator[Callable[..., str]]:
    """Arms a fault; returns the id of the run that is to meet it."""

    def strike(callback: Callback, run_id: str = "", mode: str = "once") -> str:
        run_id = run_id or new_id()
        arm(armed, callback, "-" if callback in UNNAMED else run_id, mode)
        return run_id

    yield strike
    armed.unlink(missing_ok=True)


def assert_over(agent: AgentProcess, run_id: str, callback: Callback) -> RunEnded:
    """The run is over, and says why when it failed; it has no process, and the agent runs the next one."""
    ended = agent.wait_for(run_id, RunEnded)
    agent.wait_until_gone(run_id)
    pids = [pid for event in agent.events[run_id] if isinstance(event, RanksStarted) for pid in event.pids]
    eventually(lambda: not any(map(is_alive, pids)), what="the end of the ranks")
    following = agent.launch(VICTIM, ranks=2)
    assert agent.wait_for(following, RunEnded).state is RunState.SUCCEEDED
    agent.wait_until_gone(following)
    assert [event for event in agent.events[run_id] if isinstance(event, RunEnded)] == [ended]
    return ended


def assert_says(ended: RunEnded, callback: Callback) -> None:
    assert ended.state is RunState.FAILED
    assert ended.failure is not None
    assert ended.failure.kind is FailureKind.INTERNAL
    assert (
        f"an internal error in the agent on {socket.gethostname()}: Planted: planted in {callback}"
        in ended.failure.message
    )
    assert "pool.log" in ended.failure.message


def assert_struck(armed: Path) -> None:
    eventually(lambda: not armed.exists(), 10, "the fault: the callback was not called")


def first(count: int, callbacks: Sequence[Callback]) -> list[object]:
    """So many of these are in `make test`, the others in `make test-all`."""
    return [*callbacks[:count], *(pytest.param(each, marks=pytest.mark.slow) for each in callbacks[count:])]


@pytest.mark.parametrize("callback", first(3, FRESH), ids=str)
def test_a_fault_in_a_runs_callback_ends_that_run(
    agent: AgentProcess, strike: Callable[..., str], armed: Path, callback: Callback
):
    run_id = strike(callback)
    if callback in WHILE_IT_GOES_ON:
        agent.launch(UNTIL_STRUCK, ranks=2, names={"armed": str(armed)}, run_id=run_id)
    else:
        agent.launch(VICTIM, ranks=2, outputs=(OutputName(name="value"),), run_id=run_id)
    assert_says(assert_over(agent, run_id, callback), callback)


def test_an_order_that_can_not_be_read_costs_its_run(agent: AgentProcess):
    (received, lock), (other_heard, other_lock) = os.pipe(), os.pipe()
    run_id = agent.launch(VICTIM, ranks=2, locks=(lock,), damage={"attempt": "first"})
    following = agent.launch(VICTIM, ranks=2, locks=(other_lock,))
    os.close(lock)
    os.close(other_lock)
    ended = agent.wait_for(run_id, RunEnded)
    assert (ended.state, ended.failure and ended.failure.kind) == (RunState.FAILED, FailureKind.INTERNAL)
    assert ended.failure is not None
    assert ended.failure.message.startswith(f"the agent on {socket.gethostname()} can't read the pool's order")
    assert "Expected `int`, got `str` - at `$.attempt`" in ended.failure.message
    assert "`sgpu pool stop`" in ended.failure.message
    assert "\n" not in ended.failure.message
    agent.wait_until_gone(run_id)
    # its device is free, and the next run holds its own
    assert select.select([received], [], [], 5)[0]
    agent.wait_for(following, RanksStarted)
    assert not select.select([other_heard], [], [], 0)[0]
    assert agent.wait_for(following, RunEnded).state is RunState.SUCCEEDED
    agent.wait_until_gone(following)
    assert select.select([other_heard], [], [], 5)[0]
    for descriptor in (received, other_heard):
        os.close(descriptor)


@pytest.mark.parametrize("callback", first(1, AFTER), ids=str)
def test_a_fault_after_the_last_word_leaves_no_process(
    agent: AgentProcess, strike: Callable[..., str], armed: Path, callback: Callback
):
    run_id = agent.launch(VICTIM, ranks=2, run_id=strike(callback))
    assert assert_over(agent, run_id, callback).state is RunState.SUCCEEDED
    assert_struck(armed)


@pytest.mark.parametrize("callback", first(1, WATCHING), ids=str)
def test_a_fault_of_what_watches_a_run_spares_it(
    agent: AgentProcess, strike: Callable[..., str], armed: Path, callback: Callback
):
    run_id = strike(callback)
    agent.launch(UNTIL_STRUCK, ranks=2, names={"armed": str(armed)}, run_id=run_id)
    assert assert_over(agent, run_id, callback).state is RunState.SUCCEEDED


@pytest.mark.parametrize("callback", first(1, SPARED), ids=str)
def test_a_fault_beside_a_run_spares_it(
    agent: AgentProcess, strike: Callable[..., str], armed: Path, callback: Callback
):
    strike(callback, "-")
    run_id = agent.launch(VICTIM, ranks=2)
    assert assert_over(agent, run_id, callback).state is RunState.SUCCEEDED
    assert_struck(armed)


@pytest.mark.slow
@pytest.mark.parametrize("callback", [each for each in (*FRESH, *AFTER) if each not in TOLD], ids=str)
def test_a_fault_that_stays_ends_the_run_all_the_same(
    agent: AgentProcess, strike: Callable[..., str], armed: Path, callback: Callback
):
    run_id = agent.launch(VICTIM, ranks=2, outputs=(OutputName(name="value"),), run_id=strike(callback, mode="always"))
    agent.wait_until_gone(run_id)
    armed.unlink()
    assert_over(agent, run_id, callback)


@pytest.mark.parametrize("callback", first(2, FAILING), ids=str)
def test_a_fault_while_a_run_fails(agent: AgentProcess, strike: Callable[..., str], armed: Path, callback: Callback):
    run_id = agent.launch(FAILS, ranks=2, run_id=strike(callback))
    assert assert_over(agent, run_id, callback).state is RunState.FAILED
    assert_struck(armed)


@pytest.mark.parametrize("callback", first(2, CELLS), ids=str)
def test_a_fault_in_a_cells_callback_ends_the_cell(
    agent: AgentProcess, strike: Callable[..., str], armed: Path, callback: Callback
):
    session = agent.connect(2)
    run_id = new_id()
    strike(callback, run_id)
    session.begin(VICTIM, run_id=run_id)
    ended = agent.wait_for(run_id, RunEnded)
    agent.wait_until_gone(run_id)
    if ended.state is RunState.FAILED:
        assert_says(ended, callback)
    assert_struck(armed)
    if session.run_id not in agent.gone:
        # the session either works as before or ends
        following = session.begin(VICTIM)
        agent.wait_for(following, RunEnded)
        agent.end_run(session.run_id)
    assert_over(agent, session.run_id, callback)


@pytest.mark.parametrize("callback", first(3, LINES), ids=str)
def test_a_fault_on_a_line_costs_at_most_its_cell(
    agent: AgentProcess, strike: Callable[..., str], armed: Path, callback: Callback
):
    session = agent.connect(2)
    line = Line.entered(session)
    run_id = new_id()
    strike(callback, run_id)
    line.submit(session, VICTIM, run_id=run_id)
    # the notebook learns the end, or that the pool has to start the cell
    if line.events_of(run_id):
        agent.wait_for_taken(run_id)
        agent.wait_for(run_id, RunEnded)
        agent.wait_until_gone(run_id)
    else:
        assert run_id not in agent.events
    assert_struck(armed)
    if session.run_id not in agent.gone:
        following = session.begin(VICTIM)
        agent.wait_for(following, RunEnded)
        agent.end_run(session.run_id)
    assert_over(agent, session.run_id, callback)
    line.close()


@pytest.mark.parametrize("callback", first(1, SESSIONS), ids=str)
def test_a_fault_in_a_sessions_callback_ends_the_session(
    agent: AgentProcess, strike: Callable[..., str], armed: Path, callback: Callback
):
    run_id = agent.launch(ranks=2, kind=RunKind.SESSION, name="work", run_id=strike(callback))
    if callback in AT_ITS_END:
        agent.wait_for(run_id, RanksStarted)
        agent.end_run(run_id)
    assert_over(agent, run_id, callback)
    assert_struck(armed)


@pytest.mark.parametrize("callback", first(2, ASKED), ids=str)
def test_who_asks_is_told_of_a_fault(agent: AgentProcess, strike: Callable[..., str], callback: Callback):
    session = agent.connect(2)
    strike(callback, "-")
    if callback == at(NodeSession.restart):
        problem = agent.restart(session.run_id, (1,))
    else:
        problem = agent.ask(session.run_id, RankQuestion(rank=0, what="complete", code="no", cursor=1)).problem
    # a rank's own answer is lost with the session
    assert f"Planted: planted in {callback}" in problem or problem == "rank 0 has died"
    if session.run_id not in agent.gone:
        agent.end_run(session.run_id)
    assert_over(agent, session.run_id, callback)


@pytest.mark.parametrize("callback", first(1, STACKS), ids=str)
def test_stacks_that_can_not_be_taken_cost_no_run(agent: AgentProcess, strike: Callable[..., str], callback: Callback):
    run_id = agent.launch("input_ = __import__('time').sleep(60)", ranks=2)
    agent.wait_for(run_id, RanksStarted)
    strike(callback, "-")
    stacks = agent.take_stacks(run_id)
    assert [stack.rank for stack in stacks] == [0, 1]
    assert all(f"planted in {callback}" in stack.problem for stack in stacks)
    # its ranks may not have begun the cell yet
    eventually(lambda: len(agent.take_stacks(run_id)[0].frames) > 0, what="a stack")
    agent.end_run(run_id)
    assert assert_over(agent, run_id, callback).state is RunState.CANCELLED


# a rank can start no thread while the file exists
NO_THREAD = """
import _thread, os, sys
if "sgpu_magic.worker.process.zygote" in sys.orig_argv:
    start = _thread.start_new_thread

    def refused(*args):
        if os.path.exists({gate!r}):
            raise RuntimeError("can't start new thread")
        return start(*args)

    _thread.start_new_thread = refused
"""


@pytest.mark.slow
def test_a_rank_that_gets_no_thread_says_so(tmp_path: Path, new_home: Callable[..., Home]):
    gate = tmp_path / "gate"
    (tmp_path / "sitecustomize.py").write_text(NO_THREAD.format(gate=str(gate)))
    home = new_home({"PYTHONPATH": str(tmp_path), "SGPU_CPU_SLOTS": "4"})
    client = PoolClient(home)
    try:
        assert client.begin("1", ranks=2).ended().state is RunState.SUCCEEDED
        gate.touch()
        ended = client.begin("1", ranks=2).ended()
        assert (ended.state, ended.failure and ended.failure.kind) == (RunState.FAILED, FailureKind.INTERNAL)
        assert ended.failure is not None
        assert "could not go on: RuntimeError: can't start new thread" in ended.failure.message
        gate.unlink()
        assert client.begin("1", ranks=2).ended().state is RunState.SUCCEEDED
    finally:
        client.close()
