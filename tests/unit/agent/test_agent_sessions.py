"""Sessions in a real agent, with real ranks and no pool: cells, failures, interrupts, dead ranks, the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_process import AgentProcess, AgentSession
from free_ports import free_port
from process_table import below, is_alive, process_table
from waiting import eventually

from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.events import GroupRenewed, Noted, RanksRestarted, RanksStarted, RunEnded, SessionMoved
from sgpu_magic.wire.rank_events import OutputWritten
from sgpu_magic.wire.run import Interpreter, RankQuestion

MODEL = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
part = dist.new_group([0, 1])
steps = 0
"""
# each rank gets different data, so equal weights mean that gradients were exchanged
STEP = """
loss = model(torch.full((1, 4), float(rank + 1))).sum()
loss.backward()
with torch.no_grad():
    for p in model.parameters():
        p -= 0.1 * p.grad
        p.grad = None
steps += 1
count = torch.ones(1)
dist.all_reduce(count, group=part)
print(steps, int(count), round(float(sum(p.sum() for p in model.parameters())), 4))
"""
UNSTOPPABLE = """
import time
while rank == {rank}:
    try:
        print('on', flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print('no', flush=True)
"""


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    made = AgentProcess()
    yield made
    made.close()
    eventually(lambda: not is_alive(made.process.pid), what="the agent's end")


@pytest.fixture
def session(agent: AgentProcess) -> Iterator[AgentSession]:
    made = agent.connect(2)
    yield made
    if made.run_id not in agent.gone:
        agent.end_run(made.run_id, "the test is over")
        agent.wait_until_gone(made.run_id)


def trained(session: AgentSession) -> set[str]:
    """Train a step; return what the ranks printed: one text when they agree."""
    ended, printed = session.run(STEP)
    assert ended.state is RunState.SUCCEEDED, ended
    return set(printed.values())


def test_what_a_cell_leaves_is_there_in_the_next(session: AgentSession):
    session.run("x = rank * 10")
    ended, printed = session.run("print(x, world_size)", names={"unused": 1})
    assert ended.state is RunState.SUCCEEDED
    assert printed == {0: "0 2\n", 1: "10 2\n"}


