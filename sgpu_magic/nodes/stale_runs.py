"""Runs that were given up while their node was unreachable, and are ended when the node has reconnected."""

from __future__ import annotations

from collections.abc import Callable, Set

from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.node import Adopt, EndRun, EventsKept, KillRanks, ToAgent

_REASON = "its node reconnected after it was given up"
# an event number above all others: acknowledges every event
_ALL_EVENTS = 1 << 60


class StaleRuns:
    """The stale runs of all nodes. A node is usable once its stale runs have ended.

    Args:
        send: Sends a message to a node's agent.
    """

    def __init__(self, send: Callable[[str, ToAgent], None]) -> None:
        self._send = send
        self._runs: dict[str, set[str]] = {}

    @property
    def nodes(self) -> Set[str]:
        """The nodes on which stale runs have not ended yet."""
        return self._runs.keys()

    def is_stale(self, node: str, run_id: str) -> bool:
        return run_id in self._runs.get(node, ())

    def end(self, node: str, run_id: str) -> None:
        """End the ranks of a run on a node; the run continues without them or has ended."""
        self._runs.setdefault(node, set()).add(run_id)
        for order in (
            Adopt(run_id=run_id, number=_ALL_EVENTS),
            EndRun(run_id=run_id, state=RunState.CANCELLED, reason=_REASON),
            KillRanks(run_id=run_id),
            EventsKept(run_id=run_id, number=_ALL_EVENTS),
        ):
            self._send(node, order)

    def ranks_exited(self, node: str, run_id: str) -> None:
        """Forget a stale run whose ranks have exited."""
        self._send(node, EventsKept(run_id=run_id, number=_ALL_EVENTS))
        self._runs[node].discard(run_id)
        if not self._runs[node]:
            del self._runs[node]

    def node_lost(self, node: str) -> None:
        self._runs.pop(node, None)
