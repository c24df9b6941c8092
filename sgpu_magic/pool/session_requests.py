"""What clients ask of a session's ranks: to be replaced, and what is in their namespaces."""

from __future__ import annotations

import time
from collections.abc import Callable

from sgpu_magic.nodes.engine import Engine
from sgpu_magic.pool.active_runs import ActiveRuns
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.pool_run import PoolRun
from sgpu_magic.pool.scheduling import stimuli as sched
from sgpu_magic.pool.scheduling.session_rules import named
from sgpu_magic.pool.server import ConnectedClient, Server
from sgpu_magic.wire.client import Accepted, AskRank, RankAnswered, RestartRanks
from sgpu_magic.wire.ids import short
from sgpu_magic.wire.rank import RankAnswer
from sgpu_magic.wire.states import RunKind, RunState

_REMEDY = "Begin another with %sgpu_connect."


class SessionRequests:
    """Passes them on to the engine, and its answers back.

    Args:
        server: Where the clients are connected.
        engine: Where the ranks are.
        active: The runs that go on.
        ledger: Knows when and why a session ended.
        feed: Tells the scheduler, which lets no cell begin while ranks are replaced.
    """

    def __init__(
        self, server: Server, engine: Engine, active: ActiveRuns, ledger: Ledger, feed: Callable[[sched.Stimulus], None]
    ) -> None:
        self._server = server
        self._engine = engine
        self._active = active
        self._ledger = ledger
        self._feed = feed
        self._number = 0
        self._restarts: dict[int, tuple[ConnectedClient, RestartRanks]] = {}
        self._questions: dict[int, tuple[ConnectedClient, AskRank]] = {}

    # ------------------------------------------------------------ from clients

    def restart(self, client: ConnectedClient, message: RestartRanks) -> None:
        """Have ranks replaced, unless a cell is in the way."""
        session = self._session(message.session)
        problem = self.unknown(message.session) if session is None else self._why_not_now(session, message.ranks)
        if problem:
            self._server.refuse(client, message.request, problem, "SessionError")
            return
        self._number += 1
        self._restarts[self._number] = (client, message)
        reason = f"{_ranks(message.ranks)} of its session {'is' if len(message.ranks) == 1 else 'are'} being restarted"
        self._feed(sched.SessionPaused(message.session, reason, time.monotonic()))
        self._engine.restart_session_ranks(self._number, message.session, message.ranks)

    def ask(self, client: ConnectedClient, message: AskRank) -> None:
        """Pass a question on to an idle rank. Whatever is in the way is the answer: nobody shall wait for it."""
        session = self._session(message.session)
        if session is None:
            problem = self.unknown(message.session)
        elif session.state is not RunState.RUNNING:
            problem = f"{named(session.spec)} is {session.state}."
        elif not 0 <= message.question.rank < session.spec.placement.ranks:
            problem = f"{named(session.spec)} has no rank {message.question.rank}."
        else:
            self._number += 1
            self._questions[self._number] = (client, message)
            self._engine.ask_rank(self._number, message.session, message.question)
            return
        self._answer(client, message, RankAnswer(problem=problem))

    def unknown(self, session: str) -> str:
        """Say of a session that does not go on when and why it ended."""
        try:
            row = self._ledger.summary(session)
        except ValueError:
            row = None
        if row is None or row.kind is not RunKind.SESSION:
            return f"there is no session {short(session)} in this pool. {_REMEDY}"
        name = f"session {row.name or short(session)}"
        when = "" if row.ended_at is None else time.strftime(" at %H:%M", time.localtime(row.ended_at))
        why = f": {row.failure.strip().rstrip('.')}" if row.failure else ""
        return f"{name} ended{when}{why}. {_REMEDY}"

    # ------------------------------------------------------------ from the engine

    def restarted(self, request: int, session: str, problem: str) -> None:
        self._feed(sched.SessionPaused(session, "", time.monotonic()))
        asked = self._restarts.pop(request, None)
        if asked is None:
            return
        client, message = asked
        if problem:
            self._server.refuse(client, message.request, problem, "SessionError")
            return
        run = self._session(session)
        name = named(run.spec) if run is not None else f"session {short(session)}"
        text = f"{_ranks(message.ranks)} of {name} {'is' if len(message.ranks) == 1 else 'are'} new"
        self._server.send(client, Accepted(request=message.request, run_id=session, text=text))

    def answered(self, request: int, answer: RankAnswer) -> None:
        asked = self._questions.pop(request, None)
        if asked is not None:
            self._answer(*asked, answer)

    def session_gone(self, session: str) -> None:
        """Nobody will answer any more."""
        text = f"session {short(session)} ended before it could answer. {_REMEDY}"
        for number, (client, message) in list(self._restarts.items()):
            if message.session == session:
                del self._restarts[number]
                self._server.refuse(client, message.request, text, "SessionError")
        for number, (client, question) in list(self._questions.items()):
            if question.session == session:
                del self._questions[number]
                self._answer(client, question, RankAnswer(problem=text))

    # ------------------------------------------------------------ within

    def _session(self, run_id: str) -> PoolRun | None:
        run = self._active.get(run_id)
        return run if run is not None and run.spec.kind is RunKind.SESSION and not run.ended else None

    def _why_not_now(self, session: PoolRun, ranks: tuple[int, ...]) -> str:
        name, last = named(session.spec), session.spec.placement.ranks - 1
        if session.state is not RunState.RUNNING:
            return f"{name} is {session.state}; its ranks can be restarted while it is running."
        if strange := [rank for rank in ranks if not 0 <= rank <= last]:
            return f"{name} has ranks 0 to {last}, not {', '.join(map(str, strange))}."
        if any(message.session == session.run_id for _, message in self._restarts.values()):
            return f"ranks of {name} are being restarted already."
        for run in self._active.going:
            if run.spec.session == session.run_id and run.spec.in_session and run.placed_at and not run.ended:
                cell = f"{short(run.run_id)} ({run.spec.name})" if run.spec.name else short(run.run_id)
                return (
                    f"run {cell} is running in {name}. Cancel it first: interrupt its cell, or "
                    f"`sgpu cancel {short(run.run_id)}`. Then restart the ranks."
                )
        return ""

    def _answer(self, client: ConnectedClient, message: AskRank, answer: RankAnswer) -> None:
        self._server.send(client, RankAnswered(request=message.request, answer=answer))


def _ranks(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return "all ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
