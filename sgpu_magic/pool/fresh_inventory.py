"""What the nodes have, and how old that news is."""

from __future__ import annotations

import time
from collections.abc import Callable

from sgpu_magic.wire.devices import Inventory

# an inventory older than this is taken anew before a run is placed on real devices
_FRESH_S = 2.0


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
        """Call at once where nothing can have changed, else once the nodes have been asked again."""
        inventory = self.inventory
        if inventory is not None and (
            all(device.simulated for device in inventory.devices) or time.monotonic() - self._at < _FRESH_S
        ):
            call()
            return
        if inventory is not None and not self._waiting:
            self._take()
        self._waiting.append(call)
