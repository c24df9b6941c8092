"""Records of what is sent with a run: packed objects, packages, local code and `--upload` files."""

from __future__ import annotations

import msgspec

from sgpu_magic.wire.base import Record
from sgpu_magic.wire.decoding import MsgpackDecoder

UPLOADS_VARIABLE = "SGPU_UPLOADS"
"""Environment variable with the paths of a rank's uploads: JSON, path by name."""
MOST_UPLOADED_FILES = 50_000
"""Maximum number of files in one upload, each of which is a separate blob."""


# ---------------------------------------------------------------- packed objects


class InlinePayload(Record, frozen=True, tag="inline", kw_only=True):
    """The packed bytes are the message's first raw frame."""


class SharedPayload(Record, frozen=True, tag="shared", kw_only=True):
    """The packed bytes are in a memory file of a live process: `/proc/<pid>/fd/<fd>`.

    Args:
        inode: Inode of the memory file, because the process may close it and reuse the number for another file. 0 if
            the process keeps it open while anyone reads it.
    """

    pid: int
    fd: int
    size: int
    inode: int = 0


class FilePayload(Record, frozen=True, tag="file", kw_only=True):
    """The packed bytes are in a file, used when memory is short and for results from nodes on other machines."""

    path: str
    size: int


class StoredPart(Record, frozen=True, kw_only=True):
    """A range of the packed bytes that is stored as a blob (see `files`).

    Args:
        digest: Digest of the blob.
        offset: Offset of the range in the packed bytes.
        size: Size in bytes.
    """

    digest: str
    offset: int
    size: int


