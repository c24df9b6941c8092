"""Clients' requests and their replies. The scheduler decides what they mean for devices and queue."""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import time
from collections.abc import Callable, Sequence

from sgpu_magic import __version__
from sgpu_magic.config import Settings, pool_settings
from sgpu_magic.config.submission_checks import ends_with_notebook
from sgpu_magic.errors import PoolError, RunUnknown, UsageError
from sgpu_magic.files.run_directory import read_spec
from sgpu_magic.formatting import plural
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.pool.active_runs import ActiveRuns
from sgpu_magic.pool.environment_store import EnvironmentStore
from sgpu_magic.pool.file_requests import FileRequestHandler
from sgpu_magic.pool.health import Guard
from sgpu_magic.pool.inventory import STATUS_FRESH_S, FreshInventory
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.line_cells import LineCells
from sgpu_magic.pool.permissions import Permissions
from sgpu_magic.pool.rank_requests import Forwarding, RankRequests
from sgpu_magic.pool.scheduling import stimuli as sched
from sgpu_magic.pool.server import ConnectedClient, Server
from sgpu_magic.pool.status import StatusReports
from sgpu_magic.pool.submissions import Submissions
from sgpu_magic.pool.tracker import Tracker
from sgpu_magic.wire.base import CancelReason, RunState, short
from sgpu_magic.wire.client import (
    Accepted,
    AskRank,
    AskStacks,
    Attach,
    Attached,
    Cancel,
    ClientMessage,
    Describe,
    Detach,
    Goodbye,
    KeepEnvironment,
    OpenLine,
    Ping,
    ReclaimPayload,
    RestartRanks,
    ResultsReceived,
    SendComms,
    StopPool,
    Submit,
    TrackRun,
    Unfollow,
    Warm,
)
from sgpu_magic.wire.events import Described, Detached
from sgpu_magic.wire.files import KEY, AskBlobs, ListRunFiles, PutBlob, ReadRunFile
from sgpu_magic.wire.node import DetachRun, KillRanks
from sgpu_magic.wire.pool_status import (
    PROTOCOL_VERSION,
    AskBulk,
    AskStatus,
    Hello,
    Welcome,
)
from sgpu_magic.wire.streams import OpenStream, StreamClosed, StreamData, StreamEnded, StreamTaken

# an agent reports a cell that came over its session's line within this time
_REPORTED_S = 0.2
# delay of a pool's stop, so that its reply is sent first
_ANSWER_FIRST_S = 0.05
# longer than the default grace of 5 s for ranks that were asked to exit
_RANKS_LEAVE_S, _RANKS_PAUSE_S = 6.0, 0.02
_OF_RUNS = (Submit, Cancel, RestartRanks, Attach)


