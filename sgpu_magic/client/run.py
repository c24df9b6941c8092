"""The handle of a submitted run: its events, its cancelling, and what it returns."""

from __future__ import annotations

import os
import queue
from collections.abc import Sequence
from typing import Any, cast

from sgpu_magic.client.link import EventItem, PoolLink
from sgpu_magic.errors import SerializationError
from sgpu_magic.payload import unpack
from sgpu_magic.protocol.events import Event, RunEnded
from sgpu_magic.protocol.messages import Cancel, ResultsReceived
from sgpu_magic.protocol.records import InlinePayload, PackedLayout, RunSpec, SharedPayload


class Run:
    """A run that a pool has taken.

    Args:
        spec: What was submitted.
        key: The run's HMAC key.
        link: The connection to its pool.
        events: Where its events come in.
    """

    def __init__(self, spec: RunSpec, key: bytes, link: PoolLink, events: queue.SimpleQueue[EventItem | None]) -> None:
        self.spec = spec
        self.run_id = spec.run_id
        self._key = key
        self._link = link
        self._events = events

    @property
    def link_lost(self) -> bool:
        return self._link.lost.is_set()

    @property
    def pool_pid(self) -> int:
        return self._link.pid

    def next_event(self, timeout_s: float) -> tuple[Event, Sequence[bytes]] | None:
        """Return the next event and its raw frames, None when none came in time or the pool is lost."""
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def cancel(self, reason: str) -> None:
        """Ask the pool to stop the run; its events tell when it has."""
        request, _ = self._link.new_request()
        self._link.send(Cancel(request=request, run=self.run_id, reason=reason))

    def load_results(self, ended: RunEnded, frames: Sequence[bytes], namespace: dict[str, object]) -> list[RankValues]:
        """Unpack what the ranks returned, by rank, then let the pool free its side.

        Raises:
            SerializationError: Something can't be rebuilt in the notebook.
        """
        inline = iter(frames)
        loaded: list[RankValues] = []
        try:
            for result in ended.results:
                payload = result.payload
                if payload is None:
                    loaded.append(RankValues({}, None))
                    continue
                if isinstance(payload.source, InlinePayload):
                    data = memoryview(bytearray(next(inline)))
                elif isinstance(payload.source, SharedPayload):
                    data = _map(f"/proc/{payload.source.pid}/fd/{payload.source.fd}")
                else:
                    data = _map(payload.source.path)
                content = unpack.unpack(data, payload.layout, self._key, namespace)
                loaded.append(RankValues.of(content, result.rank))
        finally:
            self._link.send(ResultsReceived(run_id=self.run_id))
        return loaded

    def load_exception(
        self, layout: PackedLayout | None, frames: Sequence[bytes], namespace: dict[str, object]
    ) -> BaseException | None:
        """Unpack the culprit's exception, None when it did not travel or its type does not exist here."""
        if layout is None or not frames:
            return None
        try:
            error = unpack.unpack(memoryview(bytearray(frames[0])), layout, self._key, namespace)
        except SerializationError:
            return None
        return error if isinstance(error, BaseException) else None

    def close(self) -> None:
        self._link.unfollow(self.run_id)


class RankValues:
    """What one rank returned: names of `--out`, and the last expression's value."""

    __slots__ = ("names", "value")

    def __init__(self, names: dict[str, object], value: object) -> None:
        self.names = names
        self.value = value

    @classmethod
    def of(cls, content: object, rank: int) -> RankValues:
        """Check what a rank sent: `{"names": {...}, "value": ...}`."""
        if not isinstance(content, dict):
            raise SerializationError(f"rank {rank}'s result is not what a rank sends.")
        parts = cast("dict[str, Any]", content)
        return cls(parts["names"], parts["value"])


def _map(path: str) -> memoryview:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return memoryview(unpack.map_private(descriptor, os.fstat(descriptor).st_size))
    finally:
        os.close(descriptor)
