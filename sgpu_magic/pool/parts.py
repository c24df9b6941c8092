"""What all parts of the service work with, and what a fault in one costs: its run, or its answer, and no more.

Whatever a client or a node says is taken in within a call of `Guard`. A fault outside of these belongs to nobody: the
service leaves, and the next one takes its runs over.
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

# an inventory older than this is taken anew before a run is placed on real devices
_FRESH_S = 2.0


class ServiceFault(Exception):
    """The service has a fault that belongs to no run."""


class Guard:
    """Makes calls whose faults are somebody's.

    Args:
        server: Where the clients are connected.
        active: The runs.
        where: Where faults are written, a sentence's end.

    Attributes:
        end: Ends a run of a fault, given a sentence, and whether its ranks are gone.
    """

    def __init__(self, server: Server, active: ActiveRuns, where: str) -> None:
        self._server = server
        self._active = active
        self._where = where
        self.end: Callable[[PoolRun, str, bool], None] = lambda _run, _why, _gone: None

    def for_run(self, run_id: str, call: Callable[[], None], *, gone: bool = False) -> None:
        """Make a call for a run, which ends of a fault.

        Args:
            run_id: The run.
            call: The call.
            gone: Its ranks are gone.
        """
        run = self._active.get(run_id)
        try:
            call()
        except Exception as error:  # noqa: BLE001
            self.log(f"run {run_id} ends of it", error)
            run = self._active.get(run_id) or run
            if run is not None:
                self.end(run, self._words_of(error), gone)

    def for_client(self, client: ConnectedClient, message: ClientMessage, call: Callable[[], None]) -> None:
        """Make a call for a client's message.

        An `SgpuError` is the answer: what the client asks for can't be had. A fault costs the answer; a run that was to
        begin ends.
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
        """Pass an answer of a node on. A fault costs this answer, which is waited for with a deadline."""
        try:
            call()
        except Exception as error:  # noqa: BLE001
            self.log("an answer of a node was dropped", error)

    def log(self, what: str, error: BaseException) -> None:
        """Write a fault into the service's log."""
        # it may lie on a disk that is full
        with contextlib.suppress(OSError):
            sys.stderr.write(f"a fault in the pool service: {what}\n{''.join(traceback.format_exception(error))}")

    def _words_of(self, error: Exception) -> str:
        return f"a fault in the pool service ({type(error).__name__}: {error}); {self._where}"


class FreshInventory:
    """Of one pool.

    Args:
        take: Asks the nodes; the answer comes by `taken`.

    Attributes:
        inventory: The newest; None before the first.
    """

    def __init__(self, take: Callable[[], None]) -> None:
        self._take = take
        self.inventory: Inventory | None = None
        self._at = 0.0
        self._waiting: list[Callable[[], None]] = []

    @property
    def host(self) -> str:
        """The machine, or the name of the cluster; "" before it is known."""
        return self.inventory.host if self.inventory is not None else ""

    def taken(self, inventory: Inventory) -> list[Callable[[], None]]:
        """This is the newest. Returns whom it is to be told by a call."""
        self.inventory = inventory
        self._at = time.monotonic()
        waiting, self._waiting = self._waiting, []
        return waiting

    def when_fresh(self, call: Callable[[], None]) -> None:
        """Call at once where nothing can have changed, else once the nodes have been asked again.

        Real devices may be in use outside the pool since the last look.
        """
        inventory = self.inventory
        if inventory is not None and (
            all(device.simulated for device in inventory.devices) or time.monotonic() - self._at < _FRESH_S
        ):
            call()
            return
        if inventory is not None and not self._waiting:
            self._take()
        self._waiting.append(call)


class PoolParts(msgspec.Struct, frozen=True):
    """What all parts of one service work with.

    Args:
        settings: The pool's.
        server: Where the clients are connected.
        engine: Where the ranks are.
        ledger: All runs there ever were.
        active: Those that go on.
        scheduler: Who gets what.
        stock: What the nodes have.
        guard: Makes calls whose faults are somebody's.
        feed: Tells the scheduler what happened, and does what it says.
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
