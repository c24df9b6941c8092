"""Where a payload's bytes lie while ranks read them: inline, in a memory file that is used again, or in a file."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from sgpu_magic.client.blob_sender import BlobSender, Piece, Sending
from sgpu_magic.client.link import PoolLink
from sgpu_magic.config import Settings, private_dir
from sgpu_magic.payload.buffers import INLINE_LIMIT, SharedBuffer, regions_of, write_file
from sgpu_magic.payload.pack import Packed
from sgpu_magic.system.byte_sizes import fits_memory
from sgpu_magic.wire.attachments import FilePayload, InlinePayload, Payload, SharedPayload, StoredPart, StoredPayload
from sgpu_magic.wire.client import ReclaimPayload

# a reclaim is answered in a millisecond or two; a run that still needs the memory does not answer
_RECLAIM_TIMEOUT_S = 0.05
# the memory of a large payload goes back to the machine after this
_IDLE_S = 60.0


@dataclass(slots=True)
class _Slot:
    buffer: SharedBuffer
    run_id: str
    released: threading.Event
    run_over: bool = False


class PayloadMemory:
    """The kernel's memory files. Touched pages are five times faster to write than fresh ones."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def place(
        self, packed: Packed, run_id: str, link: PoolLink, settings: Settings, sending: Sending
    ) -> tuple[Payload, list[bytes]]:
        """Put the packed bytes where ranks can read them.

        Returns:
            The payload and the raw frames to send along.

        Raises:
            UsageError: Neither memory nor disk has room for it, here or at a pool of another machine.
            PoolLost: That pool is gone.
        """
        if packed.total_bytes <= INLINE_LIMIT:
            return Payload(source=InlinePayload(), layout=packed.layout), [packed.to_bytes()]
        if not link.welcome.near:
            return Payload(source=_sent(packed, link, sending), layout=packed.layout), []
        with self._lock:
            slot = self._reusable(packed.total_bytes, link)
            if slot is None:
                path = private_dir(settings.state_path / "uploads") / f"{run_id}.bin"
                write_file(packed, path)
                return Payload(source=FilePayload(path=str(path), size=packed.total_bytes), layout=packed.layout), []
            # until it is written, the memory may be used again: an interrupt can come in the middle
            slot.run_id, slot.run_over = "", True
            slot.released.set()
            slot.buffer.write(packed)
            slot.run_id, slot.released, slot.run_over = run_id, threading.Event(), False
        source = SharedPayload(pid=os.getpid(), fd=slot.buffer.fd, size=packed.total_bytes)
        return Payload(source=source, layout=packed.layout), []

    def submitted(self, run_id: str, link: PoolLink) -> None:
        """This pool service has the run, perhaps as another's successor: it says when it no longer reads the memory."""
        with self._lock:
            for slot in self._slots:
                if slot.run_id == run_id:
                    slot.released = link.payload_released(run_id)

    def forget(self, run_id: str) -> None:
        """Never write the run's memory again: whoever reads it holds it, and nobody tells when that ends."""
        with self._lock:
            for slot in [slot for slot in self._slots if slot.run_id == run_id]:
                slot.buffer.close()
                self._slots.remove(slot)

    def pool_lost(self) -> None:
        """The pool is gone: what it was still copying is not waited for."""
        with self._lock:
            for slot in [slot for slot in self._slots if slot.run_over and not slot.released.is_set()]:
                slot.buffer.close()
                self._slots.remove(slot)

    def run_over(self, run_id: str, accepted: bool) -> None:
        """No rank reads the run's memory any more (it may still be copied to disk)."""
        with self._lock:
            for slot in self._slots:
                if slot.run_id == run_id:
                    slot.run_over = True
                    if not accepted:
                        slot.released.set()
            if self._slots:
                self._restart_timer()

    def close(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            for slot in self._slots:
                slot.buffer.close()
            self._slots.clear()

    def _reusable(self, size: int, link: PoolLink) -> _Slot | None:
        for slot in sorted(self._slots, key=lambda slot: -slot.buffer.size):
            if slot.released.is_set() or (slot.run_over and self._reclaim(slot, link)):
                if slot.buffer.size >= size or fits_memory(size - slot.buffer.size):
                    return slot
                return None
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
            # closing this descriptor harms nobody who reads the memory; only writing it again would
            for slot in [slot for slot in self._slots if slot.released.is_set() or slot.run_over]:
                slot.buffer.close()
                self._slots.remove(slot)
            self._timer = None
            if self._slots:
                self._restart_timer()


def _sent(packed: Packed, link: PoolLink, sending: Sending) -> StoredPayload:
    """Send a pool whose ranks are on other machines what it lacks of the packed bytes."""
    regions = list(regions_of(packed))
    sender = BlobSender(link, sending.part("variables", packed.total_bytes))
    digests = sender.send(Piece(region.size, region.load) for region in regions)
    parts = (
        StoredPart(digest=digest, offset=region.offset, size=region.size)
        for digest, region in zip(digests, regions, strict=True)
    )
    return StoredPayload(parts=tuple(parts), size=packed.total_bytes)


def remove_upload(payload: Payload) -> None:
    """Remove the file of a payload that no pool took."""
    if isinstance(payload.source, FilePayload):
        Path(payload.source.path).unlink(missing_ok=True)
