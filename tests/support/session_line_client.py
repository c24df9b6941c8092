"""A notebook's end of a session's line to a real agent."""

from __future__ import annotations

import secrets
import select
import socket
from typing import Any

import msgspec
from agent_process import AgentProcess, AgentSession, launch_order

from sgpu_magic.config import Settings
from sgpu_magic.system.message_stream import StreamConnection
from sgpu_magic.wire import codec
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.client import Submit
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.node import RunEvent
from sgpu_magic.wire.pool_status import session_socket_file
from sgpu_magic.wire.session_line import CellRefused, EnterLine

_OF_SPEC = ("session", "detach", "owner", "placement", "run_id", "kind", "timeout_s", "fresh")


class Line:
    """A connection to the agent, as a notebook has it."""

    def __init__(self, agent: AgentProcess) -> None:
        settings = Settings(state_dir=str(agent.path / "state"), runtime_dir=str(agent.path / "run"))
        self._agent = agent
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(str(session_socket_file(settings.runtime_path)))
        self._stream = StreamConnection[Any](self.socket, codec.from_line)

    @classmethod
    def entered(cls, session: AgentSession) -> Line:
        """Return a connection that has taken a cell."""
        token = secrets.token_bytes(32)
        made = cls(session.agent)
        made.send(EnterLine(token=token))
        session.agent.offer_line(session.run_id, token)
        # refused until the token has arrived from the pool's side
        for _ in range(100):
            if made.events_of(made.submit(session, "pass")):
                break
        return made

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
