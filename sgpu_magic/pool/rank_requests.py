"""Clients' requests to ranks: stacks, questions about namespaces, restarts, and streams to ports.

All of them are passed on to the engine, and the replies back to the clients.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import msgspec

from sgpu_magic.errors import SessionError, UsageError
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.pool.active_runs import ActiveRuns
from sgpu_magic.pool.format_capacity import format_session
from sgpu_magic.pool.format_queue import format_restarting, format_run_title
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.pool_run import PoolRun
from sgpu_magic.pool.scheduling import stimuli as sched
from sgpu_magic.pool.server import ConnectedClient, Server
from sgpu_magic.system.message_stream import Pending
from sgpu_magic.wire.base import ErrorKind, RunKind, RunState, short
from sgpu_magic.wire.client import Accepted, AskRank, AskStacks, RankAnswered, RestartRanks, Stacks
from sgpu_magic.wire.files import StreamMessage
from sgpu_magic.wire.node import Question, RestartSessionRanks
from sgpu_magic.wire.rank_events import RankStack
from sgpu_magic.wire.run import CellSource, RankAnswer
from sgpu_magic.wire.streams import OpenStream, StreamClosed, StreamEnded, StreamOpened

_REMEDY = "Start another with %sgpu_connect."
_MOST_OF_CLIENT = 256


class RankRequests:
    """Passes requests to ranks. A request that can't be passed on is answered with the reason at once.

    Args:
        server: Where the clients are connected.
        engine: Where the ranks run.
        ledger: The rows of all runs.
        active: The active runs.
        feed: Feeds a stimulus to the scheduler and executes its instructions.
    """

    def __init__(
        self,
        *,
        server: Server,
        engine: Engine,
        ledger: Ledger,
        active: ActiveRuns,
        feed: Callable[[sched.Stimulus], None],
    ) -> None:
        self._server = server
        self._engine = engine
        self._ledger = ledger
        self._active = active
        self._feed = feed
        # never reused, so that late replies are ignored
        self._numbers = itertools.count(1)
        # (client, its message, run whose ranks were asked) by number
        self._asked = Pending[int, tuple[ConnectedClient, AskStacks | AskRank | RestartRanks, str]]()

    # ------------------------------------------------------------ from clients

    def ask_stacks(self, client: ConnectedClient, message: AskStacks, run: PoolRun) -> None:
        """Take the stacks of a run's ranks."""
        if run.placed_at is None:
            raise UsageError(f"run {short(run.run_id)} has no ranks yet: it is {run.state}.")
        self._engine.take_stacks(self._number(client, message, run.run_id), run.run_id)

    def restart(self, client: ConnectedClient, message: RestartRanks) -> None:
        """Restart ranks of a session, unless a cell runs in it."""
        session = self._session(message.session)
        problem = self.no_session(message.session) if session is None else self._why_not_now(session, message.ranks)
        if problem is not None:
            raise SessionError(problem)
        number = self._number(client, message, message.session)
        self._feed(sched.SessionPaused(message.session, message.ranks))
        order = RestartSessionRanks(request=number, session=message.session, ranks=message.ranks)
        self._engine.ask_session(order)

    def ask(self, client: ConnectedClient, message: AskRank) -> None:
        """Send a question to an idle rank of a session."""
        if (session := self._session(message.session)) is None:
            problem = self.no_session(message.session)
        elif session.state is not RunState.RUNNING:
            problem = f"{format_session(session.run_id, session.spec.name)} is {session.state}."
        elif not 0 <= message.question.rank < session.spec.placement.ranks:
            problem = f"{format_session(session.run_id, session.spec.name)} has no rank {message.question.rank}."
        else:
            number = self._number(client, message, message.session)
            order = Question(request=number, session=message.session, question=message.question)
            self._engine.ask_session(order)
            return
        self._answer(client, message, RankAnswer(problem=problem))

    def no_session(self, session: str) -> str:
        """Return a sentence that says when and why a session ended, or that there is none."""
        if (row := self._ledger.summary(session)) is None or row.kind is not RunKind.SESSION:
            return f"there is no session {short(session)} in this pool. {_REMEDY}"
        name = f"session {row.name or short(session)}"
        when = "" if row.ended_at is None else time.strftime(" at %H:%M", time.localtime(row.ended_at))
        why = f": {row.failure.strip().rstrip('.')}" if row.failure else ""
        return f"{name} ended{when}{why}. {_REMEDY}"

    # ------------------------------------------------------------ from the engine

    def stacks_taken(self, request: int, stacks: tuple[RankStack, ...]) -> None:
        if (asked := self._asked.pop(request, None)) is not None:
            client, message, run_id = asked
            run = self._active.speaker(run_id)
            cell = run.spec.cell if run is not None else CellSource(body="")
            self._server.send(client, Stacks(request=message.request, run_id=run_id, stacks=stacks, cell=cell))

    def restarted(self, request: int, session: str, problem: str | None) -> None:
        self._feed(sched.SessionResumed(session))
        if (asked := self._asked.pop(request, None)) is None or not isinstance(asked[1], RestartRanks):
            return
        client, message = asked[0], asked[1]
        if problem:
            self._server.refuse(client, message.request, problem, ErrorKind.SESSION)
            return
        run = self._session(session)
        name = format_session(run.run_id, run.spec.name) if run is not None else f"session {short(session)}"
        are = "is" if len(message.ranks) == 1 else "are"
        text = f"{format_restarting(message.ranks)} of {name} {are} new"
        self._server.send(client, Accepted(request=message.request, run_id=session, text=text))

    def answered(self, request: int, answer: RankAnswer) -> None:
        if (asked := self._asked.pop(request, None)) is not None and isinstance(asked[1], AskRank):
            self._answer(asked[0], asked[1], answer)

    def run_exited(self, run_id: str) -> None:
        """Answer the open requests to a run whose ranks are gone."""
        ended = f"session {short(run_id)} ended before it could answer. {_REMEDY}"
        for client, message, _ in self._asked.take_all(lambda asked: asked[2] == run_id):
            if isinstance(message, AskRank):
                self._answer(client, message, RankAnswer(problem=ended))
            elif isinstance(message, RestartRanks):
                self._server.refuse(client, message.request, ended, ErrorKind.SESSION)
            else:
                text = f"run {short(run_id)} ended before its ranks could be asked."
                self._server.refuse(client, message.request, text)

    # ------------------------------------------------------------ internals

    def _number(self, client: ConnectedClient, message: AskStacks | AskRank | RestartRanks, run_id: str) -> int:
        number = next(self._numbers)
        self._asked[number] = client, message, run_id
        return number

    def _session(self, run_id: str) -> PoolRun | None:
        run = self._active.get(run_id)
        return run if run is not None and run.is_session and not run.ended else None

    def _why_not_now(self, session: PoolRun, ranks: tuple[int, ...]) -> str | None:
        """Return why ranks of the session can't be restarted now; None when they can."""
        name, last = format_session(session.run_id, session.spec.name), session.spec.placement.ranks - 1
        if session.state is not RunState.RUNNING:
            return f"{name} is {session.state}; its ranks can be restarted while it is running."
        if strange := [rank for rank in ranks if not 0 <= rank <= last]:
            return f"{name} has ranks 0 to {last}, not {', '.join(map(str, strange))}."
        asked = (message for _, message, run_id in self._asked.values() if run_id == session.run_id)
        if any(isinstance(message, RestartRanks) for message in asked):
            return f"ranks of {name} are already being restarted."
        for run in self._active.going:
            if run.spec.session == session.run_id and run.spec.in_session and run.placed_at and not run.ended:
                title = format_run_title(run.run_id, run.spec.name)
                return (
                    f"run {title} is running in {name}. Cancel it first: interrupt its cell, or "
                    f"`sgpu cancel {short(run.run_id)}`. Then restart the ranks."
                )
        return None

    def _answer(self, client: ConnectedClient, message: AskRank, answer: RankAnswer) -> None:
        self._server.send(client, RankAnswered(request=message.request, answer=answer))


