"""Fetches a launch's inputs from the pool's store: the payload into memory, code and wheels into files.

Local code is unpacked once, and stays while a run uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import re
import shutil
import stat
import zipfile
import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec

from sgpu_magic.agent.faults import call_in_background
from sgpu_magic.agent.inputs.blobs import FIXED_TIME, BlobCache, Uploaded
from sgpu_magic.agent.reports import Send
from sgpu_magic.config import Settings, private_dir
from sgpu_magic.files.content_store import join_blobs, join_parts, piece_sizes
from sgpu_magic.files.kept_folders import KeptFolders
from sgpu_magic.files.whole_file import appearing
from sgpu_magic.system.byte_sizes import fits_memory
from sgpu_magic.wire.attachments import CodeBundle, StoredPayload, Wheel
from sgpu_magic.wire.node import Launch


def travels_by_blobs(launch: Launch) -> bool:
    """Whether the launch needs anything from the pool's store before it can start."""
    wheels = launch.environment.wheels if launch.environment is not None else ()
    if any(upload.manifest for upload in launch.uploads) or launch.checkpoints:
        return True
    return isinstance(launch.payload.source, StoredPayload) or any(each.blobs for each in (*launch.code, *wheels))


Item = TypeVar("Item", CodeBundle, Wheel)


class LaunchInputs:
    """Fetches the notebook's code and files that launches need.

    Args:
        settings: The pool's settings.
        send: Sends to the current pool service.

    Attributes:
        blobs: Fetches blobs.
        uploaded: Assembles uploaded folders and files.
        code: Unpacks local code.
    """

    def __init__(self, settings: Settings, send: Send) -> None:
        self._folder = settings.state_path / "arrivals"
        self.blobs = BlobCache(settings, send)
        self.uploaded = Uploaded(settings, self.blobs)
        self.code = CodeBundles(settings)

    async def luggage(self, launch: Launch) -> Launch:
        """Fetch code, wheels, checkpoints and uploads; return the launch with their paths on this node.

        Code archives and wheels stay until `over`, uploads until `release`.

        Raises:
            BlobMissing: A blob can't be fetched.
            OSError: A file can't be written.
        """
        code = [await self._on_disk(launch, bundle, f"code-{at}") for at, bundle in enumerate(launch.code)]
        launch = msgspec.structs.replace(launch, code=tuple(code))
        environment = launch.environment
        if environment is not None and environment.wheels:
            wheels = [await self._on_disk(launch, wheel, f"wheel-{at}") for at, wheel in enumerate(environment.wheels)]
            environment = msgspec.structs.replace(environment, wheels=tuple(wheels))
            launch = msgspec.structs.replace(launch, environment=environment)
        for file in launch.checkpoints:
            await self.blobs.run_file(launch, file)
        return await self.uploaded.arrive(launch) if launch.uploads else launch

    async def payload(self, launch: Launch, source: StoredPayload) -> tuple[int, str]:
        """Assemble the payload in memory, or in a file where memory is short.

        Returns:
            Its descriptor, and the file's path, "" for memory.

        Raises:
            BlobMissing: A part can't be fetched.
            OSError: There is not enough space.
        """
        paths = await asyncio.gather(*(self.blobs.path(launch, part.digest, part.size) for part in source.parts))
        joined = call_in_background(lambda: _joined(launch.run_dir, source, paths), "sgpu-arrival")
        try:
            return await asyncio.shield(joined)
        except asyncio.CancelledError:
            joined.add_done_callback(_discard)
            raise

    def over(self, run_id: str) -> None:
        """Remove the launch's archives and wheels: its ranks start, or it has ended."""
        self.blobs.leave(run_id)
        shutil.rmtree(self._folder / run_id, ignore_errors=True)

    def release(self, run_id: str) -> None:
        """Release the run's code and uploads: its ranks are gone."""
        self.code.release(run_id)
        self.uploaded.release(run_id)

    # ------------------------------------------------------------ within

    async def _on_disk(self, launch: Launch, each: Item, name: str) -> Item:
        if not each.blobs:
            return each
        paths = [
            await self.blobs.path(launch, digest, size)
            for digest, size in zip(each.blobs, piece_sizes(each.size), strict=True)
        ]
        if len(paths) == 1:
            return msgspec.structs.replace(each, path=str(paths[0]))
        target = private_dir(self._folder / launch.spec.run_id) / name
        await call_in_background(lambda: _join(paths, target), "sgpu-arrival")
        return msgspec.structs.replace(each, path=str(target))


