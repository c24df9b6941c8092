"""Submits runs with their attachments to a pool, and resubmits or reattaches them when the pool service dies.

A payload is sent inline, in a reused memory file, or in a file.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from sgpu_magic.client.blob_sender import Sending, send_packed
from sgpu_magic.client.connection import Connection, ask
from sgpu_magic.client.link import PoolLink, PoolLost
from sgpu_magic.client.local_transport import EventQueue, Tell
from sgpu_magic.client.mirror import mirror_path, note_sent
from sgpu_magic.client.run import Attachments, Run, Submitted
from sgpu_magic.client.this_machine import this_context, this_interpreter
from sgpu_magic.client.upload_files import sent
from sgpu_magic.config import Settings, private_dir
from sgpu_magic.errors import PoolError, RunUnknown, SgpuError
from sgpu_magic.payload.buffers import INLINE_LIMIT, SharedBuffer, write_file
from sgpu_magic.payload.pack import Packed
from sgpu_magic.system.processes import fits_memory
from sgpu_magic.wire.attachments import (
    FilePayload,
    InlinePayload,
    Payload,
    SharedPayload,
)
from sgpu_magic.wire.client import Accepted, Attach, Attached, Cancel, ReclaimPayload, Submit
from sgpu_magic.wire.run import RunSpec

# how long to look for, or start, the next pool service in order to cancel a run
_CANCEL_PATIENCE_S = 60.0
_CANCEL_PAUSE_S = 0.2
# a reclaim is answered in 1 to 2 ms; a run that still needs the memory does not answer
_RECLAIM_TIMEOUT_S = 0.05
# unused payload memory is freed after this
_IDLE_S = 60.0


class Submitter:
    """Submits runs over one connection, the part of `Pool` that hands runs over. Thread-safe.

    Args:
        connection: The connection to the pool.
        memory: Memory files for payloads.
        settings: Settings, with the directory of runs.
        name: The pool's name.
        on_sending: As in `Pool`.

    Attributes:
        name: The pool's name.
    """

    def __init__(
        self, connection: Connection, memory: PayloadMemory, settings: Settings, name: str, on_sending: Tell | None
    ) -> None:
        self.name = name
        self._on_sending = on_sending
        self._connection = connection
        self._memory = memory
        self._settings = settings
        self._submitting = 0
        self._lock = threading.Lock()

    def submit(self, spec: RunSpec, packed: Packed, key: bytes, environ: dict[str, str], along: Attachments) -> Run:
        """As `Pool.submit`."""
        with self._lock:
            self._submitting += 1
        try:
            link = self._connection.made(start=True)
            try:
                run = self._submit_once(link, spec, packed, key, environ, along)
            except PoolLost:
                # the pool ended either before it accepted the run or after
                link = self._connection.made(start=True)
                try:
                    run = self._taken_before(link, spec, key)
                except RunUnknown:
                    run = self._submit_once(link, spec, packed, key, environ, along)
        finally:
            with self._lock:
                self._submitting -= 1
        if run.mirror is not None:
            note_sent(self._settings, self.name, run.spec)
        return run

    def unless_submitting(self, act: Callable[[], None]) -> None:
        """Call `act` unless a submission is in progress."""
        with self._lock:
            if not self._submitting:
                act()

    def find_again(self, run: Run) -> None:
        """Attach to a run again after its pool service died, through the next service, which is started if needed.

        A run that was still queued is submitted again.

        Raises:
            RunUnknown: The run had started, and the new service does not have it.
            PoolLost: The new service died too.
            PoolError: The new service can't be started or reached.
        """
        link = self._connection.made(start=True)
        question = Attach(request=0, run=run.run_id, after=run.last_seq, owns=run.owned)
        try:
            answer = ask(link, question, Attached)
        except RunUnknown:
            if run.submission is None:
                raise
            message, frames = run.submission
            events = link.follow(run.run_id)
            self._memory.submitted(run.run_id, link)
            ask(link, message, Accepted, frames=frames)
            run.moved(link, events, from_start=True)
            return
        self._memory.submitted(run.run_id, link)
        run.moved(link, link.attached(answer.request, run.run_id))

    def run_of(
        self, spec: RunSpec, key: bytes, link: PoolLink, events: EventQueue, submission: Submitted | None = None
    ) -> Run:
        """Return the handle of a run of this pool; arguments as for `Run`."""
        run = Run(spec, key, link, events, self._directory(link, spec.run_id), submission)
        run.pool = self.name
        return run

    def _directory(self, link: PoolLink, run_id: str) -> Path:
        """Return the local directory of a run's files: the run's own, or the mirror of a run on another machine."""
        if link.welcome.same_host:
            state_dir = dict(link.welcome.settings).get("state_dir", self._settings.state_dir)
            return msgspec.structs.replace(self._settings, state_dir=state_dir).runs_path / run_id
        return mirror_path(self._settings, self.name, run_id)

    def cancel_in_background(self, run: Run, reason: str) -> None:
        """Cancel a run whose pool service died, through the next service, in a background thread."""

        # a run that was still queued ended with its pool
        run.submission = None

        def work() -> None:
            deadline = time.monotonic() + _CANCEL_PATIENCE_S
            while time.monotonic() < deadline:
                try:
                    self.find_again(run)
                except PoolError:
                    # the next service is starting, or has died too
                    time.sleep(_CANCEL_PAUSE_S)
                except SgpuError:
                    # no pool has the run any more
                    return
                else:
                    run.cancel(reason)
                    return

        threading.Thread(target=work, name="sgpu-cancel", daemon=True).start()

    def _taken_before(self, link: PoolLink, spec: RunSpec, key: bytes) -> Run:
        answer = ask(link, Attach(request=0, run=spec.run_id, owns=True), Attached)
        self._memory.forget(spec.run_id)
        run = self.run_of(spec, key, link, link.attached(answer.request, spec.run_id))
        run.owned = True
        return run

    def _submit_once(
        self, link: PoolLink, spec: RunSpec, packed: Packed, key: bytes, environ: dict[str, str], along: Attachments
    ) -> Run:
        with Sending(self.name, link, self._on_sending) as sending:
            payload, frames = self._memory.put(packed, spec.run_id, link, self._settings, sending)
            along, notes = sent(along, link, self._settings.state_path, sending)
        spec = spec.with_notes(notes)
        events = link.follow(spec.run_id)
        try:
            self._memory.submitted(spec.run_id, link)
            stand = msgspec.structs.asdict(along.stand) if along.stand is not None else {}
            message = Submit(
                request=0,
                spec=spec,
                interpreter=along.interpreter or this_interpreter(environ),
                context=msgspec.structs.replace(
                    this_context(environ, key), elsewhere=along.elsewhere, cell=along.cell, **stand
                ),
                payload=payload,
                environment=along.environment,
                code=along.code,
                tracking=along.tracking,
                uploads=along.uploads,
            )
            ask(link, message, Accepted, frames=frames)
        except BaseException:
            # also on an interrupt: a run that was accepted nevertheless must not continue unnoticed
            link.send(Cancel(request=0, run=spec.run_id, reason="it was interrupted while it was submitted"))
            link.unfollow(spec.run_id, events)
            if isinstance(payload.source, FilePayload):
                Path(payload.source.path).unlink(missing_ok=True)
            self._memory.run_over(spec.run_id, accepted=False)
            raise
        return self.run_of(spec, key, link, events, (message, frames))


# ---------------------------------------------------------------- payload memory


class _Slot(msgspec.Struct):
    buffer: SharedBuffer
    run_id: str
    released: threading.Event
    run_over: bool = False


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
            UsageError: Neither memory nor disk has room for it, here or at a remote pool.
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
            slot.run_id, slot.run_over = "", True
            slot.released.set()
            slot.buffer.write(packed)
            slot.run_id, slot.released, slot.run_over = run_id, threading.Event(), False
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
            self._drop(lambda slot: slot.run_over and not slot.released.is_set())

    def run_over(self, run_id: str, accepted: bool) -> None:
        """Mark the run's memory as no longer read by ranks; it may still be being copied to disk."""
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
            self._drop(lambda slot: True)

    def _drop(self, which: Callable[[_Slot], bool]) -> None:
        # closing this descriptor does not affect readers of the memory
        for slot in [slot for slot in self._slots if which(slot)]:
            slot.buffer.close()
            self._slots.remove(slot)

    def _reusable(self, size: int, link: PoolLink) -> _Slot | None:
        for slot in sorted(self._slots, key=lambda slot: -slot.buffer.size):
            if slot.released.is_set() or (slot.run_over and self._reclaim(slot, link)):
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
            self._drop(lambda slot: slot.released.is_set() or slot.run_over)
            self._timer = None
            if self._slots:
                self._restart_timer()
