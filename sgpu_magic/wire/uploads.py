"""Folders and files of the notebook's that go along with a run (`--upload`).

Where the nodes see the notebook's files, a path is all that goes. Else the files' bytes are blobs (see `blobs`), and
one more blob, the manifest, says which of them become which files; its digest stands for the whole.
"""

from __future__ import annotations

import msgspec

from sgpu_magic.wire.record import Record

VARIABLE = "SGPU_UPLOADS"
"""The environment variable that tells a rank where they lie: JSON, path by name."""

MOST_FILES = 50_000
"""In one of them: each file is a blob of its own."""


class UploadedFile(Record, frozen=True):
    """One file.

    Args:
        name: Below the folder, with `/` between; the file's own where only a file goes along.
        size: In bytes.
        blobs: Digests of its bytes, cut into pieces of `PIECE_BYTES`.
        executable: Its owner may execute it.
    """

    name: str
    size: int
    blobs: tuple[str, ...] = ()
    executable: bool = False


class Manifest(Record, frozen=True, kw_only=True):
    """What one upload consists of.

    Args:
        files: In order of their names.
        folders: Those that have no file.
        single: It is the one file, not a folder.
    """

    files: tuple[UploadedFile, ...]
    folders: tuple[str, ...] = ()
    single: bool = False


class Upload(Record, frozen=True, kw_only=True):
    """A folder or file that goes along.

    Args:
        name: What `runtime.upload_path` takes.
        path: Where it lies on the node; "" where that is not known yet.
        below: Where it is in the notebook's working directory, "" where it is not in there.
        manifest: The digest of its manifest, "" where the nodes see the notebook's files.
        manifest_size: Of the manifest, in bytes.
    """

    name: str
    path: str = ""
    below: str = ""
    manifest: str = ""
    manifest_size: int = 0


class ManifestUnusable(Exception):
    """A manifest is none; the message is the reason."""


_decoder = msgspec.msgpack.Decoder(Manifest)


def encoded(manifest: Manifest) -> bytes:
    """Return a manifest's bytes: the same for the same files."""
    return msgspec.msgpack.encode(manifest)


def decoded(data: bytes) -> Manifest:
    """Return the manifest that these bytes are.

    Raises:
        ManifestUnusable: They are none.
    """
    try:
        manifest = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ManifestUnusable(f"what an upload consists of can't be read: {error}") from None
    if len(manifest.files) > MOST_FILES:
        raise ManifestUnusable(f"an upload has {len(manifest.files):,} files, and {MOST_FILES:,} are possible")
    return manifest
