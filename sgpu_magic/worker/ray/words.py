"""What a rank and its node program say to each other, and rank 0 and the other ranks: one JSON record a line."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from sgpu_magic.wire.record import Record

M = TypeVar("M")


class StartNode(Record, frozen=True, tag="start-node", kw_only=True):
    """Start Ray's processes of this node; the first line on the program's standard input.

    Args:
        head: The head's `host:port`; "" makes this node the head.
        directory: Sockets and logs.
        address: Where the node is reached.
        cpus: CPUs that Ray may give away.
        gpus: The same of GPUs.
        simulated: The GPUs are simulated.
        object_store_bytes: Most memory of objects.
        objects_directory: Where objects lie; "" is `/dev/shm`.
        spill_directory: Where they go when memory is full.
        dashboard: The head has a dashboard.
    """

    head: str
    directory: str
    address: str
    cpus: int
    gpus: int
    simulated: bool
    object_store_bytes: int
    objects_directory: str
    spill_directory: str
    dashboard: bool


class NodeStarted(Record, frozen=True, tag="node-started", kw_only=True):
    """Ray is up on this node.

    Args:
        address: The head's `host:port`.
        dashboard: The dashboard's `host:port`, "" where this node has none.
        metrics_port: Of the node's metrics in Prometheus' format, on `address`; 0 where there are none.
        session_directory: Of Ray's sockets and logs.
        ray_version: Ray's.
    """

    address: str
    dashboard: str
    metrics_port: int
    session_directory: str
    ray_version: str


class NodeTroubled(Record, frozen=True, tag="node-troubled", kw_only=True):
    """Ray could not be started here, or one of its processes has died.

    Args:
        text: What has happened, a clause: "Ray's raylet ended with status 1".
        log: The end of that process's log.
        missing: Ray is not installed in the ranks' Python.
    """

    text: str
    log: str = ""
    missing: bool = False


FromNode = NodeStarted | NodeTroubled


class Hello(Record, frozen=True, tag="hello", kw_only=True):
    """A rank has come to rank 0.

    Args:
        rank: Its number.
        secret: What rank 0 has told its peers.
        leads: It is the first rank of another node, and starts Ray there.
    """

    rank: int
    secret: str
    leads: bool = False


class HeadKnown(Record, frozen=True, tag="head-known", kw_only=True):
    """The head is up: join it."""

    address: str
    ray_version: str


class NodeJoined(Record, frozen=True, tag="node-joined", kw_only=True):
    """Ray is up on the rank's node too; `problem` says why it is not, "" when it is."""

    problem: str = ""


class LinesAsked(Record, frozen=True, tag="lines-asked", kw_only=True):
    """How many lines have the driver's tasks and actors written on your node?"""


class LinesCounted(Record, frozen=True, tag="lines-counted", kw_only=True):
    lines: int


class DriverDone(Record, frozen=True, tag="driver-done", kw_only=True):
    """The driver is done, however it ended: the cluster goes."""


AtMeeting = Hello | HeadKnown | NodeJoined | LinesAsked | LinesCounted | DriverDone


def line_of(word: Record) -> bytes:
    """One word as it is sent."""
    return msgspec.json.encode(word) + b"\n"


class LineReader(Generic[M]):
    """Puts words together from what a socket or pipe gives.

    Args:
        decoder: Of the words that come.
    """

    def __init__(self, decoder: msgspec.json.Decoder[M]) -> None:
        self._decoder = decoder
        self._rest = b""

    def feed(self, data: bytes) -> list[M]:
        """Take what has come and return the words that are whole.

        Raises:
            ValueError: It is no word.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [self._decoder.decode(line) for line in lines if line]


node_words: msgspec.json.Decoder[FromNode] = msgspec.json.Decoder(FromNode)
meeting_words: msgspec.json.Decoder[AtMeeting] = msgspec.json.Decoder(AtMeeting)
start_words: msgspec.json.Decoder[StartNode] = msgspec.json.Decoder(StartNode)
