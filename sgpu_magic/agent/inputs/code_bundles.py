"""Local code of notebooks on this node: each archive is unpacked once, and stays while a run may import from it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path, PurePosixPath

from sgpu_magic.config import Settings
from sgpu_magic.files.kept_folders import KeptFolders
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