@pytest.mark.slow
def test_the_replay_of_a_cell_says_what_it_lacks(session: AgentSession):
    run_id = session.begin("print(x)", names={"x": 1})
    session.agent.wait_until_gone(run_id)
    replay = session.agent.path / "state" / "runs" / run_id / "_air.py"
    eventually(replay.is_file, what="the cell's replay")
    rank = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    done = subprocess.run([sys.executable, replay], env=os.environ | rank, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "what earlier cells had set on its ranks is not here" in done.stderr


def test_a_cell_on_some_ranks_runs_on_these_alone(session: AgentSession):
    ended, printed = session.run("here = True\nprint(rank)", only=(1,))
    assert printed == {1: "1\n"}
    assert [result.rank for result in ended.results] == [1]
    assert session.run("print('here' in globals())")[1] == {0: "False\n", 1: "True\n"}


def test_one_rank_raises_while_the_other_waits_for_it_and_everything_goes_on(session: AgentSession):
    session.run(MODEL)
    first = trained(session)
    ended, _ = session.run("if rank == 1:\n    raise ValueError('NaN')\ndist.all_reduce(torch.ones(1))")
    assert ended.state is RunState.FAILED
    assert ended.failure is not None
    assert (ended.failure.rank, ended.failure.message) == (1, "NaN")
    renewed = session.agent.wait_for(session.run_id, GroupRenewed)
    assert (renewed.reason, renewed.lost) == ("ranks were released from a collective", None)
    second = trained(session)
    assert len(first) == len(second) == 1
    assert next(iter(second)).startswith("2 2 ")


def test_the_renewal_is_told_before_the_cells_last_word(session: AgentSession):
    run_id = session.begin(
        "import torch, torch.distributed as dist\nif rank == 0:\n    1 / 0\ndist.all_reduce(torch.ones(1))"
    )
    session.agent.wait_until_gone(run_id)
    kinds = [type(event) for event in session.agent.events[run_id]]
    assert kinds.index(GroupRenewed) < kinds.index(RunEnded)


def test_the_same_error_on_every_rank_leaves_the_groups_alone(session: AgentSession):
    ended, _ = session.run("undefined_name")
    assert ended.state is RunState.FAILED
    assert [e for e in session.agent.events[session.run_id] if isinstance(e, GroupRenewed)] == []


@pytest.mark.slow
def test_a_backward_pass_that_fails_alike_everywhere_leaves_the_model_usable(session: AgentSession):
    session.run(
        "import torch\nfrom torch.nn.parallel import DistributedDataParallel\n"
        "model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))"
    )
    ended, _ = session.run(
        "def fail(gradient):\n    raise ValueError('half way')\n"
        "hook = model.module[0].weight.register_hook(fail)\nloss = model(torch.ones(1, 4)).sum()\nloss.backward()"
    )
    assert ended.failure is not None
    assert "half way" in ended.failure.message
    assert [e for e in session.agent.events[session.run_id] if isinstance(e, GroupRenewed)] == []
    ended, printed = session.run(
        "hook.remove()\nmodel.zero_grad()\n"
        "for _ in range(2):\n    model(torch.ones(1, 4)).sum().backward()\nprint('trained')"
    )
    assert printed == {0: "trained\n", 1: "trained\n"}, ended


def test_a_rank_that_takes_long_to_draw_its_traceback_is_not_freed(session: AgentSession):
    ended, _ = session.run(
        "import time\nclass Slow(Exception):\n    def __str__(self):\n        time.sleep(0.4 * rank)\n"
        "        return 'alike'\nraise Slow"
    )
    assert ended.failure is not None
    assert len(ended.others) == 1
    assert not ended.others[0].is_consequence
    assert [e for e in session.agent.events[session.run_id] if isinstance(e, GroupRenewed)] == []


def test_a_cell_that_ends_the_process_group_gets_it_back(session: AgentSession):
    ended, _ = session.run("import torch.distributed as dist\ndist.destroy_process_group()")
    assert ended.state is RunState.SUCCEEDED
    _, printed = session.run("import torch\nx = torch.ones(1)\ndist.all_reduce(x)\nprint(int(x))")
    assert printed == {0: "2\n", 1: "2\n"}


@pytest.mark.slow
def test_an_interrupt_of_a_barrier_keeps_the_variables_and_the_model(session: AgentSession):
    session.run(MODEL)
    trained(session)
    run_id = session.begin("import time\nprint('in', flush=True)\ntime.sleep(60) if rank == 0 else dist.barrier()")
    session.agent.wait_for(run_id, OutputWritten, 2)
    session.agent.end_run(run_id)
    ended = session.agent.wait_for(run_id, RunEnded)
    session.agent.wait_until_gone(run_id)
    assert ended.state is RunState.CANCELLED
    assert ended.unstopped == ()
    assert next(iter(trained(session))).startswith("2 2 ")


def test_a_rank_that_does_not_stop_is_named_and_killed_on_demand(session: AgentSession):
    agent = session.agent
    run_id = session.begin(UNSTOPPABLE.format(rank=1))
    agent.wait_for(run_id, OutputWritten)
    agent.end_run(run_id)
    assert agent.wait_for(run_id, RunEnded).unstopped == (1,)
    assert run_id not in agent.gone
    agent.kill_ranks(run_id)
    agent.wait_until_gone(run_id)
    refused, _ = session.run("print(rank)")
    assert refused.failure is not None
    assert refused.failure.kind is FailureKind.SESSION
    assert "%sgpu_restart --rank 1" in refused.failure.message
    assert session.run("print(rank)", only=(0,))[1] == {0: "0\n"}


def test_a_dead_rank_is_replaced_and_the_others_keep_what_they_have(session: AgentSession):
    agent = session.agent
    session.run("import torch, torch.distributed as dist\nkept = rank + 1\npart = dist.new_group([0, 1])")
    pids = agent.wait_for(session.run_id, RanksStarted).pids
    os.kill(pids[1], signal.SIGKILL)
    assert "rank 1 of 2" in agent.wait_for(session.run_id, Noted).text
    assert agent.wait_for(session.run_id, SessionMoved).dead == (1,)
    assert agent.restart(session.run_id, (1,)) is None
    restarted = agent.wait_for(session.run_id, RanksRestarted)
    assert restarted.ranks == (1,)
    assert restarted.pids[0] not in pids
    _, printed = session.run(
        "import torch, torch.distributed as dist\n"
        "x = torch.ones(1)\ndist.all_reduce(x)\nprint(int(x), globals().get('kept'))"
    )
    assert printed == {0: "2 1\n", 1: "2 None\n"}


def test_a_rank_that_dies_in_a_cell_fails_it_and_not_the_session(session: AgentSession):
    session.run("kept = 1")
    ended, _ = session.run("import os\nif rank == 0:\n    os._exit(3)\nimport time\ntime.sleep(60)")
    assert ended.state is RunState.FAILED
    assert ended.failure is not None
    assert ended.failure.kind is FailureKind.WORKER_DIED
    assert session.agent.restart(session.run_id, (0,)) is None
    assert session.run("print(globals().get('kept'))")[1] == {0: "None\n", 1: "1\n"}


def test_all_ranks_are_replaced_when_none_is_named(session: AgentSession):
    session.run("x = 1")
    assert session.agent.restart(session.run_id, ()) is None
    body = (
        "import torch, torch.distributed as dist\n"
        "y = torch.ones(1)\ndist.all_reduce(y)\nprint(int(y), 'x' in globals())"
    )
    assert session.run(body)[1] == {0: "2 False\n", 1: "2 False\n"}


def test_a_stuck_rank_is_replaced_too(session: AgentSession):
    agent = session.agent
    run_id = session.begin(UNSTOPPABLE.format(rank=0))
    agent.wait_for(run_id, OutputWritten)
    agent.end_run(run_id)
    agent.wait_for(run_id, RunEnded)
    assert agent.restart(session.run_id, (0,)) is None
    assert session.run("print(rank)")[1] == {0: "0\n", 1: "1\n"}


def test_what_is_printed_between_cells_is_the_sessions_and_not_the_next_cells(session: AgentSession):
    agent = session.agent
    fifo = agent.path / "fifo"
    os.mkfifo(fifo)
    session.run(
        "import threading\n"
        "def late():\n    with open(path) as file:\n        print('late', file.read(), flush=True)\n"
        "threading.Thread(target=late).start()",
        only=(0,),
        names={"path": str(fifo)},
    )
    fifo.write_text("word")
    assert agent.wait_for(session.run_id, OutputWritten).text == "late word\n"
    assert session.run("print('mine')", only=(0,))[1] == {0: "mine\n"}
    assert agent.printed(session.run_id) == {0: "late word\n"}
    assert (agent.path / "state" / "runs" / session.run_id / "rank-0.log").read_text() == "late word\n"


def test_a_child_that_never_stops_writing_keeps_no_cell_and_no_other_run(agent: AgentProcess, session: AgentSession):
    ended, _ = session.run(
        "import subprocess\nfrom IPython.display import display\n"
        "child = subprocess.Popen(['yes'])\ndisplay('shown')\nprint('done')"
    )
    assert ended.state is RunState.SUCCEEDED, ended
    beside = agent.launch("print('quick')", ranks=1)
    assert agent.wait_for(beside, RunEnded).state is RunState.SUCCEEDED
    assert session.run("child.kill()")[0].state is RunState.SUCCEEDED


def test_questions_go_to_idle_ranks_only(session: AgentSession):
    agent = session.agent
    session.run("value = 41")
    answer = agent.ask(session.run_id, RankQuestion(rank=0, what="complete", code="val", cursor=3))
    assert "value" in [match.text for match in answer.matches]
    run_id = session.begin("import time\nprint('in', flush=True)\ntime.sleep(60)")
    agent.wait_for(run_id, OutputWritten)
    assert "busy" in agent.ask(session.run_id, RankQuestion(rank=0, what="names")).problem
    agent.end_run(run_id)
    agent.wait_until_gone(run_id)


def test_a_fresh_run_beside_the_ranks_sees_nothing_of_them(session: AgentSession):
    agent = session.agent
    session.run("x = 1")
    busy = session.begin("import time\nprint('in', flush=True)\ntime.sleep(60)")
    agent.wait_for(busy, OutputWritten)
    _, printed = session.run("print('x' in globals())", fresh=True)
    assert printed == {0: "False\n", 1: "False\n"}
    agent.end_run(busy)
    agent.wait_until_gone(busy)


def test_new_processes_stand_by_for_a_session_once_it_has_had_a_fresh_run(agent: AgentProcess, session: AgentSession):
    def ranks() -> int:
        table = process_table()
        zygotes = [pid for pid, process in table.items() if process.parent == agent.process.pid]
        return sum(process.parent in zygotes for process in table.values())

    # with an earlier session, its standby group would exist by the time this run has one
    agent.wait_until_gone(agent.launch("pass", ranks=1))
    eventually(lambda: ranks() >= 3, what="the group that stands by for runs")
    assert ranks() == 3
    for warm in ("zygote", "standby"):
        fresh = session.begin("pass", fresh=True)
        assert agent.wait_for(fresh, RanksStarted).warm == warm
        agent.wait_until_gone(fresh)
        eventually(lambda: ranks() == 5, what="the group that stands by for the session")


def test_the_end_takes_cells_and_fresh_runs_along_and_leaves_no_process(agent: AgentProcess):
    session = agent.connect(2)
    cell = session.begin(
        "import time, subprocess\nsubprocess.Popen(['sleep', '99'])\nprint('in', flush=True)\ntime.sleep(60)"
    )
    fresh = session.begin("import time\nprint('in', flush=True)\ntime.sleep(60)", fresh=True)
    agent.wait_for(cell, OutputWritten)
    agent.wait_for(fresh, OutputWritten)
    pids = [*agent.wait_for(session.run_id, RanksStarted).pids, *agent.wait_for(fresh, RanksStarted).pids]
    table = process_table()
    sleeping = [pid for pid in below([agent.process.pid], table) if table[pid].command.startswith("sleep")]
    agent.end_run(session.run_id, "disconnected")
    for run_id in (cell, fresh, session.run_id):
        agent.wait_until_gone(run_id)
        assert agent.wait_for(run_id, RunEnded).state is RunState.CANCELLED
    assert sleeping
    eventually(lambda: not any(is_alive(pid) for pid in [*pids, *sleeping]), what="the end of every process")


def test_a_session_that_was_ended_takes_no_cell(agent: AgentProcess):
    session = agent.connect(1)
    agent.end_run(session.run_id, "disconnected")
    agent.wait_until_gone(session.run_id)
    ended, _ = session.run("pass")
    assert ended.failure is not None
    assert ended.failure.kind is FailureKind.SESSION


# ---------------------------------------------------------------- a zygote that does not start


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kill -9 $$", "was killed by SIGKILL while it imported torch"),
        ("echo old >&2; exit 1", "says: old"),
        # the log also has the other process's output
        ("exit 3", "exited with code 3 and printed nothing"),
    ],
)
def test_a_python_that_does_not_start_is_told_by_how_it_ended(agent: AgentProcess, script: str, words: str):
    program = agent.path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    interpreter = Interpreter(executable=str(program), key="of-a-script", variables={})
    run_id = agent.launch("1", ranks=2, interpreter=interpreter)
    failure = agent.wait_for(run_id, RunEnded).failure
    assert failure.kind is FailureKind.ENVIRONMENT
    assert f"{words}." in f"{failure.message}."
    assert str(program) in failure.message
    agent.wait_until_gone(run_id)


