"""Records of packed objects: how their bytes lie, and where."""

from __future__ import annotations

from sgpu_magic.wire.record import Record


class InlinePayload(Record, frozen=True, tag="inline", kw_only=True):
    """The packed bytes are the message's first raw frame."""


class SharedPayload(Record, frozen=True, tag="shared", kw_only=True):
    """The packed bytes lie in a memory file of a live process: `/proc/<pid>/fd/<fd>`."""

    pid: int
    fd: int
    size: int


class FilePayload(Record, frozen=True, tag="file", kw_only=True):
    """The packed bytes lie in a file on the node, used when memory is short."""

    path: str
    size: int


class StoredPart(Record, frozen=True, kw_only=True):
    """Some of the packed bytes, which are a blob (see `blobs`).

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
