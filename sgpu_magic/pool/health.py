"""Limits each fault of the service to one run or one reply.

Every message from a client, a node or a helper process is handled within a call of `Guard`. After a fault outside of
`Guard`, the service exits and the next one adopts its runs: those with a living agent continue under it, queued ones
are resubmitted by their notebooks, and all others are recorded as lost; their logs stay. A fault soon after the start
would recur in every successor, so the next service is degraded; see `Health`.
"""

from __future__ import annotations

from collections.abc import Callable

from sgpu_magic.errors import PoolError, SgpuError
from sgpu_magic.pool.active_runs import ActiveRuns
from sgpu_magic.pool.pool_run import PoolRun
from sgpu_magic.pool.server import ConnectedClient, Server
from sgpu_magic.system.processes import write_log
from sgpu_magic.wire.base import ErrorKind
from sgpu_magic.wire.client import ClientMessage, Submit


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
        end_run: Ends a run after a fault. Takes the run, a sentence, and whether its ranks have exited.
    """

    def __init__(
        self, server: Server, active: ActiveRuns, where: str, end_run: Callable[[PoolRun, str, bool], None]
    ) -> None:
        self._server = server
        self._active = active
        self._where = where
        self._end_run = end_run

    def for_run(self, run_id: str, call: Callable[[], None], *, have_ranks_exited: bool = False) -> None:
        """Make a call for a run; a fault ends the run.

        Args:
            run_id: The run.
            call: The call.
            have_ranks_exited: Whether its ranks have exited.
        """
        run = self._active.get(run_id)
        try:
            call()
        except Exception as error:  # noqa: BLE001
            self.log(f"run {run_id} ends because of it", error)
            if (run := self._active.get(run_id) or run) is not None:
                self._end_run(run, self._fault_message(error), have_ranks_exited)

    def for_client(self, client: ConnectedClient, message: ClientMessage, call: Callable[[], None]) -> None:
        """Make a call for a client's message.

        An `SgpuError` becomes the reply and refuses the request. After a fault the request is refused with an
        `InternalError`, and a run that the message submitted ends.
        """
        try:
            call()
        except SgpuError as error:
            self._server.refuse(client, getattr(message, "request", 0), error.text, kind_of(error))
        except Exception as error:  # noqa: BLE001
            self.log(f"a message of process {client.pid} was dropped ({type(message).__name__})", error)
            run = self._active.get(message.spec.run_id) if isinstance(message, Submit) else None
            if run is not None and run.owner is client:
                self._end_run(run, self._fault_message(error), False)
            elif request := getattr(message, "request", 0):
                self._server.refuse(client, request, self._fault_message(error), ErrorKind.INTERNAL)

    def for_nobody(self, call: Callable[[], None], what: str = "a node's reply was dropped") -> None:
        """Make a call that belongs to no run, such as passing on a node's reply, which clients await with a deadline.

        Args:
            call: The call.
            what: The consequence of a fault, for the log.
        """
        try:
            call()
        except Exception as error:  # noqa: BLE001
            self.log(what, error)

    def log(self, what: str, error: BaseException) -> None:
        """Write a fault into the service's log."""
        write_log(f"an internal error in the pool service: {what}\n", error)

    def _fault_message(self, error: Exception) -> str:
        return f"an internal error in the pool service ({type(error).__name__}: {error}); {self._where}"


def kind_of(error: SgpuError) -> ErrorKind:
    """Return the kind of an error for the client: that of its class, or of the nearest class above it."""
    kinds = {kind.value: kind for kind in ErrorKind}
    return next((kinds[cls.__name__] for cls in type(error).__mro__ if cls.__name__ in kinds), ErrorKind.POOL)