class Requests:
    """Handles clients' requests.

    Args:
        settings: The pool's settings.
        server: Where the clients are connected.
        engine: Where the ranks run.
        ledger: The rows of all runs.
        active: The active runs.
        stock: The newest inventory of the nodes.
        guard: Makes calls and contains their faults.
        feed: Feeds a stimulus to the scheduler and executes its instructions.
        permissions: What each client may ask for.
        kept_environments: The files that describe the runs' packages.
        files: Receives uploads and reads runs' files.
        tracker: Has runs written to MLflow.
        status: Answers questions about the status.
        forwarding: Forwards connections to ports of runs.
        ranks: Passes requests to ranks.
        submissions: Accepts or refuses submitted runs.
        line_cells: Opens the lines of sessions.
        stop: Ends the pool.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        server: Server,
        engine: Engine,
        ledger: Ledger,
        active: ActiveRuns,
        stock: FreshInventory,
        guard: Guard,
        feed: Callable[[sched.Stimulus], None],
        permissions: Permissions,
        kept_environments: EnvironmentStore,
        files: FileRequestHandler,
        tracker: Tracker,
        status: StatusReports,
        forwarding: Forwarding,
        ranks: RankRequests,
        submissions: Submissions,
        line_cells: LineCells,
        stop: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._server = server
        self._engine = engine
        self._ledger = ledger
        self._active = active
        self._stock = stock
        self._guard = guard
        self._feed = feed
        self._files = files
        self._kept_environments = kept_environments
        self._permissions = permissions
        self._tracker = tracker
        self._status = status
        self._forwarding = forwarding
        self._ranks = ranks
        self._submissions = submissions
        self._line_cells = line_cells
        self._stop = stop
        self._service_id = secrets.token_hex(8)

    def on_message(self, client: ConnectedClient, asked: ClientMessage, frames: Sequence[bytes]) -> None:
        """Handle a client's message.

        Raises:
            SgpuError: The request is refused.
        """
        if isinstance(asked, _OF_RUNS) and not self._active.settled:
            # wait until the runs of an earlier service are adopted; a cancel must not overtake its run's submission
            self._when_fresh(client, asked, lambda: self.on_message(client, asked, frames))
            return
        match message := self._permissions.permitted(client, asked):
            case Hello():
                self._server.send(client, self._welcome(client))
            case Warm():
                self._engine.warm(message)
            case Submit():
                self._submissions.submit(client, message, frames)
            case Describe() | TrackRun() if self._active.speaker(message.run_id) is None:
                # a cell that came over its session's line is reported a moment later
                about = functools.partial(self._note_about_run, message)
                asyncio.get_running_loop().call_later(_REPORTED_S, self._guard.for_client, client, message, about)
            case Describe() | TrackRun():
                self._note_about_run(message)
            case KeepEnvironment():
                self._kept_environments.keep(message, client.user)
            case Cancel():
                self._cancel(client, message)
            case RestartRanks():
                self._ranks.restart(client, message)
            case OpenLine():
                self._line_cells.open(client, message)
            case AskRank():
                self._ranks.ask(client, message)
            case Attach():
                self._attach(client, message)
            case Unfollow():
                if (run := self._active.speaker(message.run_id)) is not None and client in run.watchers:
                    run.watchers.remove(client)
                if run is None or client not in run.followers:
                    self._active.event_feed.forget(client, message.run_id)
            case Detach():
                self._detach(client, message)
            case AskStacks():
                self._ask_stacks(client, message)
            case SendComms():
                if (run := self._active.get(message.run_id)) is not None and run.placed_at is not None:
                    self._engine.forward(message.run_id, message.rank, message, frames)
            case ReclaimPayload():
                self._engine.order(message)
            case ResultsReceived():
                run = self._active.speaker(message.run_id)
                # a detached run keeps its results for later clients
                if run is None or not run.spec.detach:
                    self._engine.order(message)
            case AskStatus():
                self._when_fresh(client, message, lambda: self._status.answer(client, message))
            case AskBlobs() | PutBlob() | ReadRunFile() | ListRunFiles():
                self._files.on_request(client, message, frames)
            case OpenStream() | StreamData() | StreamTaken() | StreamEnded() | StreamClosed():
                self._forwarding.from_client(client, message, frames)
            case StopPool():
                self._stop_asked(client, message, asyncio.get_running_loop().time() + _RANKS_LEAVE_S)
            case Goodbye():
                self._server.drop(client)
                self.on_client_disconnect(client)
            case Ping() | AskBulk() | None:
                pass

    def on_client_disconnect(self, client: ConnectedClient) -> None:
        """Cancel the attached runs of a client that is gone: its kernel died or unloaded the extension."""
        self._forwarding.on_client_disconnect(client)
        for run in self._active.on_client_disconnect(client):
            self._engine.order(ResultsReceived(run_id=run.run_id))
            self._feed(sched.CancelRequested(run.run_id, CancelReason.OWNER_GONE))

    def ranks_exited(self, run_id: str) -> None:
        """End the requests and streams to a run whose ranks are gone."""
        self._ranks.run_exited(run_id)
        self._forwarding.run_exited(run_id)

    def _note_about_run(self, message: Describe | TrackRun) -> None:
        if isinstance(message, TrackRun):
            self._tracker.track(message.run_id, message.tracking)
        elif (run := self._active.speaker(message.run_id)) is not None:
            self._active.publish(run, Described(tags=message.tags), time.time())

    # ------------------------------------------------------------ cancel, stop

    def _cancel(self, client: ConnectedClient, message: Cancel) -> None:
        if not message.run:
            return
        run = self._permissions.going(client, message.run, ends=True)
        kill = message.kill and (run.state is RunState.CANCELLING or run.state.is_final)
        text = f"run {short(run.run_id)} is being {'killed' if kill else 'cancelled'}"
        self._server.send(client, Accepted(request=message.request, run_id=run.run_id, text=text))
        if kill:
            self._engine.order(KillRanks(run_id=run.run_id))
        else:
            self._feed(sched.CancelRequested(run.run_id, message.reason))

    def _stop_asked(self, client: ConnectedClient, message: StopPool, until: float) -> None:
        """Stop the pool unless it is in use; until the loop's time `until`, wait for ranks of runs that have ended."""
        loop = asyncio.get_running_loop()
        going = [] if message.force else self._active.going
        if going and all(run.ended for run in going) and loop.time() < until:
            again = functools.partial(self._stop_asked, client, message, until)
            loop.call_later(_RANKS_PAUSE_S, self._guard.for_client, client, message, again)
            return
        if going:
            names = ", ".join(short(run.run_id) for run in going)
            raise PoolError(f"the pool has active runs ({names}). Wait for them, or end them too with --force.")
        self._server.send(client, Accepted(request=message.request, text="the pool is stopping"))
        loop.call_later(_ANSWER_FIRST_S, self._stop)

    # ------------------------------------------------------------ attach, detach, stacks

    def _attach(self, client: ConnectedClient, message: Attach) -> None:
        run_id = self._permissions.to_follow(client, message.run)
        run = self._active.speaker(run_id)
        directory = self._active.directory(run_id)
        spec = run.spec if run is not None else read_spec(directory)
        if spec is None:
            raise RunUnknown(
                f"the output and results of run {short(run_id)} are no longer kept. `sgpu runs` still lists it."
            )
        summary = self._ledger.summary(run_id)
        state = RunState.FAILED if summary is None else summary.state
        if run is not None:
            state = run.state
        try:
            key = (directory / KEY).read_bytes()
        except OSError:
            key = run.submit.context.key if run is not None else b""
        self._server.send(client, Attached(request=message.request, spec=spec, state=state, key=key))
        if run is None or run.log is not None:
            self._active.event_feed.catch_up(client, run_id, directory, message.after)
        if run is None:
            return
        if client is run.owner:
            # it follows the run here from now on, as its line is closed
            run.is_on_line = False
        if client in run.followers:
            return
        if message.owns and not spec.detach:
            run.owner = client
            run.adopted = run.is_on_line = False
            self._line_cells.session_owned(run)
        else:
            run.watchers.append(client)

    def _detach(self, client: ConnectedClient, message: Detach) -> None:
        if message.run:
            run = self._permissions.going(client, message.run)
            if why := ends_with_notebook(run.spec):
                raise UsageError(why)
            runs = [run]
        else:
            owned = [run for run in self._active.going if run.owner is client]
            runs = [run for run in owned if not ends_with_notebook(run.spec)]
        for run in runs:
            try:
                run.hold_payload()
            except OSError as error:
                why = f"its variables can't be read: {error.strerror}"
                raise UsageError(f"run {short(run.run_id)} can't be detached: {why}.") from error
            if not run.spec.detach:
                run.detach()
                self._engine.order(DetachRun(run_id=run.run_id))
                self._active.publish(run, Detached(reason="it was detached"), time.time())
        names = ", ".join(short(run.run_id) for run in runs)
        verb = "continues" if len(runs) == 1 else "continue"
        text = f"{plural(len(runs), 'run')} {names} {verb} without a notebook" if runs else "no run to detach"
        first = runs[0].run_id if runs else ""
        self._server.send(client, Accepted(request=message.request, run_id=first, text=text))

    def _ask_stacks(self, client: ConnectedClient, message: AskStacks) -> None:
        if message.run:
            run = self._permissions.going(client, message.run)
        else:
            placed = [run for run in self._active.going if run.placed_at is not None]
            if not (seen := [run for run in placed if client.may_see(run.spec.owner.user)]):
                raise RunUnknown("no run is active.")
            run = seen[-1]
        self._ranks.ask_stacks(client, message, run)

    def _when_fresh(self, client: ConnectedClient, message: ClientMessage, call: Callable[[], None]) -> None:
        def refuse() -> None:
            raise PoolError(
                "the pool's nodes have not answered yet. `%sgpu_status` shows when they have; start it again then."
            )

        for_client = functools.partial(self._guard.for_client, client, message)
        guarded = functools.partial(for_client, call)
        match message:
            case AskStatus():
                # reply without an inventory if none arrives in time
                self._stock.when_fresh(guarded, STATUS_FRESH_S, late=guarded)
            case Submit():
                self._stock.when_fresh(guarded, late=functools.partial(for_client, refuse))
            case _:
                self._stock.when_fresh(guarded)

    def _welcome(self, client: ConnectedClient) -> Welcome:
        settings = self._settings
        sees_client = client.same_host and settings.environments == "auto"
        return Welcome(
            protocol_version=PROTOCOL_VERSION,
            package_version=__version__,
            pid=os.getpid(),
            busy=bool(self._active.going),
            sees_client=sees_client,
            same_host=client.same_host and client.shares_pids,
            near=client.same_host and client.shares_pids and not self._engine.far,
            user=client.user,
            service=self._service_id,
            pool=settings.pool or "local",
            settings=() if settings.listen else tuple(pool_settings(settings).items()),
            bulk_port=0 if client.same_host else self._server.bulk_port,
            # a local pool inherits the variables of its first client; Jupyter sets this one
            started_by="" if settings.listen else os.path.basename(os.environ.get("JPY_SESSION_NAME", "")),
        )
