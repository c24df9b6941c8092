"""Brings folders and files that go along with a run to a pool whose nodes do not see this machine's files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sgpu_magic.client.blob_sender import BlobSender, Piece, pieces_of
from sgpu_magic.client.known_digests import KnownDigests
from sgpu_magic.client.link import PoolLink
from sgpu_magic.client.sending import Sending
from sgpu_magic.client.upload_files import FoundFile, FoundFiles, find_files
from sgpu_magic.errors import UsageError
from sgpu_magic.system.byte_sizes import format_bytes
from sgpu_magic.wire.blobs import PIECE_BYTES
from sgpu_magic.wire.uploads import Manifest, Upload, UploadedFile, encoded

_MOST_MANIFEST_BYTES = PIECE_BYTES


@dataclass(frozen=True, slots=True)
class SentUploads:
    """What was brought.

    Args:
        uploads: As the nodes find them.
        notes: A sentence for each: how much it is, and how much of it was sent.
    """

    uploads: tuple[Upload, ...]
    notes: tuple[str, ...]


def send_uploads(uploads: Iterable[Upload], link: PoolLink, state: Path, sending: Sending) -> SentUploads:
    """Send what the pool lacks of them; what it has from an earlier run is not sent again.

    Args:
        uploads: With their paths on this machine.
        link: To the pool.
        state: The state directory, where digests are kept.
        sending: Tells how far they are.

    Raises:
        UsageError: One can't go along, or the pool has no room.
        SerializationError: A file can't be read.
        PoolLost: The pool ended.
    """
    sent: list[Upload] = []
    notes: list[str] = []
    for upload in uploads:
        made, note = _send(upload, link, state, sending)
        sent.append(made)
        notes.append(note)
    return SentUploads(tuple(sent), tuple(notes))


def _send(upload: Upload, link: PoolLink, state: Path, sending: Sending) -> tuple[Upload, str]:
    root = Path(upload.path)
    found = find_files(root)
    known = KnownDigests(state, root)
    total = sum(file.status.st_size for file in found.files)
    sender = BlobSender(link, sending.part(upload.name, total))
    digests = iter(sender.send(_pieces(found.files, known)))
    by_file = {
        file.name: tuple(next(digests) for _ in range(0, file.status.st_size, PIECE_BYTES)) for file in found.files
    }
    lacked = sender.sent_bytes
    known.keep({file.path: (file.status, by_file[file.name]) for file in found.files})
    manifest = encoded(_manifest(found, by_file))
    if len(manifest) > _MOST_MANIFEST_BYTES:
        raise UsageError(f"--upload {upload.name} has too many files: pack them into an archive.")
    (digest,) = sender.send([Piece(len(manifest), lambda: memoryview(manifest))])
    made = msgspec.structs.replace(upload, path="", manifest=digest, manifest_size=len(manifest))
    count = "1 file" if len(found.files) == 1 else f"{len(found.files):,} files"
    return made, (
        f"uploaded {upload.name}: {count}, {format_bytes(total)}, of which the pool lacked {format_bytes(lacked)}"
    )


def _pieces(files: Iterable[FoundFile], known: KnownDigests) -> Iterator[Piece]:
    for file in files:
        digests = known.of(file.path, file.status) or ()
        for at, piece in enumerate(pieces_of(file.path, file.status.st_size)):
            yield Piece(piece.size, piece.load, digests[at] if digests else "")


def _manifest(found: FoundFiles, blobs: dict[str, tuple[str, ...]]) -> Manifest:
    files = tuple(
        UploadedFile(file.name, file.status.st_size, blobs[file.name], bool(file.status.st_mode & 0o100))
        for file in found.files
    )
    return Manifest(files=files, folders=found.folders, single=found.single)
