"""Content-addressed blobs on disk, by BLAKE3: one folder per user, evicted in order of last use.

blobs/<user>/ab/cdef...      a complete blob with that digest
blobs/<user>/parts/abcdef... an upload in progress; it can be resumed, also by the next service
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from blake3 import blake3

from sgpu_magic.config import private_dir
from sgpu_magic.files.atomic_file import write_at
from sgpu_magic.files.disk_usage import evict
from sgpu_magic.wire.attachments import StoredPart
from sgpu_magic.wire.files import PIECE_BYTES, is_digest, is_store_name

_PARTS = "parts"
_READ_BYTES = 1 << 20
# a blob is not evicted for this long after a client asked for it: it is about to be used
_ASKED_S = 600.0
# incomplete uploads are removed after this time
_PART_STALE_S = 24 * 3600.0
# disk space that uploads leave free
_DISK_RESERVE_BYTES = 1_000_000_000
_MOST_OPEN = 32
_JOINED_AT_ONCE = 2


class BlobRefused(OSError):
    """A blob is refused; the message is a sentence for the user."""


def store_name(user: str) -> str:
    """The folder name of a user's store: the user name if it is valid as one, otherwise a digest of it."""
    if is_store_name(user) and not user.startswith("_"):
        return user
    return "_" + hashlib.blake2b(os.fsencode(user), digest_size=16).hexdigest()


def blob_digest(data: memoryview) -> str:
    """Return the digest of a blob's bytes, computed on all cores."""
    return blake3(data, max_threads=blake3.AUTO).hexdigest()


def is_intact(file: int, digest: str) -> bool:
    """Whether a descriptor's bytes have that digest."""
    hashed, _ = _digest_of(file)
    return hashed.hexdigest() == digest


def _digest_of(file: int) -> tuple[blake3, int]:
    """Return the running digest and the number of a descriptor's bytes."""
    hashed, size = blake3(), 0
    while data := os.pread(file, _READ_BYTES, size):
        hashed.update(data)
        size += len(data)
    return hashed, size


def blob_path(root: Path, store: str, digest: str) -> Path:
    """The path of a blob, whether it exists or not.

    Raises:
        BlobRefused: The store name or the digest is invalid.
    """
    if not is_store_name(store) or not is_digest(digest):
        raise BlobRefused(f"{store[:100]!r} has no blob {digest[:100]!r}")
    return root / store / digest[:2] / digest[2:]


class _Coming(msgspec.Struct, eq=False):
    """An upload in progress.

    Args:
        file: Its file descriptor.
        hashed: The digest of the bytes so far.
        size: The number of bytes so far.
    """

    file: int
    hashed: blake3
    size: int