def test_idle_ranks_sleep(agent: AgentProcess, session: AgentSession):
    session.run("import torch, torch.distributed as dist\ndist.all_reduce(torch.ones(1))")
    (pid, *_) = agent.wait_for(session.run_id, RanksStarted).pids
    before, began = wake_ups(pid), time.monotonic()
    eventually(lambda: wake_ups(pid) - before >= 30, 60, "wake-ups of gloo's loop")
    # by itself, the loop looks a hundred times a second whether it is to end
    assert 30 / (time.monotonic() - began) < 60


def test_a_group_that_is_made_for_a_run_is_not_made_with_late_timers():
    body = (
        "import os, pathlib\n"
        "for task in os.listdir('/proc/self/task'):\n"
        "    if pathlib.Path(f'/proc/self/task/{task}/comm').read_text().strip() == 'gloo_tcp_loop':\n"
        "        print(int(pathlib.Path(f'/proc/{task}/timerslack_ns').read_text()) < 1_000_000)"
    )
    # of its own: it has no group on standby yet, whose loops may sleep
    agent = AgentProcess()
    try:
        run_id = agent.launch(body, ranks=2)
        agent.wait_until_gone(run_id)
        assert agent.printed(run_id) == {0: "True\n", 1: "True\n"}
    finally:
        agent.close()


def wake_ups(pid: int) -> int:
    """How often the threads of a process have waited for something so far."""
    statuses = (task.joinpath("status").read_text() for task in Path(f"/proc/{pid}/task").iterdir())
    lines = (line.split() for status in statuses for line in status.splitlines())
    return sum(int(words[1]) for words in lines if words and words[0] == "voluntary_ctxt_switches:")
