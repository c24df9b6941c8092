"""Submitted runs: checked, held, passed to the scheduler; their packages, prepared and described while they wait.

The directories of all runs with the same environment and user link to the same read-only files that describe it
(`requirements.txt`, `pylock.toml`), so a thousand runs take no more disk space than one. Files that no run's directory
links to any more are removed by the pool's retention.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.config.submission_checks import unfit, unstartable
from sgpu_magic.errors import PoolError, SessionError, UsageError
from sgpu_magic.files.run_directory import why_no_run
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.pool.active_runs import ActiveRuns
from sgpu_magic.pool.file_requests import FileRequestHandler, names_files
from sgpu_magic.pool.health import Guard, Health
from sgpu_magic.pool.inventory import FreshInventory
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.pool_run import PoolRun
from sgpu_magic.pool.scheduling import stimuli as sched
from sgpu_magic.pool.server import ConnectedClient, Server
from sgpu_magic.wire.base import RunState, is_valid_id
from sgpu_magic.wire.client import Submit

# after a service's death a notebook resubmits its session at once, so the cell need not wait longer
_LOOK_AGAIN_S = 0.05


class Submissions:
    """Accepts or refuses submitted runs.

    Args:
        settings: The pool's settings.
        server: Where the clients are connected.
        engine: Where the ranks run.
        ledger: The rows of all runs.
        active: The active runs.
        stock: The newest inventory of the nodes.
        guard: Makes calls and contains their faults.
        health: Why no new run is started.
        feed: Feeds a stimulus to the scheduler and executes its instructions.
        no_session: Returns a sentence that says when and why a session ended.
        files: Holds what runs need of their users' uploads.
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
        health: Health,
        feed: Callable[[sched.Stimulus], None],
        no_session: Callable[[str], str],
        files: FileRequestHandler,
    ) -> None:
        self._settings = settings
        self._server = server
        self._engine = engine
        self._ledger = ledger
        self._active = active
        self._stock = stock
        self._guard = guard
        self._health = health
        self._feed = feed
        self._files = files
        self._no_session = no_session
        self._loop = asyncio.get_running_loop()

    def submit(self, client: ConnectedClient, submit: Submit, frames: Sequence[bytes]) -> None:
        """Accept a run and pass it to the scheduler.

        Raises:
            SgpuError: The run is refused.
        """
        if client not in self._server.clients:
            # the client is gone: the run would have no owner
            return
        if not client.same_files and submit.environment is not None:
            # the kernel's own Python is on another machine only
            submit = msgspec.structs.replace(submit, environment=msgspec.structs.replace(submit.environment, own=False))
        spec = submit.spec
        again = self._active.resubmittable.get(spec.run_id)
        if again is not None and not client.may_see(again.owner.user):
            again = None
        known = self._active.get(spec.run_id) or (not again and self._ledger.has(spec.run_id))
        if known or not is_valid_id(spec.run_id):
            raise UsageError("the run's ID is invalid or was used before.")
        if (not client.same_host or self._engine.far) and names_files(submit):
            raise UsageError("its payload is in files on the notebook's machine, which its ranks can't read.")
        if problem := unfit(spec) or unstartable(submit):
            raise UsageError(problem)
        if not again and (problem := why_no_run(self._settings.runs_path)):
            raise PoolError(problem)
        if not again and not spec.session:
            self._health.check()
        if spec.session and not self._has_session(client, submit, frames):
            return
        spec = msgspec.structs.replace(spec, submitted_at=time.time() if again is None else again.submitted_at)
        run = PoolRun(msgspec.structs.replace(submit, spec=spec), frames, client)
        if spec.detach:
            try:
                run.hold_payload()
            except OSError as error:
                raise UsageError(f"the run's variables can't be read: {error.strerror}.") from error
        self._files.hold(run.submit)
        self._active.add(run)

        def feed() -> None:
            self._feed(sched.RunSubmitted(run.scheduled))

        if spec.session:
            # a run in a session takes no device
            feed()
        else:
            self._stock.when_fresh(functools.partial(self._guard.for_client, client, submit, feed))
            environment = run.submit.environment
            if environment is not None and not run.has_group and self._active.get(run.run_id) is run:
                self._engine.prepare(run.run_id, run.submit.interpreter, environment)

    def unprepare(self, run: PoolRun) -> None:
        """Stop preparing the packages of a run that ends in the queue."""
        environment = None if run.placed_at is not None else run.submit.environment
        if environment is not None and self._engine.builds(run.submit.interpreter, environment):
            self._engine.end_run(run.run_id, RunState.CANCELLED, "")

    # ------------------------------------------------------------ internals

    def _has_session(self, client: ConnectedClient, submit: Submit, frames: Sequence[bytes]) -> bool:
        """Whether the cell's session exists. If it may be resubmitted, the cell's submission is retried later.

        Raises:
            SessionError: There is no such session.
        """
        if (session := self._active.get(submit.spec.session)) is not None and session.log is not None:
            return True
        if session is None and submit.spec.session not in self._active.resubmittable:
            raise SessionError(self._no_session(submit.spec.session))
        # the session was queued in a service that was killed, and its notebook resubmits it as well
        again = functools.partial(self.submit, client, submit, frames)
        self._loop.call_later(_LOOK_AGAIN_S, self._guard.for_client, client, submit, again)
        return False
