"""Events of runs, sent to the clients that follow them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.pool.clients import ConnectedClient
from sgpu_magic.pool.run_log import RunLog
from sgpu_magic.pool.server import SEND_AGAIN_S
from sgpu_magic.system.processes import write_log
from sgpu_magic.wire.events import Event

# limits per turn for a lagging client, so that other clients get their turn
_TURN_EVENTS = 256
_TURN_BYTES = 1 << 20
Offer = Callable[[ConnectedClient, Event, Sequence[bytes]], bool]
_Item = tuple[Event, Sequence[bytes]]


class _Lag(msgspec.Struct, eq=False):
    """A client that lacks events of a run.

    Args:
        client: The client.
        run_id: The run.
        seq: Number of the last event that the client has.
        file: Reads the run's log.
        events: The events of the current pass over the log.
        next: An event that the client's connection did not accept.
    """

    client: ConnectedClient
    run_id: str
    seq: int
    file: EventFile
    events: Iterator[_Item]
    next: _Item | None = None


class EventFeed:
    """Sends events of runs to their followers. Used from the loop's thread only.

    Args:
        offer: Sends an event to a client; returns False when its connection accepts no more for now.
        log_of: Returns an active run's log; None for a finished run.

    Attributes:
        lags: The clients that lack events, keyed by client and run.
    """

    def __init__(self, offer: Offer, log_of: Callable[[str], RunLog | None]) -> None:
        self._offer = offer
        self._log_of = log_of
        self._loop = asyncio.get_running_loop()
        self.lags: dict[tuple[ConnectedClient, str], _Lag] = {}
        self._timer: asyncio.Handle | None = None

    def publish(
        self, clients: Sequence[ConnectedClient], event: Event, frames: Sequence[bytes], directory: Path
    ) -> None:
        """Send a run's newest event to its followers; a lagging client gets it later from the log."""
        for client in clients:
            if (client, event.run_id) not in self.lags and not self._offer(client, event, frames):
                self.catch_up(client, event.run_id, directory, event.seq - 1)

    def catch_up(self, client: ConnectedClient, run_id: str, directory: Path, after: int) -> None:
        """Send the run's events after number `after`, then new ones while the client follows the run."""
        if (lag := self.lags.get((client, run_id))) is not None:
            after = min(after, lag.seq)
        log = self._log_of(run_id)
        file = EventFile(directory, 0 if log is None else log.offset_before(after))
        self.lags[client, run_id] = _Lag(client, run_id, after, file, iter(()))
        if self._timer is None:
            self._timer = self._loop.call_soon(self._turn)

    def forget(self, client: ConnectedClient, run_id: str = "") -> None:
        """Stop sending events to a client: those of one run, or of all runs if `run_id` is empty."""
        for key in [key for key in self.lags if key[0] is client and run_id in ("", key[1])]:
            del self.lags[key]

    def _turn(self) -> None:
        self._timer = None
        moved = False
        for key, lag in list(self.lags.items()):
            try:
                caught_up, sent = self._go_on(lag)
            except (OSError, ValueError, msgspec.DecodeError) as error:
                # the log was removed or corrupted: live events are still sent
                write_log(f"the events of run {lag.run_id} can't be read: {error}\n")
                caught_up, sent = True, False
            moved |= sent
            if caught_up:
                del self.lags[key]
        if self.lags:
            self._timer = self._loop.call_soon(self._turn) if moved else self._loop.call_later(SEND_AGAIN_S, self._turn)

    def _go_on(self, lag: _Lag) -> tuple[bool, bool]:
        """Send one chunk. Returns whether the client has caught up, and whether anything was sent."""
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
            if (item := next(lag.events, None)) is None:
                # more events may have been written since this pass began
                lag.events = lag.file.new_events()
                item = next(lag.events, None)
        except OSError:
            if log is None:
                raise
            # the disk accepts no writes, so no log exists yet
            item = None
        if item is None and log is not None:
            return next((item for item in log.unwritten if item[0].seq > lag.seq), None)
        return item
