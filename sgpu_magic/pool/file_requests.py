"""File transfers over the clients' links: uploads into the users' stores, and parts of runs' files.

Disk operations run in a separate thread, in the order of the requests.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.errors import RunUnknown, UsageError
from sgpu_magic.files.atomic_file import link_or_copy
from sgpu_magic.files.content_store import BlobRefused, BlobStore, blob_path, store_name
from sgpu_magic.files.run_directory import EventFile, disk_room, links_below, list_below, open_below
from sgpu_magic.pool.active_runs import ActiveRuns
from sgpu_magic.pool.permissions import Permissions
from sgpu_magic.pool.server import ConnectedClient, Server
from sgpu_magic.system.serial_threads import FileThread
from sgpu_magic.wire.attachments import (
    CodeBundle,
    FilePayload,
    ManifestUnusable,
    SharedPayload,
    StoredPayload,
    Upload,
    Wheel,
    manifest_in,
)
from sgpu_magic.wire.base import ErrorKind, Record, short
from sgpu_magic.wire.client import Submit
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.files import (
    BULK_CHUNK_BYTES,
    PAYLOAD_PARTS,
    PIECE_BYTES,
    AskBlobs,
    BlobsHeld,
    BlobTaken,
    ListRunFiles,
    PutBlob,
    ReadRunFile,
    RunFileRead,
    RunFiles,
)
from sgpu_magic.wire.run import RUN_RECORD

_RESULT = re.compile(r"result-(\d+)\.bin")
_MOST_ASKED = 10_000
# largest accepted file offset
_MOST_OFFSET = 1 << 62
# maximum number of runs whose result memory files are cached
_MOST_KNOWN = 100

_Answer = tuple[Record, Sequence[bytes]]


class FileRequestHandler:
    """Handles clients' uploads and reads of files.

    Args:
        settings: The pool's settings.
        server: Where the clients are connected.
        active: The active runs.
        permissions: Knows which user a run belongs to.
    """

    def __init__(self, *, settings: Settings, server: Server, active: ActiveRuns, permissions: Permissions) -> None:
        settings = settings
        self._most_kept_bytes = settings.keep_payload
        self._stores = settings.state_path / "blobs"
        self._payloads: dict[str, tuple[str, StoredPayload]] = {}
        self._server = server
        self._active = active
        self._permissions = permissions
        self._store = BlobStore(self._stores, settings.blobs_bytes)
        self._thread = FileThread("sgpu-bytes")
        # by run: the ranks' memory files with results; used in the thread only
        self._in_memory: OrderedDict[str, dict[int, str]] = OrderedDict()

    def on_request(
        self, client: ConnectedClient, message: AskBlobs | PutBlob | ReadRunFile | ListRunFiles, frames: Sequence[bytes]
    ) -> None:
        """Check a request, execute it in the thread, and send the reply.

        Raises:
            SgpuError: The request is refused.
        """
        match message:
            case AskBlobs():
                call = self._ask(store_name(client.user), message)
            case PutBlob():
                call = self._put(store_name(client.user), message, frames)
            case ReadRunFile():
                call = self._read(self._directory(client, message.run), message)
            case ListRunFiles():
                call = functools.partial(_list, self._directory(client, message.run), message)
        self._thread.do(
            call,
            lambda answer: self._server.send(client, *answer),
            lambda error: self._server.refuse(client, message.request, *self._why_not(message, error)),
        )

    def hold(self, submit: Submit) -> None:
        """Keep what a submitted run needs in its user's store until `release`."""
        if digests := needed_blobs(submit):
            store = store_name(submit.spec.owner.user)
            uploaded = [digest for upload in submit.uploads for digest in self._uploaded(store, upload)]
            self._store.hold(submit.spec.run_id, store, [*digests, *uploaded])
            source = submit.payload.source
            if isinstance(source, StoredPayload) and source.size <= self._most_kept_bytes:
                self._payloads[submit.spec.run_id] = store, source

    def release(self, run_id: str) -> None:
        """Release what a finished run held in the store, after its directory has its payload."""
        if (payload := self._payloads.pop(run_id, None)) is None:
            self._store.release(run_id)
            return
        directory = self._active.directory(run_id)
        self._thread.do(
            lambda: _keep_payload(directory, self._stores, *payload),
            lambda _: self._store.release(run_id),
            lambda _: self._store.release(run_id),
        )

    def close(self) -> None:
        self._thread.close()
        self._store.close()

    # ------------------------------------------------------------ uploads

    def _uploaded(self, store: str, upload: Upload) -> list[str]:
        """Return the blobs of an upload; none if its manifest can't be read, which its nodes will report."""
        if not upload.manifest or not 0 < upload.manifest_size <= PIECE_BYTES:
            return []
        try:
            with open(blob_path(self._stores, store, upload.manifest), "rb") as file:
                manifest = manifest_in(file.read(upload.manifest_size))
        except (OSError, ManifestUnusable):
            return []
        return [digest for file in manifest.files for digest in file.blobs]

    def _ask(self, store: str, message: AskBlobs) -> Callable[[], _Answer]:
        if len(message.blobs) > _MOST_ASKED:
            raise UsageError(f"more than {_MOST_ASKED:,} blobs were requested at once.")

        def held() -> _Answer:
            sizes = tuple(self._store.stored_bytes(store, digest, size) for digest, size in message.blobs)
            return BlobsHeld(request=message.request, bytes=sizes), ()

        return held

    def _put(self, store: str, message: PutBlob, frames: Sequence[bytes]) -> Callable[[], _Answer]:
        if len(frames) != 1 or len(frames[0]) > BULK_CHUNK_BYTES or message.size < 0:
            raise UsageError("a chunk of an upload has the wrong size.")

        def put() -> _Answer:
            up_to = self._store.put(store, message.digest, message.size, message.offset, frames[0])
            return BlobTaken(request=message.request, up_to=up_to), ()

        return put

    def _why_not(
        self, message: AskBlobs | PutBlob | ReadRunFile | ListRunFiles, error: OSError
    ) -> tuple[str, ErrorKind]:
        """Return why a request failed in the thread, and which error that is."""
        why = error.strerror or str(error)
        match message:
            case ReadRunFile(name=name) | ListRunFiles(under=name):
                file = name[:200] or "its directory"
                return f"{file} of the run can't be read at the pool: {why}.", ErrorKind.RUN_FILE_UNKNOWN
            case _ if isinstance(error, BlobRefused):
                return f"the pool refused the run's variables: {error}", ErrorKind.USAGE
            case _:
                return f"the pool can't keep the run's variables: {why}. {self._room()}", ErrorKind.USAGE

    def _room(self) -> str:
        with contextlib.suppress(OSError):
            return f"On the pool, {disk_room(self._stores)}; its operator has to free space."
        return "The pool's operator has to check its disk."

    # ------------------------------------------------------------ files of runs

    def _directory(self, client: ConnectedClient, run_id: str) -> Path:
        if (owner := self._permissions.user_of(run_id)) is None or not client.may_see(owner):
            # don't reveal whether another user's run exists
            raise RunUnknown(f"this pool has no run {run_id[:40]!r} of yours.")
        return self._active.directory(run_id)

    def _read(self, directory: Path, message: ReadRunFile) -> Callable[[], _Answer]:
        size, offset = min(message.size, BULK_CHUNK_BYTES), message.offset
        if size < 0 or not 0 <= offset <= _MOST_OFFSET:
            raise UsageError("a part of a file can't begin or end outside the file.")

        def read() -> _Answer:
            descriptor, kept = self._open(directory, message.name)
            try:
                status, data = os.fstat(descriptor), os.pread(descriptor, size, offset)
            finally:
                os.close(descriptor)
            changed_at = status.st_mtime if kept else 0.0
            return RunFileRead(request=message.request, size=status.st_size, changed_at=changed_at), (data,)

        return read

    def _open(self, directory: Path, name: str) -> tuple[int, bool]:
        """Open a file of a run, or the memory file that will become one. Returns whether it is on disk."""
        try:
            return open_below(directory, name), True
        except FileNotFoundError:
            if (result := _RESULT.fullmatch(name)) is None:
                raise
        with contextlib.suppress(OSError):
            return self._open_memory(directory, int(result[1])), False
        # the memory file was released, so its copy is on disk
        return open_below(directory, name), True

    def _open_memory(self, directory: Path, rank: int) -> int:
        """Open the memory file of a rank's result.

        Raises:
            OSError: The memory file is gone.
        """
        run_id = directory.name
        if (known := self._in_memory.get(run_id)) is None:
            known = self._in_memory[run_id] = _results_in_memory(directory)
            if len(self._in_memory) > _MOST_KNOWN:
                self._in_memory.popitem(last=False)
        if rank not in known:
            raise FileNotFoundError(f"rank {rank} of run {short(run_id)} has no result in memory")
        descriptor = os.open(known[rank], os.O_RDONLY | os.O_CLOEXEC)
        # the descriptor number may have been reused
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:sgpu-payload-{run_id}-{rank} "):
            os.close(descriptor)
            raise FileNotFoundError(f"the result of rank {rank} of run {short(run_id)} is gone")
        return descriptor


