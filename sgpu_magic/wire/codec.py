"""Message encoding and framing on a byte stream; formats of a rank's output pipe and stack file. No I/O.

On ZeroMQ, a message is `[msgpack, raw frame, raw frame ...]`. On a stream socket, the same parts follow one header:
the number of parts (u32), then the size of each part (u64), little-endian.

File names and environment variables need not be UTF-8. Python decodes them with lone surrogates (`os.fsdecode`), which
msgpack cannot encode. Each surrogate is sent as an escape character and a private-use character, and restored on
decoding.
"""

from __future__ import annotations

import contextlib
import re
import signal
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec

from sgpu_magic.wire.base import Record
from sgpu_magic.wire.client import ClientMessage, FromBulk, PoolMessage, ToBulk
from sgpu_magic.wire.decoding import Data, MsgpackDecoder, border, convert, decode_msgpack
from sgpu_magic.wire.devices import Inventory
from sgpu_magic.wire.events import Noted
from sgpu_magic.wire.node import AgentReady, FromAgent, RunEvent, ToAgent
from sgpu_magic.wire.rank import FromRank, FromZygote, ToRank, ToZygote
from sgpu_magic.wire.session_line import FromLine, ToLine
from sgpu_magic.wire.tracking import FromTracker, ToTracker

_encoder = msgspec.msgpack.Encoder()
_U32 = struct.Struct("<I")
MAX_PARTS = 4096
MAX_PART_BYTES = 4 << 30
MAX_MESSAGE_BYTES = 8 << 30

_ESCAPE = "\U0010f7ff"
_ESCAPE_BYTES = _ESCAPE.encode()
# first of the private-use characters that stand for surrogates, up to the last code point
_PRIVATE = 0x10F800
_TO_ESCAPE = re.compile(f"[\ud800-\udfff{_ESCAPE}]")
_ESCAPED = re.compile(f"{_ESCAPE}([{_ESCAPE}-\U0010ffff])")

M = TypeVar("M")
R = TypeVar("R", bound=Record)
_BINARY = (bytes, bytearray, memoryview)

# These mark what Python's stderr writes into a rank's common output pipe. They are OSC escape sequences that no
# terminal knows, so a mark that is not removed stays invisible.
STDERR_BEGIN = b"\x1b]sgpu;2\x07"
STDERR_END = b"\x1b]sgpu;1\x07"

# user code and libraries use SIGUSR1 themselves, so it is only the fallback without real-time signals
STACK_SIGNAL = signal.SIGRTMAX - 4 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR1

# A rank's stack file, which the agent creates and both sides read. No message could carry its content: the first
# `AREA_BYTES` are a fixed area that the rank writes while it runs, so that it survives a SIGKILL:
#
#     ident of the main thread (8) | valid half: 0 none, 1, 2 (8) | time of the last sample (8) | half 1 | half 2
#
# Each half holds the length of its text (8) and the text. The rank writes the half that is not valid, then the number
# of the valid one. Output of faulthandler follows after the area. Both have faulthandler's format:
# `  File "cell.py", line 3 in train`.
AREA_BYTES = 16_384
HEADER = struct.Struct("=QQd")
LENGTH = struct.Struct("=Q")
HALF_BYTES = (AREA_BYTES - HEADER.size) // 2
TEXT_BYTES = HALF_BYTES - LENGTH.size


class Decoder(MsgpackDecoder[M]):
    """Decodes messages of one type.

    Args:
        type: A record, or a union of records.
        salvaged: Called with malformed data and the decoding error; returns a message to use instead, or raises
            `msgspec.DecodeError` if there is none.
    """

    def __init__(self, type: Any, salvaged: Callable[[Data, Exception], M] | None = None) -> None:
        super().__init__(type)
        self._salvaged = salvaged

    def decode(self, data: Data) -> M:
        """Return the message.

        Raises:
            msgspec.DecodeError: The data is malformed, or does not match the declared type.
        """
        try:
            if _ESCAPE_BYTES not in bytes(data):
                return super().decode(data)
            with border():
                plain = _with_texts(msgspec.msgpack.decode(data), _unescaped)
            return convert(plain, self._type)
        except msgspec.DecodeError as error:
            with contextlib.suppress(msgspec.DecodeError):
                if self._salvaged is not None:
                    return self._salvaged(data, error)
            raise


class _SpecOutline(msgspec.Struct, frozen=True):
    run_id: str


class UnreadableLaunch(msgspec.Struct, frozen=True, tag="launch"):
    """The part of a malformed `Launch` that is needed to refuse it.

    Args:
        spec: The run's spec, reduced to its id.
        number: As in `Launch`.
        locks: As in `Launch`.
        problem: The decoding error.
    """

    spec: _SpecOutline
    number: int = 0
    locks: int = 0
    problem: str | None = None

    @property
    def run_id(self) -> str:
        return self.spec.run_id


Order = ToAgent | UnreadableLaunch


def _refusable(data: Data, error: Exception) -> UnreadableLaunch:
    return msgspec.structs.replace(decode_msgpack(data, type=UnreadableLaunch), problem=str(error))


class _RunEventOutline(msgspec.Struct, tag="run-event"):
    """The part of a malformed `RunEvent` that is needed to replace it."""

    run_id: str
    number: int
    at: float
    part: int = 0


