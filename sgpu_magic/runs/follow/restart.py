"""A kernel's restart: its cell's output says so, and with `detach_on_restart` its runs are detached before it ends."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

from sgpu_magic.client.pools import Pools

_DETACH_TIMEOUT_S = 1.0
_SHUTDOWN = "shutdown_request"


def watch_restarts(kernel: Any, pools: Pools, *, detaches: bool) -> RestartWatch | None:
    """Return a watch over the kernel's restarts, None where there is no kernel or it does not tell."""
    if _SHUTDOWN not in getattr(kernel, "control_handlers", {}):
        return None
    return RestartWatch(kernel, pools, detaches=detaches)


class RestartWatch:
    """Stands before the kernel's own handling of a shutdown request.

    Args:
        kernel: The ipykernel.
        pools: Have the runs.
        detaches: Detach them before the kernel ends.

    Attributes:
        asked: Set when a restart has been asked for.
        before: Called when one has been asked for, in the thread of the control channel; takes a moment at most.
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
        """Give the kernel its own handler back."""
        if self._kernel.control_handlers.get(_SHUTDOWN) == self._shut_down:
            self._kernel.control_handlers[_SHUTDOWN] = self._original

    async def _shut_down(self, stream: Any, ident: Any, parent: Any) -> None:
        """Runs in the thread of the control channel, while the main thread follows a run or does something else."""
        if parent["content"].get("restart"):
            self.asked.set()
            if self.before is not None:
                self.before()
            if self.detaches:
                self._pools.detach_all(_DETACH_TIMEOUT_S)
        handled = self._original(stream, ident, parent)
        if inspect.isawaitable(handled):
            await handled
