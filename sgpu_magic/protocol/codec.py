"""Encoding of messages and their framing on a byte stream. No I/O.

On ZeroMQ a message is `[msgpack, raw frame, raw frame ...]`. On a stream socket the same parts are preceded by
one header: part count (u32), then each part's size (u64), little endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from sgpu_magic.protocol.messages import ClientMessage, PoolMessage
from sgpu_magic.protocol.node_messages import FromAgent, ToAgent
from sgpu_magic.protocol.rank_messages import FromRank, ToRank
from sgpu_magic.protocol.record import Record
from sgpu_magic.protocol.tracking import FromTracker, ToTracker
from sgpu_magic.protocol.zygote_messages import FromZygote, ToZygote

_encoder = msgspec.msgpack.Encoder()
_U32 = struct.Struct("<I")
MAX_PARTS = 4096
MAX_PART_BYTES = 4 << 30

M = TypeVar("M")

client_messages = msgspec.msgpack.Decoder[ClientMessage](ClientMessage)
pool_messages = msgspec.msgpack.Decoder[PoolMessage](PoolMessage)
to_agent = msgspec.msgpack.Decoder[ToAgent](ToAgent)
from_agent = msgspec.msgpack.Decoder[FromAgent](FromAgent)
to_zygote = msgspec.msgpack.Decoder[ToZygote](ToZygote)
from_zygote = msgspec.msgpack.Decoder[FromZygote](FromZygote)
to_rank = msgspec.msgpack.Decoder[ToRank](ToRank)
from_rank = msgspec.msgpack.Decoder[FromRank](FromRank)
to_tracker = msgspec.msgpack.Decoder[ToTracker](ToTracker)
from_tracker = msgspec.msgpack.Decoder[FromTracker](FromTracker)


def encode(message: Record) -> bytes:
    return _encoder.encode(message)


def frame(message: Record, blobs: Iterable[bytes] = ()) -> bytes:
    """Return the bytes of one message for a stream socket."""
    parts = [encode(message), *blobs]
    header = struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts))
    return b"".join([header, *parts])


class FrameReader(Generic[M]):
    """Cuts a byte stream into messages.

    Args:
        decoder: The decoder of this direction's union.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._pending = bytearray()

    @property
    def incomplete_bytes(self) -> int:
        """Bytes of a message that has begun and is not whole."""
        return len(self._pending)

    def feed(self, data: bytes) -> Iterator[tuple[M, Sequence[bytes]]]:
        """Yield each (message, raw frames) that `data` completes.

        Raises:
            ValueError: The stream is not ours, or a part is larger than `MAX_PART_BYTES`.
            msgspec.ValidationError: A message does not have its declared shape.
        """
        self._pending += data
        while True:
            sizes = self._sizes()
            if sizes is None:
                return
            start = _U32.size + 8 * len(sizes)
            if len(self._pending) < start + sum(sizes):
                return
            parts: list[bytes] = []
            for size in sizes:
                parts.append(bytes(self._pending[start : start + size]))
                start += size
            del self._pending[:start]
            yield self._decoder.decode(parts[0]), parts[1:]

    def _sizes(self) -> tuple[int, ...] | None:
        if len(self._pending) < _U32.size:
            return None
        (count,) = _U32.unpack_from(self._pending)
        if not 1 <= count <= MAX_PARTS:
            raise ValueError(f"a message of {count} parts: the stream is damaged")
        if len(self._pending) < _U32.size + 8 * count:
            return None
        sizes = struct.unpack_from(f"<{count}Q", self._pending, _U32.size)
        if max(sizes) > MAX_PART_BYTES:
            raise ValueError(f"a message part of {max(sizes)} bytes: the stream is damaged")
        return sizes
