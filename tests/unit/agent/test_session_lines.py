"""A session's line in a real agent with real ranks, and no pool: who may use it, and what the pool is told."""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent_process import AgentProcess, AgentSession, launch_order
from process_table import is_alive
from session_line_client import Line
from waiting import eventually

from sgpu_magic.files.atomic_file import read_json
from sgpu_magic.wire.attachments import CodeBundle, SharedPayload
from sgpu_magic.wire.base import RunKind, RunState
from sgpu_magic.wire.client import Cancel
from sgpu_magic.wire.devices import Placement
from sgpu_magic.wire.events import RanksStarted, RunEnded, StateChanged
from sgpu_magic.wire.node import Launch, RunEvent
from sgpu_magic.wire.run import RUN_RECORD, RunRecord
from sgpu_magic.wire.session_line import CellRefused, EnterLine

RANKS = 2


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    made = AgentProcess()
    yield made
    made.close()
    eventually(lambda: not is_alive(made.process.pid), what="the agent's end")


@pytest.fixture
def session(agent: AgentProcess) -> Iterator[AgentSession]:
    made = agent.connect(RANKS)
    yield made
    if made.run_id not in agent.gone:
        agent.end_run(made.run_id, "the test is over")
        agent.wait_until_gone(made.run_id)


@pytest.fixture
def line(session: AgentSession) -> Iterator[Line]:
    made = Line.entered(session)
    yield made
    made.close()


def test_a_cell_starts_at_once_and_the_pool_learns_it_in_order(agent: AgentProcess, session: AgentSession, line: Line):
    run_id = line.submit(session, "print('rank', rank)")
    events = line.events_of(run_id)
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert isinstance(events[0].body, RanksStarted)
    end = events[-1].body
    assert isinstance(end, RunEnded)
    assert (end.state, len(end.results)) == (RunState.SUCCEEDED, RANKS)
    taken = agent.wait_for_taken(run_id)
    assert taken.launch.spec.session == session.run_id
    agent.wait_until_gone(run_id)
    assert agent.taken[run_id] == 0, "an event came before the run that it is about"
    assert len(agent.events[run_id]) == len(events)
    assert agent.printed(run_id) == {0: "rank 0\n", 1: "rank 1\n"}


def test_the_directories_of_cells_are_written_while_others_follow_without_a_pause(
    agent: AgentProcess, session: AgentSession, line: Line
):
    first = line.submit(session, "pass")
    line.events_of(first)
    followed = 0
    deadline = time.monotonic() + 5
    while not is_written(agent, first):
        assert time.monotonic() < deadline, "the first cell's directory is not written"
        assert line.events_of(line.submit(session, "pass"))
        followed += 1
    assert followed > 1


def test_a_session_that_ends_has_the_directories_of_all_its_cells(
    agent: AgentProcess, session: AgentSession, line: Line
):
    last = line.submit(session, "pass")
    line.events_of(last)
    agent.end_run(session.run_id, "the test is over")
    agent.wait_until_gone(session.run_id)
    assert is_written(agent, last)


def is_written(agent: AgentProcess, run_id: str) -> bool:
    """Whether a run's directory has its record with the final state, which is written last."""
    record = read_json(agent.path / "state" / "runs" / run_id / RUN_RECORD, RunRecord)
    return record is not None and record.state.is_final


def test_a_long_cell_is_reported_while_it_runs_and_can_be_stopped_from_there(
    agent: AgentProcess, session: AgentSession, line: Line
):
    run_id = line.submit(session, "import time\ntime.sleep(600)")
    agent.wait_for_taken(run_id)
    agent.wait_for(run_id, RanksStarted)
    agent.end_run(run_id, "`sgpu cancel`")
    end = line.events_of(run_id)[-1].body
    assert isinstance(end, RunEnded)
    assert (end.state, end.reason) == (RunState.CANCELLED, "`sgpu cancel`")


def test_a_cell_is_stopped_over_the_line(agent: AgentProcess, session: AgentSession, line: Line):
    run_id = line.submit(session, "import time\ntime.sleep(600)")
    line.send(Cancel(request=0, run=run_id, reason="interrupted"))
    bodies = [event.body for event in line.events_of(run_id)]
    assert StateChanged(state=RunState.CANCELLING, reason="interrupted") in bodies
    end = bodies[-1]
    assert isinstance(end, RunEnded)
    assert (end.state, end.reason) == (RunState.CANCELLED, "interrupted")
    agent.wait_until_gone(run_id)
    assert line.events_of(line.submit(session, "pass"))


