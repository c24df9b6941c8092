"""What all parts of the service share, and how faults are contained: a fault costs one run or one reply.

Every message from a client, a node or a helper process is handled within a call of `Guard`. After a fault outside of
`Guard`, the service exits and the next one adopts its runs: those with a living agent continue under it, queued ones
are resubmitted by their notebooks, and all others are recorded as lost; their logs stay. A service that meets a fault
soon after its start would pass it on for ever: its successor is degraded, which `Health` describes.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError, SgpuError
from sgpu_magic.files.run_directory import read_spec
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.pool.active_runs import ActiveRuns, PoolRun, submitted_fields
from sgpu_magic.pool.ledger import Ledger, Metered, in_one_line
from sgpu_magic.pool.run_log import RunLog
from sgpu_magic.pool.scheduling import stimuli as sched
from sgpu_magic.pool.scheduling.scheduler import Scheduler
from sgpu_magic.pool.scheduling.stimuli import Stimulus
from sgpu_magic.pool.server import ConnectedClient, Server
from sgpu_magic.system.processes import may_be_alive, write_log
from sgpu_magic.wire.base import OWNER_GONE, FailureKind, RunState
from sgpu_magic.wire.client import ClientMessage, Submit
from sgpu_magic.wire.costs import cost_so_far, gpu_s_so_far
from sgpu_magic.wire.devices import Inventory
from sgpu_magic.wire.events import Noted, RunEnded, Submitted
from sgpu_magic.wire.node import HeldRun
from sgpu_magic.wire.rank_events import Failure
from sgpu_magic.wire.run import Owner

# an inventory older than this is refreshed before a run is placed on real devices
FRESH_S = 2.0
# a status that is requested every second is then at most two seconds old
STATUS_FRESH_S = 1.0
# must be less than the 15 s for which a client waits for its reply
ANSWER_WITHIN_S = 8.0

_TAKEN_OVER = "the pool service ended unexpectedly; a new one was started and has taken over the run"
_LOST = "the pool service and the agent of its ranks ended unexpectedly"
_NOT_AGAIN = "the pool service ended while the run waited in its queue, and its notebook did not submit it again"
_LOOK_S = 0.25


class ServiceFault(Exception):
    """A fault of the service that belongs to no run."""


class Health:
    """Why this service starts no new runs. It still follows and ends existing ones.

    Attributes:
        problems: Sentences without a full stop, by the part of the service that each is about.
    """

    def __init__(self) -> None:
        self.problems: dict[str, str] = {}

    @property
    def problem(self) -> str:
        """All problems in one text; "" without any."""
        return "; ".join(self.problems.values())

    def report(self, part: str, problem: str) -> None:
        """Record a part's problem; "" clears it."""
        if not problem:
            self.problems.pop(part, None)
        elif self.problems.get(part) != problem:
            self.problems[part] = problem
            write_log(f"sgpu: no new run is started: {problem}\n")

    def check(self) -> None:
        """Refuse a new run while there is a problem.

        Raises:
            PoolError: There is one.
        """
        if self.problems:
            raise PoolError(
                f"the pool starts no new runs: {self.problem}. Its active runs continue. It accepts runs again when "
                "this is over; to restart it, run `sgpu pool stop` (a served pool's operator restarts it)."
            )


class Guard:
    """Makes calls, and attributes a fault to the run or client that the call is for.

    Args:
        server: Where the clients are connected.
        active: The active runs.
        where: Where faults are logged, as the end of a sentence.

    Attributes:
        end: Ends a run after a fault. Takes the run, a sentence, and whether its ranks are gone.
    """

    def __init__(self, server: Server, active: ActiveRuns, where: str) -> None:
        self._server = server
        self._active = active
        self._where = where
        self.end: Callable[[PoolRun, str, bool], None] = lambda _run, _why, _gone: None

    def for_run(self, run_id: str, call: Callable[[], None], *, gone: bool = False) -> None:
        """Make a call for a run; a fault ends the run.

        Args:
            run_id: The run.
            call: The call.
            gone: Whether its ranks are gone.
        """
        run = self._active.get(run_id)
        try:
            call()
        except Exception as error:  # noqa: BLE001
            self.log(f"run {run_id} ends because of it", error)
            if (run := self._active.get(run_id) or run) is not None:
                self.end(run, self._words_of(error), gone)

    def for_client(self, client: ConnectedClient, message: ClientMessage, call: Callable[[], None]) -> None:
        """Make a call for a client's message.

        An `SgpuError` becomes the reply and refuses the request. After a fault the request is refused with an
        `InternalError`, and a run that the message submitted ends.
        """
        try:
            call()
        except SgpuError as error:
            self._server.refuse(client, getattr(message, "request", 0), error.message, type(error).__name__)
        except Exception as error:  # noqa: BLE001
            self.log(f"a message of process {client.pid} was dropped ({type(message).__name__})", error)
            run = self._active.get(message.spec.run_id) if isinstance(message, Submit) else None
            if run is not None and run.owner is client:
                self.end(run, self._words_of(error), False)
            elif request := getattr(message, "request", 0):
                self._server.refuse(client, request, self._words_of(error), "InternalError")

    def for_nobody(self, call: Callable[[], None], what: str = "a node's reply was dropped") -> None:
        """Make a call that belongs to no run, such as passing on a node's reply, which clients await with a deadline.

        Args:
            call: The call.
            what: What a fault costs, for the log.
        """
        try:
            call()
        except Exception as error:  # noqa: BLE001
            self.log(what, error)

    def log(self, what: str, error: BaseException) -> None:
        """Write a fault into the service's log."""
        write_log(f"an internal error in the pool service: {what}\n", error)

    def _words_of(self, error: Exception) -> str:
        return f"an internal error in the pool service ({type(error).__name__}: {error}); {self._where}"


