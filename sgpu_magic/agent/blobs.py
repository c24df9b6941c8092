"""Blobs of the pool's store on this node, and the uploaded folders and files that are assembled from them, each once.

A blob is read from the pool's store on the pool's machine; elsewhere it is fetched and cached for a while. A folder
stays while a run uses it. Where the node sees the notebook's files, uploads are used in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.agent.faults import call_in_background
from sgpu_magic.agent.node_context import FIXED_TIME, point_link
from sgpu_magic.agent.reports import Send
from sgpu_magic.config import Settings, private_dir
from sgpu_magic.files.content_store import blob_path, is_intact, join_blobs, piece_sizes
from sgpu_magic.files.kept_folders import KeptFolders
from sgpu_magic.files.run_directory import parts_of
from sgpu_magic.files.whole_file import appearing, evict, used_entries, write_at
from sgpu_magic.system.message_stream import Pending
from sgpu_magic.wire.attachments import UPLOADS_VARIABLE, Manifest, ManifestUnusable, Upload, UploadedFile, manifest_in
from sgpu_magic.wire.files import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    PIECE_BYTES,
    WINDOW,
    BlobFetched,
    FetchBlob,
    FetchRunFile,
    RunFile,
    is_digest,
)
from sgpu_magic.wire.node import Launch

# blobs fetched at once: one is hashed while another arrives
_AT_ONCE = 2


class BlobMissing(Exception):
    """A blob can't be fetched; the message is the reason."""


class BlobCache:
    """Provides the blobs that runs of this agent need. Used in the loop's thread.

    Args:
        settings: The pool's settings.
        send: Sends to the current pool service.
    """

    def __init__(self, settings: Settings, send: Send) -> None:
        self._stores = settings.state_path / "blobs"
        self._folder = settings.state_path / "blob-cache"
        self._most_bytes = settings.blobs_bytes
        self._send = send
        self._requests = itertools.count(1)
        self._asked = Pending[int, tuple[FetchBlob | FetchRunFile, asyncio.Future[bytes]]]()
        self._coming: dict[str, asyncio.Future[Path]] = {}
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._users: dict[str, set[str]] = {}

    async def path(self, launch: Launch, digest: str, size: int) -> Path:
        """Return a blob's path on this node, and fetch the blob if necessary. Concurrent callers share one transfer.

        Args:
            launch: The launch that needs the blob until `leave`.
            digest: The blob's digest.
            size: Its size in bytes.

        Raises:
            BlobMissing: The blob can't be fetched.
            OSError: It can't be written.
        """
        if not launch.far:
            here = blob_path(self._stores, launch.store, digest)
            if not here.is_file():
                raise BlobMissing("a part of them is no longer in the pool's store. Run the cell again")
            return here
        self._users.setdefault(digest, set()).add(launch.spec.run_id)
        coming = self._coming.get(digest)
        if coming is None:
            coming = self._coming[digest] = asyncio.ensure_future(self._fetched(launch.store, digest, size))
            coming.add_done_callback(lambda _: self._coming.pop(digest, None))
        # a cancelled caller does not stop the transfer for the others
        return await asyncio.shield(coming)

    def leave(self, run_id: str) -> None:
        """Release the run's blobs and cancel transfers that no other run needs."""
        for digest, users in list(self._users.items()):
            users.discard(run_id)
            if not users:
                del self._users[digest]
                if (coming := self._coming.get(digest)) is not None:
                    coming.cancel()

    def fetched(self, answer: BlobFetched, frames: Sequence[bytes]) -> None:
        """Handle the pool's answer with a part of a blob or file."""
        asked = self._asked.pop(answer.request, None)
        if asked is None or asked[1].done():
            return
        part = asked[1]
        if answer.problem or not frames:
            part.set_exception(BlobMissing(answer.problem or "a part of them arrived empty"))
        else:
            part.set_result(frames[0])

    def service_came(self) -> None:
        """Send all unanswered requests to the new service."""
        for question, _ in list(self._asked.values()):
            self._send(question)

    # ------------------------------------------------------------ within

    async def _fetched(self, store: str, digest: str, size: int) -> Path:
        path = self._folder / digest
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size == size:
                os.utime(path)
                return path
        async with self._turns:
            private_dir(self._folder.parent)
            private_dir(self._folder)
            self._make_room(size)
            with appearing(path) as file:
                question = functools.partial(FetchBlob, store=store, digest=digest)
                await self._fetch_into(file.fileno(), size, question)
                if not await call_in_background(lambda: is_intact(file.fileno(), digest), "sgpu-hash"):
                    raise BlobMissing("a part of them was damaged in the transfer from the pool. Run the cell again")
        return path

    async def run_file(self, launch: Launch, file: RunFile) -> None:
        """Fetch a file of the run's directory at the pool into its directory on this node.

        Raises:
            BlobMissing: The file can't be fetched.
            OSError: It can't be written.
        """
        path = Path(launch.run_dir, *parts_of(file.name))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with self._turns:
            with appearing(path, 0o700 if file.executable else 0o600) as target:
                question = functools.partial(FetchRunFile, run_id=launch.spec.run_id, name=file.name)
                await self._fetch_into(target.fileno(), file.size, question)
                # a later modification time shows that the ranks have written the file
                os.utime(target.fileno(), (file.changed_at, file.changed_at))

    async def _fetch_into(self, file: int, size: int, question: Callable[..., FetchBlob | FetchRunFile]) -> None:
        under_way: list[tuple[int, asyncio.Future[bytes]]] = []
        at = 0
        try:
            while at < size or under_way:
                while at < size and len(under_way) < WINDOW // _AT_ONCE:
                    length = min(CHUNK_BYTES, size - at)
                    under_way.append((at, self._ask(question(request=next(self._requests), offset=at, size=length))))
                    at += length
                offset, part = under_way[0]
                data = await part
                del under_way[0]
                write_at(file, data, offset)
        finally:
            for _, part in under_way:
                part.cancel()

    def _ask(self, question: FetchBlob | FetchRunFile) -> asyncio.Future[bytes]:
        part: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        part.add_done_callback(lambda _: self._asked.pop(question.request, None))
        self._asked[question.request] = question, part
        self._send(question)
        return part

    def _make_room(self, size: int) -> None:
        """Remove the least recently used blobs beyond the budget, except those that runs use."""

        def remove(path: Path) -> bool:
            # a blob being fetched has a temporary name: `.<digest>-...`
            if path.name.lstrip(".")[: 2 * DIGEST_BYTES] in self._users:
                return False
            path.unlink(missing_ok=True)
            return True

        evict(used_entries(self._folder), self._most_bytes - size, remove)


