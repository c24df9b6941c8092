"""Shared memory in which payloads reach the pool, reused from run to run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import msgspec

from sgpu_magic.client.blob_sender import Sending, send_packed
from sgpu_magic.client.link import PoolLink
from sgpu_magic.config import Settings, private_dir
from sgpu_magic.payload.buffers import INLINE_LIMIT, SharedBuffer, write_file
from sgpu_magic.payload.pack import Packed
from sgpu_magic.system.processes import fits_memory
from sgpu_magic.wire.attachments import (
    FilePayload,
    InlinePayload,
    Payload,
    SharedPayload,
)
from sgpu_magic.wire.client import ReclaimPayload

# a reclaim is answered in 1 to 2 ms; a run that still needs the memory does not answer
_RECLAIM_TIMEOUT_S = 0.05
# unused payload memory is freed after this
_IDLE_S = 60.0


class _Slot(msgspec.Struct):
    buffer: SharedBuffer
    run_id: str
    released: threading.Event
    run_ended: bool = False


class PayloadMemory:
    """The kernel's memory files, reused because touched pages are five times faster to write than fresh ones."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def put(
        self, packed: Packed, run_id: str, link: PoolLink, settings: Settings, sending: Sending
    ) -> tuple[Payload, list[bytes]]:
        """Write the packed bytes where ranks can read them.

        Returns:
            The payload and the raw frames to send with it.

        Raises:
            UsageError: Neither memory nor disk has enough space for it, here or at a remote pool.
            PoolLost: The remote pool is gone.
        """
        if packed.total_bytes <= INLINE_LIMIT:
            return Payload(source=InlinePayload(), layout=packed.layout), [packed.to_bytes()]
        if not link.welcome.near:
            return Payload(source=send_packed(packed, link, sending), layout=packed.layout), []
        with self._lock:
            if (slot := self._reusable(packed.total_bytes, link)) is None:
                path = private_dir(settings.state_path / "uploads") / f"{run_id}.bin"
                write_file(packed, path)
                return Payload(source=FilePayload(path=str(path), size=packed.total_bytes), layout=packed.layout), []
            # the slot stays reusable until the payload is written: an interrupt may stop the writing
            slot.run_id, slot.run_ended = "", True
            slot.released.set()
            slot.buffer.write(packed)
            slot.run_id, slot.released, slot.run_ended = run_id, threading.Event(), False
        source = SharedPayload(pid=os.getpid(), fd=slot.buffer.fd, size=packed.total_bytes)
        return Payload(source=source, layout=packed.layout), []

    def submitted(self, run_id: str, link: PoolLink) -> None:
        """Wait for this pool service, perhaps a successor, to report that it no longer reads the run's memory."""
        with self._lock:
            for slot in self._slots:
                if slot.run_id == run_id:
                    slot.released = link.payload_released(run_id)

    def forget(self, run_id: str) -> None:
        """Never write the run's memory again: nothing reports when its readers are done."""
        with self._lock:
            self._drop(lambda slot: slot.run_id == run_id)

    def pool_lost(self) -> None:
        """Drop the memory of ended runs that the lost pool was still copying."""
        with self._lock:
            self._drop(lambda slot: slot.run_ended and not slot.released.is_set())

    def on_run_ended(self, run_id: str, accepted: bool) -> None:
        """Mark the run's memory as no longer read by ranks; it may still be being copied to disk."""
        with self._lock:
            for slot in self._slots:
                if slot.run_id == run_id:
                    slot.run_ended = True
                    if not accepted:
                        slot.released.set()
            if self._slots:
                self._restart_timer()

    def close(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._drop(lambda slot: True)

    def _drop(self, which: Callable[[_Slot], bool]) -> None:
        # closing this descriptor does not affect readers of the memory
        for slot in [slot for slot in self._slots if which(slot)]:
            slot.buffer.close()
            self._slots.remove(slot)

    def _reusable(self, size: int, link: PoolLink) -> _Slot | None:
        for slot in sorted(self._slots, key=lambda slot: -slot.buffer.size):
            if slot.released.is_set() or (slot.run_ended and self._reclaim(slot, link)):
                return slot if slot.buffer.size >= size or fits_memory(size - slot.buffer.size) else None
        if not fits_memory(size):
            return None
        slot = _Slot(SharedBuffer(), "", threading.Event())
        self._slots.append(slot)
        return slot

    def _reclaim(self, slot: _Slot, link: PoolLink) -> bool:
        link.send(ReclaimPayload(run_id=slot.run_id))
        return slot.released.wait(_RECLAIM_TIMEOUT_S)

    def _restart_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(_IDLE_S, self._free_idle)
        self._timer.daemon = True
        self._timer.start()

    def _free_idle(self) -> None:
        with self._lock:
            self._drop(lambda slot: slot.released.is_set() or slot.run_ended)
            self._timer = None
            if self._slots:
                self._restart_timer()
