"""One process that writes runs to one MLflow store, and the stream to it. It is replaced when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.system.message_stream import MessageStream
from sgpu_magic.wire import codec
from sgpu_magic.wire.tracking import EndTracker, FromTracker, Hurry, RunOver, Track, TrackingDone, is_store_variable

# it is given so long to import at idle priority, while the ranks may have all cores
_PATIENCE_S = 5.0
_FIRST_PAUSE_S = 1.0
_LAST_PAUSE_S = 60.0
_REAP_S = 0.05
_URGENT = "--urgent"


class TrackerProcess:
    """Keeps one process alive while it has runs to write. Used from the loop's thread only.

    Args:
        settings: The pool's.
        said: Called with what it says.
    """

    def __init__(self, settings: Settings, said: Callable[[FromTracker], None]) -> None:
        # on its command line; what may be secret comes with the runs
        self._settings = msgspec.json.encode(replace(settings, tracking_uri="", index_url="")).decode()
        self._said = said
        self._loop = asyncio.get_running_loop()
        self._orders: dict[str, Track] = {}
        self._over: set[str] = set()
        self._child: subprocess.Popen[bytes] | None = None
        self._stream: MessageStream[FromTracker] | None = None
        self._deaths = 0
        self._heard = False
        self._urgent = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def track(self, order: Track) -> None:
        """Have the run written."""
        self._orders[order.run_id] = order
        if self._stream is not None:
            self._stream.send(order)
        elif self._timer is None:
            self._start()
        if order.urgent:
            self.hurry(order.run_id)

    def hurry(self, run_id: str) -> None:
        """A rank waits for the run's place."""
        order = self._orders.get(run_id)
        if order is None:
            return
        self._orders[run_id] = msgspec.structs.replace(order, urgent=True)
        if not self._heard and not self._urgent:
            # it is still importing at idle priority, which it can't leave: another one does not begin there
            self._start_again()
        elif self._stream is not None:
            self._stream.send(Hurry(run_id=run_id))

    def over(self, run_id: str) -> None:
        """The run's event log does not grow any more."""
        if run_id in self._orders:
            self._over.add(run_id)
            if self._stream is not None:
                self._stream.send(RunOver(run_id=run_id))

    def close(self, wait_s: float) -> None:
        """End it; one that writes is given a little time for what there is."""
        if self._timer is not None:
            self._timer.cancel()
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.send(EndTracker())
        if self._child is not None:
            try:
                self._child.wait(wait_s if self._heard else 0.0)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
            self._child = None
        if stream is not None:
            stream.close()

    def _start(self) -> None:
        self._timer = None
        self._heard = False
        self._urgent = self._deaths > 0 or any(order.urgent for order in self._orders.values())
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "sgpu_magic.tracking",
                    str(theirs.fileno()),
                    self._settings,
                    *([_URGENT] if self._urgent else []),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                cwd="/",
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if not is_store_variable(name)}
                | {"PYTHONSAFEPATH": "1"},
            )
        self._stream = MessageStream[FromTracker](ours, codec.from_tracker, self._take, self._lost)
        for run_id, order in self._orders.items():
            self._stream.send(order)
            if run_id in self._over:
                self._stream.send(RunOver(run_id=run_id))
        if not self._urgent:
            self._timer = self._loop.call_later(_PATIENCE_S, self._too_slow)

    def _too_slow(self) -> None:
        self._timer = None
        if not self._heard and self._orders:
            self._orders = {name: msgspec.structs.replace(order, urgent=True) for name, order in self._orders.items()}
            self._start_again()

    def _start_again(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._end_child()
        self._start()

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            self._reap(child)

    def _reap(self, child: subprocess.Popen[bytes]) -> None:
        if child.poll() is None:
            self._loop.call_later(_REAP_S, self._reap, child)

    def _take(self, message: FromTracker, frames: Sequence[bytes]) -> None:
        self._heard = True
        self._deaths = 0
        if isinstance(message, TrackingDone):
            self._orders.pop(message.run_id, None)
            self._over.discard(message.run_id)
        self._said(message)

    def _lost(self) -> None:
        """It ended: after an idle minute, or because it was killed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._stream = None
        self._end_child()
        if self._orders:
            self._deaths += 1
            pause_s = min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._deaths - 1, 10))
            self._timer = self._loop.call_later(pause_s, self._start)
