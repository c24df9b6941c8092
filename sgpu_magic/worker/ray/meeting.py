"""How the ranks of a run with its own Ray cluster meet: all with rank 0, over one connection each.

Where rank 0 listens goes through the process group, at once; from then on nobody sits in a collective, so a rank that
waits for the driver hears an interrupt. The end of a connection is the news that the other one is gone.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import time
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from sgpu_magic.wire.record import Record
from sgpu_magic.worker.ray.node_process import LineReader, line_of


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


meeting_words: msgspec.json.Decoder[AtMeeting] = msgspec.json.Decoder(AtMeeting)
W = TypeVar("W", bound=AtMeeting)
# nobody is to wait for ever for a rank whose agent does not tell of its end
_COME_S = 120.0
_LOOK_S = 0.1
_CHUNK_BYTES = 1 << 16


class PeerGone(RuntimeError):
    """Another rank of the run is gone, which is told of by itself."""

    def __init__(self, who: str) -> None:
        # in the words of a lost connection: it is one, and no cause
        super().__init__(f"Connection closed by peer: {who} is gone")


class Connection:
    """One rank's connection to rank 0, at either end.

    Args:
        sock: Connected; the connection owns it.
        who: The other end, for people.
    """

    def __init__(self, sock: socket.socket, who: str) -> None:
        self._socket = sock
        self._who = who
        self._reader = LineReader(meeting_words)
        self._come: list[AtMeeting] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def say(self, word: AtMeeting) -> None:
        """Send a word.

        Raises:
            PeerGone: The other end is gone.
        """
        try:
            self._socket.sendall(line_of(word))
        except OSError:
            raise PeerGone(self._who) from None

    def hear(self, kind: type[W], until: float | None = None) -> W:
        """Return the next word, which must be of this kind.

        Args:
            kind: Of the word.
            until: `time.monotonic()` at which to give up; None waits for ever.

        Raises:
            PeerGone: The other end is gone, or says something else, or nothing in time.
        """
        while not self._come:
            # an interrupt is heard between the looks
            left_s = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self], [], [], left_s)[0]:
                raise PeerGone(self._who)
            self.take()
        word = self.next_word()
        if not isinstance(word, kind):
            raise PeerGone(self._who)
        return word

    def next_word(self) -> AtMeeting:
        """The word that has come; to be asked for only where there is one (`has_word`)."""
        return self._come.pop(0)

    def take(self) -> None:
        """Read what has come.

        Raises:
            PeerGone: The end of the connection, or what is no word.
        """
        try:
            data = self._socket.recv(_CHUNK_BYTES)
            self._come += self._reader.feed(data)
        except (ConnectionError, ValueError):
            data = b""
        if not data:
            raise PeerGone(self._who)

    @property
    def has_word(self) -> bool:
        """Whether `hear` returns at once."""
        return bool(self._come)

    def close(self) -> None:
        self._socket.close()


class Host:
    """Rank 0's end.

    Args:
        address: Where the other ranks reach it.
        ranks: World size.
    """

    def __init__(self, address: str, ranks: int) -> None:
        self._ranks = ranks
        self._listening = socket.create_server((address, 0), backlog=ranks)
        self.secret = secrets.token_hex(16)
        self._guests: dict[int, Connection] = {}
        self.leaders: list[int] = []

    @property
    def place(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self._listening.getsockname()[:2]
        return str(host), int(port)

    def gather(self) -> None:
        """Wait until every rank has come.

        Raises:
            PeerGone: One has not.
        """
        until = time.monotonic() + _COME_S
        while len(self._guests) < self._ranks - 1:
            if time.monotonic() > until:
                missing = sorted(set(range(1, self._ranks)) - self._guests.keys())
                raise PeerGone(f"rank {missing[0]}")
            if select.select([self._listening], [], [], _LOOK_S)[0]:
                sock, _ = self._listening.accept()
                self._admit(Connection(sock, "a rank"), until)
        self._listening.close()

    def _admit(self, guest: Connection, until: float) -> None:
        """A stranger who has found the port knows no secret."""
        try:
            hello = guest.hear(Hello, min(until, time.monotonic() + 5.0))
        except PeerGone:
            guest.close()
            return
        if not hmac.compare_digest(hello.secret, self.secret):
            guest.close()
            return
        self._guests[hello.rank] = guest
        if hello.leads:
            self.leaders.append(hello.rank)

    def tell_leaders(self, word: AtMeeting) -> None:
        """Say it to the first ranks of the other nodes.

        Raises:
            PeerGone: One is gone.
        """
        for rank in self.leaders:
            self._guests[rank].say(word)

    def answers(self, kind: type[W], within_s: float) -> Iterator[tuple[int, W]]:
        """Yield each leader's next word.

        Raises:
            PeerGone: One is gone, or says nothing in time.
        """
        until = time.monotonic() + within_s
        for rank in self.leaders:
            yield rank, self._guests[rank].hear(kind, until)

    def close(self, within_s: float) -> None:
        """The driver is done: let all others go, and wait until the cluster's other nodes have stopped."""
        self._listening.close()
        for guest in self._guests.values():
            try:
                guest.say(DriverDone())
            except PeerGone:
                continue
        until = time.monotonic() + within_s
        for rank in self.leaders:
            try:
                # its connection ends when its part of the cluster is gone
                self._guests[rank].hear(DriverDone, until)
            except PeerGone:
                continue
        for guest in self._guests.values():
            guest.close()


def come_to(place: tuple[str, int], secret: str, rank: int, *, leads: bool) -> Connection:
    """Be a guest: connect to rank 0.

    Raises:
        PeerGone: It is gone.
    """
    try:
        sock = socket.create_connection(place, timeout=_COME_S)
    except OSError:
        raise PeerGone("rank 0") from None
    sock.settimeout(None)
    connection = Connection(sock, "rank 0")
    connection.say(Hello(rank=rank, secret=secret, leads=leads))
    return connection
