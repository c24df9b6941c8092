"""Messages of parts over pipes: whole, in order, urgent ones first, and nothing else accepted."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator, Sequence

import pytest
from waiting import eventually

from sgpu_magic.system.part_stream import PipeStream

MOST_BYTES, MOST_PARTS = 1 << 20, 8


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for descriptor in (reading, writing):
        try:
            os.close(descriptor)
        except OSError:
            continue


@pytest.fixture
def ends(pipe: tuple[int, int]) -> tuple[PipeStream, PipeStream]:
    """A sender and a receiver."""
    unused = os.open(os.devnull, os.O_RDWR)
    made = PipeStream(unused, pipe[1], MOST_BYTES, MOST_PARTS), PipeStream(pipe[0], unused, MOST_BYTES, MOST_PARTS)
    os.close(unused)
    return made


def exchanged(sender: PipeStream, receiver: PipeStream, count: int) -> list[list[bytes]]:
    """Send all that is queued, and return what arrives."""
    found: list[Sequence[bytes]] = []

    def arrived() -> bool:
        sender.send()
        found.extend(receiver.receive(3))
        return len(found) >= count

    eventually(arrived, 10, lambda: f"{len(found)} of {count} messages have arrived")
    return [[bytes(part) for part in parts] for parts in found]


def test_messages_arrive_whole_and_in_order(ends: tuple[PipeStream, PipeStream]) -> None:
    chance = random.Random(7)
    messages = [
        [chance.randbytes(chance.choice((0, 1, 100, 70_000, 300_000))) for _ in range(chance.randint(1, MOST_PARTS))]
        for _ in range(60)
    ]
    sender, receiver = ends
    for parts in messages:
        sender.put(parts)
    assert sender.has_unsent
    assert exchanged(sender, receiver, len(messages)) == messages
    assert (sender.unsent_bytes, sender.has_unsent) == (0, False)


def test_what_can_wait_is_overtaken_but_never_in_the_middle(ends: tuple[PipeStream, PipeStream]) -> None:
    sender, receiver = ends
    large = [[bytes([number]) * 600_000] for number in range(3)]
    for parts in large:
        sender.put(parts, can_wait=True)
    # the first is under way: the pipe takes a part of it
    sender.send()
    sender.put([b"now"])
    assert exchanged(sender, receiver, 4) == [large[0], [b"now"], *large[1:]]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 0),
        struct.pack("<I", MOST_PARTS + 1),
        struct.pack("<2I", 1, MOST_BYTES + 1),
        struct.pack("<I", 0xFFFFFFFF),
        b"Last login: Tue Dec  1\n",
    ],
)
def test_anything_else_ends_the_stream(pipe: tuple[int, int], data: bytes) -> None:
    receiver = PipeStream(pipe[0], pipe[1], MOST_BYTES, MOST_PARTS)
    os.write(pipe[1], data)
    with pytest.raises(ConnectionError):
        receiver.receive(10)


def test_the_end_of_the_stream_is_an_error_also_in_the_middle_of_a_message(pipe: tuple[int, int]) -> None:
    receiver = PipeStream(pipe[0], pipe[1], MOST_BYTES, MOST_PARTS)
    os.write(pipe[1], struct.pack("<2I", 1, 10) + b"abc")
    assert receiver.receive(10) == []
    os.close(pipe[1])
    with pytest.raises(ConnectionResetError):
        receiver.receive(10)
