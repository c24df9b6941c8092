"""A TCP connection over the links: the same messages between client and pool, and between pool and agent.

client -> pool -> agent   OpenStream
client <- pool <- agent   StreamOpened
both ways                 StreamData, StreamTaken, StreamEnded, StreamClosed

Each side has at most `WINDOW_BYTES` under way that the other has not taken, so a slow reader slows its writer and
fills no memory between them. A stream's number is its client's; towards an agent it is the pool's.
"""

from __future__ import annotations

from sgpu_magic.wire.record import Record

STREAM_CHUNK_BYTES = 1 << 16
"""Most bytes of one message."""

WINDOW_BYTES = 1 << 20
"""Most bytes under way in one direction of one stream."""


class OpenStream(Record, frozen=True, tag="open-stream", kw_only=True):
    """Connect to a port that a process of the run listens on. Answered by `StreamOpened` or `StreamClosed`.

    Args:
        stream: Its number.
        run: A unique prefix of the run's id; the id itself towards an agent.
        rank: On whose node.
        port: The TCP port there.
        watches: Connect to nothing: only say whether the port is there, and tell by `StreamClosed` when the run ends.
    """

    stream: int
    run: str
    port: int
    rank: int = 0
    watches: bool = False


class StreamOpened(Record, frozen=True, tag="stream-opened", kw_only=True):
    """It is connected, or watched.

    Args:
        run_id: The run's.
        problem: Of one that watches: why nobody can connect yet, "" when one can.
    """

    stream: int
    run_id: str
    problem: str = ""


class StreamData(Record, frozen=True, tag="stream-data", kw_only=True):
    """The next bytes are the raw frame. `offset`: where they belong; a gap is an end."""

    stream: int
    offset: int


class StreamTaken(Record, frozen=True, tag="stream-taken", kw_only=True):
    """The receiver's program has taken the bytes up to `offset`."""

    stream: int
    offset: int


class StreamEnded(Record, frozen=True, tag="stream-ended", kw_only=True):
    """No more bytes in this direction: there were `offset`. The other direction goes on."""

    stream: int
    offset: int


class StreamClosed(Record, frozen=True, tag="stream-closed", kw_only=True):
    """It is over in both directions. `problem` says why, "" when its programs have ended it."""

    stream: int
    problem: str = ""


StreamMessage = StreamData | StreamTaken | StreamEnded | StreamClosed
"""What both sides say of a stream that is open."""
