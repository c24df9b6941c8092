"""The newest inventory of the pool's nodes, and calls that wait for a fresh one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from sgpu_magic.wire.devices import Inventory

# an inventory older than this is refreshed before a run is placed on real devices
FRESH_S = 2.0
# a status that is requested every second is then at most two seconds old
STATUS_FRESH_S = 1.0
# must be less than the 15 s for which a client waits for its reply
ANSWER_WITHIN_S = 8.0


class FreshInventory:
    """The newest inventory of one pool.

    Args:
        take: Asks the nodes for an inventory, which `receive` gets.

    Attributes:
        inventory: The newest inventory; an empty one before the first.
    """

    def __init__(self, take: Callable[[], None]) -> None:
        self._take = take
        self.inventory = Inventory(host="")
        # time at which `inventory` was taken; None before the first
        self._at: float | None = None
        self._waiting: list[Callable[[], None]] = []

    def receive(self, inventory: Inventory) -> list[Callable[[], None]]:
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
