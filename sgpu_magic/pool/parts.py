"""What all parts of the service share, and how faults are contained: a fault costs one run or one reply.

Every message from a client or a node is handled within a call of `Guard`. After a fault outside of `Guard`, the service
exits and the next one adopts its runs.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.errors import SgpuError
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.pool.active_runs import ActiveRuns, PoolRun
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.scheduling.scheduler import Scheduler
from sgpu_magic.pool.scheduling.stimuli import Stimulus
from sgpu_magic.pool.server import ConnectedClient, Server
from sgpu_magic.wire.client import ClientMessage, Submit
from sgpu_magic.wire.devices import Inventory

# an inventory older than this is refreshed before a run is placed on real devices
FRESH_S = 2.0
# a status that is asked for every second is then at most two seconds old
STATUS_FRESH_S = 1.0


class ServiceFault(Exception):
    """A fault of the service that belongs to no run."""


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
            run = self._active.get(run_id) or run
            if run is not None:
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

    def for_nobody(self, call: Callable[[], None]) -> None:
        """Pass on a node's reply. A fault drops this reply; clients wait for it with a deadline."""
        try:
            call()
        except Exception as error:  # noqa: BLE001
            self.log("a node's reply was dropped", error)

    def log(self, what: str, error: BaseException) -> None:
        """Write a fault into the service's log."""
        # the log's disk may be full
        with contextlib.suppress(OSError):
            sys.stderr.write(
                f"an internal error in the pool service: {what}\n{''.join(traceback.format_exception(error))}"
            )

    def _words_of(self, error: Exception) -> str:
        return f"an internal error in the pool service ({type(error).__name__}: {error}); {self._where}"


class FreshInventory:
    """The newest inventory of one pool.

    Args:
        take: Asks the nodes for an inventory, which `taken` receives.

    Attributes:
        inventory: The newest inventory; None before the first.
    """

    def __init__(self, take: Callable[[], None]) -> None:
        self._take = take
        self.inventory: Inventory | None = None
        self._at = 0.0
        self._waiting: list[Callable[[], None]] = []

    @property
    def host(self) -> str:
        """The name of the machine or the cluster; "" before it is known."""
        return self.inventory.host if self.inventory is not None else ""

    def taken(self, inventory: Inventory) -> list[Callable[[], None]]:
        """Store the newest inventory. Returns the calls that waited for it."""
        self.inventory = inventory
        self._at = time.monotonic()
        waiting, self._waiting = self._waiting, []
        return waiting

    def when_fresh(self, call: Callable[[], None], fresh_s: float = FRESH_S) -> None:
        """Call at once if the inventory is fresh, else after the nodes have sent a new one.

        Processes outside the pool may have begun to use real devices since the last inventory.

        Args:
            call: The call.
            fresh_s: Age in seconds up to which an inventory counts as fresh.
        """
        inventory = self.inventory
        if inventory is not None and (
            all(device.simulated for device in inventory.devices) or time.monotonic() - self._at < fresh_s
        ):
            call()
            return
        if inventory is not None and not self._waiting:
            self._take()
        self._waiting.append(call)


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
    feed: Callable[[Stimulus], None]
