"""Handing a run over to the pool, and to the next one when that dies while the run goes on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from sgpu_magic.client.attachments import Attachments, sent
from sgpu_magic.client.blob_sender import Sending
from sgpu_magic.client.connection import Connection, ask
from sgpu_magic.client.interpreter import this_context, this_interpreter
from sgpu_magic.client.link import PoolLink, PoolLost
from sgpu_magic.client.mirror import mirror_path
from sgpu_magic.client.payload_memory import PayloadMemory, remove_upload
from sgpu_magic.client.run import Run
from sgpu_magic.client.sent_runs import note_sent
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError, RunUnknown, SgpuError
from sgpu_magic.payload.pack import Packed
from sgpu_magic.wire.client import Accepted, Attach, Attached, Cancel, Submit
from sgpu_magic.wire.run import RankContext, RunSpec

# a run's next pool service is looked for, or started, for so long when the run is to be cancelled
_CANCEL_PATIENCE_S = 60.0
_CANCEL_PAUSE_S = 0.2


class Submitter:
    """Submits runs over the one connection. Methods may be called by any thread.

    Args:
        connection: To the pool.
        memory: Where payloads lie.
        settings: Where runs have their directories.
        pool: The pool's name.
        on_sending: As `Pool`'s.
    """

    def __init__(
        self,
        connection: Connection,
        memory: PayloadMemory,
        settings: Settings,
        pool: str,
        on_sending: Callable[[str], None] | None = None,
    ) -> None:
        self._pool = pool
        self._on_sending = on_sending
        self._connection = connection
        self._memory = memory
        self._settings = settings
        self._submitting = 0
        self._lock = threading.Lock()

    def submit(self, spec: RunSpec, packed: Packed, key: bytes, environ: dict[str, str], along: Attachments) -> Run:
        """Ship the payload and queue the run; as `Pool.submit`."""
        with self._lock:
            self._submitting += 1
        try:
            run = self._submitted(spec, packed, key, environ, along)
        finally:
            with self._lock:
                self._submitting -= 1
        if run.mirror is not None:
            note_sent(self._settings, self._pool, run.spec)
        return run

    def unless_submitting(self, act: Callable[[], None]) -> None:
        """Do something between submissions, or nothing while one is under way."""
        with self._lock:
            if not self._submitting:
                act()

    def _submitted(self, spec: RunSpec, packed: Packed, key: bytes, environ: dict[str, str], along: Attachments) -> Run:
        try:
            return self._submit_once(self._connection.made(start=True), spec, packed, key, environ, along)
        except PoolLost:
            # it was about to end when it was asked, and had not taken the run; or it was killed when it had
            link = self._connection.made(start=True)
            with contextlib.suppress(RunUnknown):
                return self._taken_before(link, spec, key)
            return self._submit_once(link, spec, packed, key, environ, along)

    def find_again(self, run: Run) -> None:
        """As `Pool.find_again`."""
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

    def directory(self, link: PoolLink, run_id: str) -> Path:
        """Where a run's files are found here: its directory, or for those of another machine the mirror of it."""
        if link.welcome.same_host:
            return self._settings.runs_path / run_id
        return mirror_path(self._settings, self._pool, run_id)

    def cancel_in_background(self, run: Run, reason: str) -> None:
        """As `Pool.cancel_in_background`."""

        # a run that was still queued has ended with its pool
        run.submission = None

        def work() -> None:
            deadline = time.monotonic() + _CANCEL_PATIENCE_S
            while time.monotonic() < deadline:
                try:
                    self.find_again(run)
                except PoolError:
                    # one that is about to start, or has died as well
                    time.sleep(_CANCEL_PAUSE_S)
                except SgpuError:
                    # no pool has it any more
                    return
                else:
                    run.cancel(reason)
                    return

        threading.Thread(target=work, name="sgpu-cancel", daemon=True).start()

    def _taken_before(self, link: PoolLink, spec: RunSpec, key: bytes) -> Run:
        answer = ask(link, Attach(request=0, run=spec.run_id, owns=True), Attached)
        self._memory.forget(spec.run_id)
        run = Run(spec, key, link, link.attached(answer.request, spec.run_id), self.directory(link, spec.run_id))
        run.owned = True
        return run

    def _submit_once(
        self, link: PoolLink, spec: RunSpec, packed: Packed, key: bytes, environ: dict[str, str], along: Attachments
    ) -> Run:
        with Sending(self._pool, link, self._on_sending) as sending:
            payload, frames = self._memory.place(packed, spec.run_id, link, self._settings, sending)
            along, notes = sent(along, link, self._settings.state_path, sending)
        if notes:
            shipped = msgspec.structs.replace(spec.shipped, notes=(*spec.shipped.notes, *notes))
            spec = msgspec.structs.replace(spec, shipped=shipped)
        events = link.follow(spec.run_id)
        accepted = False
        try:
            self._memory.submitted(spec.run_id, link)
            message = Submit(
                request=0,
                spec=spec,
                interpreter=along.interpreter or this_interpreter(environ),
                context=_context(environ, key, along),
                payload=payload,
                environment=along.environment,
                code=along.code,
                tracking=along.tracking,
                uploads=along.uploads,
            )
            ask(link, message, Accepted, frames=frames)
            accepted = True
        except BaseException:
            # also an interrupt while waiting: a run that was taken after all must not go on unseen
            link.send(Cancel(request=0, run=spec.run_id, reason="it was interrupted while it was submitted"))
            link.unfollow(spec.run_id, events)
            remove_upload(payload)
            raise
        finally:
            if not accepted:
                self._memory.run_over(spec.run_id, accepted=False)
        return Run(spec, key, link, events, self.directory(link, spec.run_id), (message, frames))


def _context(environ: dict[str, str], key: bytes, along: Attachments) -> RankContext:
    here = this_context(environ, key)
    if along.stand is not None:
        here = msgspec.structs.replace(here, cwd=along.stand.cwd, sys_path=along.stand.sys_path)
    if along.elsewhere or along.cell is not None:
        here = msgspec.structs.replace(here, elsewhere=along.elsewhere, cell=along.cell)
    return here
