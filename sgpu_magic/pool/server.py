"""Receives clients' messages and sends replies and events, over a ZeroMQ router on a socket in a private directory.

ZeroMQ hides a peer's death, so each client reports its process ID and the service holds a pidfd for it. A served pool
has a second router, for clients on other machines.

A client elsewhere that logs in to this machine is connected through a relay here, a process of its own. It names its
instance, as its logins break and are made anew: when a relay ends, its client has `away_s` seconds to come back.

Events of runs are sent at once. A client that lags behind gets them from the run's log: it began to follow a run that
already has events, or it reads more slowly than the run produces them. The missing events are read from the log in
bounded chunks, as fast as the client's connection accepts them.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from sgpu_magic.config import user_name
from sgpu_magic.pool.clients import ConnectedClient, OnDisconnect, OnMessage, Router
from sgpu_magic.pool.remote_clients import Listening, RemoteClients
from sgpu_magic.system.processes import Peer, is_alive, peer_of
from sgpu_magic.wire import codec
from sgpu_magic.wire.base import ErrorKind, Record
from sgpu_magic.wire.client import ClientMessage, Notice, Ping, Pong, Refused
from sgpu_magic.wire.events import Event
from sgpu_magic.wire.option_text import Text
from sgpu_magic.wire.pool_status import Hello

_NO_PIDFD_POLL_S = 1.0
_SENT_AHEAD = 500
_LINGER_MS = 500
SEND_AGAIN_S = 0.02
_LAST_MESSAGES_S = 0.1


class Server(Router):
    """The router for clients on this machine; passes messages for remote clients to `RemoteClients`.

    Args:
        path: The socket's path.
        on_message: Called with the client, the message and its raw frames.
        on_disconnect: Called when a client's process has died, or a remote client has been silent for too long.
        listening: Where the pool listens for clients on other machines; None when it doesn't.
        away_s: Seconds after which a client whose relay has ended counts as gone.

    Attributes:
        address: The address for clients on other machines; "" when the pool accepts none.
        bulk_port: The port for other machines' messages with file data; 0 without one.
    """

    def __init__(
        self,
        path: Path,
        on_message: OnMessage,
        on_disconnect: OnDisconnect,
        listening: Listening | None = None,
        away_s: float = math.inf,
    ) -> None:
        # ZeroMQ buffers this many messages for a client that does not read; the rest waits here or in the runs' logs
        super().__init__(on_message, on_disconnect, received_ahead=0, sent_ahead=_SENT_AHEAD, linger_ms=_LINGER_MS)
        self._monitor: zmq.Socket[bytes] | None = None
        self._away_s = away_s
        # by instance; and when those without a relay count as gone
        self._relayed: dict[str, ConnectedClient] = {}
        self._away: dict[str, asyncio.TimerHandle] = {}
        self.listen_again(path)
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._remote = None if listening is None else RemoteClients(listening, on_message, on_disconnect)
        self.address, self.bulk_port = (
            ("", 0) if self._remote is None else (self._remote.address, self._remote.bulk_port)
        )

    def listen_again(self, path: Path) -> None:
        """Listen at a path: at startup, and again after the path was removed.

        Raises:
            OSError: The socket can't be bound.
        """
        try:
            self._socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        os.chmod(path, 0o600)

    @property
    def clients(self) -> list[ConnectedClient]:
        near = dict.fromkeys((*self._by_identity.values(), *self._relayed.values()))
        return [*near, *(self._remote.clients if self._remote is not None else ())]

    def send(self, client: ConnectedClient, message: Record, frames: Sequence[bytes] = ()) -> None:
        """Send a message now, or once the client's connection accepts it; drop it when the client is gone."""
        if client.key:
            if self._remote is not None:
                self._remote.send(client, message, frames)
            return
        parts = [codec.encode(message), *frames]
        if (request := getattr(message, "request", 0)) in client.answers:
            client.answers[request] = parts
        if client.unsent or not self._try_send(client, parts):
            client.unsent.append(parts)
            if len(client.unsent) == 1:
                self._loop.call_later(SEND_AGAIN_S, self._send_again, client)

    def offer(self, client: ConnectedClient, event: Event, frames: Sequence[bytes]) -> bool:
        """Send an event; return False when the client's connection accepts no more for now."""
        if client.key:
            return self._remote is None or self._remote.offer(client, event, frames)
        return not client.unsent and super().offer(client, event, frames)

    def _send_again(self, client: ConnectedClient) -> None:
        while client.unsent and not self._socket.closed and client.identity in self._by_identity:
            if not self._try_send(client, client.unsent[0]):
                self._loop.call_later(SEND_AGAIN_S, self._send_again, client)
                return
            client.unsent.popleft()
        client.unsent.clear()

    def notify(self, text: str) -> None:
        """Send a notice to every client; "" clears it."""
        for client in self.clients:
            self.send(client, Notice(text=text))

    def refuse(self, client: ConnectedClient, request: int, message: Text, error: ErrorKind = ErrorKind.USAGE) -> None:
        """Refuse a client's request."""
        self.send(client, Refused(request=request, error=error, message=message))

    def close(self) -> None:
        if self._remote is not None:
            self._remote.close()
        self._loop.remove_reader(self._socket.fileno())
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._monitor = None
        for timer in self._away.values():
            timer.cancel()
        for client in list(self._by_identity.values()):
            self._forget(client)
        self._socket.close()
        self._context.term()

    def _on_client_message(self, identity: bytes, message: ClientMessage, parts: Sequence[zmq.Frame]) -> None:
        if (client := self._by_identity.get(identity)) is None and isinstance(message, Hello):
            client = self._greet(identity, message, parts[0])
        if client is None:
            return
        if client.is_relayed and isinstance(message, Ping):
            self.send(client, Pong())
            return
        is_repeated, answer = client.answer_of(message) if client.is_relayed else (False, None)
        if answer is not None:
            self._try_send(client, answer)
        elif not is_repeated:
            self._on_message(client, message, [part.bytes for part in parts[1:]])

    def _greet(self, identity: bytes, hello: Hello, frame: zmq.Frame) -> ConnectedClient | None:
        connection = _connection_of(frame)
        try:
            peer = None if connection < 0 else _peer(connection)
        except OSError:
            # the sender has gone: its descriptor is closed, or belongs to something else by now
            return None
        # the pid in this process's PID namespace; the client may report another one, and a relay its client's
        reported = 0 if hello.instance else hello.pid
        pid = reported if peer is None else peer.pid
        if hello.instance:
            client = self._relayed_client(identity, pid, hello)
        else:
            client = ConnectedClient(identity, pid, user=hello.user, shares_pids=pid == hello.pid)
        if not pid:
            self._end_with_connection(client, connection)
        elif hasattr(os, "pidfd_open"):
            try:
                client.pidfd = os.pidfd_open(pid)
            except OSError:
                if client.is_relayed:
                    self._died(client)
                return None
            self._loop.add_reader(client.pidfd, self._died, client)
        else:
            self._loop.call_later(_NO_PIDFD_POLL_S, self._poll, client)
        self._by_identity[identity] = client
        return client

    def _relayed_client(self, identity: bytes, pid: int, hello: Hello) -> ConnectedClient:
        """Return the client that a relay stands for: one that has come back, or a new one.

        Whoever can log in to this machine as this user, and reach the socket, may do all that this user may.
        """
        if (client := self._relayed.get(hello.instance)) is None:
            client = ConnectedClient(
                identity,
                pid,
                user=user_name(),
                same_host=False,
                shares_pids=False,
                admin=True,
                same_files=hello.same_files,
                instance=hello.instance,
            )
            self._relayed[hello.instance] = client
            return client
        if (timer := self._away.pop(hello.instance, None)) is not None:
            timer.cancel()
        # the relay before may still be there, behind a connection that broke
        self._forget(client)
        client.unsent.clear()
        client.identity, client.pid = identity, pid
        return client

    def _end_with_connection(self, client: ConnectedClient, connection: int) -> None:
        """Treat the end of the client's connection as its death: the process is not visible from here."""
        if self._monitor is None:
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._loop.add_reader(self._monitor.fileno(), self._disconnected)
        # first handle disconnects of earlier connections that had the same descriptor
        self._disconnected()
        client.connection = connection

    def _disconnected(self) -> None:
        while self._monitor is not None:
            try:
                ended = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["value"]
            except zmq.Again:
                return
            for client in [client for client in self._by_identity.values() if client.connection == ended]:
                # the client's last messages, such as its goodbye, may not have been read yet
                self._loop.call_later(_LAST_MESSAGES_S, self._on_connection_closed, client)

    def _on_connection_closed(self, client: ConnectedClient) -> None:
        if self._by_identity.get(client.identity) is client:
            self._died(client)

    def _poll(self, client: ConnectedClient) -> None:
        if client.identity in self._by_identity and not is_alive(client.pid):
            self._died(client)
        elif client.identity in self._by_identity:
            self._loop.call_later(_NO_PIDFD_POLL_S, self._poll, client)

    def _died(self, client: ConnectedClient) -> None:
        self._forget(client)
        if client.is_relayed and math.isfinite(self._away_s):
            self._away[client.instance] = self._loop.call_later(self._away_s, self._stayed_away, client)
        else:
            self._on_disconnect(client)

    def _stayed_away(self, client: ConnectedClient) -> None:
        self._drop_relayed(client)
        self._on_disconnect(client)

    def _drop_relayed(self, client: ConnectedClient) -> None:
        self._relayed.pop(client.instance, None)
        if (timer := self._away.pop(client.instance, None)) is not None:
            timer.cancel()

    def _forget(self, client: ConnectedClient) -> None:
        self._by_identity.pop(client.identity, None)
        if client.pidfd is not None:
            self._loop.remove_reader(client.pidfd)
            os.close(client.pidfd)
            client.pidfd = None

    def drop(self, client: ConnectedClient) -> None:
        """Forget a client that has sent `Goodbye`."""
        if client.key:
            if self._remote is not None:
                self._remote.drop(client)
            return
        self._forget(client)
        if client.is_relayed:
            self._drop_relayed(client)


def _connection_of(frame: zmq.Frame) -> int:
    """Return the descriptor of the connection on which a message came; -1 if it is unknown."""
    try:
        return int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError):
        return -1


def _peer(connection: int) -> Peer | None:
    with socket.socket(fileno=os.dup(connection)) as copy:
        return peer_of(copy)
