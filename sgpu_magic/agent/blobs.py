"""Blobs of the pool's store on this node, and the uploaded folders and files that are assembled from them, each once.

A blob is read from the pool's store on the pool's machine; elsewhere it is fetched and cached for a while. A folder
stays while a run uses it. Where the node sees the notebook's files, uploads are used in place.

Both are kept per user, as in the pool's store: knowing a digest gives no access to bytes that another user has sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sgpu_magic.agent.faults import call_in_background
from sgpu_magic.agent.node_context import FIXED_TIME, point_link
from sgpu_magic.agent.reports import FileAnswer, FileRequests
from sgpu_magic.config import Settings, private_dir
from sgpu_magic.files.atomic_file import appearing, write_at
from sgpu_magic.files.content_store import blob_path, is_intact, join_blobs, piece_sizes
from sgpu_magic.files.disk_usage import evict, used_entries
from sgpu_magic.files.file_state import FileState
from sgpu_magic.files.folder_cache import FolderCache
from sgpu_magic.files.run_directory import make_folder_below, make_link_below, parts_of
from sgpu_magic.wire.attachments import UPLOADS_VARIABLE, Manifest, ManifestUnusable, Upload, UploadedFile, manifest_in
from sgpu_magic.wire.decoding import MsgpackDecoder
from sgpu_magic.wire.files import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    PIECE_BYTES,
    WINDOW,
    FetchBlob,
    FetchRunFile,
    RunFile,
    is_digest,
    is_store_name,
)
from sgpu_magic.wire.node import Launch

# blobs fetched at once: one is hashed while another arrives
_AT_ONCE = 2

UPLOADS_HERE = "uploads-here"
"""The folder of a node's copies of uploads, below its state directory."""

_WAITING_AT_ONCE = 64


class BlobMissing(Exception):
    """A blob can't be fetched; the message is the reason."""


