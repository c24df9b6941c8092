"""The pool service's socket for agents on other machines: each node has its own key; other peers get no answer.

ZeroMQ hides a peer's death and drops messages in transit when a connection breaks; so each side sends a heartbeat every
second and counts messages. A long silence means a lost node; a gap only ends the link, and the node opens a new one.

The socket's key pair and port are persisted: they are the same for every service of the pool.
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
from sgpu_magic.files.atomic_file import read_json, write_whole
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
from sgpu_magic.system.processes import write_log
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
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.decoding import MsgpackDecoder
from sgpu_magic.wire.node import FromAgent, ToAgent

_from_node = MsgpackDecoder[FromNode](FromNode)
# check for silence more often than heartbeats arrive: a lost node is reported within 5 s
_TICK_S = BEAT_S / 2
# if the timer itself is this late, the pool is busy rather than its nodes silent
_STARVED_S = 1.0
_LINGER_MS = 1000
_PORT = "door-port"
_Keys = dict[str, tuple[str, str]]


class NodeLink(msgspec.Struct, eq=False):
    """The link to one node's agent (a `NodeChannel`).

    Args:
        node: The node's id.
        link: The link's name.
        identity: ZeroMQ's identity of the current connection.
        received_at: When the node last sent something, in seconds of the loop's clock.
        listener: The listener that the link belongs to.
        sent: The number of messages sent to the agent.
        received: The number of messages received from it.
        open: Whether messages can be sent.
    """

    node: str
    link: str
    identity: bytes
    received_at: float
    listener: AgentListener
    sent: int = 0
    received: int = 0
    open: bool = msgspec.field(default=True)

    def send(self, message: ToAgent, frames: Sequence[bytes] = ()) -> None:
        """Send a message to the agent, unless the link is closed."""
        if self.open:
            self.sent += 1
            self.listener.send(self.identity, Carried(link=self.link, number=self.sent), codec.encode(message), *frames)

    def close(self) -> None:
        """Forget the link. An agent that is still running opens another one."""
        self.open = False
        self.listener.forget(self)


class AgentListener:
    """Listens for agents. Use it from the loop's thread only.

    Args:
        address: `tcp://host:port`; port 0 chooses a free one.
        pair: The pool's key pair.
        on_message: Called with the link, the agent's message and its raw frames.
        on_lost: Called once when a node is silent or its agent has exited: with the node, the reason, and whether
            it is only silent.

    Raises:
        UsageError: The address can't be bound.
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
        # node by public key; looked up at each handshake
        self._nodes: dict[str, str] = {}
        self._links: dict[str, NodeLink] = {}
        self._context = zmq.Context()
        self._admission = Admission(self._context, self._nodes.__contains__)
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = _LINGER_MS
        # a full queue would drop messages; its size is bounded by the flow control of large transfers
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
        """Admit the nodes with these keys (public key to node id), and no others."""
        self._nodes.clear()
        self._nodes.update(nodes)

    def close(self) -> None:
        self._timer.cancel()
        self._links.clear()
        self._socket.close()
        self._admission.close()
        self._context.term()

    # ------------------------------------------------------------ for links

    def send(self, identity: bytes, message: Record, *frames: bytes) -> None:
        # a peer that is not connected misses the message, detects the gap and opens a new link
        self._socket.send([identity, codec.encode(message), *frames])

    def forget(self, link: NodeLink) -> None:
        if self._links.get(link.node) is link:
            del self._links[link.node]

    # ------------------------------------------------------------ internals

    def _received(self, frames: Sequence[zmq.Frame]) -> None:
        identity, *parts = frames
        # messages of a connected key that is no longer listed are ignored too
        node = self._nodes.get(sender_of(parts[0]), "") if parts else ""
        # other protocols get no answer
        with contextlib.suppress(msgspec.DecodeError):
            if node:
                self._on_node_message(node, identity.bytes, _from_node.decode(parts[0].buffer), parts[1:])

    def _on_node_message(self, node: str, identity: bytes, message: FromNode, parts: Sequence[zmq.Frame]) -> None:
        if isinstance(message, LinkHello):
            if message.node == node:
                self._greet(node, identity, message.link)
            return
        link = self._links.get(node)
        if link is None or link.link != message.link:
            if not isinstance(message, LinkBroken | NodeLeaves):
                self.send(identity, LinkBroken(link=message.link))
            return
        link.identity = identity
        link.received_at = self._loop.time()
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
                    decoded = codec.from_agent.decode(parts[0].buffer)
                except msgspec.DecodeError as error:
                    text = f"A message of the agent on {node} can't be decoded and is dropped"
                    self._loop.default_exception_handler({"message": text, "exception": error})
                    return
                self._on_message(link, decoded, [part.bytes for part in parts[1:]])
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
        self.send(link.identity, LinkOpened(link=name))

    def _break(self, link: NodeLink) -> None:
        """Tell the node to open a new link; until then it counts as connected."""
        self.send(link.identity, LinkBroken(link=link.link))

    def _tick(self) -> None:
        now = self._loop.time()
        late, self._tick_due = now - self._tick_due, now + _TICK_S
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        self._beats = not self._beats
        self._socket.drain()
        for link in list(self._links.values()):
            if late > _STARVED_S:
                link.received_at += late
            silent_s = now - link.received_at
            if silent_s > SILENT_S:
                link.close()
                self._on_lost(link.node, f"it has been silent for {silent_s:.1f} s", True)
            elif self._beats:
                self.send(link.identity, LinkBeat(link=link.link, sent=link.sent))


