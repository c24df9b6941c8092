"""Records of what travels with a run: packed objects, packages, local code, and what `--upload` names."""

from __future__ import annotations

import msgspec

from sgpu_magic.wire.record import Record

# ---------------------------------------------------------------- packed objects


class InlinePayload(Record, frozen=True, tag="inline", kw_only=True):
    """The packed bytes are the message's first raw frame."""


class SharedPayload(Record, frozen=True, tag="shared", kw_only=True):
    """The packed bytes lie in a memory file of a live process: `/proc/<pid>/fd/<fd>`.

    Args:
        inode: The memory file's: the process may close it, and have another file at that number. 0 where it does not
            as long as somebody reads it.
    """

    pid: int
    fd: int
    size: int
    inode: int = 0


class FilePayload(Record, frozen=True, tag="file", kw_only=True):
    """The packed bytes lie in a file on the node, used when memory is short."""

    path: str
    size: int


class StoredPart(Record, frozen=True, kw_only=True):
    """Some of the packed bytes, which are a blob (see `files`).

    Args:
        digest: The blob's.
        offset: Where they belong in the packed bytes.
        size: How many they are.
    """

    digest: str
    offset: int
    size: int


class StoredPayload(Record, frozen=True, tag="stored", kw_only=True):
    """The packed bytes lie in blobs of the pool's. What no part covers is of no account."""

    parts: tuple[StoredPart, ...]
    size: int

    @property
    def digests(self) -> tuple[str, ...]:
        """Of all its blobs, each once."""
        return tuple(dict.fromkeys(part.digest for part in self.parts))


PayloadSource = InlinePayload | SharedPayload | FilePayload | StoredPayload


class PackedLayout(Record, frozen=True, kw_only=True):
    """How one packed object lies in its bytes: `[pickle][buffer 0][buffer 1]...`.

    Args:
        pickle_size: Bytes of the pickle stream at offset 0.
        buffers: (offset, size) of each out-of-band buffer, 64-byte aligned, in pickle order.
        mac: HMAC-SHA256 under the run's key over the pickle stream and this table; checked before unpickling.
            Buffers are raw data that nothing unpickles, so they are not covered.
    """

    pickle_size: int
    buffers: tuple[tuple[int, int], ...]
    mac: bytes


class Payload(Record, frozen=True, kw_only=True):
    source: PayloadSource
    layout: PackedLayout


# ---------------------------------------------------------------- packages and code


class Wheel(Record, frozen=True, kw_only=True):
    """A wheel that no registry has: a local project's, or one repacked from what is installed.

    Args:
        file: Its file name, `name-1.0-py3-none-any.whl`.
        sha256: Of its bytes, hexadecimal; what it is kept under.
        size: In bytes.
        path: Where the client has it.
        blobs: Digests of the pool's blobs that it consists of, in order, where nodes don't see the client's files.
    """

    file: str
    sha256: str
    size: int
    path: str
    blobs: tuple[str, ...] = ()


class CodeBundle(Record, frozen=True, kw_only=True):
    """The modules under one entry of the kernel's `sys.path`, as a zip archive.

    Args:
        entry: The kernel's path entry; on the node the unpacked bundle stands in its place.
        sha256: Of the archive, hexadecimal. Alike for alike contents: file times and order are normalised.
        size: Of the archive, in bytes.
        path: Where the client has it.
        blobs: As a wheel's.
    """

    entry: str
    sha256: str
    size: int
    path: str
    blobs: tuple[str, ...] = ()


class Environment(Record, frozen=True, kw_only=True):
    """The packages that a run's ranks have, as a node that has to build them needs to know them.

    Args:
        digest: Over pins, hashes, Python tag, platform and the two choices below; what a built one is kept under.
        label: For people: "" is the notebook's own, else a base environment's, a saved one's or a file's name.
        own: The notebook's own: a node where the kernel's interpreter is at hand uses that and builds nothing.
        python: `3.11`.
        platform: As `packaging.tags` names it without the glibc's version: `linux_x86_64`.
        requirements: Lines of a requirements file, complete: they are installed without their dependencies. What a
            node's base layer brings (torch, `nvidia-*`, sgpu-magic and what its worker needs) is left out.
        needed: What the requirements' lines leave to the node's base layer, as pins for the record: `torch==2.13.0`.
        resolve: The requirements are what a person wrote: dependencies are looked up, versions may be open.
        wheels: Installed beside them.
        torch_mine: `--torch mine`: torch and `nvidia-*` are installed as the notebook has them.
        allow_build: Source distributions may be built.
        packages: How many there are, those of the base layer not counted.
        conda: Packages that conda has installed; a node that has to build refuses them.
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

# Where the nodes see the notebook's files, a path is all that goes. Else the files' bytes are blobs (see `files`), and
# one more blob, the manifest, says which of them become which files; its digest stands for the whole.

UPLOADS_VARIABLE = "SGPU_UPLOADS"
"""The environment variable that tells a rank where the uploads lie: JSON, path by name."""

MOST_UPLOADED_FILES = 50_000
"""In one upload: each file is a blob of its own."""


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


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return a manifest's bytes: the same for the same files."""
    return msgspec.msgpack.encode(manifest)


def manifest_in(data: bytes) -> Manifest:
    """Return the manifest that these bytes are.

    Raises:
        ManifestUnusable: They are none.
    """
    try:
        manifest = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ManifestUnusable(f"what an upload consists of can't be read: {error}") from None
    if len(manifest.files) > MOST_UPLOADED_FILES:
        raise ManifestUnusable(f"an upload has {len(manifest.files):,} files, and {MOST_UPLOADED_FILES:,} are possible")
    return manifest
