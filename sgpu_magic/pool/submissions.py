"""What clients submit: checked, held here, brought before the scheduler, its packages made ready while it waits."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from sgpu_magic.nodes.base import Engine
from sgpu_magic.pool import stimuli as sched
from sgpu_magic.pool.admission import unfit, unstartable
from sgpu_magic.pool.byte_desk import ByteDesk, names_files
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.run_book import PoolRun, RunBook
from sgpu_magic.pool.server import ConnectedClient, Server
from sgpu_magic.wire.ids import is_valid_id
from sgpu_magic.wire.messages import ClientMessage, Submit
from sgpu_magic.wire.records import RunSpec
from sgpu_magic.wire.states import RunState

# a notebook that submits its session again after a service's death does so at once
_LOOK_AGAIN_S = 0.05


class Placing(Protocol):
    """The pool service, which finds devices for runs."""

    def feed(self, stimulus: sched.Stimulus) -> None: ...
    def with_fresh_inventory(self, call: Callable[[], None]) -> None: ...

    def answer(self, client: ConnectedClient, message: ClientMessage, call: Callable[[], None]) -> None:
        """Make a call for a client's message, which pays for its faults."""
        ...

    @property
    def resubmittable(self) -> Mapping[str, RunSpec]:
        """Runs that an earlier service had in its queue, by their ids."""
        ...


class Submissions:
    """Takes runs, or refuses them.

    Args:
        placing: The service.
        server: Where the clients are connected.
        engine: Where the ranks will be.
        book: Gets the runs.
        ledger: All runs there ever were.
        no_session: Says of a session that does not go on when and why it ended.
        bytes_desk: Keeps what runs need of their users' uploads.
    """

    def __init__(
        self,
        placing: Placing,
        server: Server,
        engine: Engine,
        book: RunBook,
        ledger: Ledger,
        no_session: Callable[[str], str],
        bytes_desk: ByteDesk,
    ) -> None:
        self._bytes_desk = bytes_desk
        self._placing = placing
        self._server = server
        self._engine = engine
        self._book = book
        self._ledger = ledger
        self._no_session = no_session
        self._loop = asyncio.get_running_loop()

    def submit(self, client: ConnectedClient, submit: Submit, frames: Sequence[bytes]) -> None:
        """Take a run and bring it before the scheduler, or tell the client why not."""
        spec = submit.spec
        again = self._placing.resubmittable.get(spec.run_id)
        if again is not None and not client.may_see(again.owner.user):
            again = None
        if not is_valid_id(spec.run_id) or self._book.get(spec.run_id) or (not again and self._ledger.has(spec.run_id)):
            problem = "the run's id is not valid or was used before."
        elif (not client.same_host or self._engine.far) and names_files(submit):
            problem = "what it ships lies in files of the notebook's machine, which its ranks do not see."
        else:
            problem = unfit(spec) or unstartable(submit)
        if problem:
            self._server.refuse(client, submit.request, problem)
            return
        if not again and (problem := self._book.why_not_recorded()):
            self._server.refuse(client, submit.request, problem, "PoolError")
            return
        if spec.session and not self._has_session(client, submit, frames):
            return
        spec = msgspec.structs.replace(spec, submitted_at=time.time() if again is None else again.submitted_at)
        run = PoolRun(msgspec.structs.replace(submit, spec=spec), frames, client)
        if spec.detach:
            try:
                run.hold_payload()
            except OSError as error:
                self._server.refuse(client, submit.request, f"the run's variables can't be read: {error.strerror}.")
                return
        self._bytes_desk.hold(run.submit)
        self._book.add(run)
        if spec.session:
            # it takes no device
            self._placing.feed(sched.RunSubmitted(spec, time.monotonic()))
        else:
            fed = lambda: self._placing.feed(sched.RunSubmitted(spec, time.monotonic()))  # noqa: E731
            self._placing.with_fresh_inventory(functools.partial(self._placing.answer, client, submit, fed))
            self._prepare(run)

    def unprepare(self, run: PoolRun) -> None:
        """It ends in the queue: nobody needs its packages any more."""
        environment = run.submit.environment
        if (
            environment is not None
            and run.placed_at is None
            and self._engine.builds(run.submit.interpreter, environment)
        ):
            self._engine.end_run(run.run_id, RunState.CANCELLED, "")

    # ------------------------------------------------------------ within

    def _prepare(self, run: PoolRun) -> None:
        """A run that waits has its packages made ready meanwhile."""
        environment = run.submit.environment
        if environment is not None and run.placed_at is None and self._book.get(run.run_id) is run:
            self._engine.prepare(run.run_id, run.submit.interpreter, environment)

    def _has_session(self, client: ConnectedClient, submit: Submit, frames: Sequence[bytes]) -> bool:
        """Whether the cell's session is there. Else it is looked for again, or the cell refused."""
        session = self._book.get(submit.spec.session)
        if session is not None and session.log is not None:
            return True
        if session is not None or submit.spec.session in self._placing.resubmittable:
            # it waited in the queue of a service that was killed, and is submitted again as well
            again = functools.partial(self._look_again, client, submit, frames)
            self._loop.call_later(_LOOK_AGAIN_S, self._placing.answer, client, submit, again)
        else:
            self._server.refuse(client, submit.request, self._no_session(submit.spec.session), "SessionError")
        return False

    def _look_again(self, client: ConnectedClient, submit: Submit, frames: Sequence[bytes]) -> None:
        if client in self._server.clients:
            self.submit(client, submit, frames)
