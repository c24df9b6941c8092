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
from sgpu_magic.system.child_process import start_error
from sgpu_magic.wire import codec
from sgpu_magic.wire.tracking import (
    EndTracker,
    FromTracker,
    Hurry,
    RunLogComplete,
    Track,
    TrackerReady,
    TrackerRests,
    TrackingDone,
    TrackingReport,
    TrackingTroubled,
    is_store_variable,
)

# time to import at idle priority, while ranks may use all cores; after it, the process is restarted at normal priority
_PATIENCE_S = 5.0
_AGAIN_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
_URGENT = "--urgent"


class TrackerProcess:
    """Keeps one process alive while it has runs to write. Used from the loop's thread only.

    Args:
        settings: The pool's settings.
        on_report: Called with what the process reports about runs.
    """

    def __init__(self, settings: Settings, on_report: Callable[[TrackingReport], None]) -> None:
        # without settings that may contain a password: each run's order has its own
        self._settings = msgspec.json.encode(replace(settings, tracking_uri="", index_url=""))
        self._on_report = on_report
        self._orders: dict[str, Track] = {}
        self._finished: set[str] = set()
        self._child = child_process.ChildProcess(
            self._start,
            codec.from_tracker,
            self._on_message,
            pauses_s=_AGAIN_S,
            # the process exits after an idle minute, or may be killed: restart it only while there is work
            wanted=lambda: any(run not in self._resting or run in self._finished for run in self._orders),
            begun=self._on_start,
            failed=self._failed,
        )
        # idle sessions that the last process released when it exited
        self._resting: frozenset[str] = frozenset()
        self._has_reported = False
        self._urgent = False
        self._patience: asyncio.TimerHandle | None = None
        # why the process can't be started; "" while it can
        self._problem = ""

    @property
    def pid(self) -> int | None:
        return self._child.pid

    def track(self, order: Track) -> None:
        """Start writing a run."""
        self._orders[order.run_id] = order
        self._child.send(order)
        if self._problem:
            # report it now, since the next start is only due later
            self._on_report(TrackingTroubled(run_id=order.run_id, text=self._problem))
        self._child.begin()
        if order.urgent:
            self.hurry(order.run_id)

    def hurry(self, run_id: str) -> None:
        """Write a run first, because a rank waits for its MLflow run."""
        if (order := self._orders.get(run_id)) is None:
            return
        self._orders[run_id] = replace(order, urgent=True)
        if not self._has_reported and not self._urgent:
            # it is still importing at idle priority, which it can't leave: start another at normal priority
            self._child.begin_again()
        else:
            self._child.send(Hurry(run_id=run_id))
            self._child.begin()

    def finish_run(self, run_id: str) -> None:
        """Tell the process that the run's event log is complete."""
        if run_id in self._orders:
            self._finished.add(run_id)
            self._child.send(RunLogComplete(run_id=run_id))
            self._child.begin()

    def close(self, wait_s: float) -> None:
        """End the process; if it has started writing, it gets `wait_s` seconds to finish."""
        self._lose_patience(None)
        self._child.end(EndTracker(), wait_s if self._has_reported else 0.0)

    def _start(self) -> child_process.Started:
        self._has_reported = False
        self._urgent = self._child.ends > 0 or any(order.urgent for order in self._orders.values())
        return child_process.start(
            [sys.executable, "-m", "sgpu_magic.tracking"],
            [_URGENT] if self._urgent else [],
            environ={name: value for name, value in os.environ.items() if not is_store_variable(name)},
            order=self._settings,
        )

    def _failed(self, error: OSError) -> None:
        """Report to the runs that they are not in MLflow for now; they are sent once the process can be started."""
        self._problem = (
            "the run is not in MLflow yet: the pool can't start the process that writes there "
            f"({start_error(error)}), and tries again"
        )
        for run_id in list(self._orders):
            self._on_report(TrackingTroubled(run_id=run_id, text=self._problem))

    def _on_start(self) -> None:
        self._problem = ""
        self._resting = frozenset()
        for run_id, order in self._orders.items():
            self._child.send(order)
            if run_id in self._finished:
                self._child.send(RunLogComplete(run_id=run_id))
        self._lose_patience(None if self._urgent else _PATIENCE_S)

    def _lose_patience(self, after_s: float | None) -> None:
        """Restart the process if it has not reported after `after_s` seconds; None cancels the timer."""
        if self._patience is not None:
            self._patience.cancel()
        self._patience = None if after_s is None else asyncio.get_running_loop().call_later(after_s, self._too_slow)

    def _too_slow(self) -> None:
        if not self._has_reported and self._orders and self._child.pid is not None:
            self._orders = {name: replace(order, urgent=True) for name, order in self._orders.items()}
            self._child.begin_again()

    def _on_message(self, message: FromTracker) -> None:
        self._has_reported = True
        self._child.well()
        if isinstance(message, TrackerReady):
            return
        if isinstance(message, TrackerRests):
            self._resting = frozenset(message.run_ids)
            # no rank waits for them any more
            idle = {name: replace(self._orders[name], urgent=False) for name in self._resting & self._orders.keys()}
            self._orders |= idle
            return
        if isinstance(message, TrackingDone):
            self._orders.pop(message.run_id, None)
            self._finished.discard(message.run_id)
        self._on_report(message)