# ---------------------------------------------------------------- folders and files, read-only

_WAITING_AT_ONCE = 64


class Uploaded:
    """The node's copies of uploads, in `uploads-here/<manifest digest>`, locked while a run of this agent uses them.

    Args:
        settings: The pool's settings.
        blobs: Provides the uploads' blobs.
    """

    def __init__(self, settings: Settings, blobs: BlobCache) -> None:
        self._kept = KeptFolders(settings.state_path / "uploads-here", settings.blobs_bytes)
        self._blobs = blobs
        # only accessed in the loop's thread
        self._of: dict[str, dict[str, Upload]] = {}

    async def arrive(self, launch: Launch) -> Launch:
        """Return the launch with its uploads' paths on this node, where they stay until `release`.

        Raises:
            BlobMissing: A blob can't be fetched, or a manifest is invalid.
            OSError: There is not enough space.
        """
        here: list[Upload] = []
        for upload in launch.uploads:
            path = await self._path(launch, upload) if upload.manifest else upload.path
            here.append(msgspec.structs.replace(upload, path=path))
        return msgspec.structs.replace(launch, uploads=tuple(here))

    def placed(self, launch: Launch) -> Launch:
        """Tell the launch's ranks the paths of its uploads and of those of the session's earlier cells."""
        spec = launch.spec
        known = dict(self._of.get(spec.session, {})) if spec.session else {}
        known.update((upload.name, upload) for upload in launch.uploads)
        if not known:
            return launch
        self._of[spec.session if spec.in_session else spec.run_id] = known
        context = launch.context
        if context.elsewhere:
            for upload in known.values():
                _link(context.cwd, upload)
        told = json.dumps({name: upload.path for name, upload in known.items()})
        environ = {**context.environ, UPLOADS_VARIABLE: told}
        return msgspec.structs.replace(launch, context=msgspec.structs.replace(context, environ=environ))

    def release(self, run_id: str) -> None:
        """Release the run's uploads: its ranks are gone."""
        self._of.pop(run_id, None)
        self._kept.release(run_id)

    # ------------------------------------------------------------ within

    async def _path(self, launch: Launch, upload: Upload) -> str:
        """Return an upload's path on this node, and assemble it if necessary."""
        spec, digest = launch.spec, upload.manifest
        user = spec.session if spec.in_session else spec.run_id
        if not is_digest(digest) or not 0 < upload.manifest_size <= PIECE_BYTES:
            raise BlobMissing(f"the upload {upload.name} has no valid manifest")
        # wanted from now on, so that nothing is removed meanwhile
        path = self._kept.want(digest, user)
        manifest = await self._manifest(launch, upload)
        is_whole = functools.partial(_is_whole, manifest=manifest)
        if path is None:
            path = await call_in_background(lambda: self._kept.find(digest, is_whole), "sgpu-upload")
        if path is None:
            blobs = await self._fetch(launch, manifest)
            fill = functools.partial(_put_together, manifest=manifest, blobs=blobs)
            path = await call_in_background(lambda: self._kept.put(digest, fill, is_whole), "sgpu-upload")
        if not self._kept.is_wanted(digest, user):
            raise BlobMissing("the run has ended")
        return str(path / manifest.files[0].name) if manifest.single else str(path)

    async def _manifest(self, launch: Launch, upload: Upload) -> Manifest:
        path = await self._blobs.path(launch, upload.manifest, upload.manifest_size)
        try:
            manifest = manifest_in(path.read_bytes())
        except ManifestUnusable as error:
            raise BlobMissing(str(error)) from None
        if manifest.single and len(manifest.files) != 1:
            raise BlobMissing("the manifest of a single-file upload does not list exactly one file")
        return manifest

    async def _fetch(self, launch: Launch, manifest: Manifest) -> dict[str, Path]:
        """Fetch all blobs of a manifest, a few at a time."""
        wanted = {blob: size for file in manifest.files for blob, size in _blobs_of(file)}
        blobs: dict[str, Path] = {}
        turns = asyncio.Semaphore(_WAITING_AT_ONCE)

        async def fetch(blob: str, size: int) -> None:
            async with turns:
                blobs[blob] = await self._blobs.path(launch, blob, size)

        await asyncio.gather(*(fetch(blob, size) for blob, size in wanted.items()))
        return blobs