# ---------------------------------------------------------------- streams


class _Forwarded(msgspec.Struct, eq=False):
    """A stream that is open, or being opened.

    Args:
        client: The client that opened it.
        stream: Its number at the client.
        run_id: The run that it leads to.
        ranks_of: The run that owns the ranks: for a cell in a session, the session.
        rank: The rank to whose node it leads.
        watches: Whether it only waits for the run's end.
        ended: How many of its two directions have ended.
    """

    client: ConnectedClient
    stream: int
    run_id: str
    ranks_of: str
    rank: int
    watches: bool
    ended: int = 0


class Forwarding:
    """Forwards clients' connections to ports of their runs, without inspecting the data.

    Args:
        server: Where the clients are connected.
        engine: Where the ranks run.
        find: Returns the client's active run with a prefix; else a sentence that says why there is none.
    """

    def __init__(
        self, *, server: Server, engine: Engine, find: Callable[[ConnectedClient, str], PoolRun | str]
    ) -> None:
        self._server = server
        self._engine = engine
        self._find = find
        self._number = 0
        # keyed by the number that nodes use for the stream
        self._streams: dict[int, _Forwarded] = {}
        # keyed by client, not by ZeroMQ identity, which changes with each reconnection
        self._by_client: dict[tuple[ConnectedClient, int], int] = {}

    # ------------------------------------------------------------ from clients

    def from_client(
        self, client: ConnectedClient, message: OpenStream | StreamMessage, frames: Sequence[bytes]
    ) -> None:
        """Open a stream, or pass on a client's message of an open one."""
        if isinstance(message, OpenStream):
            self._open(client, message)
            return
        if (number := self._by_client.get((client, message.stream))) is None:
            return
        forwarded = self._streams[number]
        if not forwarded.watches:
            self._to_node(number, forwarded, message, frames)
        self._count_end(number, forwarded, message)

    def on_client_disconnect(self, client: ConnectedClient) -> None:
        """Close a client's streams at the nodes too."""
        for number, forwarded in list(self._streams.items()):
            if forwarded.client is client:
                self._drop(number, forwarded)
                if not forwarded.watches:
                    self._to_node(number, forwarded, StreamClosed(stream=number, problem="its client is gone"), ())

    # ------------------------------------------------------------ from the engine

    def from_node(self, message: StreamOpened | StreamMessage, frames: Sequence[bytes]) -> None:
        """Pass on a node's message of a stream."""
        if (forwarded := self._streams.get(message.stream)) is None:
            return
        number = message.stream
        passed = msgspec.structs.replace(message, stream=forwarded.stream)
        if isinstance(passed, StreamOpened):
            passed = msgspec.structs.replace(passed, run_id=forwarded.run_id)
        self._server.send(forwarded.client, passed, frames)
        if not isinstance(message, StreamOpened):
            self._count_end(number, forwarded, message)

    def run_exited(self, run_id: str) -> None:
        """Close the streams to a run whose ranks are gone."""
        for number, forwarded in list(self._streams.items()):
            if run_id in (forwarded.run_id, forwarded.ranks_of):
                self._drop(number, forwarded)
                text = f"run {short(run_id)} has ended"
                self._server.send(forwarded.client, StreamClosed(stream=forwarded.stream, problem=text))

    # ------------------------------------------------------------ internals

    def _open(self, client: ConnectedClient, message: OpenStream) -> None:
        """Open a stream, or close it at once with the reason why it can't be opened."""
        run = self._find(client, message.run)
        problem = run if isinstance(run, str) else self._why_not(client, run, message)
        if problem or isinstance(run, str):
            self._server.send(client, StreamClosed(stream=message.stream, problem=problem))
            return
        self._number += 1
        ranks_of = run.spec.session if run.spec.in_session else run.run_id
        forwarded = _Forwarded(client, message.stream, run.run_id, ranks_of, message.rank, message.watches)
        self._streams[self._number] = forwarded
        self._by_client[client, message.stream] = self._number
        order = msgspec.structs.replace(message, stream=self._number, run=ranks_of)
        self._engine.forward(ranks_of, message.rank, order, ())

    def _why_not(self, client: ConnectedClient, run: PoolRun, message: OpenStream) -> str:
        ranks = run.spec.placement.ranks
        if not 0 <= message.rank < ranks:
            return f"run {short(run.run_id)} has no rank {message.rank}: it has {ranks}."
        if run.placed_at is None or run.state in (RunState.QUEUED, RunState.PREPARING):
            return f"run {short(run.run_id)} has no ranks yet: it is {run.state}."
        if run.ended:
            return f"run {short(run.run_id)} has ended."
        if (client, message.stream) in self._by_client:
            return f"the stream {message.stream} is already open."
        if sum(forwarded.client is client for forwarded in self._streams.values()) >= _MOST_OF_CLIENT:
            return f"this client has {_MOST_OF_CLIENT} connections open, the maximum."
        return ""

    def _to_node(self, number: int, forwarded: _Forwarded, message: StreamMessage, frames: Sequence[bytes]) -> None:
        passed = msgspec.structs.replace(message, stream=number)
        self._engine.forward(forwarded.ranks_of, forwarded.rank, passed, frames)

    def _count_end(self, number: int, forwarded: _Forwarded, message: StreamMessage) -> None:
        if isinstance(message, StreamEnded):
            forwarded.ended += 1
        # after both directions have ended, only acknowledgements may still arrive
        if isinstance(message, StreamClosed) or forwarded.ended == 2:
            self._drop(number, forwarded)

    def _drop(self, number: int, forwarded: _Forwarded) -> None:
        self._streams.pop(number, None)
        self._by_client.pop((forwarded.client, forwarded.stream), None)
