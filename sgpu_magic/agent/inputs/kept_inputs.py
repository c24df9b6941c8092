"""What went along with runs, on this node: folders and files, and local code. Each is put together once.

It stays while a run uses it. Where the node sees the notebook's files, folders and files are those themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path, PurePosixPath

import msgspec

from sgpu_magic.agent.background_call import call_in_background
from sgpu_magic.agent.inputs.blob_cache import BlobCache, BlobMissing
from sgpu_magic.config import Settings
from sgpu_magic.files.content_store import join_blobs, piece_sizes
from sgpu_magic.files.kept_folders import KeptFolders
from sgpu_magic.files.safe_paths import parts_of
from sgpu_magic.wire.attachments import (
    UPLOADS_VARIABLE,
    CodeBundle,
    Manifest,
    ManifestUnusable,
    Upload,
    UploadedFile,
    manifest_in,
)
from sgpu_magic.wire.files import PIECE_BYTES, is_digest
from sgpu_magic.wire.node import Launch

# ---------------------------------------------------------------- folders and files, for reading only

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


# ---------------------------------------------------------------- local code: archives, unpacked

# of what environments may have
_SHARE = 10
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 20
# times of unpacked files lie in the ten years after `_TIME`
_TIMES = 315_360_000


class CodeUnusable(Exception):
    """An archive of local code is not what it says that it is; the message is one paragraph."""


class CodeBundles(KeptFolders):
    """The node's unpacked archives, in `code/<sha256>` beside its environments. Methods may be called by any thread.

    An unpacked archive is locked (shared) while a run of this agent uses it, so no agent removes it.

    Args:
        settings: Where environments are kept, and how many bytes they may have.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.environments_path / "code", settings.environments_bytes // _SHARE)
        self._limit = settings.code_limit_bytes

    def unpack(self, run_id: str, bundles: Iterable[CodeBundle]) -> Mapping[str, str]:
        """Return the folder of each bundle, by the kernel's path entry; unpacked now if need be.

        Args:
            run_id: The run or session that uses them until `release`.
            bundles: What travelled along.

        Raises:
            CodeUnusable: An archive is missing, damaged, too large, or wants to write elsewhere.
            OSError: There is no room.
        """
        found: dict[str, str] = {}
        for bundle in bundles:
            digest = bundle.sha256
            if _DIGEST.fullmatch(digest) is None:
                raise CodeUnusable(f"the notebook's code has no valid digest ({digest[:80]!r}).")
            path = self.want(digest, run_id) or self.put(digest, functools.partial(self._fill, bundle))
            found[bundle.entry] = str(path)
        return found

    def _fill(self, bundle: CodeBundle, folder: Path) -> None:
        with _opened(bundle) as archive:
            _unpack(archive, folder, max(self._limit, bundle.size))


@contextlib.contextmanager
def _opened(bundle: CodeBundle) -> Generator[zipfile.ZipFile]:
    """Open the archive and check that it is the one that was meant."""
    try:
        with open(bundle.path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != bundle.sha256:
                raise CodeUnusable(
                    f"the notebook's code from {bundle.entry} arrived damaged: {bundle.path} has another digest than "
                    "was said. Run the cell again; the archive is made anew when you remove that file."
                )
            with zipfile.ZipFile(file) as archive:
                yield archive
    except FileNotFoundError:
        raise CodeUnusable(
            f"the notebook's code from {bundle.entry} did not arrive: {bundle.path} is not there. Run the cell again."
        ) from None
    except zipfile.BadZipFile as error:
        raise CodeUnusable(f"the notebook's code from {bundle.entry} can't be unpacked: {error}.") from None


def _unpack(archive: zipfile.ZipFile, folder: Path, limit: int) -> None:
    """Write plain files below `folder`, and nothing anywhere else.

    Raises:
        CodeUnusable: A name leads out of the folder or stands twice, or a member is no plain file.
    """
    seen: set[str] = set()
    total = 0
    for info in archive.infolist():
        name = PurePosixPath(info.filename)
        mode = info.external_attr >> 16
        is_safe = (
            info.filename == str(name)
            and not name.is_absolute()
            and name.parts
            and not {"..", "."}.intersection(name.parts)
            and "\\" not in info.filename
            and "\0" not in info.filename
            and (stat.S_IFMT(mode) in (0, stat.S_IFREG))
            and info.compress_type == zipfile.ZIP_STORED
            and info.filename not in seen
        )
        if not is_safe:
            raise CodeUnusable(
                f"the notebook's code has a file {info.filename!r}, which has no place in its folder. It is not "
                "unpacked."
            )
        seen.add(info.filename)
        total += info.file_size
        if total > limit:
            raise CodeUnusable(f"the notebook's code is larger than the {limit} bytes that this node takes.")
        _write(archive, info, folder.joinpath(*name.parts), executable=bool(mode & stat.S_IXUSR))


def _write(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path, *, executable: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o755 if executable else 0o644
    )
    checksum = 0
    with open(descriptor, "wb") as target, archive.open(info) as source:
        while chunk := source.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
            target.write(chunk)
    # by time and size Python and a session's ranks tell an edited file: other contents have another time
    changed_at = _TIME + checksum % _TIMES
    os.utime(path, (changed_at, changed_at))