class _ReadyOutline(msgspec.Struct, tag="agent-ready"):
    """The part of a malformed `AgentReady` that is needed to replace its agent."""

    pid: int = 0


def _replaced(data: Data, error: Exception) -> FromAgent:
    """Return a `Noted` in place of a malformed event, and an `AgentReady` of no known version in place of another."""
    outline = decode_msgpack(data, type=_RunEventOutline | _ReadyOutline)
    if isinstance(outline, _ReadyOutline):
        return AgentReady(pid=outline.pid, protocol_version=0, inventory=Inventory(host=""))
    return _noted(outline, error)


def _noted(event: _RunEventOutline, error: Exception) -> RunEvent:
    note = (
        f"the pool can't read a message of this run's agent and ignores it: {error}. They may have been started from "
        "different installations of sgpu-magic: restart the pool, which starts new agents (`sgpu pool stop`; a served "
        "pool's operator restarts it)."
    )
    return RunEvent(run_id=event.run_id, number=event.number, at=event.at, body=Noted(text=note), part=event.part)


client_messages = Decoder[ClientMessage](ClientMessage)
pool_messages = Decoder[PoolMessage](PoolMessage)
to_bulk = Decoder[ToBulk](ToBulk)
from_bulk = Decoder[FromBulk](FromBulk)
to_line = Decoder[ToLine](ToLine)
from_line = Decoder[FromLine](FromLine)
# a malformed `Launch` becomes an `UnreadableLaunch`, a malformed event a `Noted` of its run, and a malformed
# `AgentReady` one of an unknown version, whose agent is replaced
to_agent = Decoder[Order](ToAgent, _refusable)
from_agent = Decoder[FromAgent](FromAgent, _replaced)
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
    """Return the record with lone surrogates written as `\\udce9`, for display and storage."""
    try:
        _encoder.encode(record)
    except UnicodeEncodeError:
        plain = _with_texts(msgspec.to_builtins(record, builtin_types=_BINARY), _written_out)
        return convert(plain, type(record))
    return record


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return the value with `change` applied to each string, including the keys of dictionaries."""
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
    """Splits a byte stream into messages.

    Args:
        decoder: Decoder of the messages of this direction.
        most_bytes: The size of all parts of a message together, at most.
    """

    def __init__(self, decoder: Decoder[M] | MsgpackDecoder[M], most_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._decoder = decoder
        self._most_bytes = most_bytes
        self._pending = bytearray()

    @property
    def incomplete_bytes(self) -> int:
        """The number of buffered bytes of an incomplete message."""
        return len(self._pending)

    def feed(self, data: bytes) -> Iterator[tuple[M, Sequence[bytes]]]:
        """Yield (message, raw frames) for each message that `data` completes.

        Raises:
            ValueError: The stream is damaged, or a part is larger than `MAX_PART_BYTES`, or a message than
                `most_bytes`.
            msgspec.DecodeError: A message is not msgpack, or does not match the declared type.
        """
        self._pending += data
        while sizes := self._sizes():
            start = _U32.size + 8 * len(sizes)
            parts: list[bytes] = []
            for size in sizes:
                parts.append(bytes(self._pending[start : start + size]))
                start += size
            del self._pending[:start]
            yield self._decoder.decode(parts[0]), parts[1:]

    def _sizes(self) -> tuple[int, ...]:
        """Return the sizes of the next message's parts; none while it is incomplete."""
        if len(self._pending) < _U32.size:
            return ()
        (count,) = _U32.unpack_from(self._pending)
        if not 1 <= count <= MAX_PARTS:
            raise ValueError(f"a message of {count} parts: the stream is damaged")
        begin = _U32.size + 8 * count
        if len(self._pending) < begin:
            return ()
        sizes = struct.unpack_from(f"<{count}Q", self._pending, _U32.size)
        if max(sizes) > MAX_PART_BYTES:
            raise ValueError(f"a message part of {max(sizes)} bytes: the stream is damaged")
        if sum(sizes) > self._most_bytes:
            raise ValueError(f"a message of {sum(sizes):,} bytes, of at most {self._most_bytes:,}")
        return sizes if len(self._pending) >= begin + sum(sizes) else ()


# ---------------------------------------------------------------- a rank's output pipe and stack file


def half_offset(half: int) -> int:
    """Return the offset of half 1 or 2."""
    return HEADER.size + (half - 1) * HALF_BYTES


def sampled_at(area: bytes) -> float:
    """Return when the rank was last sampled, seconds since the epoch; 0 if it never was."""
    return HEADER.unpack_from(area)[2] if len(area) >= AREA_BYTES else 0.0


def read_area(area: bytes) -> tuple[int, str]:
    """Return the ident of the rank's main thread (0 if it has not started) and the sampled lines ("" for none)."""
    if len(area) < AREA_BYTES:
        return 0, ""
    ident, half, _ = HEADER.unpack_from(area)
    if half not in (1, 2):
        return ident, ""
    begin = half_offset(half)
    (size,) = LENGTH.unpack_from(area, begin)
    begin += LENGTH.size
    return ident, area[begin : begin + min(size, TEXT_BYTES)].decode("utf-8", "replace")
