"""A real agent without a pool service: this process sends the orders and receives the events."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import planted_faults

from sgpu_magic.client.this_machine import this_context, this_interpreter, this_owner
from sgpu_magic.config import Settings
from sgpu_magic.payload.pack import pack_namespace
from sgpu_magic.system.message_stream import StreamConnection
from sgpu_magic.wire import codec
from sgpu_magic.wire.attachments import InlinePayload, Payload
from sgpu_magic.wire.base import Record, RunKind, RunState, new_id
from sgpu_magic.wire.devices import Lease, Placement
from sgpu_magic.wire.events import RanksStarted, RunEnded
from sgpu_magic.wire.node import (
    AgentReady,
    Answered,
    CellTaken,
    EndAgent,
    EndRun,
    KillRanks,
    Launch,
    OfferLine,
    Question,
    RanksGone,
    RestartSessionRanks,
    RunEvent,
    SessionRanksRestarted,
    StacksTaken,
    TakeStacks,
)
from sgpu_magic.wire.rank_events import OutputWritten, RankStack
from sgpu_magic.wire.run import CellSource, RankAnswer, RankQuestion, RunSpec

_KEY = bytes(range(32))
_PATIENCE_S = 30.0


def launch_order(
    state: Path,
    body: str = "",
    *,
    ranks: int,
    kind: RunKind = RunKind.CELL,
    names: Mapping[str, object] | None = None,
    **spec: Any,
) -> tuple[Launch, bytes]:
    """Return the order to start a run, and its payload. Arguments as of `AgentProcess.launch`."""
    run_id = spec.pop("run_id", "") or new_id()
    interpreter = spec.pop("interpreter", None) or this_interpreter()
    packed = pack_namespace(dict(names or {}), {}, _KEY)
    launch = Launch(
        spec=RunSpec(
            run_id=run_id,
            name=spec.pop("name", "cell"),
            cell=CellSource(body=body, execution_count=1),
            placement=Placement(ranks=ranks),
            outputs=spec.pop("outputs", ()),
            owner=this_owner(),
            timeout_s=600.0,
            kind=kind,
            **spec,
        ),
        interpreter=interpreter,
        # not pytest's settings, which turn warnings into errors
        context=msgspec.structs.replace(this_context(os.environ, _KEY), settings={}),
        payload=Payload(source=InlinePayload(), layout=packed.layout),
        lease=Lease(lease_id="lease", device_type="cpu", ranks=ranks, cpu_slots=ranks),
        run_dir=str(state / "runs" / run_id),
    )
    return launch, packed.to_bytes()


class AgentProcess:
    """One agent, its zygote and its ranks, in their own directories.

    Args:
        planted: The file that arms a fault in it (see `planted_faults`); None plants none.
        path: The parent of all its directories; None makes one.
        options: The pool's options.

    Attributes:
        events: Events by run, in order.
        gone: Runs whose ranks are gone, or idle again.
        taken: By cell that came over a line, how many of its events had come before the agent's report of it.
    """

    def __init__(self, planted: Path | None = None, path: Path | None = None, **options: Any) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="sga")) if path is None else path
        self._made = path is None
        (self.path / "run").mkdir(mode=0o700)
        settings = Settings(state_dir=str(self.path / "state"), runtime_dir=str(self.path / "run"), **options)
        program = ["-m", "sgpu_magic.agent"] if planted is None else [str(Path(planted_faults.__file__)), str(planted)]
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *program, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, "PYTHONSAFEPATH": "1"},
            )
        assert self.process.stdin is not None
        with self.process.stdin as stdin:
            stdin.write(msgspec.json.encode(settings))
        self._link = StreamConnection(ours, codec.from_agent)
        self.events: dict[str, list[Any]] = {}
        self.gone: set[str] = set()
        self.taken: dict[str, int] = {}
        self._others: list[Record] = []
        self._taken: list[CellTaken] = []
        self._until(lambda: self._take(AgentReady), "the agent's first word")

    # ------------------------------------------------------------ orders

    def launch(
        self,
        body: str = "",
        *,
        ranks: int,
        kind: RunKind = RunKind.CELL,
        names: Mapping[str, object] | None = None,
        locks: Sequence[int] = (),
        damage: Mapping[str, object] | None = None,
        **spec: Any,
    ) -> str:
        """Order a run and return its id.

        Args:
            body: The cell.
            ranks: World size.
            kind: A run, or a session.
            names: The namespace to ship.
            locks: Descriptors of device locks.
            damage: Fields of the order to replace with invalid values.
            spec: Further fields of the `RunSpec`.
        """
        launch, payload = launch_order(self.path / "state", body, ranks=ranks, kind=kind, names=names, **spec)
        launch = msgspec.structs.replace(launch, locks=len(locks), **(damage or {}))
        self._link.send(launch, [payload], locks)
        return launch.spec.run_id

    def connect(self, ranks: int) -> AgentSession:
        """Start a session and wait until its ranks have joined."""
        session = AgentSession(self, self.launch(ranks=ranks, kind=RunKind.SESSION, name="work"), ranks)
        self.wait_for(session.run_id, RanksStarted)
        return session

    def offer_line(self, session: str, token: bytes) -> None:
        """Let the agent admit one connection to the session's line."""
        self._link.send(OfferLine(session=session, token=token))

    def wait_for_taken(self, run_id: str) -> CellTaken:
        """Wait until the agent reports a cell that came over a line."""

        def found() -> CellTaken | None:
            return next((one for one in self._taken if one.launch.spec.run_id == run_id), None)

        return self._until(found, f"the report of {run_id}")

    def end_run(self, run_id: str, reason: str = "interrupted") -> None:
        self._link.send(EndRun(run_id=run_id, state=RunState.CANCELLED, reason=reason))

    def kill_ranks(self, run_id: str) -> None:
        self._link.send(KillRanks(run_id=run_id))

    def restart(self, session: str, ranks: tuple[int, ...]) -> str | None:
        """Replace ranks; return the problem, None for none."""
        self._link.send(RestartSessionRanks(request=1, session=session, ranks=ranks))
        return self._until(lambda: self._take(SessionRanksRestarted), "ranks that are restarted").problem

    def ask(self, session: str, question: RankQuestion) -> RankAnswer:
        self._link.send(Question(request=2, session=session, question=question))
        return self._until(lambda: self._take(Answered), "an answer").answer

    def take_stacks(self, run_id: str) -> tuple[RankStack, ...]:
        self._link.send(TakeStacks(request=3, run_id=run_id))
        return self._until(lambda: self._take(StacksTaken), "stacks").stacks

    # ------------------------------------------------------------ events

    def wait_for(self, run_id: str, kind: type[Any], count: int = 1) -> Any:
        """Return the run's first (or `count`th) event of a kind."""

        def found() -> Any:
            events = [event for event in self.events.get(run_id, ()) if isinstance(event, kind)]
            return events[count - 1] if len(events) >= count else None

        return self._until(found, lambda: f"{kind.__name__} of {run_id}; there were {self.events.get(run_id)}")

    def wait_until_gone(self, run_id: str) -> None:
        self._until(lambda: run_id in self.gone, f"the end of {run_id}")

    def printed(self, run_id: str) -> dict[int, str]:
        """Return what each rank has printed."""
        texts: dict[int, str] = {}
        for event in self.events.get(run_id, ()):
            if isinstance(event, OutputWritten):
                texts[event.rank] = texts.get(event.rank, "") + event.text
        return texts

    def close(self) -> None:
        """End the agent and its processes."""
        self._link.send(EndAgent())
        self.process.wait(_PATIENCE_S)
        self._link.close()
        if self._made:
            shutil.rmtree(self.path)

    def forget(self) -> None:
        """Free the resources of an agent that has ended otherwise."""
        self._link.close()
        if self._made:
            shutil.rmtree(self.path)

    def _until(self, found: Callable[[], Any], what: str | Callable[[], str]) -> Any:
        deadline = time.monotonic() + _PATIENCE_S
        while not (value := found()):
            if not self._link.has_message():
                ready, _, _ = select.select([self._link], [], [], max(0.0, deadline - time.monotonic()))
                assert ready, f"not within {_PATIENCE_S:.0f} s: {what() if callable(what) else what}"
            received = self._link.receive()
            assert received is not None, "the agent ended"
            match received[0]:
                case RunEvent(run_id=run_id, body=body):
                    self.events.setdefault(run_id, []).append(body)
                case RanksGone(run_id=run_id):
                    self.gone.add(run_id)
                case CellTaken(launch=launch) as taken:
                    self._taken.append(taken)
                    self.taken[launch.spec.run_id] = len(self.events.get(launch.spec.run_id, ()))
                case other:
                    self._others.append(other)
        return value

    def _take(self, kind: type[Any]) -> Any:
        found = next((message for message in self._others if isinstance(message, kind)), None)
        if found is not None:
            self._others.remove(found)
        return found


class AgentSession:
    """A connected session.

    Args:
        agent: The agent that it runs on.
        run_id: The session's run.
        ranks: The session's world size.
    """

    def __init__(self, agent: AgentProcess, run_id: str, ranks: int) -> None:
        self.agent = agent
        self.run_id = run_id
        self.ranks = ranks

    def begin(self, body: str, **spec: Any) -> str:
        """Order a cell and return its id."""
        return self.agent.launch(body, ranks=self.ranks, session=self.run_id, **spec)

    def run(self, body: str, **spec: Any) -> tuple[RunEnded, dict[int, str]]:
        """Run a cell to its end; return its final event and what each rank printed."""
        run_id = self.begin(body, **spec)
        ended = self.agent.wait_for(run_id, RunEnded)
        self.agent.wait_until_gone(run_id)
        return ended, self.agent.printed(run_id)
