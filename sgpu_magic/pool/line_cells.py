"""Cells that a session's notebook sends to the agent over the session's line, and which the pool records afterwards."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from sgpu_magic.errors import SessionError
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.pool.active_runs import ActiveRuns
from sgpu_magic.pool.instructions import LaunchHandler
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.pool_run import PoolRun, submitted_fields
from sgpu_magic.pool.run_log import RunLog
from sgpu_magic.pool.scheduling import stimuli as sched
from sgpu_magic.pool.server import ConnectedClient, Server
from sgpu_magic.pool.tracker import Tracker
from sgpu_magic.wire.base import RunState, short
from sgpu_magic.wire.client import LineOpened, OpenLine, Submit
from sgpu_magic.wire.events import Submitted
from sgpu_magic.wire.node import CellTaken

_TOKEN_BYTES = 32


class LineCells:
    """Opens the lines of sessions, and records the cells that came over them.

    Args:
        server: Where the clients are connected.
        engine: Where the ranks run.
        ledger: The rows of all runs.
        active: The active runs.
        launches: Records launches.
        tracker: Has runs written to MLflow.
        feed: Feeds a stimulus to the scheduler and executes its instructions.
    """

    def __init__(
        self,
        *,
        server: Server,
        engine: Engine,
        ledger: Ledger,
        active: ActiveRuns,
        launches: LaunchHandler,
        tracker: Tracker,
        feed: Callable[[sched.Stimulus], None],
    ) -> None:
        self._server = server
        self._engine = engine
        self._ledger = ledger
        self._active = active
        self._launches = launches
        self._tracker = tracker
        self._feed = feed

    def open(self, client: ConnectedClient, message: OpenLine) -> None:
        """Let a client connect to the agent of a session that it owns.

        Raises:
            SessionError: It does not own the session, or the agent is not on the client's machine.
        """
        session = self._active.get(message.session)
        path, token = "", secrets.token_bytes(_TOKEN_BYTES)
        is_own = session is not None and session.is_session and session.owner is client
        if is_own and client.same_host and client.shares_pids:
            path = self._engine.offer_line(message.session, token)
        if not path:
            raise SessionError(f"session {short(message.session)} has no line for this client.")
        self._server.send(client, LineOpened(request=message.request, path=path, token=token))

    def record(self, taken: CellTaken) -> None:
        """Record a cell that its session's agent has started."""
        launch = taken.launch
        spec = launch.spec
        if self._active.get(spec.run_id) is not None or self._ledger.has(spec.run_id):
            self._engine.end_run(spec.run_id, RunState.CANCELLED, "its ID was used before")
            return
        session = self._active.get(spec.session)
        owner = None if session is None else session.owner
        run = PoolRun(Submit(request=0, **submitted_fields(launch)), (), owner, RunState.STARTING)
        run.is_on_line, run.adopted = True, owner is None
        run.log = RunLog(self._active.directory(run.run_id), run.run_id)
        run.order_group()
        self._active.add(run)
        self._ledger.record(spec, RunState.STARTING)
        self._active.publish(run, Submitted(spec=spec), spec.submitted_at)
        self._tracker.follow(run)
        now = time.monotonic()
        self._feed(sched.RunAdopted(run.scheduled, launch.lease, now - taken.started_s))
        self._launches.launched(run, launch.lease)

    def session_owned(self, session: PoolRun) -> None:
        """Note that a session's notebook has come back to it: its cells on the line are the notebook's too."""
        for run in self._active.going:
            if run.is_on_line and run.owner is None and run.spec.session == session.run_id:
                run.owner, run.adopted = session.owner, False