class BlobStore:
    """All users' stores. Use it from one thread; only `hold` and `release` may be called from others.

    Args:
        root: The directory of the stores.
        most_bytes: The quota of one user's blobs, in bytes.
        reserve_bytes: Disk space that an upload must leave free.
    """

    def __init__(self, root: Path, most_bytes: int, reserve_bytes: int = _DISK_RESERVE_BYTES) -> None:
        self._root = root
        self._reserve_bytes = reserve_bytes
        self._most_bytes = most_bytes
        # blobs (store, digest) that unfinished runs need, by run
        self._in_use: dict[str, frozenset[tuple[str, str]]] = {}
        self._coming: dict[tuple[str, str], _Coming] = {}
        self._asked: dict[tuple[str, str], float] = {}
        self._sizes: dict[str, int] = {}

    def hold(self, run_id: str, store: str, digests: Iterable[str]) -> None:
        """Keep these blobs for a run until `release`."""
        self._in_use[run_id] = frozenset((store, digest) for digest in digests)

    def release(self, run_id: str) -> None:
        """Release a run's blobs."""
        self._in_use.pop(run_id, None)

    def stored_bytes(self, store: str, digest: str, size: int) -> int:
        """Return how many bytes of a blob are stored, and protect it from eviction for 10 minutes.

        Raises:
            BlobRefused: The store name or the digest is invalid.
        """
        path = blob_path(self._root, store, digest)
        self._asked[store, digest] = time.monotonic()
        with contextlib.suppress(FileNotFoundError):
            # after a power failure a file may exist without its bytes
            if path.stat().st_size == size:
                os.utime(path)
                return size
            path.unlink()
        return self._begun(store, digest, size)

    def put(self, store: str, digest: str, size: int, offset: int, data: bytes) -> int:
        """Append bytes to a blob, and return how many are stored then. Bytes at another offset are ignored.

        Args:
            store: The store's name.
            digest: The blob's digest.
            size: The blob's size in bytes.
            offset: The offset of `data` in the blob.
            data: The bytes.

        Raises:
            BlobRefused: The bytes do not match the size or digest, or there is no room.
            OSError: The bytes can't be written.
        """
        path = blob_path(self._root, store, digest)
        if path.exists():
            return size
        key = store, digest
        coming = self._coming.get(key) or self._open(store, digest, size)
        if offset != coming.size:
            return coming.size
        if coming.size + len(data) > size or (not data and size):
            self._drop(key)
            raise BlobRefused("an upload does not have the size that was announced. Run the cell again.")
        try:
            write_at(coming.file, data, coming.size)
        except OSError:
            # the upload can be resumed from here once there is room
            os.ftruncate(coming.file, coming.size)
            raise
        coming.hashed.update(data)
        coming.size += len(data)
        self._sizes[store] += len(data)
        if coming.size == size:
            self._finish(key, coming, path)
        return coming.size

    def close(self) -> None:
        """Close all open files; uploads in progress can be resumed later."""
        for coming in self._coming.values():
            os.close(coming.file)
        self._coming.clear()

    # ------------------------------------------------------------ uploads in progress

    def _begun(self, store: str, digest: str, size: int) -> int:
        if (coming := self._coming.get((store, digest))) is not None:
            return coming.size
        try:
            begun = self._part(store, digest).stat().st_size
        except FileNotFoundError:
            return 0
        # the last chunk completes a blob, so one with all its bytes starts again
        return begun if begun < size else 0

    def _open(self, store: str, digest: str, size: int) -> _Coming:
        """Begin or resume an upload; the bytes of a resumed one are digested again."""
        self._make_room(store, size)
        while len(self._coming) >= _MOST_OPEN:
            os.close(self._coming.pop(next(iter(self._coming))).file)
        part = self._part(store, digest)
        for folder in (self._root, self._root / store, part.parent):
            private_dir(folder)
        file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if os.fstat(file).st_size >= size:
            os.ftruncate(file, 0)
        coming = self._coming[store, digest] = _Coming(file, *_digest_of(file))
        return coming

    def _finish(self, key: tuple[str, str], coming: _Coming, path: Path) -> None:
        store, digest = key
        if coming.hashed.hexdigest() != digest:
            self._drop(key)
            raise BlobRefused(
                "an upload does not have the digest that was announced: it was damaged in transit, or a variable was "
                "changed while it was sent. Run the cell again."
            )
        private_dir(path.parent)
        os.close(coming.file)
        del self._coming[key]
        os.replace(self._part(store, digest), path)

    def _drop(self, key: tuple[str, str]) -> None:
        os.close(self._coming.pop(key).file)
        self._part(*key).unlink(missing_ok=True)

    def _part(self, store: str, digest: str) -> Path:
        return self._root / store / _PARTS / digest

    # ------------------------------------------------------------ disk space

    def _make_room(self, store: str, size: int) -> None:
        if size > self._most_bytes:
            raise BlobRefused(
                f"an upload of {size / 1e9:,.1f} GB is more than a user may keep at this pool "
                f"({self._most_bytes / 1e9:,.1f} GB, its setting blobs_bytes). Send less, with the option exclude."
            )
        total = self._sizes.get(store)
        if total is None:
            total = self._sizes[store] = sum(size for _, size, _ in self._all(store))
        if total + size > self._most_bytes:
            self._evict(store, self._most_bytes - size)
        root = self._root if self._root.exists() else self._root.parent
        if shutil.disk_usage(root).free < size + self._reserve_bytes:
            self._evict(store, 0)
        if shutil.disk_usage(root).free < size + self._reserve_bytes:
            raise BlobRefused(
                f"the disk of this pool has no room for {size / 1e9:,.1f} GB more. Send less, with the option "
                "exclude, or have its operator free some."
            )

    def _evict(self, store: str, most_bytes: int) -> None:
        """Remove the least recently used blobs that are not needed, until the store has at most that size."""
        now = time.monotonic()
        self._asked = {key: at for key, at in self._asked.items() if now - at < _ASKED_S}
        needed = {*self._asked, *self._coming}
        needed.update(*list(self._in_use.values()))

        def remove(blob: tuple[Path, str]) -> bool:
            path, digest = blob
            if (store, digest) in needed:
                return False
            path.unlink(missing_ok=True)
            return True

        total = self._sizes[store] = evict(self._all(store), most_bytes, remove)
        if total > most_bytes > 0:
            raise BlobRefused(
                f"the active runs need {total / 1e9:,.1f} GB of the {self._most_bytes / 1e9:,.1f} GB that a user "
                "may keep at this pool (its setting blobs_bytes). Wait for one of them, or ship less."
            )

    def _all(self, store: str) -> Iterator[tuple[float, int, tuple[Path, str]]]:
        """Yield all blobs in the form that `evict` takes; remove uploads that have been incomplete for too long."""
        stale = time.time() - _PART_STALE_S
        for path in (self._root / store).glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat(follow_symlinks=False)
                whole = path.parent.name != _PARTS
                digest = path.parent.name + path.name if whole else path.name
                if whole or status.st_mtime > stale or (store, digest) in self._coming:
                    yield status.st_mtime, status.st_size, (path, digest)
                else:
                    path.unlink()


