"""The pool service's socket for agents on other machines: each has a key of its own, all else gets no answer.

ZeroMQ hides a peer's death and drops what was under way when a connection breaks; so each side beats once a second and
counts what it has carried. Too long a silence is a lost node; a gap only ends the link, and the node begins a new one.

The socket's key pair and port are kept, the same for every service of the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import zmq

from sgpu_magic.errors import UsageError
from sgpu_magic.files.whole_file import write_whole
from sgpu_magic.nodes.ray.uplink import (
    BEAT_S,
    SILENT_S,
    Carried,
    FromNode,
    LinkBeat,
    LinkBroken,
    LinkHello,
    LinkOpened,
    NodeLeaves,
)
from sgpu_magic.system.secure_sockets import (
    Admission,
    KeyPair,
    LoopSocket,
    bound_to,
    new_key_pair,
    secure_server,
    sender_of,
)
from sgpu_magic.wire import codec
from sgpu_magic.wire.node import FromAgent, ToAgent
from sgpu_magic.wire.record import Record

_from_node = msgspec.msgpack.Decoder[FromNode](FromNode)
# silence is looked for more often than it is broken: a node is named within 5 s
_TICK_S = BEAT_S / 2
# a timer that comes so much later than it should tells of a busy pool, not of silent nodes
_STARVED_S = 1.0
_LINGER_MS = 1000
_PORT = "door-port"
_Keys = dict[str, tuple[str, str]]


class NodeLink(msgspec.Struct, eq=False):
    """The way to one node's agent (a `NodeChannel`).

    Args:
        node: Its id.
        link: This link's name.
        identity: What ZeroMQ calls its connection at the moment.
        heard_at: Seconds of the loop's clock.
        sent: Messages carried to it.
        received: Messages that came.
    """

    node: str
    link: str
    identity: bytes
    heard_at: float
    listener: AgentListener
    sent: int = 0
    received: int = 0
    open: bool = msgspec.field(default=True)

    def send(self, message: ToAgent, frames: Sequence[bytes] = ()) -> None:
        """Send a message to the agent, unless the link is over."""
        if self.open:
            self.sent += 1
            self.listener.say(self, Carried(link=self.link, number=self.sent), codec.encode(message), *frames)

    def close(self) -> None:
        """Forget the link. An agent that is still there begins another one."""
        self.open = False
        self.listener.forget(self)


class AgentListener:
    """Listens for agents. Used from the loop's thread only.

    Args:
        address: `tcp://host:port`; port 0 is one that is free.
        pair: The pool's keys.
        on_message: Called with the link, the agent's message and its raw frames.
        on_lost: Called once with the node, why, and whether it is only silent, when it is or its agent is over.

    Raises:
        UsageError: Nothing can listen there.
    """

    def __init__(
        self,
        address: str,
        pair: KeyPair,
        on_message: Callable[[NodeLink, FromAgent, Sequence[bytes]], None],
        on_lost: Callable[[str, str, bool], None],
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        # by public key; the admission asks it at each handshake
        self._nodes: dict[str, str] = {}
        self._links: dict[str, NodeLink] = {}
        self._context = zmq.Context()
        self._admission = Admission(self._context, self._nodes.__contains__)
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = _LINGER_MS
        # a full queue would drop messages; what is in it is bounded by the windows of those that send much
        socket.sndhwm = socket.rcvhwm = 0
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        secure_server(socket, pair)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close()
            self._admission.close()
            self._context.term()
            raise UsageError(
                f"the pool can't listen for its nodes at {address}: {error.strerror}. "
                "Set ray_node_listen (SGPU_RAY_NODE_LISTEN) to a free tcp://address:port of this machine."
            ) from None
        self.address = bound_to(socket)
        self._socket = LoopSocket(socket, self._received)
        self._tick_due = self._loop.time() + _TICK_S
        self._beats = False
        self._timer = self._loop.call_later(_TICK_S, self._tick)

    def admit(self, nodes: Mapping[str, str]) -> None:
        """Let in the nodes (public key to node id) that hold these keys, and no others any more."""
        self._nodes.clear()
        self._nodes.update(nodes)

    def close(self) -> None:
        self._timer.cancel()
        self._links.clear()
        self._socket.close()
        self._admission.close()
        self._context.term()

    # ------------------------------------------------------------ for links

    def say(self, link: NodeLink, message: Record, *frames: bytes) -> None:
        self._send(link.identity, message, *frames)

    def forget(self, link: NodeLink) -> None:
        if self._links.get(link.node) is link:
            del self._links[link.node]

    # ------------------------------------------------------------ within

    def _send(self, identity: bytes, message: Record, *frames: bytes) -> None:
        # one that is not connected will miss something, and say so
        self._socket.send([identity, codec.encode(message), *frames])

    def _received(self, frames: Sequence[zmq.Frame]) -> None:
        identity, *parts = frames
        # a key that was let in and is not listed any more says nothing either
        node = self._nodes.get(sender_of(parts[0]), "") if parts else ""
        # what is not our protocol gets no answer
        with contextlib.suppress(msgspec.DecodeError):
            if node:
                self._heard(node, identity.bytes, _from_node.decode(parts[0].buffer), parts[1:])

    def _heard(self, node: str, identity: bytes, message: FromNode, parts: Sequence[zmq.Frame]) -> None:
        if isinstance(message, LinkHello):
            if message.node == node:
                self._greet(node, identity, message.link)
            return
        link = self._links.get(node)
        if link is None or link.link != message.link:
            if not isinstance(message, LinkBroken | NodeLeaves):
                self._send(identity, LinkBroken(link=message.link))
            return
        link.identity = identity
        link.heard_at = self._loop.time()
        match message:
            case LinkBeat(sent=sent):
                if sent != link.received:
                    self._break(link)
            case Carried(number=number):
                link.received += 1
                if number != link.received or not parts:
                    self._break(link)
                    return
                try:
                    said = codec.from_agent.decode(parts[0].buffer)
                except msgspec.DecodeError as error:
                    text = f"A message of the agent on {node} can't be decoded, and is left out"
                    self._loop.default_exception_handler({"message": text, "exception": error})
                    return
                self._on_message(link, said, [part.bytes for part in parts[1:]])
            case LinkBroken():
                link.close()
            case NodeLeaves(why=why):
                link.close()
                self._on_lost(node, why or "its agent has ended", False)

    def _greet(self, node: str, identity: bytes, name: str) -> None:
        link = self._links.get(node)
        if link is None or link.link != name:
            if link is not None:
                link.open = False
            self._links[node] = link = NodeLink(node, name, identity, self._loop.time(), self)
        link.identity = identity
        self.say(link, LinkOpened(link=name))

    def _break(self, link: NodeLink) -> None:
        """The node comes back by itself; until then it counts as there."""
        self.say(link, LinkBroken(link=link.link))

    def _tick(self) -> None:
        now = self._loop.time()
        late, self._tick_due = now - self._tick_due, now + _TICK_S
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        self._beats = not self._beats
        self._socket.drain()
        for link in list(self._links.values()):
            if late > _STARVED_S:
                link.heard_at += late
            silent_s = now - link.heard_at
            if silent_s > SILENT_S:
                link.close()
                self._on_lost(link.node, f"it has been silent for {silent_s:.1f} s", True)
            elif self._beats:
                self.say(link, LinkBeat(link=link.link, sent=link.sent))


# ---------------------------------------------------------------- what is kept in a private directory


class NodeKeys:
    """A key pair for each node, kept: a pool service that is started again knows its agents by them.

    Args:
        path: A file of mode 0600; its directory is there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._pairs = msgspec.json.decode(path.read_bytes(), type=_Keys)
        except (OSError, msgspec.DecodeError):
            self._pairs: _Keys = {}

    def of(self, node: str) -> KeyPair:
        """The node's pair; made when it has none.

        Raises:
            OSError: It can't be written down.
        """
        if node not in self._pairs:
            pair = new_key_pair()
            self._write({**self._pairs, node: (pair.public, pair.secret)})
        return KeyPair(*self._pairs[node])

    @property
    def nodes(self) -> Mapping[str, str]:
        """Node by public key."""
        return {public: node for node, (public, _) in self._pairs.items()}

    def forget_others(self, nodes: Collection[str]) -> None:
        """Nodes that the cluster has no more never come again: Ray gives no id twice."""
        left = {node: pair for node, pair in self._pairs.items() if node in nodes}
        if left != self._pairs:
            self._write(left)

    def _write(self, pairs: _Keys) -> None:
        write_whole(self._path, msgspec.json.encode(pairs))
        self._pairs = pairs


def listen_address(listen: str, directory: Path) -> str:
    """Where to listen: the setting, with the port of last time where it has none.

    Raises:
        UsageError: It is not `tcp://host:port`.
    """
    parts = urlsplit(listen)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme != "tcp" or not host or port is None:
        raise UsageError(
            f"the setting ray_node_listen is {listen!r}; it must be tcp://address:port, with port 0 for any that is "
            "free."
        )
    if port == 0:
        with contextlib.suppress(OSError, ValueError):
            port = int((directory / _PORT).read_text())
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def keep_port(address: str, directory: Path) -> None:
    """Write down where it listens now."""
    write_whole(directory / _PORT, str(urlsplit(address).port).encode())
