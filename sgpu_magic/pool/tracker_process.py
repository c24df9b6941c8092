"""A process that writes runs to one MLflow store, and the stream to it. A new one is started when it dies."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from sgpu_magic.config import Settings
from sgpu_magic.system import child_process
from sgpu_magic.wire import codec
from sgpu_magic.wire.tracking import (
    EndTracker,
    FromTracker,
    Hurry,
    RunOver,
    Track,
    TrackerRests,
    TrackingDone,
    TrackingReport,
    is_store_variable,
)

# time for the process to import at idle priority, while ranks may use all cores; then it is started anew
_PATIENCE_S = 5.0
_AGAIN_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
_URGENT = "--urgent"


class TrackerProcess:
    """Keeps one process alive while it has runs to write. Used from the loop's thread only.

    Args:
        settings: The pool's settings.
        said: Called with what the process reports about runs.
    """

    def __init__(self, settings: Settings, said: Callable[[TrackingReport], None]) -> None:
        # passed on its command line, so without secrets; those come with the runs
        self._settings = msgspec.json.encode(replace(settings, tracking_uri="", index_url="")).decode()
        self._said = said
        self._orders: dict[str, Track] = {}
        self._over: set[str] = set()
        self._child = child_process.ChildProcess(
            self._start,
            codec.from_tracker,
            self._take,
            pauses_s=_AGAIN_S,
            # it exits after an idle minute, or is killed
            wanted=lambda: any(run not in self._resting or run in self._over for run in self._orders),
            begun=self._begun,
        )
        # idle sessions that the last process has left
        self._resting: frozenset[str] = frozenset()
        self._heard = False
        self._urgent = False
        self._patience: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        return self._child.pid

    def track(self, order: Track) -> None:
        """Start writing a run."""
        self._orders[order.run_id] = order
        self._child.send(order)
        self._child.begin()
        if order.urgent:
            self.hurry(order.run_id)

    def hurry(self, run_id: str) -> None:
        """Give a run precedence, because a rank waits for its MLflow run."""
        if (order := self._orders.get(run_id)) is None:
            return
        self._orders[run_id] = replace(order, urgent=True)
        if not self._heard and not self._urgent:
            # it is still importing at idle priority, which it can't leave: start another at normal priority
            self._child.begin_again()
        else:
            self._child.send(Hurry(run_id=run_id))
            self._child.begin()

    def over(self, run_id: str) -> None:
        """Tell the process that the run's event log is complete."""
        if run_id in self._orders:
            self._over.add(run_id)
            self._child.send(RunOver(run_id=run_id))
            self._child.begin()

    def close(self, wait_s: float) -> None:
        """End the process; if it has started writing, it gets `wait_s` seconds to finish."""
        self._lose_patience(None)
        self._child.end(EndTracker(), wait_s if self._heard else 0.0)

    def _start(self) -> child_process.Started:
        self._heard = False
        self._urgent = self._child.ends > 0 or any(order.urgent for order in self._orders.values())
        return child_process.start(
            [sys.executable, "-m", "sgpu_magic.tracking"],
            [self._settings, *([_URGENT] if self._urgent else [])],
            environ={name: value for name, value in os.environ.items() if not is_store_variable(name)},
        )

    def _begun(self) -> None:
        self._resting = frozenset()
        for run_id, order in self._orders.items():
            self._child.send(order)
            if run_id in self._over:
                self._child.send(RunOver(run_id=run_id))
        self._lose_patience(None if self._urgent else _PATIENCE_S)

    def _lose_patience(self, after_s: float | None) -> None:
        """Restart the process if it has not reported after so many seconds; None cancels that."""
        if self._patience is not None:
            self._patience.cancel()
        self._patience = None if after_s is None else asyncio.get_running_loop().call_later(after_s, self._too_slow)

    def _too_slow(self) -> None:
        if not self._heard and self._orders and self._child.pid is not None:
            self._orders = {name: replace(order, urgent=True) for name, order in self._orders.items()}
            self._child.begin_again()

    def _take(self, message: FromTracker) -> None:
        self._heard = True
        self._child.well()
        if isinstance(message, TrackerRests):
            self._resting = frozenset(message.run_ids)
            # no rank waits for them any more
            idle = {name: replace(self._orders[name], urgent=False) for name in self._resting & self._orders.keys()}
            self._orders |= idle
            return
        if isinstance(message, TrackingDone):
            self._orders.pop(message.run_id, None)
            self._over.discard(message.run_id)
        self._said(message)
