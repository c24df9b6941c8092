"""What clients ask, and the answers. What follows from it for devices and queue is the scheduler's to say."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from sgpu_magic.files.run_directory import read_spec
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.pool.active_runs import ActiveRuns
from sgpu_magic.pool.file_requests import FileRequests
from sgpu_magic.pool.forwarding import Forwarding
from sgpu_magic.pool.kept_environments import KeptEnvironments
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.permissions import Permissions
from sgpu_magic.pool.scheduling import stimuli as sched
from sgpu_magic.pool.server import ConnectedClient, Server
from sgpu_magic.pool.session_requests import SessionRequests
from sgpu_magic.pool.submissions import Placing, Submissions, ends_with_notebook
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
    Ping,
    ReclaimPayload,
    RestartRanks,
    ResultsReceived,
    Stacks,
    StopPool,
    Submit,
    TellComms,
    TrackRun,
    Unfollow,
    Warm,
)
from sgpu_magic.wire.events import Described, Detached
from sgpu_magic.wire.failures import RankStack
from sgpu_magic.wire.files import (
    KEY,
    AskBlobs,
    ListRunFiles,
    OpenStream,
    PutBlob,
    ReadRunFile,
    StreamClosed,
    StreamData,
    StreamEnded,
    StreamTaken,
)
from sgpu_magic.wire.ids import short
from sgpu_magic.wire.pool_status import AskStatus, Hello, PoolStatus, Welcome
from sgpu_magic.wire.run import CellSource
from sgpu_magic.wire.states import OWNER_GONE, RunState


class Core(Placing, Protocol):
    """The pool service."""

    def welcome(self, client: ConnectedClient) -> Welcome: ...
    def status(self, question: AskStatus) -> PoolStatus: ...
    def stop_soon(self) -> None: ...
    def track(self, message: TrackRun) -> None: ...

    @property
    def settled(self) -> bool:
        """What an earlier service left is known."""
        ...


class Requests:
    """Answers clients.

    Args:
        core: The service.
        server: Where they are connected.
        engine: Where the ranks are.
        active: The runs.
        ledger: All runs there ever were.
        permissions: What each client may ask for.
        kept_environments: What describes the runs' packages.
        files: Takes uploads and reads runs' files.
    """

    def __init__(
        self,
        core: Core,
        server: Server,
        engine: Engine,
        active: ActiveRuns,
        ledger: Ledger,
        permissions: Permissions,
        kept_environments: KeptEnvironments,
        files: FileRequests,
    ) -> None:
        self._core = core
        self._files = files
        self._server = server
        self._engine = engine
        self._active = active
        self._ledger = ledger
        self._kept_environments = kept_environments
        # never used twice: an answer that comes late is for nobody
        self._stack_numbers = itertools.count(1)
        self._asked_stacks: dict[int, tuple[ConnectedClient, AskStacks, str]] = {}
        self._permissions = permissions
        self.forwarding = Forwarding(server, engine, self._permissions.own_going)
        self.sessions = SessionRequests(server, engine, active, ledger, core.feed)
        self.submissions = Submissions(core, server, engine, active, ledger, self.sessions.unknown, files)

    def heard(self, client: ConnectedClient, asked: ClientMessage, frames: Sequence[bytes]) -> None:
        match message := self._permissions.permitted(client, asked):
            case Hello():
                self._server.send(client, self._core.welcome(client))
            case Warm():
                self._engine.warm(message)
            case Submit():
                self._when_settled(client, message, lambda: self._submit(client, message, frames))
            case Describe():
                run = self._active.speaker(message.run_id)
                if run is not None:
                    self._active.tell(run, Described(tags=message.tags), time.time())
            case TrackRun():
                self._core.track(message)
            case KeepEnvironment():
                self._kept_environments.keep(message, client.user)
            case Cancel():
                # never before the run that it means
                self._when_settled(client, message, lambda: self._cancel(client, message))
            case RestartRanks():
                self._when_settled(client, message, lambda: self.sessions.restart(client, message))
            case AskRank():
                self.sessions.ask(client, message)
            case Attach():
                self._when_settled(client, message, lambda: self._attach(client, message))
            case Unfollow():
                run = self._active.speaker(message.run_id)
                if run is not None and client in run.watchers:
                    run.watchers.remove(client)
                if run is None or client not in run.followers:
                    self._active.feed.forget(client, message.run_id)
            case Detach():
                self._detach(client, message)
            case AskStacks():
                self._ask_stacks(client, message)
            case TellComms():
                if (run := self._active.get(message.run_id)) is not None and run.placed_at is not None:
                    self._engine.tell_comms(message, frames)
            case ReclaimPayload():
                self._engine.reclaim_payload(message.run_id)
            case ResultsReceived():
                self._results_received(message.run_id)
            case AskStatus():
                tell = functools.partial(self._tell_status, client, message)
                self._core.with_fresh_inventory(functools.partial(self._core.answer, client, message, tell))
            case AskBlobs() | PutBlob() | ReadRunFile() | ListRunFiles():
                self._files.heard(client, message, frames)
            case OpenStream():
                self.forwarding.opens(client, message)
            case StreamData() | StreamTaken() | StreamEnded() | StreamClosed():
                self.forwarding.from_client(client, message, frames)
            case StopPool():
                self._stop_asked(client, message)
            case Goodbye():
                self._server.drop(client)
                self.client_gone(client)
            case Ping() | None:
                pass

    def client_gone(self, client: ConnectedClient) -> None:
        """A kernel is dead or has unloaded: runs that only it wanted have no owner any more."""
        self.forwarding.client_gone(client)
        for run in self._active.client_gone(client):
            self._engine.results_received(run.run_id)
            self._core.feed(sched.CancelRequested(run.run_id, OWNER_GONE, time.monotonic()))

    def stacks_taken(self, request: int, stacks: tuple[RankStack, ...]) -> None:
        asked = self._asked_stacks.pop(request, None)
        if asked is not None:
            client, question, run_id = asked
            run = self._active.speaker(run_id)
            cell = run.spec.cell if run is not None else CellSource(body="")
            self._server.send(client, Stacks(request=question.request, run_id=run_id, stacks=stacks, cell=cell))

    def ranks_gone(self, run_id: str) -> None:
        """Nobody will answer for its ranks any more."""
        self.sessions.session_gone(run_id)
        self.forwarding.run_gone(run_id)
        for number, (client, question, asked_run) in list(self._asked_stacks.items()):
            if asked_run == run_id:
                del self._asked_stacks[number]
                text = f"run {short(run_id)} ended before its ranks could be asked."
                self._server.refuse(client, question.request, text)

    # ------------------------------------------------------------ cancel, stop

    def _submit(self, client: ConnectedClient, message: Submit, frames: Sequence[bytes]) -> None:
        # whoever has gone meanwhile would leave a run without an owner
        if client in self._server.clients:
            self.submissions.submit(client, message, frames)

    def _cancel(self, client: ConnectedClient, message: Cancel) -> None:
        run = self._permissions.going(client, message.request, message.run, ends=True) if message.run else None
        if run is None:
            return
        kill = message.kill and (run.state is RunState.CANCELLING or run.state.is_final)
        text = f"run {short(run.run_id)} is being {'killed' if kill else 'cancelled'}"
        self._server.send(client, Accepted(request=message.request, run_id=run.run_id, text=text))
        if kill:
            self._engine.kill_ranks(run.run_id)
        else:
            self._core.feed(sched.CancelRequested(run.run_id, message.reason, time.monotonic()))

    def _stop_asked(self, client: ConnectedClient, message: StopPool) -> None:
        if self._active.going and not message.force:
            names = ", ".join(short(run.run_id) for run in self._active.going)
            text = f"the pool has runs going on ({names}). Wait for them, or stop it with --force, which ends them."
            self._server.refuse(client, message.request, text, "PoolError")
            return
        self._server.send(client, Accepted(request=message.request, text="the pool stops"))
        self._core.stop_soon()

    # ------------------------------------------------------------ follow, let go, look into

    def _attach(self, client: ConnectedClient, message: Attach) -> None:
        run_id = self._permissions.to_follow(client, message)
        if run_id is None:
            return
        run = self._active.speaker(run_id)
        directory = self._active.directory(run_id)
        spec = run.spec if run is not None else read_spec(directory)
        if spec is None:
            text = f"what run {short(run_id)} printed and returned is no longer kept, only that it was: `sgpu runs`."
            self._server.refuse(client, message.request, text, "RunUnknown")
            return
        summary = self._ledger.summary(run_id)
        state = run.state if run is not None else summary.state if summary is not None else RunState.FAILED
        try:
            key = (directory / KEY).read_bytes()
        except OSError:
            key = run.submit.context.key if run is not None else b""
        self._server.send(client, Attached(request=message.request, spec=spec, state=state, key=key))
        if run is None or run.log is not None:
            self._active.feed.catch_up(client, run_id, directory, message.after)
        if run is None or client in run.followers:
            return
        if message.owns and not spec.detach:
            run.owner = client
            run.adopted = False
        else:
            run.watchers.append(client)

    def _detach(self, client: ConnectedClient, message: Detach) -> None:
        if message.run:
            run = self._permissions.going(client, message.request, message.run)
            if run is None:
                return
            if why := ends_with_notebook(run.spec):
                self._server.refuse(client, message.request, why)
                return
            runs = [run]
        else:
            owned = [run for run in self._active.going if run.owner is client]
            runs = [run for run in owned if not ends_with_notebook(run.spec)]
        for run in runs:
            try:
                run.hold_payload()
            except OSError as error:
                text = f"run {short(run.run_id)} can't go on alone: its variables can't be read: {error.strerror}."
                self._server.refuse(client, message.request, text)
                return
            if not run.spec.detach:
                run.detach()
                self._engine.detach_run(run.run_id)
                self._active.tell(run, Detached(reason="it was detached"), time.time())
        names = ", ".join(short(run.run_id) for run in runs)
        verb = "goes" if len(runs) == 1 else "go"
        text = f"run{'s' * (len(runs) > 1)} {names} {verb} on without a notebook" if runs else "no run to detach"
        self._server.send(client, Accepted(request=message.request, run_id=runs[0].run_id if runs else "", text=text))

    def _ask_stacks(self, client: ConnectedClient, message: AskStacks) -> None:
        if message.run:
            run = self._permissions.going(client, message.request, message.run)
        else:
            placed = [run for run in self._active.going if run.placed_at is not None]
            run = next((run for run in reversed(placed) if client.may_see(run.spec.owner.user)), None)
            if run is None:
                self._server.refuse(client, message.request, "no run is going on.", "RunUnknown")
        if run is None:
            return
        if run.placed_at is None:
            text = f"run {short(run.run_id)} has no ranks yet: it is {run.state}."
            self._server.refuse(client, message.request, text)
            return
        number = next(self._stack_numbers)
        self._asked_stacks[number] = (client, message, run.run_id)
        self._engine.take_stacks(number, run.run_id)

    # ------------------------------------------------------------ within

    def _results_received(self, run_id: str) -> None:
        run = self._active.speaker(run_id)
        # a detached run's results stay for whoever comes later
        if run is None or not run.spec.detach:
            self._engine.results_received(run_id)

    def _tell_status(self, client: ConnectedClient, message: AskStatus) -> None:
        self._server.send(client, self._permissions.shown(client, self._core.status(message)))

    def _when_settled(self, client: ConnectedClient, message: ClientMessage, call: Callable[[], None]) -> None:
        """Once it is known which runs of an earlier service go on."""
        if self._core.settled:
            call()
        else:
            self._core.with_fresh_inventory(functools.partial(self._core.answer, client, message, call))
