"""Distinguishes a restart of the kernel from its shutdown."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

from sgpu_magic.client.pools import Pools

_DETACH_TIMEOUT_S = 1.0
# on a restart, a front end interrupts the kernel before it requests the shutdown
_RESTART_PATIENCE_S = 0.3
_SHUTDOWN = "shutdown_request"


def watch_restarts(kernel: Any, pools: Pools, *, detaches: bool) -> RestartWatch | None:
    """Return a watch over the kernel's restarts; None if there is no kernel, or it does not report them."""
    if _SHUTDOWN not in getattr(kernel, "control_handlers", {}):
        return None
    return RestartWatch(kernel, pools, detaches=detaches)


class RestartWatch:
    """Wraps the kernel's handler of shutdown requests.

    Args:
        kernel: The ipykernel.
        pools: The process's pools.
        detaches: Whether to detach the runs before the kernel ends.

    Attributes:
        asked: Set when a restart has been requested.
        before: Called when a restart is requested, in the thread of the control channel; must return quickly.
    """

    def __init__(self, kernel: Any, pools: Pools, *, detaches: bool) -> None:
        self.detaches = detaches
        self.asked = threading.Event()
        self.before: Callable[[], None] | None = None
        self._kernel = kernel
        self._pools = pools
        self._original = kernel.control_handlers[_SHUTDOWN]
        kernel.control_handlers[_SHUTDOWN] = self._shut_down

    def remove(self) -> None:
        """Restore the kernel's own handler."""
        if self._kernel.control_handlers.get(_SHUTDOWN) == self._shut_down:
            self._kernel.control_handlers[_SHUTDOWN] = self._original

    def is_asked(self) -> bool:
        """Whether an interrupt belongs to a restart that detaches the runs; waits up to 0.3 s for the restart."""
        with contextlib.suppress(KeyboardInterrupt):
            return self.detaches and self.asked.wait(_RESTART_PATIENCE_S)
        return False

    async def _shut_down(self, stream: Any, ident: Any, parent: Any) -> None:
        """Handle a shutdown request, in the thread of the control channel while the main thread continues."""
        if parent["content"].get("restart"):
            self.asked.set()
            if self.before is not None:
                self.before()
            if self.detaches:
                self._pools.detach_all(_DETACH_TIMEOUT_S)
        handled = self._original(stream, ident, parent)
        if inspect.isawaitable(handled):
            await handled