class BlobCache:
    """Provides the blobs that runs of this agent need. Used in the loop's thread.

    Args:
        settings: The pool's settings.
        requests: Requests parts of files from the pool.
    """

    def __init__(self, settings: Settings, requests: FileRequests) -> None:
        self._stores = settings.state_path / "blobs"
        self._folder = settings.state_path / "blob-cache"
        self._most_bytes = settings.blobs_bytes
        self._requests = requests
        # transfers in progress, by store and digest
        self._coming: dict[tuple[str, str], asyncio.Future[Path]] = {}
        self._turns = asyncio.Semaphore(_AT_ONCE)
        # the runs that use a blob, by store and digest
        self._users: dict[tuple[str, str], set[str]] = {}

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
        if not is_store_name(launch.store) or not is_digest(digest):
            raise BlobMissing("a part of them has no valid digest")
        blob = launch.store, digest
        self._users.setdefault(blob, set()).add(launch.spec.run_id)
        coming = self._coming.get(blob)
        if coming is None:
            coming = self._coming[blob] = asyncio.ensure_future(self._fetched(launch.store, digest, size))
            coming.add_done_callback(lambda _: self._coming.pop(blob, None))
        # a cancelled caller does not stop the transfer for the others
        return await asyncio.shield(coming)

    def release(self, run_id: str) -> None:
        """Release the run's blobs and cancel transfers that no other run needs."""
        for blob, users in list(self._users.items()):
            users.discard(run_id)
            if not users:
                del self._users[blob]
                if (coming := self._coming.get(blob)) is not None:
                    coming.cancel()

    # ------------------------------------------------------------ internals

    async def _fetched(self, store: str, digest: str, size: int) -> Path:
        path = self._folder / store / digest
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size == size:
                os.utime(path)
                return path
        async with self._turns:
            private_dir(self._folder.parent)
            private_dir(self._folder)
            private_dir(path.parent)
            self._make_room(size)
            with appearing(path) as file:
                question = FetchBlob(request=0, store=store, digest=digest, offset=0, size=0)
                await self._fetch_into(file.fileno(), size, question)
                if not await call_in_background(lambda: is_intact(file.fileno(), digest), "sgpu-hash"):
                    raise BlobMissing("a part of them was damaged in the transfer from the pool. Run the cell again")
        return path

    async def run_file(self, launch: Launch, file: RunFile) -> None:
        """Fetch a file, link or empty folder of the run's directory at the pool into its directory on this node.

        Raises:
            BlobMissing: The file can't be fetched.
            OSError: It can't be written.
        """
        if file.folder or file.target:
            root = private_dir(Path(launch.run_dir))
            if file.folder:
                make_folder_below(root, file.name)
            else:
                make_link_below(root, file.name, file.target)
            return
        path = Path(launch.run_dir, *parts_of(file.name))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with self._turns:
            with appearing(path, 0o700 if file.executable else 0o600) as target:
                question = FetchRunFile(request=0, run_id=launch.spec.run_id, name=file.name, offset=0, size=0)
                await self._fetch_into(target.fileno(), file.size, question)
                # a later modification time shows that the ranks have written the file
                os.utime(target.fileno(), (file.changed_at, file.changed_at))

    async def _fetch_into(self, file: int, size: int, question: FetchBlob | FetchRunFile) -> None:
        under_way: deque[tuple[int, asyncio.Future[FileAnswer]]] = deque()
        offsets = iter(range(0, size, CHUNK_BYTES))
        try:
            while True:
                for at in itertools.islice(offsets, WINDOW // _AT_ONCE - len(under_way)):
                    part = msgspec.structs.replace(question, offset=at, size=min(CHUNK_BYTES, size - at))
                    under_way.append((at, self._requests.ask(part)))
                if not under_way:
                    return
                at, answer = under_way[0]
                problem, frames = await answer
                del under_way[0]
                if problem or not frames:
                    raise BlobMissing(problem or "a part of them arrived empty")
                write_at(file, frames[0], at)
        finally:
            for _, answer in under_way:
                answer.cancel()

    def _make_room(self, size: int) -> None:
        """Remove the least recently used blobs of all users beyond the budget, except those that runs use."""

        def remove(path: Path) -> bool:
            # a blob being fetched has a temporary name: `.<digest>-...`
            if (path.parent.name, path.name.lstrip(".")[: 2 * DIGEST_BYTES]) in self._users:
                return False
            path.unlink(missing_ok=True)
            return True

        blobs = [entry for store in self._folder.iterdir() for entry in used_entries(store)]
        evict(blobs, self._most_bytes - size, remove)


# ---------------------------------------------------------------- folders and files, read-only

# in each copy: the upload, and the states of its files and folders when it was assembled
_CONTENT, _STATES = "content", "states"
_states_decoder = MsgpackDecoder(dict[str, FileState])


class Uploaded:
    """The node's copies of uploads, in `uploads-here/<store>-<manifest digest>`, locked while a run here uses them.

    A copy in which a run has written is not used for later runs.

    Args:
        settings: The pool's settings.
        blobs: Provides the uploads' blobs.
    """

    def __init__(self, settings: Settings, blobs: BlobCache) -> None:
        self._kept = FolderCache(settings.state_path / UPLOADS_HERE, settings.blobs_bytes)
        self._blobs = blobs
        # only accessed in the loop's thread
        self._of: dict[str, dict[tuple[str, str], Upload]] = {}

    async def arrive(self, launch: Launch) -> Launch:
        """Return the launch with its uploads' paths on this node, where they stay until `release`.

        Raises:
            BlobMissing: A blob can't be fetched, or a manifest is invalid.
            OSError: There is not enough space.
        """
        here = [
            msgspec.structs.replace(upload, path=await self._path(launch, upload)) if upload.manifest else upload
            for upload in launch.uploads
        ]
        return msgspec.structs.replace(launch, uploads=tuple(here))

    def add_uploads(self, launch: Launch) -> Launch:
        """Give the launch's ranks the paths of its uploads and of those of the session's earlier cells."""
        spec = launch.spec
        known = dict(self._of.get(spec.session, {})) if spec.session else {}
        known.update(((upload.name, upload.below), upload) for upload in launch.uploads)
        if not known:
            return launch
        self._of[spec.session if spec.in_session else spec.run_id] = known
        context = launch.context
        if context.is_remote:
            for upload in known.values():
                _link(context.cwd, upload)
        uploads = json.dumps({name: upload.path for (name, _), upload in known.items() if name})
        environ = {**context.environ, UPLOADS_VARIABLE: uploads}
        return msgspec.structs.replace(launch, context=msgspec.structs.replace(context, environ=environ))

    def release(self, run_id: str) -> None:
        """Release the run's uploads: its ranks are gone."""
        self._of.pop(run_id, None)
        self._kept.release(run_id)

    # ------------------------------------------------------------ internals

    async def _path(self, launch: Launch, upload: Upload) -> str:
        """Return an upload's path on this node, and assemble it if necessary."""
        spec, digest = launch.spec, upload.manifest
        user = spec.session if spec.in_session else spec.run_id
        if not is_digest(digest) or not 0 < upload.manifest_size <= PIECE_BYTES:
            raise BlobMissing(f"the upload {upload.name or upload.below} has no valid manifest")
        # a manifest proves that the user knows the digests of its blobs, not that the blobs are in the user's store
        name = f"{launch.store}-{digest}"
        # marked as in use first, so that it is not evicted meanwhile
        copy, path = name, self._kept.keep_for(name, user)
        manifest = await self._manifest(launch, upload)
        for number in itertools.count(1):
            if path is None or await call_in_background(functools.partial(_is_unchanged, path), "sgpu-upload"):
                break
            # a run that still uses this copy has modified it
            copy = f"{name}.{number}"
            path = self._kept.keep_for(copy, user)
        if path is None:
            path = await call_in_background(lambda: self._kept.find(copy, _is_unchanged), "sgpu-upload")
        if path is None:
            blobs = await self._fetch(launch, manifest)
            fill = functools.partial(_put_together, manifest=manifest, blobs=blobs)
            path = await call_in_background(lambda: self._kept.put(copy, fill, _is_unchanged), "sgpu-upload")
        if not self._kept.is_kept_for(copy, user):
            raise BlobMissing("the run has ended")
        content = path / _CONTENT
        return str(content / manifest.files[0].name) if manifest.single else str(content)

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
    copy, folder = folder, folder / _CONTENT
    folder.mkdir()
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
    states: dict[str, FileState] = {}
    for directory, _, names in os.walk(folder, topdown=False):
        os.chmod(directory, 0o500)
        states.update((path, _state(copy, path)) for path in _paths_below(copy, directory, names))
    (copy / _STATES).write_bytes(msgspec.msgpack.encode(states))


def _paths_below(copy: Path, directory: str, names: list[str]) -> list[str]:
    """Return the paths, relative to the copy, of a directory and of some files in it."""
    own = os.path.relpath(directory, copy)
    return [own, *(os.path.join(own, name) for name in names)]


def _state(copy: Path, path: str) -> FileState:
    return FileState.from_stat(os.lstat(copy / path))


def _is_unchanged(copy: Path) -> bool:
    """Whether an upload's copy is unmodified: ranks that run as root can write to it whatever its modes are.

    A folder's state changes with its entries, so added files are detected.
    """
    with contextlib.suppress(OSError, msgspec.DecodeError):
        states = _states_decoder.decode((copy / _STATES).read_bytes())
        return all(_state(copy, path) == state for path, state in states.items())
    return False


def _link(cwd: str, upload: Upload) -> None:
    """Link an upload into the ranks' working directory, at its path in the notebook's folder."""
    if not upload.below:
        return
    parts = parts_of(upload.below)
    if any(os.path.islink(os.path.join(cwd, *parts[:count])) for count in range(1, len(parts))):
        # within another upload, which is not written to
        return
    link = os.path.join(cwd, *parts)
    os.makedirs(os.path.dirname(link), mode=0o700, exist_ok=True)
    _link_below(link, upload.path)


def _link_below(link: str, path: str) -> None:
    """Make a link to an upload, or links to what is in it where there is a folder already."""
    if not os.path.lexists(link) or os.path.islink(link):
        point_link(link, path)
    elif os.path.isdir(link) and os.path.isdir(path):
        for name in os.listdir(path):
            _link_below(os.path.join(link, name), os.path.join(path, name))
    # otherwise ranks of an earlier cell have created something with that name
