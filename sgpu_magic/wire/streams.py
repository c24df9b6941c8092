"""Messages of TCP connections that are carried over the links."""

from __future__ import annotations

from sgpu_magic.wire.base import Record


class OfStream(Record, frozen=True, kw_only=True):
    """Base of the messages that concern one stream, by its number."""

    stream: int


class OpenStream(OfStream, frozen=True, tag="open-stream", kw_only=True):
    """Connect to a port on which a process of the run listens. Answered by `StreamOpened` or `StreamClosed`.

    Args:
        run: Unique prefix of the run's id; towards an agent, the full id.
        rank: The rank whose node to connect to.
        port: TCP port on that node.
        watches: Do not connect: only report whether the port is open, and send `StreamClosed` when the run ends.
    """

    run: str
    port: int
    rank: int = 0
    watches: bool = False


class StreamOpened(OfStream, frozen=True, tag="stream-opened", kw_only=True):
    """The stream is connected, or its port is watched.

    Args:
        run_id: The run's id.
        problem: For a watched port: why it does not accept connections yet; None if it does.
    """

    run_id: str
    problem: str | None = None


class StreamData(OfStream, frozen=True, tag="stream-data", kw_only=True):
    """The next bytes of the stream are the raw frame. `offset` is their position; a gap closes the stream."""

    offset: int


class StreamTaken(OfStream, frozen=True, tag="stream-taken", kw_only=True):
    """The receiving program has taken the bytes up to `offset`."""

    offset: int


class StreamEnded(OfStream, frozen=True, tag="stream-ended", kw_only=True):
    """This direction has ended after `offset` bytes. The other direction continues."""

    offset: int


class StreamClosed(OfStream, frozen=True, tag="stream-closed", kw_only=True):
    """Both directions are closed. `problem` says why; None if the connected programs closed them."""

    problem: str | None = None
