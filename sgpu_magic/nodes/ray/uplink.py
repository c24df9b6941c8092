"""On a node: the agent process, and the relay between its Unix socket and the pool service on another machine.

The agent is the same program as in the local engine; it does no networking. When the link is lost, its socket is
closed, and it waits for the next pool service as usual; each link uses a new socket.

A link carries the messages of `wire.node`. It begins with the node's `LinkHello` and lasts until one side detects
silence or a gap; then the node opens the next link, and its agent reports again which runs it holds. A link never
retransmits: the messages that matter are numbered per run on a higher level.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import zmq

from sgpu_magic.config import Settings
from sgpu_magic.nodes.ray import agent_main
from sgpu_magic.system import child_process
from sgpu_magic.system.message_stream import MessageStream
from sgpu_magic.system.processes import signal_name
from sgpu_magic.system.secure_sockets import Endpoint, KeyPair, LoopSocket, secure_client
from sgpu_magic.wire import codec
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.decoding import MsgpackDecoder, decode_json
from sgpu_magic.wire.node import EndAgent
from sgpu_magic.wire.pool_status import agent_socket_file

# ---------------------------------------------------------------- messages of both sides

BEAT_S = 1.0
"""The interval of heartbeats on each side, in seconds."""

SILENT_S = 3.5
"""Seconds of silence after which a side considers the other lost."""

_LINGER_MS = 1000
# the agent's own shutdown includes a grace period for its ranks; after this time it is killed
_END_S = 15.0
_POLL_S = 0.05

# variables of Ray's worker process that the ranks must not inherit
_RAYS_OWN = ("RAY_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


class LinkHello(Record, frozen=True, tag="link-hello", kw_only=True):
    """A node requests a new link; repeated until `LinkOpened` arrives.

    Args:
        node: The node's id, for which its key was created.
        link: A unique name of the link.
    """

    node: str
    link: str


class LinkOpened(Record, frozen=True, tag="link-opened", kw_only=True):
    """The pool has accepted the link: the agent may send its first message."""

    link: str


class LinkBeat(Record, frozen=True, tag="link-beat", kw_only=True):
    """A heartbeat.

    Args:
        link: The link's name.
        sent: The number of messages that this side has sent on the link.
    """

    link: str
    sent: int


class Carried(Record, frozen=True, tag="carried", kw_only=True):
    """A message to or from the agent: the next frame is the message, and its raw frames follow.

    Args:
        link: The link's name.
        number: 1, 2, 3 ... on the link in this direction.
    """

    link: str
    number: int


class LinkBroken(Record, frozen=True, tag="link-broken", kw_only=True):
    """A message is missing, or the link is unknown: open a new one."""

    link: str


class NodeLeaves(Record, frozen=True, tag="node-leaves", kw_only=True):
    """The node's agent process has exited, and with it its ranks.

    Args:
        link: The link's name.
        why: A clause, for example `its agent was killed by SIGKILL`; "" after a normal exit.
    """

    link: str
    why: str = ""


FromNode = LinkHello | LinkBeat | Carried | LinkBroken | NodeLeaves
ToNode = LinkOpened | LinkBeat | Carried | LinkBroken

# ---------------------------------------------------------------- the node's side

_to_node = MsgpackDecoder[ToNode](ToNode)
_raw = MsgpackDecoder[msgspec.Raw](msgspec.Raw)


class AgentOrder(Record, frozen=True, kw_only=True):
    """The configuration of a node's agent.

    Args:
        node: The node's id.
        prefix: The prefix of the names of the pool's placement groups.
        namespace: The pool's Ray namespace.
        address: The address of the pool's agent listener, `tcp://host:port`.
        server_key: The listener's public key.
        public: The node's public key.
        secret: The node's secret key.
        settings: The agent's settings as JSON; for `Uplink`, their directories must exist.
    """

    node: str
    prefix: str
    namespace: str
    address: str
    server_key: str
    public: str
    secret: str
    settings: bytes


class Uplink:
    """One node's agent and its link, from the agent's start to its exit.

    Args:
        order: The agent's configuration.
        lock: A file descriptor of a lock that the agent inherits, so that it is held until the agent exits.
    """

    def __init__(self, order: AgentOrder, lock: int) -> None:
        self._order = order
        self._settings = decode_json(order.settings, type=Settings)
        self._loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[str] = self._loop.create_future()
        """Why the agent has exited, "" after a normal exit."""
        self._context = zmq.Context()
        self._socket: LoopSocket | None = None
        self._link = ""
        self._opened = False
        self.abandoned = False
        """The agent has exited because no pool service connected."""
        self._asked_to_end = False
        self._agent: MessageStream[msgspec.Raw] | None = None
        self._sent = self._received = 0
        ours, self._lifeline, self._child = _start(self._settings, lock)
        self._first: socket.socket | None = ours
        self._received_at = self._tick_due = self._loop.time()
        self._tick()

    def end(self) -> None:
        """Tell the agent to end its ranks and itself; kill it if that takes too long."""
        self._asked_to_end = True
        if self._agent is not None:
            self._agent.send(EndAgent())
        # the agent stops everything when this is closed, regardless of its socket
        os.close(self._lifeline)
        self._lifeline = -1
        self._loop.call_later(_END_S, self._child.kill)

    def close(self) -> None:
        self._hang_up()
        if self._agent is not None:
            self._agent.close()
        if self._first is not None:
            self._first.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
        self._context.term()

    # ------------------------------------------------------------ the link

    def _tick(self) -> None:
        now = self._loop.time()
        late, self._tick_due = now - self._tick_due, now + BEAT_S
        if self._ended():
            return
        self._loop.call_later(BEAT_S, self._tick)
        if self._socket is not None:
            self._socket.drain()
        if late > BEAT_S:
            # this process was starved; do not count that as silence of the pool
            self._received_at += late
        if self._socket is None or now - self._received_at > SILENT_S:
            self._dial()
        elif self._opened:
            self._say(LinkBeat(link=self._link, sent=self._sent))
        else:
            self._say(LinkHello(node=self._order.node, link=self._link))

    def _dial(self) -> None:
        """Open a new link over a new connection."""
        self._hang_up()
        order = self._order
        self._link, self._sent, self._received = secrets.token_hex(8), 0, 0
        connection = self._context.socket(zmq.DEALER)
        connection.linger = _LINGER_MS
        connection.sndhwm = connection.rcvhwm = 0
        secure_client(connection, Endpoint(order.address, order.server_key), KeyPair(order.public, order.secret))
        connection.connect(order.address)
        self._socket = LoopSocket(connection, self._arrived)
        self._received_at = self._loop.time()
        self._say(LinkHello(node=order.node, link=self._link))

    def _hang_up(self) -> None:
        if self._opened and self._agent is not None:
            # the agent keeps its ranks and waits for the next service
            self._agent.close()
            self._agent = None
        self._opened = False
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _say(self, message: Record, *frames: bytes) -> None:
        if self._socket is not None:
            self._socket.send([codec.encode(message), *frames])

    def _arrived(self, frames: Sequence[zmq.Frame]) -> None:
        message: ToNode = _to_node.decode(frames[0].buffer)
        parts = [frame.bytes for frame in frames[1:]]
        if message.link != self._link:
            return
        self._received_at = self._loop.time()
        match message:
            case LinkOpened():
                self._open()
            case LinkBroken():
                self._dial()
            case LinkBeat(sent=sent):
                if sent != self._received:
                    self._break()
            case Carried(number=number):
                self._received += 1
                if number != self._received:
                    self._break()
                elif self._agent is not None:
                    self._agent.send(cast("Record", msgspec.Raw(parts[0])), parts[1:])

    def _break(self) -> None:
        """Open a new link after a gap."""
        self._say(LinkBroken(link=self._link))
        self._dial()

    # ------------------------------------------------------------ the agent

    def _open(self) -> None:
        if self._opened:
            return
        self._opened = True
        connection, self._first = self._first, None
        if connection is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(str(agent_socket_file(self._settings.runtime_path)))
            except OSError:
                connection.close()
                self._ended()
                return
        self._agent = MessageStream[msgspec.Raw](connection, _raw, self._on_agent_message, self._agent_lost)

    def _on_agent_message(self, message: msgspec.Raw, frames: Sequence[bytes]) -> None:
        self._sent += 1
        self._say(Carried(link=self._link, number=self._sent), bytes(message), *frames)

    def _agent_lost(self) -> None:
        self._agent = None
        self._loop.call_later(_END_S, self._child.kill)
        self._await_end()

    def _await_end(self) -> None:
        """Poll for the agent's exit; heartbeats continue meanwhile."""
        if not self._ended():
            self._loop.call_later(_POLL_S, self._await_end)

    def _ended(self) -> bool:
        """Whether the agent process has exited; reports its exit the first time."""
        if self.finished.done():
            return True
        code = self._child.poll()
        if code is None:
            return False
        why = _why(code)
        self.abandoned = code == 0 and not self._opened and not self._asked_to_end
        self._say(NodeLeaves(link=self._link, why=why))
        self.finished.set_result(why)
        return True


def _why(code: int) -> str:
    if code == 0:
        return ""
    if code < 0:
        return f"its agent was killed by {signal_name(-code)}"
    return f"its agent ended with exit code {code}"


def _start(settings: Settings, lock: int) -> tuple[socket.socket, int, subprocess.Popen[bytes]]:
    """Start the agent. Returns this end of its socket, its lifeline and the process.

    The lifeline is the write end of a pipe that only this process holds: when it closes, the agent ends everything.
    """
    hears, lifeline = os.pipe()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_RAYS_OWN)}
    # this package's location: it may have been shipped and unpacked for this actor
    here = str(Path(__file__).parents[3])
    path = os.pathsep.join(dict.fromkeys([here, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]))
    ours, child = child_process.start(
        [sys.executable, "-I", "-S", agent_main.__file__],
        [str(hears)],
        environ={**environ, "PYTHONPATH": path},
        log=Path(settings.state_path, "agent.log"),
        order=msgspec.json.encode(settings),
        descriptors=(hears, lock),
    )
    os.close(hears)
    return ours, lifeline, child
