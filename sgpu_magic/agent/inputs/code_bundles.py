"""Local code of notebooks on this node: each archive is unpacked once, and stays while a run may import from it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import threading
import time
import zipfile
import zlib
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path, PurePosixPath

from sgpu_magic.agent.inputs.kept_folders import evict, lock_shared
from sgpu_magic.config import Settings, private_dir
from sgpu_magic.wire.attachments import CodeBundle

# of what environments may have
_SHARE = 10
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 20
# times of unpacked files lie in the ten years after this
_FIRST_TIME = 946_684_800
_TIMES = 315_360_000


class CodeUnusable(Exception):
    """An archive of local code is not what it says that it is; the message is one paragraph."""


class CodeBundles:
    """The node's unpacked archives, in `code/<sha256>` beside its environments. Methods may be called by any thread.

    An unpacked archive is locked (shared) while a run of this agent uses it, so no agent removes it.

    Args:
        settings: Where environments are kept, and how many bytes they may have.
    """

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.environments_path / "code"
        self._budget = settings.environments_bytes // _SHARE
        self._limit = settings.code_limit_bytes
        self._lock = threading.Lock()
        # descriptors of locked folders by digest, and who uses them
        self._locks: dict[str, int] = {}
        self._users: dict[str, set[str]] = {}

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
        with self._lock:
            for bundle in bundles:
                if _DIGEST.fullmatch(bundle.sha256) is None:
                    raise CodeUnusable(f"the notebook's code has no valid digest ({bundle.sha256[:80]!r}).")
                folder = self._folder / bundle.sha256
                if bundle.sha256 not in self._locks:
                    self._locks[bundle.sha256] = self._locked(bundle, folder)
                self._users.setdefault(bundle.sha256, set()).add(run_id)
                found[bundle.entry] = str(folder)
        return found

    def release(self, run_id: str) -> None:
        """The run's ranks are gone."""
        with self._lock:
            for digest, users in list(self._users.items()):
                users.discard(run_id)
                if not users:
                    del self._users[digest]
                    os.close(self._locks.pop(digest))

    def close(self) -> None:
        """No run is left."""
        with self._lock:
            for descriptor in self._locks.values():
                os.close(descriptor)
            self._locks.clear()
            self._users.clear()

    # ------------------------------------------------------------ within

    def _locked(self, bundle: CodeBundle, folder: Path) -> int:
        """A descriptor that holds the folder, made if it is not there."""
        descriptor = lock_shared(folder)
        if descriptor is not None:
            os.utime(folder)
            return descriptor
        private_dir(self._folder.parent)
        private_dir(self._folder)
        self._make(bundle, folder)
        descriptor = lock_shared(folder)
        if descriptor is None:
            raise OSError(f"{folder} was removed as soon as it was made")
        evict(self._folder, self._budget)
        return descriptor

    def _make(self, bundle: CodeBundle, folder: Path) -> None:
        temporary = self._folder / f".{bundle.sha256[:16]}-{os.getpid()}-{time.monotonic_ns()}.part"
        temporary.mkdir(mode=0o700)
        try:
            with _opened(bundle) as archive:
                _unpack(archive, temporary, max(self._limit, bundle.size))
            try:
                os.rename(temporary, folder)
            except OSError:
                # another agent was first
                if not folder.is_dir():
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


# ---------------------------------------------------------------- within


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
    changed_at = _FIRST_TIME + checksum % _TIMES
    os.utime(path, (changed_at, changed_at))
