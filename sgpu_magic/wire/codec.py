"""Encoding of messages and their framing on a byte stream. No I/O.

On ZeroMQ a message is `[msgpack, raw frame, raw frame ...]`. On a stream socket the same parts are preceded by
one header: part count (u32), then each part's size (u64), little endian.

Names of files and variables of the environment need not be UTF-8: Python decodes them with lone surrogates
(`os.fsdecode`), which msgpack has no place for. They travel as an escape character and a character of the private use
area, and arrive as they were.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar, cast

import msgspec

from sgpu_magic.wire.client import ClientMessage, PoolMessage
from sgpu_magic.wire.events import Noted
from sgpu_magic.wire.node import FromAgent, RunEvent, ToAgent
from sgpu_magic.wire.rank import FromRank, ToRank
from sgpu_magic.wire.record import Record
from sgpu_magic.wire.tracking import FromTracker, ToTracker
from sgpu_magic.wire.zygote import FromZygote, ToZygote

_encoder = msgspec.msgpack.Encoder()
_U32 = struct.Struct("<I")
MAX_PARTS = 4096
MAX_PART_BYTES = 4 << 30

_ESCAPE = "\U0010f7ff"
_ESCAPE_BYTES = _ESCAPE.encode()
# from here on to the last character there is
_PRIVATE = 0x10F800
_TO_ESCAPE = re.compile(f"[\ud800-\udfff{_ESCAPE}]")
_ESCAPED = re.compile(f"{_ESCAPE}([{_ESCAPE}-\U0010ffff])")

M = TypeVar("M")
R = TypeVar("R", bound=Record)


class Decoder(Generic[M]):
    """Decodes messages of one type. Each process needs one or two of those below: they are made when first used.

    Args:
        type: A record, or a union of records.
    """

    def __init__(self, type: Any) -> None:
        self._type = type

    def prepare(self) -> None:
        """Make it ready now, which takes some ms: in a process that is forked, once for all of its children."""
        _ = self._decoder

    @cached_property
    def _decoder(self) -> msgspec.msgpack.Decoder[M]:
        return msgspec.msgpack.Decoder(self._type)

    def decode(self, data: bytes | memoryview) -> M:
        """Return the message.

        Raises:
            msgspec.DecodeError: It is no msgpack, or does not have its declared shape.
        """
        if _ESCAPE_BYTES not in bytes(data):
            return self._decoder.decode(data)
        return msgspec.convert(_with_texts(msgspec.msgpack.decode(data), _unescaped), self._type)


class _SpecOutline(msgspec.Struct, frozen=True):
    run_id: str


class UnreadableLaunch(msgspec.Struct, frozen=True, tag="launch"):
    """As much of a `Launch` that does not have its declared shape as it takes to refuse it.

    Args:
        spec: Of the run that was to start.
        number: As in `Launch`.
        locks: As in `Launch`.
        problem: What does not fit.
    """

    spec: _SpecOutline
    number: int = 0
    locks: int = 0
    problem: str = ""

    @property
    def run_id(self) -> str:
        return self.spec.run_id


Order = ToAgent | UnreadableLaunch


class OrderDecoder(Decoder[Order]):
    """Decodes what the pool service tells an agent. A launch that can't be decoded still names its run."""

    def __init__(self) -> None:
        super().__init__(ToAgent)

    def decode(self, data: bytes | memoryview) -> Order:
        try:
            return super().decode(data)
        except msgspec.DecodeError as error:
            try:
                launch = msgspec.msgpack.decode(data, type=UnreadableLaunch)
            except msgspec.DecodeError:
                raise error from None
            return msgspec.structs.replace(launch, problem=str(error))


class _RunEventOutline(msgspec.Struct, tag="run-event"):
    """As much of a `RunEvent` as it takes to go on after it."""

    run_id: str
    number: int
    at: float
    part: int = 0


class ReportDecoder(Decoder[FromAgent]):
    """Decodes what an agent tells the pool service. An event that can't be decoded becomes a note of its run."""

    def __init__(self) -> None:
        super().__init__(FromAgent)

    def decode(self, data: bytes | memoryview) -> FromAgent:
        try:
            return super().decode(data)
        except msgspec.DecodeError as error:
            try:
                event = msgspec.msgpack.decode(data, type=_RunEventOutline)
            except msgspec.DecodeError:
                raise error from None
            note = (
                "the pool can't read something that this run's agent has told it, and leaves it out: "
                f"{error}. They may have been started from different installations of sgpu-magic: restart the pool, "
                "which starts new agents (`sgpu pool stop`; a served pool's operator restarts it)."
            )
            body = Noted(text=note)
            return RunEvent(run_id=event.run_id, number=event.number, at=event.at, body=body, part=event.part)


client_messages = Decoder[ClientMessage](ClientMessage)
pool_messages = Decoder[PoolMessage](PoolMessage)
to_agent = OrderDecoder()
from_agent = ReportDecoder()
to_zygote = Decoder[ToZygote](ToZygote)
from_zygote = Decoder[FromZygote](FromZygote)
to_rank = Decoder[ToRank](ToRank)
from_rank = Decoder[FromRank](FromRank)
to_tracker = Decoder[ToTracker](ToTracker)
from_tracker = Decoder[FromTracker](FromTracker)


def encode(message: Record) -> bytes:
    try:
        data = _encoder.encode(message)
        if _ESCAPE_BYTES not in data:
            return data
    except UnicodeEncodeError:
        pass
    return _encoder.encode(_with_texts(msgspec.to_builtins(message, builtin_types=_BINARY), _escaped))


def printable(record: R) -> R:
    """Return the record with lone surrogates written out as `\\udce9`: people read it, programs store it."""
    try:
        _encoder.encode(record)
    except UnicodeEncodeError:
        plain = _with_texts(msgspec.to_builtins(record, builtin_types=_BINARY), _written_out)
        return msgspec.convert(plain, type(record))
    return record


_BINARY = (bytes, bytearray, memoryview)


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The same with each text changed; keys of dictionaries are texts too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {_with_texts(key, change): _with_texts(one, change) for key, one in items}
    if isinstance(value, list | tuple):
        return [_with_texts(one, change) for one in cast("list[Any]", value)]
    return value


def _escaped(text: str) -> str:
    return _TO_ESCAPE.sub(
        lambda found: _ESCAPE + (_ESCAPE if found[0] == _ESCAPE else chr(ord(found[0]) - 0xD800 + _PRIVATE)), text
    )


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: _ESCAPE if found[1] == _ESCAPE else chr(ord(found[1]) - _PRIVATE + 0xD800), text)


def _written_out(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


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

    def __init__(self, decoder: Decoder[M] | msgspec.msgpack.Decoder[M]) -> None:
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