def _blobs_of(file: UploadedFile) -> list[tuple[str, int]]:
    sizes = piece_sizes(file.size)
    if len(sizes) != len(file.blobs):
        raise BlobMissing(f"the parts of {file.name[:200]} do not add up to its size")
    return list(zip(file.blobs, sizes, strict=True))


def _put_together(folder: Path, manifest: Manifest, blobs: Mapping[str, Path]) -> None:
    """Fill an empty folder from a manifest. Its names are untrusted; none leads out of the folder."""
    for name in manifest.folders:
        folder.joinpath(*parts_of(name)).mkdir(parents=True, exist_ok=True)
    for file in manifest.files:
        path = folder.joinpath(*parts_of(file.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o500 if file.executable else 0o400)
        try:
            join_blobs(descriptor, [(blobs[blob], size) for blob, size in _blobs_of(file)])
            os.utime(descriptor, (FIXED_TIME, FIXED_TIME))
        finally:
            os.close(descriptor)
    # the folder's own modification time records its last use
    for directory, _, _ in os.walk(folder, topdown=False):
        os.chmod(directory, 0o500)


def _is_whole(folder: Path, manifest: Manifest) -> bool:
    for file in manifest.files:
        try:
            status = os.lstat(folder / file.name)
        except OSError:
            return False
        if (status.st_size, int(status.st_mtime)) != (file.size, FIXED_TIME):
            return False
    return True


def _link(cwd: str, upload: Upload) -> None:
    """Link an upload at its place in the notebook's folder, below the ranks' working directory."""
    if not upload.below:
        return
    link = os.path.join(cwd, *parts_of(upload.below))
    os.makedirs(os.path.dirname(link), mode=0o700, exist_ok=True)
    if os.path.lexists(link) and not os.path.islink(link):
        # ranks of an earlier cell have created something with that name
        return
    point_link(link, upload.path)