def test_a_cell_of_the_pool_waits_for_one_of_the_line(
    agent: AgentProcess, session: AgentSession, line: Line, tmp_path: Path
):
    go = tmp_path / "go"
    session.run(f"import pathlib, time\norder = []\ngo = pathlib.Path({str(go)!r})")
    first = line.submit(session, "while not go.exists(): time.sleep(0.01)\norder.append('line')")
    agent.wait_for_taken(first)
    agent.wait_for(first, RanksStarted)
    second = session.begin("order.append('pool')\nprint(order)")
    # the line refuses what would overtake the waiting cell
    refused = line.submit(session, "order.append('late')")
    message = line.receive()
    while isinstance(message, RunEvent):
        message = line.receive()
    assert message == CellRefused(run_id=refused)
    go.touch()
    agent.wait_until_gone(second)
    assert set(agent.printed(second).values()) == {"['line', 'pool']\n"}


def test_a_waiting_cell_of_the_pool_can_be_cancelled(agent: AgentProcess, session: AgentSession, line: Line):
    first = line.submit(session, "import time\ntime.sleep(600)")
    agent.wait_for_taken(first)
    waiting = session.begin("print('never')")
    agent.end_run(waiting, "`sgpu cancel`")
    assert agent.wait_for(waiting, RunEnded).state is RunState.CANCELLED
    agent.end_run(first)
    agent.wait_until_gone(first)
    assert session.run("print('next')")[1] == {0: "next\n", 1: "next\n"}
    assert agent.printed(waiting) == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"session": "f" * 32},
        {"session": ""},
        {"detach": True},
        {"placement": Placement(ranks=0)},
        {"run_id": "../escape"},
        {"kind": RunKind.SESSION},
        {"timeout_s": 0.0},
        {"fresh": True},
        {"code": (CodeBundle(entry="/x", path="/x.zip", sha256="0" * 64, size=1),)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_a_line_does_not_take_goes_to_the_pool(session: AgentSession, line: Line, changes: dict[str, Any]):
    assert line.events_of(line.submit(session, "print('no')", **changes)) == []
    assert line.events_of(line.submit(session, "print('yes')"))


def test_other_processes_and_used_ids_are_refused(agent: AgentProcess, session: AgentSession, line: Line):
    launch, _ = launch_order(agent.path / "state", ranks=RANKS)
    stranger = msgspec.structs.replace(launch.spec.owner, pid=1)
    assert line.events_of(line.submit(session, "pass", owner=stranger)) == []
    layout = launch.payload.layout
    elsewhere = msgspec.structs.replace(launch.payload, source=SharedPayload(pid=1, fd=0, size=layout.pickle_size))
    assert line.events_of(line.submit(session, "pass", payload=elsewhere)) == []
    used = line.submit(session, "pass")
    assert line.events_of(used)
    assert line.events_of(line.submit(session, "pass", run_id=used)) == []


def test_a_token_admits_one_connection(agent: AgentProcess, session: AgentSession):
    token = secrets.token_bytes(32)
    agent.offer_line(session.run_id, token)
    lines = [Line(agent) for _ in range(2)]
    for one in lines:
        one.send(EnterLine(token=token))
    taken = [bool(one.events_of(one.submit(session, "pass"))) for one in lines for _ in range(2)]
    for one in lines:
        one.close()
    assert sorted(taken) == [False, False, True, True]


def test_a_wrong_token_admits_nothing_and_the_connection_ends(agent: AgentProcess, session: AgentSession):
    line = Line(agent)
    line.send(EnterLine(token=bytes(32)))
    assert line.events_of(line.submit(session, "print('no')")) == []
    assert line.receive() is None
    line.close()


@pytest.mark.parametrize("data", [b"\xff" * 64, struct.pack("<IQ", 1, 1 << 40), struct.pack("<IQ", 1, 4) + b"\xc1aaa"])
def test_a_damaged_line_costs_the_session_nothing(agent: AgentProcess, session: AgentSession, line: Line, data: bytes):
    line.socket.sendall(data)
    assert session.run("print('fine')")[1] == {0: "fine\n", 1: "fine\n"}


def test_the_line_closes_with_its_session(agent: AgentProcess, session: AgentSession, line: Line):
    run_id = line.submit(session, "import time\ntime.sleep(600)")
    agent.wait_for_taken(run_id)
    agent.end_run(session.run_id, "disconnected")
    end = line.events_of(run_id)[-1].body
    assert isinstance(end, RunEnded)
    assert end.state is RunState.CANCELLED
    while line.receive() is not None:
        pass


def test_a_notebook_that_is_gone_leaves_its_cell_to_the_pool(agent: AgentProcess, session: AgentSession, line: Line):
    run_id = line.submit(session, "import time\ntime.sleep(0.2)\nprint('done')")
    line.close()
    agent.wait_for_taken(run_id)
    agent.wait_until_gone(run_id)
    assert agent.printed(run_id) == {0: "done\n", 1: "done\n"}


def test_a_launch_is_what_the_pool_would_have_made(agent: AgentProcess, session: AgentSession, line: Line):
    run_id = line.submit(session, "pass")
    line.events_of(run_id)
    taken = agent.wait_for_taken(run_id).launch
    assert isinstance(taken, Launch)
    assert taken.run_dir == str(agent.path / "state" / "runs" / run_id)
    assert taken.lease.ranks == RANKS
    assert taken.spec.submitted_at > 0
