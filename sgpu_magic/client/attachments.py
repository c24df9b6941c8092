"""What goes to the pool with a run beside its payload, and how that is sent to a pool on other machines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from sgpu_magic.client.blob_sender import BlobSender, Piece, Sending, pieces_of
from sgpu_magic.client.link import PoolLink
from sgpu_magic.client.upload_files import FoundFile, FoundFiles, KnownDigests, find_files
from sgpu_magic.errors import UsageError
from sgpu_magic.system.byte_sizes import format_bytes
from sgpu_magic.wire.attachments import CodeBundle, Environment, Manifest, Upload, UploadedFile, Wheel, manifest_bytes
from sgpu_magic.wire.files import PIECE_BYTES
from sgpu_magic.wire.run import CellSource, Interpreter
from sgpu_magic.wire.tracking import Tracking

_MOST_MANIFEST_BYTES = PIECE_BYTES


@dataclass(frozen=True, slots=True)
class Stand:
    """Where ranks stand that are not to stand where this process does: working directory and `sys.path`."""

    cwd: str
    sys_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Attachments:
    """Packages, code, uploads and the place in MLflow, as `wire.client.Submit` has them.

    Args:
        interpreter: The ranks' Python; None is this process's.
        stand: Where they stand; None is where this process does.
        elsewhere: The pool's nodes do not see this machine's files.
        cell: As `RankContext.cell`.
        uploads: Folders and files of this machine.
    """

    environment: Environment | None = None
    code: tuple[CodeBundle, ...] = ()
    tracking: Tracking | None = None
    interpreter: Interpreter | None = None
    stand: Stand | None = None
    elsewhere: bool = False
    cell: CellSource | None = None
    uploads: tuple[Upload, ...] = ()


def sent(along: Attachments, link: PoolLink, state: Path, sending: Sending) -> tuple[Attachments, list[str]]:
    """Send a pool whose ranks are on other machines what it lacks of code, wheels, folders and files.

    What it has from an earlier run is not sent again.

    Args:
        along: With paths on this machine.
        link: To the pool.
        state: The state directory, where digests of files are kept.
        sending: Tells how far it is.

    Returns:
        What goes along as the nodes find it, and a sentence for each upload: its size, and how much of it was sent.

    Raises:
        UsageError: An upload can't go along, or the pool has no room.
        SerializationError: A file can't be read.
        PoolLost: The pool ended.
    """
    if link.welcome.near:
        return along, []
    environment = along.environment
    wheels = environment.wheels if environment is not None else ()
    total = sum(each.size for each in (*along.code, *wheels))
    sender = BlobSender(link, sending.part("code and packages", total))
    code = tuple(msgspec.structs.replace(bundle, path="", blobs=_blobs_of(bundle, sender)) for bundle in along.code)
    if environment is not None and wheels:
        blobs = tuple(msgspec.structs.replace(wheel, path="", blobs=_blobs_of(wheel, sender)) for wheel in wheels)
        environment = msgspec.structs.replace(environment, wheels=blobs)
    uploads = [_send(upload, link, state, sending) for upload in along.uploads]
    along = replace(along, code=code, environment=environment, uploads=tuple(upload for upload, _ in uploads))
    return along, [note for _, note in uploads]


def _blobs_of(each: CodeBundle | Wheel, sender: BlobSender) -> tuple[str, ...]:
    return tuple(sender.send_file(each.path))


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
    manifest = manifest_bytes(_manifest(found, by_file))
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
