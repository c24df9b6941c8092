"""Uploads code, wheels, folders and files to remote pools. An upload contains only files within its folder.

`.sgpuignore` in the folder excludes files. Digests of files are cached, so that a large folder is not read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from sgpu_magic.client.blob_sender import BlobContent, BlobSender, Sending, pieces_of
from sgpu_magic.client.link import PoolLink
from sgpu_magic.config import private_dir
from sgpu_magic.errors import SerializationError, UsageError
from sgpu_magic.files.atomic_file import write_whole
from sgpu_magic.files.disk_usage import keep_newest
from sgpu_magic.files.file_state import FileState
from sgpu_magic.formatting import format_bytes
from sgpu_magic.wire.attachments import (
    MOST_UPLOADED_FILES,
    CodeBundle,
    Manifest,
    Upload,
    UploadedFile,
    Wheel,
    manifest_bytes,
)
from sgpu_magic.wire.decoding import MsgpackDecoder
from sgpu_magic.wire.files import PIECE_BYTES
from sgpu_magic.wire.option_text import OptionName, text_of

if TYPE_CHECKING:
    from sgpu_magic.client.run import Attachments

FILE = ".sgpuignore"
_UPLOAD = OptionName("upload")

# excluded unless a pattern with `!` in the file includes them
_ALWAYS = (".git/", "__pycache__/", ".ipynb_checkpoints/", "/.sgpuignore")
_FOLDER = "upload-digests"
_MOST_KEPT = 100


class FoundFile(msgspec.Struct, frozen=True):
    """One file of an upload.

    Args:
        name: Path relative to the folder, with `/` as the separator.
        path: Absolute path.
        status: Status of the file itself, not of a link to it.
    """

    name: str
    path: str
    status: os.stat_result


class FoundFiles(msgspec.Struct, frozen=True):
    """The content of an upload.

    Args:
        files: Its files, sorted by name.
        folders: Folders without any file.
        single: Whether the upload is a single file instead of a folder.
    """

    files: tuple[FoundFile, ...]
    folders: tuple[str, ...] = ()
    single: bool = False


def find_files(root: Path) -> FoundFiles:
    """Find the files of an upload: of a folder, or a single file.

    A link to a file or folder within becomes a copy of it. What `.sgpuignore` in the folder excludes is left out.

    Raises:
        UsageError: A link leads out of the folder, an entry is neither file nor folder, or there are too many files.
        SerializationError: A folder can't be read.
    """
    real = Path(os.path.realpath(root))
    try:
        status = os.stat(real)
        if not stat.S_ISDIR(status.st_mode):
            _check_kind(real, status.st_mode)
            return FoundFiles((FoundFile(real.name, str(real), status),), single=True)
        walk = _Walk(real)
        walk.scan()
    except OSError as error:
        raise SerializationError(
            text_of(
                _UPLOAD,
                f" {root}: {error.filename or real} can't be read: {error.strerror or error}. Make it readable, or "
                f"list it in {FILE}.",
            )
        ) from None
    used = {str(parent) for file in walk.files for parent in PurePosixPath(file.name).parents}
    empty = sorted(name for name in walk.folders if name not in used)
    return FoundFiles(tuple(sorted(walk.files, key=lambda file: file.name)), tuple(empty))


class _Walk:
    """Collects the files below a folder.

    Args:
        root: Real path of the folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        lines: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            lines = (root / FILE).read_text(encoding="utf-8", errors="replace").splitlines()
        self._rules = IgnoreRules(lines)
        self.files: list[FoundFile] = []
        self.folders: list[str] = []

    def scan(self) -> None:
        waiting = [("", self._root)]
        while waiting:
            prefix, folder = waiting.pop()
            with os.scandir(folder) as entries:
                for entry in entries:
                    waiting.extend(self._scan_entry(prefix, entry))

    def _scan_entry(self, prefix: str, entry: os.DirEntry[str]) -> Iterator[tuple[str, str]]:
        """Record a file; yield a folder to be searched."""
        name = f"{prefix}{entry.name}"
        is_link = entry.is_symlink()
        is_folder = entry.is_dir()
        if self._rules.excludes(name, folder=is_folder):
            return
        path = self._led_to(name, entry.path) if is_link else entry.path
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError(
                text_of(
                    _UPLOAD,
                    f": {os.fsencode(entry.path)!r} has a name that is not UTF-8, which other machines may not "
                    f"support. Rename it, or list it in {FILE}.",
                )
            ) from None
        if is_folder:
            if is_link and f"{os.path.dirname(entry.path)}/".startswith(f"{path}/"):
                raise UsageError(
                    text_of(_UPLOAD, f": the link {entry.path} leads to a folder that contains it. List it in {FILE}.")
                )
            self.folders.append(name)
            yield f"{name}/", path
            return
        status = os.stat(path)
        _check_kind(Path(entry.path), status.st_mode)
        self.files.append(FoundFile(name, path, status))
        if len(self.files) > MOST_UPLOADED_FILES:
            raise UsageError(
                text_of(
                    _UPLOAD,
                    f" {self._root} has more than {MOST_UPLOADED_FILES:,} files. Pack them into an archive, or leave "
                    f"some out in {FILE}.",
                )
            )

    def _led_to(self, name: str, path: str) -> str:
        real = os.path.realpath(path)
        if not f"{real}/".startswith(f"{self._root}/"):
            raise UsageError(
                text_of(
                    _UPLOAD,
                    f" {self._root}: the link {name} points outside it, to {real}. Only what is in the folder is "
                    f"uploaded: copy it there, upload {real} by itself, or list {name} in {FILE}.",
                )
            )
        return real


