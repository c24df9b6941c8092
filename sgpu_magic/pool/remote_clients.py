"""Clients on other machines: a ZeroMQ router on TCP that admits listed keys only.

A broken connection loses nothing: a client that reconnects names its instance and resumes. A client that does not
reconnect within the link's time-out counts as gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Sequence

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from sgpu_magic.errors import UsageError
from sgpu_magic.pool.bulk_port import BulkPort
from sgpu_magic.pool.clients import AuthorizedClients, ConnectedClient, OnDisconnect, OnMessage, Router
from sgpu_magic.system.processes import write_log
from sgpu_magic.system.secure_sockets import Admission, KeyPair, bound_to, secure_server, sender_of
from sgpu_magic.wire import codec
from sgpu_magic.wire.base import ErrorKind, Record
from sgpu_magic.wire.client import ClientMessage, Ping, Pong, Refused
from sgpu_magic.wire.files import FileRequest
from sgpu_magic.wire.pool_status import AskBulk, Hello

# messages of one client that are queued here; further ones wait at the client
_RECEIVED_AHEAD = 64
# messages that are queued for one client; further ones are dropped, which `Pong.behind` reports
_SENT_AHEAD = 10_000
_LONGEST_INSTANCE = 64
_POLL_S = 2.0
_LINGER_MS = 1000

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
MOST_CONNECTIONS = 1000
MOST_OF_A_USER = 64
"""Clients of one user at once."""
MOST_UNKNOWN = 200


class Listening(msgspec.Struct, frozen=True):
    """Where and for whom a served pool listens.

    Args:
        address: `tcp://host:port`; port `*` is any free port.
        keys: The pool's key pair.
        clients: The authorized clients.
        timeout_s: Seconds of silence after which a client counts as gone.
        bulk_port: Port for messages with file data; 0 is that of `address` + 1000, or any free one; -1 opens
            none.
    """

    address: str
    keys: KeyPair
    clients: AuthorizedClients
    timeout_s: float
    bulk_port: int = 0


class RemoteClients(Router):
    """The router for clients on other machines.

    Args:
        listening: Where and for whom it listens.
        on_message: Called with the client, the message and its raw frames.
        on_disconnect: Called when a client has been silent for too long.

    Raises:
        zmq.ZMQError: The address can't be bound.
        UsageError: The port for file data can't be bound.
    """

    def __init__(self, listening: Listening, on_message: OnMessage, on_disconnect: OnDisconnect) -> None:
        # the base class makes a separate context: a flood from outside does not slow down the local socket's thread
        super().__init__(
            on_message, on_disconnect, received_ahead=_RECEIVED_AHEAD, sent_ahead=_SENT_AHEAD, linger_ms=_LINGER_MS
        )
        self._clients = listening.clients
        self._timeout_s = listening.timeout_s
        self._interval_s = min(_POLL_S, self._timeout_s / 4)
        # by public key and instance, which stay the same across a client's connections
        self._known: dict[tuple[str, str], ConnectedClient] = {}
        # the connection's descriptor in this process, and its inode, since descriptor numbers are reused
        self._sockets: dict[ConnectedClient, tuple[int, int]] = {}
        self._clients.is_changed()
        self._admission = Admission(self._context, self._admits)
        secure_server(self._socket, listening.keys)
        self._limit = ConnectionLimit(self._socket)
        self._socket.bind(listening.address)
        self.address = bound_to(self._socket)
        self._bulk: BulkPort | None = None
        if listening.bulk_port >= 0:
            try:
                self._bulk = BulkPort(self.address, listening.bulk_port, self._on_bulk_request)
            except OSError as error:
                if listening.bulk_port:
                    raise UsageError(
                        f"the pool can't use port {listening.bulk_port} for variables and files: {error.strerror}. "
                        "Choose another with the setting bulk_port."
                    ) from None
                write_log(f"sgpu: there is no port for variables and files, which use the link: {error.strerror}\n")
        # port for messages with file data; 0 without one
        self.bulk_port = self._bulk.port if self._bulk is not None else 0
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._timer = self._loop.call_later(self._interval_s, self._check)

    @property
    def clients(self) -> list[ConnectedClient]:
        return list(self._known.values())

    def send(self, client: ConnectedClient, message: Record, frames: Sequence[bytes] = ()) -> None:
        """Send a reply; it is dropped if the client is away or too slow, and the client asks for it again."""
        parts = [codec.encode(message), *frames]
        request = getattr(message, "request", 0)
        if request in client.answers:
            client.answers[request] = parts
        if self._bulk is not None and self._bulk.answered(client, request, parts):
            return
        if not self._try_send(client, parts):
            client.behind = True

    def drop(self, client: ConnectedClient) -> None:
        """Forget a client."""
        self._by_identity.pop(client.identity, None)
        self._known.pop((client.key, client.instance), None)
        self._sockets.pop(client, None)
        self._cut_bulk(client)

    def close(self) -> None:
        if self._bulk is not None:
            self._bulk.close()
        self._timer.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._limit.close()
        self._socket.close()
        self._admission.close()
        self._context.term()

    # ------------------------------------------------------------ incoming messages

    def _admits(self, key: str) -> bool:
        self._check_permissions()
        return key in self._clients.users

    def _on_client_message(self, identity: bytes, message: ClientMessage, parts: Sequence[zmq.Frame]) -> None:
        key = sender_of(parts[0])
        if key not in self._clients.users:
            # the key was revoked while the client was connected
            return
        client = self._by_identity.get(identity)
        if isinstance(message, Hello):
            client = self._greet(identity, key, message, parts[0])
        if client is None or client.key != key:
            return
        client.received_at = time.monotonic()
        if isinstance(message, Ping):
            behind, client.behind = client.behind, False
            self._try_send(client, [codec.encode(Pong(behind=behind))])
        elif isinstance(message, AskBulk):
            if self._bulk is not None:
                self._try_send(client, [codec.encode(self._bulk.offer(client))])
        else:
            is_repeated, answer = client.answer_of(message)
            if answer is not None:
                self._try_send(client, answer)
            elif not is_repeated:
                self._on_message(client, message, [part.bytes for part in parts[1:]])

    def _on_bulk_request(self, client: ConnectedClient, message: FileRequest, frames: Sequence[bytes]) -> None:
        if client.key not in self._clients.users:
            self._cut_bulk(client)
            return
        client.received_at = time.monotonic()
        self._on_message(client, message, frames)

    def _cut_bulk(self, client: ConnectedClient) -> None:
        if self._bulk is not None:
            self._bulk.cut(client)

    def _greet(self, identity: bytes, key: str, hello: Hello, frame: zmq.Frame) -> ConnectedClient | None:
        if (authorized := self._clients.users.get(key)) is None:
            return None
        if not 0 < len(hello.instance) <= _LONGEST_INSTANCE:
            self._refuse(
                identity,
                hello,
                "The greeting names no valid instance of this client. Use a current version of sgpu-magic on this "
                "machine.",
            )
            return None
        if (client := self._known.get((key, hello.instance))) is None:
            if sum(each.user == authorized.user for each in self._known.values()) >= MOST_OF_A_USER:
                write_log(f"sgpu: user {authorized.user} has {MOST_OF_A_USER} notebooks here, the maximum\n")
                self._refuse(
                    identity,
                    hello,
                    f"User {authorized.user} has {MOST_OF_A_USER} notebooks and commands connected to it, the most "
                    "that it accepts. Shut down kernels that are no longer needed, then run the cell or the command "
                    f"again; a notebook that ended without a goodbye counts for {self._timeout_s:g} s longer.",
                )
                return None
            client = ConnectedClient(identity, hello.pid, same_host=False, instance=hello.instance, key=key)
            self._known[key, hello.instance] = client
        else:
            # the client has reconnected, and repeats its pending requests on the new link
            self._cut_bulk(client)
            self._by_identity.pop(client.identity, None)
            client.identity = identity
            client.behind = False
        client.user, client.admin = authorized.user, authorized.admin
        self._by_identity[identity] = client
        with contextlib.suppress(OSError, zmq.ZMQError):
            descriptor = int(frame.get(zmq.SRCFD))
            self._sockets[client] = (descriptor, os.fstat(descriptor).st_ino)
            self._limit.knows(descriptor)
        return client

    def _refuse(self, identity: bytes, hello: Hello, why: str) -> None:
        """Answer a greeting with a refusal. The client closes its connection, which stays an unknown one until then."""
        client = ConnectedClient(identity, hello.pid, same_host=False)
        self._try_send(client, [codec.encode(Refused(request=0, error=ErrorKind.POOL, message=why))])

    # ------------------------------------------------------------ gone and revoked clients

    def _check(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._check)
        self._check_permissions()
        now = time.monotonic()
        for client in self.clients:
            if now - client.received_at > self._timeout_s:
                self._cut(client)
                self.drop(client)
                self._on_disconnect(client)

    def _check_permissions(self) -> None:
        if not self._clients.is_changed():
            return
        if self._clients.problem:
            write_log(f"sgpu: no user is authorized: {self._clients.problem}\n")
        for client in self.clients:
            if (authorized := self._clients.users.get(client.key)) is None:
                self._cut(client)
            else:
                client.user, client.admin = authorized.user, authorized.admin

    def _cut(self, client: ConnectedClient) -> None:
        self._cut_bulk(client)
        if (connection := self._sockets.pop(client, None)) is not None:
            end_connection(*connection)


class ConnectionLimit:
    """Counts the connections of a listening socket, and ends surplus ones. Used in the loop's thread.

    A connection without a `Hello` is unknown. A handshake takes milliseconds: when there are too many unknown
    connections, the oldest of them are closed, so that clients with a listed key can still connect.

    Args:
        listening: The socket, before it is bound.
        most: The most connections at once.
        most_unknown: The most unknown connections among them.

    Attributes:
        unknown: The inode of each connection without a `Hello`, by descriptor, oldest first.
    """

    def __init__(
        self, listening: zmq.Socket[bytes], most: int = MOST_CONNECTIONS, most_unknown: int = MOST_UNKNOWN
    ) -> None:
        self._listening = listening
        self._most = most
        self._most_unknown = most_unknown
        self._loop = asyncio.get_running_loop()
        self._known: set[int] = set()
        self.unknown: dict[int, int] = {}
        self._monitor = listening.get_monitor_socket(_EVENTS)
        self._loop.add_reader(self._monitor.fileno(), self._receive_all)
        self._receive_all()

    def knows(self, descriptor: int) -> None:
        """Mark a connection as known: a client with a listed key has sent `Hello` over it."""
        if self.unknown.pop(descriptor, None) is not None:
            self._known.add(descriptor)

    def close(self) -> None:
        self._loop.remove_reader(self._monitor.fileno())
        self._listening.disable_monitor()
        self._monitor.close(0)

    def _receive_all(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            descriptor = event["value"]
            self._known.discard(descriptor)
            self.unknown.pop(descriptor, None)
            if event["event"] == zmq.Event.ACCEPTED:
                # the connection may be closed already; a later event reports that
                with contextlib.suppress(OSError):
                    self.unknown[descriptor] = os.fstat(descriptor).st_ino
        while self.unknown and (
            len(self.unknown) > self._most_unknown or len(self.unknown) + len(self._known) > self._most
        ):
            oldest = next(iter(self.unknown))
            end_connection(oldest, self.unknown.pop(oldest))


def end_connection(descriptor: int, inode: int) -> None:
    """End a connection; ZeroMQ has no call for that.

    Args:
        descriptor: Its socket in this process.
        inode: The socket's inode, since the descriptor's number may have been reused.
    """
    with contextlib.suppress(OSError):
        if os.fstat(descriptor).st_ino == inode:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