# ---------------------------------------------------------------- splitting into blobs, and joining


def piece_sizes(size: int) -> list[int]:
    """The sizes of the blobs into which an object of that size is split."""
    return [min(PIECE_BYTES, size - begin) for begin in range(0, size, PIECE_BYTES)]


def join_blobs(target: int, blobs: Iterable[tuple[Path, int]]) -> None:
    """Write blobs of these sizes one after the other.

    Args:
        target: The file descriptor to write to.
        blobs: The path and size of each blob.

    Raises:
        OSError: A blob is missing or too short, or there is no room.
    """
    at = 0
    for path, size in blobs:
        _copy_blob(path, target, at, size)
        at += size


def join_parts(target: int, size: int, parts: Iterable[tuple[StoredPart, Path]]) -> None:
    """Write the parts of a payload at their offsets.

    Args:
        target: The descriptor of an empty file.
        size: The payload's size in bytes.
        parts: Each part with the path of its blob.

    Raises:
        OSError: A part is missing or outside the payload, or there is no room.
    """
    os.ftruncate(target, size)
    found = list(parts)
    if any(part.offset < 0 or part.offset + part.size > size for part, _ in found):
        raise OSError("its parts exceed its size")
    # most of the time is spent on allocating the pages of a new memory file
    with ThreadPoolExecutor(_JOINED_AT_ONCE, "sgpu-join") as threads:
        for copied in [threads.submit(_copy_blob, path, target, part.offset, part.size) for part, path in found]:
            copied.result()


def _copy_blob(path: Path, target: int, offset: int, size: int) -> None:
    with (
        open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as source,
        # opened anew, so that threads do not share a file position
        open(f"/proc/self/fd/{target}", "r+b", buffering=0) as own,
    ):
        own.seek(offset)
        at = 0
        while at < size:
            if not (count := os.sendfile(own.fileno(), source.fileno(), at, size - at)):
                raise OSError("a part of them has become shorter")
            at += count