def _check_kind(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise UsageError(
            text_of(_UPLOAD, f": {path} is neither a file nor a folder. List it in {FILE}, or leave it out.")
        )


class IgnoreRules:
    """The patterns of `.sgpuignore`; the last match decides (https://git-scm.com/docs/gitignore).

    Args:
        lines: Lines of the file; empty if there is none.
    """

    def __init__(self, lines: Iterable[str] = ()) -> None:
        import pathspec

        self._spec = pathspec.GitIgnoreSpec.from_lines((*_ALWAYS, *lines))

    def excludes(self, name: str, *, folder: bool) -> bool:
        """Whether a file or folder is excluded. Callers do not descend into excluded folders.

        Args:
            name: Path relative to the upload's folder, with `/` as the separator.
            folder: Whether it is a folder.
        """
        return self._spec.match_file(f"{name}/" if folder else name)


class _Known(msgspec.Struct, frozen=True, array_like=True):
    """A file's state when it was read, and the digests of its pieces."""

    state: FileState
    digests: tuple[str, ...]


_decoder = MsgpackDecoder(dict[str, _Known])


class KnownDigests:
    """Cached digests of the files of one folder. Made before the files are read.

    Args:
        state: The state directory, where the cache is stored.
        root: The folder.
    """

    def __init__(self, state: Path, root: Path) -> None:
        name = hashlib.blake2b(os.fsencode(root), digest_size=16).hexdigest()
        self._folder = state / _FOLDER
        self._path = self._folder / name
        # earlier than any read of the files
        self._began_ns = time.time_ns()
        self._known: dict[str, _Known] = {}
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self._known = _decoder.decode(self._path.read_bytes())

    def digests_of(self, path: str, status: os.stat_result) -> tuple[str, ...] | None:
        """Return a file's digests, None if it may have changed."""
        known = self._known.get(path)
        return known.digests if known is not None and known.state == FileState.from_stat(status) else None

    def keep(self, found: Mapping[str, tuple[os.stat_result, tuple[str, ...]]]) -> None:
        """Replace the cached digests. Write errors are ignored.

        Args:
            found: By path, the file's status when its digests were computed, and the digests.
        """
        read = {path: _Known(FileState.from_stat(status), digests) for path, (status, digests) in found.items()}
        kept = {path: known for path, known in read.items() if known.state.is_settled(self._began_ns)}
        if kept == self._known:
            return
        with contextlib.suppress(OSError):
            private_dir(self._folder.parent)
            private_dir(self._folder)
            write_whole(self._path, msgspec.msgpack.encode(kept))
            keep_newest(self._folder, _MOST_KEPT)


# ---------------------------------------------------------------- sending to a remote pool


def send_attachments(
    along: Attachments, link: PoolLink, state: Path, sending: Sending
) -> tuple[Attachments, list[str]]:
    """Send a pool the code, wheels, folders and files that it lacks.

    A no-op for a pool whose ranks are on this machine.

    Args:
        along: Attachments with paths on this machine.
        link: The link to the pool.
        state: The state directory, with cached digests of files.
        sending: Reports the progress.

    Returns:
        The attachments with blobs instead of paths, and a sentence per upload with its size and how much was sent.

    Raises:
        UsageError: An upload is not possible, or the pool has not enough space.
        SerializationError: A file can't be read.
        PoolLost: The pool ended.
    """
    if link.welcome.near:
        return along, []
    environment = along.environment
    wheels = environment.wheels if environment is not None else ()
    total = sum(each.size for each in (*along.code, *wheels))
    sender = BlobSender(link, sending.part("code and packages", total))
    code = tuple(replace(bundle, path="", blobs=_blobs_of(bundle, sender)) for bundle in along.code)
    if environment is not None and wheels:
        blobs = tuple(replace(wheel, path="", blobs=_blobs_of(wheel, sender)) for wheel in wheels)
        environment = replace(environment, wheels=blobs)
    uploads = [_send(upload, link, state, sending) for upload in along.uploads]
    along = replace(along, code=code, environment=environment, uploads=tuple(upload for upload, _ in uploads))
    return along, [note for _, note in uploads if note]


def _blobs_of(each: CodeBundle | Wheel, sender: BlobSender) -> tuple[str, ...]:
    return tuple(sender.send(pieces_of(each.path, each.size)))


def _send(upload: Upload, link: PoolLink, state: Path, sending: Sending) -> tuple[Upload, str]:
    root = Path(upload.path)
    found = find_files(root)
    known = KnownDigests(state, root)
    total = sum(file.status.st_size for file in found.files)
    name = upload.name or upload.below
    sender = BlobSender(link, sending.part(name, total))
    digests = iter(sender.send(_pieces(found.files, known)))
    by_file = {
        file.name: tuple(next(digests) for _ in range(0, file.status.st_size, PIECE_BYTES)) for file in found.files
    }
    lacked = sender.sent_bytes
    known.keep({file.path: (file.status, by_file[file.name]) for file in found.files})
    files = tuple(
        UploadedFile(file.name, file.status.st_size, by_file[file.name], bool(file.status.st_mode & 0o100))
        for file in found.files
    )
    manifest = manifest_bytes(Manifest(files=files, folders=found.folders, single=found.single))
    if len(manifest) > PIECE_BYTES:
        raise UsageError(text_of(_UPLOAD, f" {name} has too many files: pack them into an archive."))
    (digest,) = sender.send([BlobContent(len(manifest), lambda: memoryview(manifest))])
    made = replace(upload, path="", manifest=digest, manifest_size=len(manifest))
    count = "1 file" if len(found.files) == 1 else f"{len(found.files):,} files"
    note = f"uploaded {name}: {count}, {format_bytes(total)}, of which the pool lacked {format_bytes(lacked)}"
    # files without a name are told together
    return made, note if upload.name else ""


def _pieces(files: Iterable[FoundFile], known: KnownDigests) -> Iterator[BlobContent]:
    for file in files:
        digests = known.digests_of(file.path, file.status) or ()
        for at, piece in enumerate(pieces_of(file.path, file.status.st_size)):
            yield BlobContent(piece.size, piece.load, digests[at] if digests else "")
