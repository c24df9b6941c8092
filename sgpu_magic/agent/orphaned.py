"""The time between a pool service's unexpected end and the next one's coming.

The ranks go on. A run whose notebook is dead too is cancelled, as the service would have done. The notebooks that
follow a run start the next service; for runs that go on without one, the agent does it itself. When nobody is left who
could want anything, or no service comes in time, everything is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection

from sgpu_magic.agent import faults
from sgpu_magic.agent.runs.node_run import NodeRun
from sgpu_magic.agent.successor import Successor
from sgpu_magic.system.processes import may_be_alive
from sgpu_magic.wire.states import OWNER_GONE, RunState

_LOOK_S = 0.25
# a notebook that follows a run starts the next service within a second or two; what nobody follows nobody fetches
_OVER_S = 5.0
# notebooks are given this long to do it first
_SUCCESSOR_S = 1.0


class Orphaned:
    """Watches over the runs while there is no pool service.

    Args:
        executions: The runs that the agent holds.
        has_news: Whether something of a run was not told to any service yet.
        successor: Starts the next service; None where only others can.
        timeout_s: Seconds for which they wait.
        end: Ends the agent with all that it has.
    """

    def __init__(
        self,
        executions: Callable[[], Collection[NodeRun]],
        has_news: Callable[[str], bool],
        successor: Successor | None,
        timeout_s: float,
        end: Callable[[], None],
    ) -> None:
        self._executions = executions
        self._has_news = has_news
        self._successor = successor
        self._timeout_s = timeout_s
        self._since = 0.0
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """The service is gone."""
        self._since = self._loop.time()
        self._until = self._since + self._timeout_s
        self._look()

    def over(self) -> None:
        """Another one is here, or the agent ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        # whatever happens now, the agent does not stay for ever
        self._timer = self._loop.call_later(_LOOK_S, self._look)
        wanted = False
        for execution in self._executions():
            spec = execution.launch.spec
            if spec.detach or may_be_alive(spec.owner.pid, spec.owner.host):
                wanted |= not execution.gone or execution.belongings.memory.in_use or self._has_news(execution.run_id)
            elif not execution.ended:
                with faults.guarded(execution.faulted):
                    execution.end_as(RunState.CANCELLED, OWNER_GONE)
        still_there = any(not execution.gone for execution in self._executions())
        if not still_there and not any(execution.launch.spec.detach for execution in self._executions()):
            self._until = min(self._until, self._loop.time() + _OVER_S)
        if self._loop.time() > self._until or not (wanted or still_there):
            self.over()
            self._end()
        else:
            successor = self._successor
            if successor is not None and self._loop.time() > self._since + _SUCCESSOR_S and self._is_needed():
                self._since = self._loop.time()
                # a system without room for a process: the timeout ends what nobody can fetch
                with contextlib.suppress(OSError):
                    successor.start()

    def _is_needed(self) -> bool:
        return any(execution.launch.spec.detach and not execution.gone for execution in self._executions())