class StoredPayload(Record, frozen=True, tag="stored", kw_only=True):
    """The packed bytes are in blobs of the pool. Bytes that no part covers are ignored."""

    parts: tuple[StoredPart, ...]
    size: int

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of all blobs, without duplicates."""
        return tuple(dict.fromkeys(part.digest for part in self.parts))


PayloadSource = InlinePayload | SharedPayload | FilePayload | StoredPayload


class PackedLayout(Record, frozen=True, kw_only=True):
    """Layout of one packed object: `[pickle][buffer 0][buffer 1]...`.

    Args:
        pickle_size: Size in bytes of the pickle stream at offset 0.
        buffers: (offset, size) of each out-of-band buffer, 64-byte aligned, in pickle order. No page of 4096 bytes
            has parts of a buffer of 1 MiB or more and of another one.
        mac: HMAC-SHA256 of the pickle stream and this table under the run's key, checked before unpickling. Buffers are
            raw data that is never unpickled, so they are not covered.
    """

    pickle_size: int
    buffers: tuple[tuple[int, int], ...]
    mac: bytes


class Payload(Record, frozen=True, kw_only=True):
    source: PayloadSource
    layout: PackedLayout


# ---------------------------------------------------------------- packages and code


class Wheel(Record, frozen=True, kw_only=True):
    """A wheel that no package index has: built from a local project, or repacked from installed files.

    Args:
        file: File name, `name-1.0-py3-none-any.whl`.
        sha256: SHA-256 of the file, hexadecimal. The wheel is stored under it.
        size: Size in bytes.
        path: Path on the client's machine.
        blobs: Digests of the pool's blobs that make up the file, in order; empty if nodes can read the client's files.
    """

    file: str
    sha256: str
    size: int
    path: str
    blobs: tuple[str, ...] = ()


class CodeBundle(Record, frozen=True, kw_only=True):
    """The modules under one entry of the kernel's `sys.path`, as a zip archive.

    Args:
        entry: The kernel's path entry. On the node, the unpacked bundle replaces it.
        sha256: SHA-256 of the archive, hexadecimal. Equal contents have equal digests: file times and order are
            normalised.
        size: Size of the archive in bytes.
        path: Path on the client's machine.
        blobs: As in `Wheel`.
    """

    entry: str
    sha256: str
    size: int
    path: str
    blobs: tuple[str, ...] = ()


class Environment(Record, frozen=True, kw_only=True):
    """The packages of a run's ranks, described so that a node can build the environment.

    Args:
        digest: Digest of pins, hashes, Python tag, platform, `torch_mine` and `allow_build`. A built environment is
            stored under it.
        label: Display name: "" for the notebook's own packages, else the name of a base or saved environment or a file.
        own: The notebook's own packages. A node that has the kernel's interpreter uses it and builds nothing. The pool
            service sets it to False for a client whose Python is on another machine only.
        python: Python version, `3.11`.
        platform: Platform as in `packaging.tags`, without the glibc version: `linux_x86_64`.
        requirements: Complete lines of a requirements file, installed without their dependencies. Packages of the
            node's base layer (torch, `nvidia-*`, sgpu-magic and its worker's dependencies) are left out.
        needed: Packages left to the node's base layer, as pins for the record: `torch==2.13.0`.
        resolve: The requirements were written by a person: dependencies are resolved and versions may be open.
        wheels: Wheels installed in addition.
        torch_mine: `--torch mine`: torch and `nvidia-*` are installed in the notebook's versions.
        allow_build: Source distributions may be built.
        packages: Number of packages, without those of the base layer.
        conda: Packages installed by conda. A node that has to build the environment refuses them.
    """

    digest: str
    label: str = ""
    own: bool = True
    python: str = ""
    platform: str = ""
    requirements: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    resolve: bool = False
    wheels: tuple[Wheel, ...] = ()
    torch_mine: bool = False
    allow_build: bool = False
    packages: int = 0
    conda: tuple[str, ...] = ()


# ---------------------------------------------------------------- uploads

# If nodes can read the notebook's files, only a path is sent. Otherwise the files' bytes are blobs (see `files`), and
# one more blob, the manifest, lists which of them make up which files. Its digest identifies the upload.


class UploadedFile(Record, frozen=True):
    """One file of an upload.

    Args:
        name: Path below the folder, with `/` as separator; the file's own name if the upload is a single file.
        size: Size in bytes.
        blobs: Digests of its content, split into pieces of `PIECE_BYTES`.
        executable: Whether its owner may execute it.
    """

    name: str
    size: int
    blobs: tuple[str, ...] = ()
    executable: bool = False


class Manifest(Record, frozen=True, kw_only=True):
    """The contents of one upload.

    Args:
        files: The files, sorted by name.
        folders: Folders without files.
        single: The upload is a single file, not a folder.
    """

    files: tuple[UploadedFile, ...]
    folders: tuple[str, ...] = ()
    single: bool = False


class Upload(Record, frozen=True, kw_only=True):
    """A folder or file that is uploaded with a run.

    Args:
        name: The name to pass to `runtime.upload_path`; "" for a file that is only found at `below`.
        path: Path on the node; "" if not yet known.
        below: Path relative to the notebook's working directory; "" if it is outside.
        manifest: Digest of the manifest; "" if nodes can read the notebook's files.
        manifest_size: Size of the manifest in bytes.
    """

    name: str
    path: str = ""
    below: str = ""
    manifest: str = ""
    manifest_size: int = 0


class ManifestUnusable(Exception):
    """A manifest is invalid. The message gives the reason."""


_decoder = MsgpackDecoder(Manifest)


def manifest_bytes(manifest: Manifest) -> bytes:
    """Encode a manifest. The same files give the same bytes."""
    return msgspec.msgpack.encode(manifest)


def manifest_in(data: bytes) -> Manifest:
    """Decode a manifest.

    Raises:
        ManifestUnusable: The data is not a manifest, or lists more than `MOST_UPLOADED_FILES` files.
    """
    try:
        manifest = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ManifestUnusable(f"the manifest of an upload can't be read: {error}") from None
    if len(manifest.files) > MOST_UPLOADED_FILES:
        raise ManifestUnusable(
            f"an upload has {len(manifest.files):,} files; at most {MOST_UPLOADED_FILES:,} are possible"
        )
    return manifest
