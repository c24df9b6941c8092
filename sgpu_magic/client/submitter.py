"""Submits runs with their attachments to a pool, and resubmits or reattaches them when the pool service dies.

A payload is sent inline, in a reused memory file, or in a file.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from sgpu_magic.client.blob_sender import Sending
from sgpu_magic.client.connection import Connection, ask
from sgpu_magic.client.link import PoolLink, PoolLost
from sgpu_magic.client.local_transport import OnNotice
from sgpu_magic.client.mirror import mirror_path, note_sent
from sgpu_magic.client.payload_memory import PayloadMemory
from sgpu_magic.client.run import Attachments, ClientRun, Submitted
from sgpu_magic.client.send_queue import EventQueue
from sgpu_magic.client.this_machine import this_context, this_interpreter
from sgpu_magic.client.upload_files import sent
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError, RunUnknown, SgpuError
from sgpu_magic.payload.pack import Packed
from sgpu_magic.wire.attachments import (
    FilePayload,
)
from sgpu_magic.wire.client import Accepted, Attach, Attached, Cancel, Submit
from sgpu_magic.wire.run import RunSpec

# how long to look for, or start, the next pool service in order to cancel a run
_CANCEL_PATIENCE_S = 60.0
_CANCEL_PAUSE_S = 0.2


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
        self, connection: Connection, memory: PayloadMemory, settings: Settings, name: str, on_sending: OnNotice | None
    ) -> None:
        self.name = name
        self._on_sending = on_sending
        self._connection = connection
        self._memory = memory
        self._settings = settings
        self._submitting = 0
        self._lock = threading.Lock()

    def submit(
        self, spec: RunSpec, packed: Packed, key: bytes, environ: dict[str, str], along: Attachments
    ) -> ClientRun:
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

    def find_again(self, run: ClientRun) -> None:
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
    ) -> ClientRun:
        """Return the handle of a run of this pool; arguments as for `ClientRun`."""
        run = ClientRun(spec, key, link, events, self._directory(link, spec.run_id), submission)
        run.pool = self.name
        return run

    def _directory(self, link: PoolLink, run_id: str) -> Path:
        """Return the local directory of a run's files: the run's own, or the mirror of a run on another machine."""
        if link.welcome.same_host:
            state_dir = dict(link.welcome.settings).get("state_dir", self._settings.state_dir)
            return msgspec.structs.replace(self._settings, state_dir=state_dir).runs_path / run_id
        return mirror_path(self._settings, self.name, run_id)

    def cancel_in_background(self, run: ClientRun, reason: str) -> None:
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

    def _taken_before(self, link: PoolLink, spec: RunSpec, key: bytes) -> ClientRun:
        answer = ask(link, Attach(request=0, run=spec.run_id, owns=True), Attached)
        self._memory.forget(spec.run_id)
        run = self.run_of(spec, key, link, link.attached(answer.request, spec.run_id))
        run.owned = True
        return run

    def _submit_once(
        self, link: PoolLink, spec: RunSpec, packed: Packed, key: bytes, environ: dict[str, str], along: Attachments
    ) -> ClientRun:
        with Sending(self.name, link, self._on_sending) as sending:
            payload, frames = self._memory.put(packed, spec.run_id, link, self._settings, sending)
            along, notes = sent(along, link, self._settings.state_path, sending)
        spec = spec.with_notes(notes)
        events = link.follow(spec.run_id)
        try:
            self._memory.submitted(spec.run_id, link)
            working_context = msgspec.structs.asdict(along.working_context) if along.working_context is not None else {}
            message = Submit(
                request=0,
                spec=spec,
                interpreter=along.interpreter or this_interpreter(environ),
                context=msgspec.structs.replace(
                    this_context(environ, key), elsewhere=along.elsewhere, cell=along.cell, **working_context
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
