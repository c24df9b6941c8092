"""Descriptors sent with messages: each message gets its own or none, even beyond the limit of open files."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from sgpu_magic.system.message_stream import MessageStream, StreamConnection
from sgpu_magic.wire import codec
from sgpu_magic.wire.rank import FromRank, Remarked

# the first message arrives when there is room for only a few more descriptors
COUNTS = (20, 1, 3)


@contextlib.contextmanager
def room_for(descriptors: int) -> Iterator[Callable[[], None]]:
    """Leave room for few more open files until the yielded function is called."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + descriptors, hard))
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def files(folder: Path) -> Iterator[list[list[int]]]:
    """For each message, descriptors of as many files as it carries."""
    with contextlib.ExitStack() as opened:
        made: list[list[int]] = []
        for at, count in enumerate(COUNTS):
            paths = [folder / f"{at}-{number}" for number in range(count)]
            made.append([opened.enter_context(open(path, "wb")).fileno() for path in paths])
        yield made


def identities(descriptors: Sequence[int]) -> list[int]:
    return [os.fstat(descriptor).st_ino for descriptor in descriptors]


def taken(take: Callable[[int], list[int]], count: int) -> list[int] | str:
    """The files behind a message's descriptors, or the error's name."""
    try:
        found = take(count)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    try:
        return identities(found)
    finally:
        for descriptor in found:
            os.close(descriptor)


@pytest.mark.skipif(sys.platform != "linux", reason="MSG_CTRUNC for descriptors is as on Linux")
def test_a_link_gives_no_message_the_descriptors_of_another(tmp_path: Path):
    ours, theirs = socket.socketpair()
    writer, reader = (
        StreamConnection[FromRank](ours, codec.from_rank),
        StreamConnection[FromRank](theirs, codec.from_rank),
    )
    with files(tmp_path) as sent, contextlib.closing(writer), contextlib.closing(reader):
        for number, descriptors in enumerate(sent):
            writer.send(Remarked(text=str(number)), (), descriptors)
        found: list[list[int] | str] = []
        with room_for(5) as release:
            for count in COUNTS:
                assert reader.receive() is not None
                found.append(taken(reader.take_descriptors, count))
                release()
        assert found == ["EMFILE", *map(identities, sent[1:])]


@pytest.mark.skipif(sys.platform != "linux", reason="MSG_CTRUNC for descriptors is as on Linux")
def test_a_stream_gives_no_message_the_descriptors_of_another(tmp_path: Path):
    found: list[list[int] | str] = []

    async def run(sent: list[list[int]]) -> None:
        ours, theirs = socket.socketpair()
        writer = StreamConnection[FromRank](ours, codec.from_rank)
        for number, descriptors in enumerate(sent):
            writer.send(Remarked(text=str(number)), [bytes(1000)], descriptors)

        def take(message: FromRank, frames: Sequence[bytes]) -> None:
            found.append(taken(reader.take_descriptors, COUNTS[len(found)]))
            release()

        reader = MessageStream[FromRank](theirs, codec.from_rank, take, lambda: None)
        with room_for(5) as release:
            async with asyncio.timeout(10):
                while len(found) < len(COUNTS):
                    await asyncio.sleep(0.01)
        writer.close()
        reader.close()

    with files(tmp_path) as sent:
        asyncio.run(run(sent))
        assert found == ["EMFILE", *map(identities, sent[1:])]