class FreshInventory:
    """The newest inventory of one pool.

    Args:
        take: Asks the nodes for an inventory, which `taken` receives.

    Attributes:
        inventory: The newest inventory; an empty one before the first.
    """

    def __init__(self, take: Callable[[], None]) -> None:
        self._take = take
        self.inventory = Inventory(host="")
        # time at which `inventory` was taken; None before the first
        self._at: float | None = None
        self._waiting: list[Callable[[], None]] = []

    def taken(self, inventory: Inventory) -> list[Callable[[], None]]:
        """Store the newest inventory. Returns the calls that waited for it."""
        if inventory != self.inventory:
            # keep the old object if nothing has changed: comparisons of identical objects are fast
            self.inventory = inventory
        self._at = time.monotonic()
        waiting, self._waiting = self._waiting, []
        return waiting

    @property
    def is_known(self) -> bool:
        """Whether the nodes have sent any inventory."""
        return self._at is not None

    def when_fresh(
        self, call: Callable[[], None], fresh_s: float = FRESH_S, late: Callable[[], None] | None = None
    ) -> None:
        """Call at once if the inventory is fresh, else after the nodes have sent a new one.

        Processes outside the pool may have begun to use real devices since the last inventory.

        Args:
            call: The call.
            fresh_s: Age in seconds up to which an inventory counts as fresh.
            late: Called instead when the nodes have not answered within `ANSWER_WITHIN_S`; None waits for them.
        """
        stays = all(device.simulated for device in self.inventory.devices)
        if self._at is not None and (stays or time.monotonic() - self._at < fresh_s):
            call()
            return
        if self._at is not None and not self._waiting:
            self._take()
        self._waiting.append(call)
        if late is not None:
            asyncio.get_running_loop().call_later(ANSWER_WITHIN_S, self._give_up, call, late)

    def _give_up(self, call: Callable[[], None], late: Callable[[], None]) -> None:
        if call in self._waiting:
            self._waiting.remove(call)
            late()


class PoolParts(msgspec.Struct, frozen=True):
    """What all parts of one service share.

    Args:
        settings: The pool's settings.
        server: Where the clients are connected.
        engine: Where the ranks run.
        ledger: The rows of all runs.
        active: The active runs.
        scheduler: Decides which run gets which devices.
        stock: The newest inventory of the nodes.
        guard: Makes calls and contains their faults.
        health: Why no new run is started.
        feed: Feeds a stimulus to the scheduler and executes its instructions.
    """

    settings: Settings
    server: Server
    engine: Engine
    ledger: Ledger
    active: ActiveRuns
    scheduler: Scheduler
    stock: FreshInventory
    guard: Guard
    health: Health
    feed: Callable[[Stimulus], None]


# ---------------------------------------------------------------- runs of an earlier service


