"""Folders and files that went along with runs: each is put together once on this node, for reading only.

Where the node sees the notebook's files they are those themselves.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sgpu_magic.agent.background_call import call_in_background
from sgpu_magic.agent.inputs.blob_cache import BlobCache, BlobMissing
from sgpu_magic.config import Settings
from sgpu_magic.files.content_store import join_blobs, piece_sizes
from sgpu_magic.files.kept_folders import KeptFolders
from sgpu_magic.files.safe_paths import parts_of
from sgpu_magic.wire.attachments import UPLOADS_VARIABLE, Manifest, ManifestUnusable, Upload, UploadedFile, manifest_in
from sgpu_magic.wire.files import PIECE_BYTES, is_digest
from sgpu_magic.wire.node import Launch

# a file that a rank has changed all the same has another time
_TIME = 946_684_800
_AT_ONCE = 64


class Uploaded:
    """The node's copies, in `uploads/<digest of the manifest>`, locked while a run of this agent uses them.

    Args:
        settings: Where they are, and how many bytes they may have.
        blobs: Where their parts come from.
    """

    def __init__(self, settings: Settings, blobs: BlobCache) -> None:
        self._kept = KeptFolders(settings.state_path / "uploads-here", settings.blobs_bytes)
        self._blobs = blobs
        # used in the loop's thread
        self._of: dict[str, dict[str, Upload]] = {}

    async def arrive(self, launch: Launch) -> Launch:
        """Return the launch with uploads that lie on this node until `release`.

        Raises:
            BlobMissing: A part can't be had, or the upload is not what it says that it is.
            OSError: There is no room.
        """
        here: list[Upload] = []
        for upload in launch.uploads:
            path = await self._path(launch, upload) if upload.manifest else upload.path
            here.append(msgspec.structs.replace(upload, path=path))
        return msgspec.structs.replace(launch, uploads=tuple(here))

    def placed(self, launch: Launch) -> Launch:
        """Return the launch whose ranks know where its uploads are, and those of its session's earlier cells."""
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
        """The run's ranks are gone."""
        self._of.pop(run_id, None)
        self._kept.release(run_id)

    # ------------------------------------------------------------ within

    async def _path(self, launch: Launch, upload: Upload) -> str:
        """Where an upload lies here; its parts come first if it does not."""
        spec, digest = launch.spec, upload.manifest
        user = spec.session if spec.in_session else spec.run_id
        if not is_digest(digest) or not 0 < upload.manifest_size <= PIECE_BYTES:
            raise BlobMissing(f"what {upload.name} consists of was not told")
        # from now on, so that nothing is removed meanwhile
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
        path = await self._blobs.path(
            launch.spec.run_id, launch.store, upload.manifest, upload.manifest_size, far=launch.far
        )
        try:
            manifest = manifest_in(path.read_bytes())
        except ManifestUnusable as error:
            raise BlobMissing(str(error)) from None
        if manifest.single and len(manifest.files) != 1:
            raise BlobMissing("an upload of one file has another number of them")
        return manifest

    async def _fetch(self, launch: Launch, manifest: Manifest) -> dict[str, Path]:
        """Have all blobs on this node, a few at a time."""
        wanted = {blob: size for file in manifest.files for blob, size in _blobs_of(file)}
        blobs: dict[str, Path] = {}
        turns = asyncio.Semaphore(_AT_ONCE)

        async def fetch(blob: str, size: int) -> None:
            async with turns:
                blobs[blob] = await self._blobs.path(launch.spec.run_id, launch.store, blob, size, far=launch.far)

        await asyncio.gather(*(fetch(blob, size) for blob, size in wanted.items()))
        return blobs


def _blobs_of(file: UploadedFile) -> list[tuple[str, int]]:
    sizes = piece_sizes(file.size)
    if len(sizes) != len(file.blobs):
        raise BlobMissing(f"the parts of {file.name[:200]} do not make its size")
    return list(zip(file.blobs, sizes, strict=True))


def _put_together(folder: Path, manifest: Manifest, blobs: Mapping[str, Path]) -> None:
    """Fill an empty folder; the names come from elsewhere, and none leads out of it."""
    for name in manifest.folders:
        folder.joinpath(*parts_of(name)).mkdir(parents=True, exist_ok=True)
    for file in manifest.files:
        path = folder.joinpath(*parts_of(file.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o500 if file.executable else 0o400)
        try:
            join_blobs(descriptor, [(blobs[blob], size) for blob, size in _blobs_of(file)])
            os.utime(descriptor, (_TIME, _TIME))
        finally:
            os.close(descriptor)
    # the folder's own time says when it was used last
    for directory, _, _ in os.walk(folder, topdown=False):
        os.chmod(directory, 0o500)


def _is_whole(folder: Path, manifest: Manifest) -> bool:
    for file in manifest.files:
        try:
            status = os.lstat(folder / file.name)
        except OSError:
            return False
        if (status.st_size, int(status.st_mtime)) != (file.size, _TIME):
            return False
    return True


def _link(cwd: str, upload: Upload) -> None:
    """Have an upload where the notebook had it, below the ranks' working directory."""
    if not upload.below:
        return
    link = os.path.join(cwd, *parts_of(upload.below))
    os.makedirs(os.path.dirname(link), mode=0o700, exist_ok=True)
    if os.path.lexists(link) and not os.path.islink(link):
        # ranks of an earlier cell have made something of that name
        return
    temporary = f"{link}.{os.getpid()}.part"
    os.symlink(upload.path, temporary)
    os.replace(temporary, link)