# ---------------------------------------------------------------- files in a private directory


class NodeKeys:
    """The persisted key pairs of the nodes, by which a restarted pool service recognizes its agents.

    Args:
        path: The file, of mode 0600; its directory must exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pairs = read_json(path, _Keys) or {}
        self._written = self._pairs

    def pair_of(self, node: str) -> KeyPair:
        """The node's key pair; a new one if it has none."""
        if node not in self._pairs:
            pair = new_key_pair()
            self._write({**self._pairs, node: (pair.public, pair.secret)})
        return KeyPair(*self._pairs[node])

    @property
    def nodes(self) -> Mapping[str, str]:
        """Node ids by public key."""
        return {public: node for node, (public, _) in self._pairs.items()}

    def forget_others(self, nodes: Collection[str]) -> None:
        """Keep the keys of these nodes only: Ray never reuses the id of a dead node."""
        left = {node: pair for node, pair in self._pairs.items() if node in nodes}
        if left != self._written:
            self._write(left)

    def _write(self, pairs: _Keys) -> None:
        self._pairs = pairs
        try:
            write_whole(self._path, msgspec.json.encode(pairs))
        except OSError as error:
            # on a full disk the keys are still valid in this service, and are written with the next change
            write_log(
                f"the keys of the nodes can't be written to {self._path} ({error.strerror}): if this pool service ends "
                "before they are, the agents on new nodes and their runs are lost\n"
            )
        else:
            self._written = pairs


def listen_address(listen: str, directory: Path) -> str:
    """The address to listen at: the setting, with the persisted port if its port is 0.

    Raises:
        UsageError: The setting is not `tcp://host:port`.
    """
    parts = urlsplit(listen)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme != "tcp" or not host or port is None:
        raise UsageError(
            f"the setting ray_node_listen is {listen!r}; it must be tcp://address:port, with port 0 for any free port."
        )
    if port == 0:
        with contextlib.suppress(OSError, ValueError):
            port = int((directory / _PORT).read_text())
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def keep_port(address: str, directory: Path) -> None:
    """Persist the port of the address that is bound now."""
    # on a full disk the next service listens at another port
    with contextlib.suppress(OSError):
        write_whole(directory / _PORT, str(urlsplit(address).port).encode())