class Adoption:
    """Takes over an earlier service's runs, once, when the node has reported what it holds.

    Args:
        pool: The service's shared parts.
    """

    def __init__(self, pool: PoolParts) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        # read before this service accepts any run
        self._unfinished = pool.ledger.unfinished()
        # deadline for notebooks to reconnect to their runs
        self._until = self._loop.time() + pool.settings.adopt_timeout_s

    def take_over(self, held: Sequence[HeldRun]) -> None:
        self._pool.active.settled = True
        # adopt a session before the cells in it
        for one in sorted(held, key=lambda one: bool(one.launch.spec.session)):
            self._pool.guard.for_run(one.launch.spec.run_id, functools.partial(self._adopt, one))
        adopted = {one.launch.spec.run_id for one in held}
        for run_id in self._unfinished:
            if run_id not in adopted:
                self._pool.guard.for_run(run_id, functools.partial(self._judge, run_id))
        if held or self._pool.active.resubmittable:
            self._look()

    def _adopt(self, held: HeldRun) -> None:
        launch = held.launch
        now = time.monotonic()
        log = RunLog(self._pool.active.directory(launch.spec.run_id), launch.spec.run_id)
        ended = log.ended
        # the end of a group is not the end of the run until a service has handled it: it may be restarted
        goes_on = RunState.RUNNING if held.state.is_final else held.state
        run = PoolRun(
            Submit(request=0, **submitted_fields(launch)), (), None, goes_on if ended is None else ended.state
        )
        run.log = log
        launched_at = time.time() - held.started_s
        run.placed_at = now - held.started_s
        run.attempt = launch.attempt
        run.ordered = run.adopted = True
        run.ended_as = None if ended is None else ended.state
        run.payload_over = log.payload_released
        if log.failed_attempt is not None and log.failed_attempt.attempt > launch.attempt:
            # the earlier service was killed between one attempt and the next
            run.attempt, run.failed = log.failed_attempt.attempt, log.failed_attempt.failure
        self._pool.active.add(run)
        if not log.seq:
            # a cell in a session is launched before its first event is written
            self._pool.active.tell(run, Submitted(spec=launch.spec), launch.spec.submitted_at)
            placed = self._pool.active.billing.placed_event(launch.lease, launch.spec.owner.host, ())
            self._pool.active.tell(run, placed, launched_at)
        if not self._pool.ledger.has(run.run_id):
            self._pool.ledger.record(launch.spec, run.state)
        # the run's meter may have started with an earlier attempt
        metered_at, hourly = self._pool.active.billing.adopted(run, launch.lease, launched_at, now)
        if not (held.gone and run.ended):
            # otherwise the earlier service knew that the run was over, and may have given its devices to another run
            freed = held.gone and not run.may_start_again
            self._pool.feed(sched.RunAdopted(run, launch.lease, metered_at, freed, hourly))
        if ended is None:
            self._pool.ledger.update(run.run_id, state=run.state, lease=launch.lease)
            self._pool.active.tell(run, Noted(text=_TAKEN_OVER), time.time())
        elif run.run_id in self._unfinished:
            # the final event was logged, but not yet recorded in the ledger
            self._record_end(run.run_id, ended)
        self._pool.engine.adopt(run.run_id, log.numbers)

    def _judge(self, run_id: str) -> None:
        row = self._pool.ledger.summary(run_id)
        spec = read_spec(self._pool.active.directory(run_id))
        if row is not None and row.state is RunState.QUEUED and not row.started_at and spec is not None:
            self._pool.active.resubmittable[run_id] = spec
        else:
            self._close(run_id, _LOST)

    def _look(self) -> None:
        """End runs whose notebooks are dead or do not reconnect, as the earlier service would have done."""
        over = self._loop.time() > self._until
        for run_id, spec in list(self._pool.active.resubmittable.items()):
            if over or not _owner_may_live(spec.owner):
                del self._pool.active.resubmittable[run_id]
                self._close(run_id, _NOT_AGAIN)
        waits = bool(self._pool.active.resubmittable)
        for run in self._pool.active.going:
            if run.adopted and run.owner is None and not run.spec.detach and not run.ended:
                if over or not _owner_may_live(run.spec.owner):
                    self._pool.feed(sched.CancelRequested(run.run_id, OWNER_GONE))
                else:
                    waits = True
        if waits:
            self._loop.call_later(_LOOK_S, self._look)

    def _close(self, run_id: str, why: str) -> None:
        """Write the final event of a lost run; its logs stay."""
        now = time.time()
        ended = RunEnded(state=RunState.FAILED, failure=Failure(kind=FailureKind.NODE_LOST, message=why, at=now))
        directory = self._pool.active.directory(run_id)
        if directory.is_dir():
            log = RunLog(directory, run_id)
            if log.ended is not None:
                # the run had ended, but its end was not recorded in the ledger
                ended = log.ended
            else:
                if (row := self._pool.ledger.summary(run_id)) is not None and row.metered_at is not None:
                    # the time at which the ranks died is unknown: stop the meter at the last event
                    gpu_s, cost = gpu_s_so_far(row, log.at), cost_so_far(row, log.at)
                    currency = row.currency if cost is not None else ""
                    ended = msgspec.structs.replace(ended, gpu_s=gpu_s, cost=cost, currency=currency)
                log.append(ended, now)
            log.close()
        self._record_end(run_id, ended)

    def _record_end(self, run_id: str, ended: RunEnded) -> None:
        meter = Metered(gpu_s=ended.gpu_s, cost=ended.cost)
        failure = in_one_line(ended) or None
        self._pool.ledger.update(run_id, state=ended.state, ended_at=time.time(), failure=failure, meter=meter)


def _owner_may_live(owner: Owner) -> bool:
    return may_be_alive(owner.pid, owner.host, owner.namespace)