def needed_blobs(submit: Submit) -> Collection[str]:
    """Return the digests of all blobs that a run needs."""
    source = submit.payload.source
    payload = source.digests if isinstance(source, StoredPayload) else ()
    files = (digest for file in _carried_files(submit) for digest in file.blobs)
    manifests = (upload.manifest for upload in submit.uploads if upload.manifest)
    return dict.fromkeys((*payload, *files, *manifests))


def names_files(submit: Submit) -> bool:
    """Whether the message refers to files by path, which a client on another machine can't do."""
    by_path = any(file.path for file in (*_carried_files(submit), *submit.uploads))
    return by_path or isinstance(submit.payload.source, SharedPayload | FilePayload)


def _carried_files(submit: Submit) -> tuple[CodeBundle | Wheel, ...]:
    return (*submit.code, *(submit.environment.wheels if submit.environment is not None else ()))


def _list(directory: Path, message: ListRunFiles) -> _Answer:
    files, more = list_below(directory, message.under)
    links = links_below(directory, message.under)
    return RunFiles(request=message.request, files=tuple(files), more=more, links=links), ()


def _results_in_memory(directory: Path) -> dict[int, str]:
    found: dict[int, str] = {}
    with contextlib.suppress(ValueError, msgspec.DecodeError):
        for event, _ in EventFile(directory).new_events():
            if isinstance(event.body, RunEnded):
                for result in event.body.results:
                    source = result.payload.source if result.payload is not None else None
                    if isinstance(source, SharedPayload):
                        found[result.rank] = f"/proc/{source.pid}/fd/{source.fd}"
    return found


def _keep_payload(directory: Path, stores: Path, store: str, source: StoredPayload) -> None:
    """Link a run's payload from the store into its directory, if the run was started."""
    kept, folder = directory / PAYLOAD_PARTS, directory / f".{PAYLOAD_PARTS}.part"
    if not (directory / RUN_RECORD).is_file() or kept.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    for part in source.parts:
        link_or_copy(blob_path(stores, store, part.digest), folder / str(part.offset))
        # read-only: the file may be a hard link that other runs share
        os.chmod(folder / str(part.offset), 0o400)
    os.replace(folder, kept)
