"""Handing a run over to the pool with what goes along, and to the next one when that dies while the run goes on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from sgpu_magic.client.blob_sender import BlobSender, Piece, Sending, pieces_of
from sgpu_magic.client.connection import Connection, ask
from sgpu_magic.client.link import PoolLink, PoolLost
from sgpu_magic.client.mirror import mirror_path, note_sent
from sgpu_magic.client.payload_memory import PayloadMemory, remove_upload
from sgpu_magic.client.run import Run
from sgpu_magic.client.this_process import this_context, this_interpreter
from sgpu_magic.client.upload_files import FoundFile, FoundFiles, KnownDigests, find_files
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError, RunUnknown, SgpuError, UsageError
from sgpu_magic.payload.pack import Packed
from sgpu_magic.system.byte_sizes import format_bytes
from sgpu_magic.wire.attachments import CodeBundle, Environment, Manifest, Upload, UploadedFile, Wheel, manifest_bytes
from sgpu_magic.wire.client import Accepted, Attach, Attached, Cancel, Submit
from sgpu_magic.wire.files import PIECE_BYTES
from sgpu_magic.wire.run import CellSource, Interpreter, RankContext, RunSpec
from sgpu_magic.wire.tracking import Tracking

# a run's next pool service is looked for, or started, for so long when the run is to be cancelled
_CANCEL_PATIENCE_S = 60.0
_CANCEL_PAUSE_S = 0.2

_MOST_MANIFEST_BYTES = PIECE_BYTES


@dataclass(frozen=True, slots=True)
class Stand:
    """Where ranks stand that are not to stand where this process does: working directory and `sys.path`."""

    cwd: str
    sys_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Attachments:
    """Packages, code, uploads and the place in MLflow, as `wire.client.Submit` has them.

    Args:
        interpreter: The ranks' Python; None is this process's.
        stand: Where they stand; None is where this process does.
        elsewhere: The pool's nodes do not see this machine's files.
        cell: As `RankContext.cell`.
        uploads: Folders and files of this machine.
    """

    environment: Environment | None = None
    code: tuple[CodeBundle, ...] = ()
    tracking: Tracking | None = None
    interpreter: Interpreter | None = None
    stand: Stand | None = None
    elsewhere: bool = False
    cell: CellSource | None = None
    uploads: tuple[Upload, ...] = ()


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


# ---------------------------------------------------------------- to a pool on other machines


def sent(along: Attachments, link: PoolLink, state: Path, sending: Sending) -> tuple[Attachments, list[str]]:
    """Send a pool whose ranks are on other machines what it lacks of code, wheels, folders and files.

    What it has from an earlier run is not sent again.

    Args:
        along: With paths on this machine.
        link: To the pool.
        state: The state directory, where digests of files are kept.
        sending: Tells how far it is.

    Returns:
        What goes along as the nodes find it, and a sentence for each upload: its size, and how much of it was sent.

    Raises:
        UsageError: An upload can't go along, or the pool has no room.
        SerializationError: A file can't be read.
        PoolLost: The pool ended.
    """
    if link.welcome.near:
        return along, []
    environment = along.environment
    wheels = environment.wheels if environment is not None else ()
    total = sum(each.size for each in (*along.code, *wheels))
    sender = BlobSender(link, sending.part("code and packages", total))
    code = tuple(msgspec.structs.replace(bundle, path="", blobs=_blobs_of(bundle, sender)) for bundle in along.code)
    if environment is not None and wheels:
        blobs = tuple(msgspec.structs.replace(wheel, path="", blobs=_blobs_of(wheel, sender)) for wheel in wheels)
        environment = msgspec.structs.replace(environment, wheels=blobs)
    uploads = [_send(upload, link, state, sending) for upload in along.uploads]
    along = replace(along, code=code, environment=environment, uploads=tuple(upload for upload, _ in uploads))
    return along, [note for _, note in uploads]


def _blobs_of(each: CodeBundle | Wheel, sender: BlobSender) -> tuple[str, ...]:
    return tuple(sender.send_file(each.path))


def _send(upload: Upload, link: PoolLink, state: Path, sending: Sending) -> tuple[Upload, str]:
    root = Path(upload.path)
    found = find_files(root)
    known = KnownDigests(state, root)
    total = sum(file.status.st_size for file in found.files)
    sender = BlobSender(link, sending.part(upload.name, total))
    digests = iter(sender.send(_pieces(found.files, known)))
    by_file = {
        file.name: tuple(next(digests) for _ in range(0, file.status.st_size, PIECE_BYTES)) for file in found.files
    }
    lacked = sender.sent_bytes
    known.keep({file.path: (file.status, by_file[file.name]) for file in found.files})
    manifest = manifest_bytes(_manifest(found, by_file))
    if len(manifest) > _MOST_MANIFEST_BYTES:
        raise UsageError(f"--upload {upload.name} has too many files: pack them into an archive.")
    (digest,) = sender.send([Piece(len(manifest), lambda: memoryview(manifest))])
    made = msgspec.structs.replace(upload, path="", manifest=digest, manifest_size=len(manifest))
    count = "1 file" if len(found.files) == 1 else f"{len(found.files):,} files"
    return made, (
        f"uploaded {upload.name}: {count}, {format_bytes(total)}, of which the pool lacked {format_bytes(lacked)}"
    )


def _pieces(files: Iterable[FoundFile], known: KnownDigests) -> Iterator[Piece]:
    for file in files:
        digests = known.of(file.path, file.status) or ()
        for at, piece in enumerate(pieces_of(file.path, file.status.st_size)):
            yield Piece(piece.size, piece.load, digests[at] if digests else "")


def _manifest(found: FoundFiles, blobs: dict[str, tuple[str, ...]]) -> Manifest:
    files = tuple(
        UploadedFile(file.name, file.status.st_size, blobs[file.name], bool(file.status.st_mode & 0o100))
        for file in found.files
    )
    return Manifest(files=files, folders=found.folders, single=found.single)
