"""A run's events, and parts of its files, on their way from the link's thread to who waits for them."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sgpu_magic.wire.blobs import RunFileRead
from sgpu_magic.wire.events import Event

EventItem = tuple[Event, Sequence[bytes]]


class FilePart(NamedTuple):
    """A part of a run's file."""

    about: RunFileRead
    data: bytes


class EventQueue(queue.SimpleQueue["EventItem | None"]):
    """Events in their order; None means that the pool is lost.

    Attributes:
        last_seq: Number of the last event that was put in, or that was there before.
        woken: Called in the link's thread after each of them; for who takes the events of several runs.
    """

    woken: Callable[[], None] | None = None
    last_seq: int = 0

    def put(self, item: EventItem | None, block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        if item is not None:
            self.last_seq = item[0].seq
        woken = self.woken
        if woken is not None:
            woken()
