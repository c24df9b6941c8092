"""Events of runs on their way to clients: at once, or from the run's log to a client that lags behind.

A client lags when it begins to follow a run that has events, or reads more slowly than a run speaks. What it lacks is
read from the log in bounded parts, as fast as its connection takes them, from where it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.pool.clients import ConnectedClient
from sgpu_magic.pool.run_log import RunLog
from sgpu_magic.wire.events import Event

# of one client, then others have a turn
_TURN_EVENTS = 256
_TURN_BYTES = 1 << 20
# a connection that takes nothing is tried again after so long
_PAUSE_S = 0.02

Offer = Callable[[ConnectedClient, Event, Sequence[bytes]], bool]
_Item = tuple[Event, Sequence[bytes]]


@dataclass(eq=False, slots=True)
class _Lag:
    """A client that lacks events of a run.

    Args:
        client: The client.
        run_id: The run.
        seq: Number of the last event that it was sent, or had.
        file: Reads the run's log.
        events: Those of this reading.
        next: An event that its connection did not take.
    """

    client: ConnectedClient
    run_id: str
    seq: int
    file: EventFile
    events: Iterator[_Item]
    next: _Item | None = None


class EventFeed:
    """Sends events. Used from the loop's thread only.

    Args:
        offer: Sends an event to a client; False when its connection takes nothing more for now.
        log_of: The log of a run that goes on, None of one that is over.

    Attributes:
        lags: The clients that lack events, by themselves and the run.
    """

    def __init__(self, offer: Offer, log_of: Callable[[str], RunLog | None]) -> None:
        self._offer = offer
        self._log_of = log_of
        self._loop = asyncio.get_running_loop()
        self.lags: dict[tuple[ConnectedClient, str], _Lag] = {}
        self._timer: asyncio.Handle | None = None

    def tell(self, clients: Sequence[ConnectedClient], event: Event, frames: Sequence[bytes], directory: Path) -> None:
        """Send a run's newest event to who follows it; a client that lags gets it in its turn."""
        for client in clients:
            if (client, event.run_id) not in self.lags and not self._offer(client, event, frames):
                self.catch_up(client, event.run_id, directory, event.seq - 1)

    def catch_up(self, client: ConnectedClient, run_id: str, directory: Path, after: int) -> None:
        """Send the run's events after number `after`, then those that come if the client follows it."""
        lag = self.lags.get((client, run_id))
        if lag is not None:
            after = min(after, lag.seq)
        log = self._log_of(run_id)
        file = EventFile(directory, 0 if log is None else log.offset_before(after))
        self.lags[client, run_id] = _Lag(client, run_id, after, file, iter(()))
        if self._timer is None:
            self._timer = self._loop.call_soon(self._turn)

    def forget(self, client: ConnectedClient, run_id: str = "") -> None:
        """The client is gone, or no longer follows the run."""
        for key in [key for key in self.lags if key[0] is client and run_id in ("", key[1])]:
            del self.lags[key]

    def _turn(self) -> None:
        self._timer = None
        moved = False
        for key, lag in list(self.lags.items()):
            try:
                over, sent = self._go_on(lag)
            except (OSError, ValueError, msgspec.DecodeError) as error:
                # whoever removed or spoiled the log: what is live goes on
                with contextlib.suppress(OSError):
                    sys.stderr.write(f"the events of run {lag.run_id} can't be read: {error}\n")
                over, sent = True, False
            moved |= sent
            if over:
                del self.lags[key]
        if self.lags:
            self._timer = self._loop.call_soon(self._turn) if moved else self._loop.call_later(_PAUSE_S, self._turn)

    def _go_on(self, lag: _Lag) -> tuple[bool, bool]:
        """Send a part. Returns whether the client lacks nothing now, and whether something was sent."""
        sent, begun = 0, lag.file.taken_bytes
        while sent < _TURN_EVENTS and lag.file.taken_bytes - begun < _TURN_BYTES:
            item = lag.next or self._next_of(lag)
            if item is None:
                return True, sent > 0
            event, frames = item
            if event.seq > lag.seq:
                if not self._offer(lag.client, event, frames):
                    lag.next = item
                    return False, sent > 0
                lag.seq = event.seq
            lag.next = None
            sent += 1
        return False, True

    def _next_of(self, lag: _Lag) -> _Item | None:
        log = self._log_of(lag.run_id)
        try:
            item = next(lag.events, None)
            if item is None:
                # more may have come since this reading began
                lag.events = lag.file.new_events()
                item = next(lag.events, None)
        except OSError:
            if log is None:
                raise
            # its disk takes nothing, and has nothing yet
            item = None
        if item is None and log is not None:
            return next((item for item in log.unwritten if item[0].seq > lag.seq), None)
        return item