def _joined(run_dir: str, source: StoredPayload, paths: Sequence[Path]) -> tuple[int, str]:
    file = ""
    if fits_memory(source.size):
        descriptor = os.memfd_create("sgpu-payload-arrived", os.MFD_CLOEXEC)
    else:
        file = os.path.join(run_dir, ".payload.bin.part")
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        join_parts(descriptor, source.size, zip(source.parts, paths, strict=True))
    except BaseException:
        _remove(descriptor, file)
        raise
    return descriptor, file


def _discard(joined: asyncio.Future[tuple[int, str]]) -> None:
    """Remove a payload whose run was cancelled."""
    if joined.exception() is None:
        _remove(*joined.result())


def _remove(descriptor: int, file: str) -> None:
    os.close(descriptor)
    if file:
        Path(file).unlink(missing_ok=True)


def _join(paths: Sequence[Path], target: Path) -> None:
    with appearing(target) as file:
        join_blobs(file.fileno(), [(path, path.stat().st_size) for path in paths])


# ---------------------------------------------------------------- local code: archives, unpacked

# unpacked code may use a tenth of the environments' limit
_SHARE = 10
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 20
# modification times of unpacked files are in the ten years after `FIXED_TIME`
_TIMES = 315_360_000


class CodeUnusable(Exception):
    """An archive of local code can't be used; the message, one paragraph, says why."""


class CodeBundles(KeptFolders):
    """The node's unpacked archives, in `code/<sha256>` in the environments' directory. Thread-safe.

    An unpacked archive has a shared lock while a run of this agent uses it, so no agent removes it.

    Args:
        settings: The pool's settings.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.environments_path / "code", settings.environments_bytes // _SHARE)
        self._limit = settings.code_limit_bytes

    def unpack(self, run_id: str, bundles: Iterable[CodeBundle]) -> Mapping[str, str]:
        """Return each bundle's folder by the kernel's path entry, and unpack the bundle if necessary.

        Args:
            run_id: The run or session that uses the bundles until `release`.
            bundles: The launch's code bundles.

        Raises:
            CodeUnusable: An archive is missing, damaged or too large, or has paths outside its folder.
            OSError: There is not enough space.
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
    """Open the archive and check its digest."""
    try:
        with open(bundle.path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != bundle.sha256:
                raise CodeUnusable(
                    f"the notebook's code from {bundle.entry} arrived damaged: {bundle.path} does not match its "
                    "digest. Run the cell again; if you remove that file first, the archive is built again."
                )
            with zipfile.ZipFile(file) as archive:
                yield archive
    except FileNotFoundError:
        raise CodeUnusable(
            f"the notebook's code from {bundle.entry} did not arrive: {bundle.path} does not exist. Run the cell again."
        ) from None
    except zipfile.BadZipFile as error:
        raise CodeUnusable(f"the notebook's code from {bundle.entry} can't be unpacked: {error}.") from None


def _unpack(archive: zipfile.ZipFile, folder: Path, limit: int) -> None:
    """Write plain files below `folder`, and nothing elsewhere.

    Raises:
        CodeUnusable: A name leads out of the folder or occurs twice, a member is not a plain file, or the archive is
            too large.
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
                f"the notebook's code has a file {info.filename!r}, which is not allowed in its folder. The code was "
                "not unpacked."
            )
        seen.add(info.filename)
        total += info.file_size
        if total > limit:
            raise CodeUnusable(f"the notebook's code is larger than the {limit} bytes that this node accepts.")
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
    # Python and a session's ranks detect edited files by time and size, so different contents get different times
    changed_at = FIXED_TIME + checksum % _TIMES
    os.utime(path, (changed_at, changed_at))
