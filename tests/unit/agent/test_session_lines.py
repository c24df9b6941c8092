"""A session's line in a real agent with real ranks, and no pool: who may use it, and what the pool is told."""

from __future__ import annotations

import secrets
import select
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent_process import AgentProcess, AgentSession, launch_order
from process_table import is_alive
from waiting import eventually

from sgpu_magic.config import Settings
from sgpu_magic.system.message_stream import StreamConnection
from sgpu_magic.wire import codec
from sgpu_magic.wire.attachments import CodeBundle, SharedPayload
from sgpu_magic.wire.base import Record, RunKind, RunState
from sgpu_magic.wire.client import Cancel, Submit
from sgpu_magic.wire.devices import Placement
from sgpu_magic.wire.events import RanksStarted, RunEnded, StateChanged
from sgpu_magic.wire.node import Launch, RunEvent
from sgpu_magic.wire.pool_status import session_socket_file
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


class Line:
    """A connection to the agent, as a notebook has it."""

    def __init__(self, agent: AgentProcess) -> None:
        settings = Settings(state_dir=str(agent.path / "state"), runtime_dir=str(agent.path / "run"))
        self._agent = agent
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(str(session_socket_file(settings.runtime_path)))
        self._stream = StreamConnection[Any](self.socket, codec.from_line)

    def send(self, message: Record, payload: bytes | None = None) -> None:
        self._stream.send(message, () if payload is None else (payload,))

    def submit(self, session: AgentSession, body: str, /, **changes: Any) -> str:
        """Send a cell with these fields of its submission changed; return its id."""
        spec: dict[str, Any] = {name: changes.pop(name) for name in list(changes) if name in _OF_SPEC}
        state = self._agent.path / "state"
        launch, payload = launch_order(state, body, ranks=session.ranks, session=session.run_id)
        named = {name: getattr(launch, name) for name in ("interpreter", "context", "payload")} | changes
        submit = Submit(request=0, spec=msgspec.structs.replace(launch.spec, **spec), **named)
        self.send(submit, payload)
        return submit.spec.run_id

    def receive(self) -> CellRefused | RunEvent | None:
        """Return the next message; None once the agent has closed the line."""
        if not self._stream.has_message():
            ready, _, _ = select.select([self.socket], [], [], 20)
            assert ready, "the agent says nothing"
        received = self._stream.receive()
        return None if received is None else received[0]

    def events_of(self, run_id: str) -> list[RunEvent]:
        """Return a cell's events up to its end; none if it is refused."""
        events: list[RunEvent] = []
        while not (events and isinstance(events[-1].body, RunEnded)):
            message = self.receive()
            assert message is not None, "the line was closed"
            assert message.run_id == run_id
            if isinstance(message, CellRefused):
                return []
            events.append(message)
        return events

    def close(self) -> None:
        self._stream.close()


_OF_SPEC = ("session", "detach", "owner", "placement", "run_id", "kind", "timeout_s", "fresh")


@pytest.fixture
def line(agent: AgentProcess, session: AgentSession) -> Iterator[Line]:
    token = secrets.token_bytes(32)
    made = Line(agent)
    made.send(EnterLine(token=token))
    agent.offer_line(session.run_id, token)
    # the session knows the line once it has taken a cell
    for _ in range(100):
        if made.events_of(made.submit(session, "pass")):
            break
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
