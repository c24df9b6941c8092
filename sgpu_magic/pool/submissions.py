"""Submitted runs: checked, held, passed to the scheduler; their packages, prepared and described while they wait.

`unfit` and `unstartable` return why no pool accepts a run, whatever devices are free. They are pure.

The directories of all runs with the same environment and user link to the same read-only files that describe it
(`requirements.txt`, `pylock.toml`), so a thousand runs take no more disk space than one. Files that no run's directory
links to any more are removed by the pool's retention.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Sequence

import msgspec

from sgpu_magic.config import SEVEN_DAYS_S, Settings
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
from sgpu_magic.wire.base import RunKind, RunState, is_valid_id, short
from sgpu_magic.wire.client import Submit
from sgpu_magic.wire.option_text import OptionName, Text, text_of
from sgpu_magic.wire.run import RunSpec

# CPU ranks may share slots, and each costs the agent several descriptors
_MOST_RANKS = 4096
_MAX_RETRIES = 100
# after a service's death a notebook resubmits its session at once, so the cell need not wait longer
_LOOK_AGAIN_S = 0.05


def unfit(spec: RunSpec) -> Text | None:
    """Return why the run is not accepted, a sentence; None when it is."""
    is_session = spec.kind is RunKind.SESSION
    if spec.placement.ranks < 1:
        return f"a run needs at least one rank, not {spec.placement.ranks}."
    if not 0 < spec.timeout_s <= SEVEN_DAYS_S:
        return "a run's time limit must be more than 0 s and at most 7 days."
    if spec.placement.ranks > _MOST_RANKS:
        return f"a run has at most {_MOST_RANKS} ranks, not {spec.placement.ranks}."
    if not 0 <= spec.retries <= _MAX_RETRIES:
        return f"a run can be restarted 0 to {_MAX_RETRIES} times."
    if spec.max_cost is not None and not (math.isfinite(spec.max_cost) and spec.max_cost > 0):
        return text_of(OptionName("max-cost"), f" takes a finite number greater than 0, not {spec.max_cost:g}.")
    if spec.max_cost is not None and spec.session:
        return "a run in a session has no cost of its own: give the limit when you connect the session."
    if is_session and spec.session:
        return "a session has its own lease: it can't start in another session."
    if spec.idle_s is not None and not (is_session and spec.idle_s > 0):
        return "only a session has an idle limit, and it must be more than 0 s."
    if spec.retries and (is_session or spec.in_session):
        what = "a session" if is_session else "a cell in a session's ranks"
        return text_of(
            f"{what} is not restarted automatically. Leave ",
            OptionName("retries"),
            " out, or run the cell with ",
            OptionName("fresh"),
            ".",
        )
    if spec.kind in (RunKind.PUSH, RunKind.PULL) and not spec.in_session:
        return "names are pushed to and pulled from a session's ranks. Connect first with %sgpu_connect."
    return ends_with_notebook(spec) if spec.detach else None


def unstartable(submit: Submit) -> str | None:
    """Return why no process can be started from this message; None when one can.

    Checked here because a failure would hit the agent, which also serves other users' ranks.
    """
    variables = submit.interpreter.variables | submit.context.environ
    words = [submit.interpreter.executable, submit.context.cwd, *submit.context.sys_path, *variables]
    no_name = any("=" in name or not name for name in variables)
    if no_name or any("\0" in word for word in (*words, *variables.values())):
        return "its environment variables, path or directory contain a character that no process can be started with."
    return None


def ends_with_notebook(spec: RunSpec) -> str | None:
    """Return why the run can't be detached; None when it can."""
    if spec.kind is RunKind.SESSION:
        return f"session {spec.name or short(spec.run_id)} can't be detached: a session ends with its notebook."
    if spec.session:
        run = f"run {short(spec.run_id)}"
        return f"{run} can't be detached: it is in a session, which ends with its notebook. Run it without one."
    return None


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
