"""Clients that may connect to a served pool from other machines, and connected clients.

`clients.toml` of a served pool lists the authorized keys:

    ann = "Q{7s…"                               # one key
    ben = ["}aD!…", "0sV?…"]                    # one for each of his machines
    ops = {key = "8(wx…", admin = true}         # may cancel all users' runs and stop the pool

The file is read again whenever it changes. `sgpu pool authorize` and `revoke` write it and preserve manual edits.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
import zmq

from sgpu_magic.errors import UsageError
from sgpu_magic.files.atomic_file import read_trusted, write_whole
from sgpu_magic.system.processes import write_log
from sgpu_magic.system.secure_sockets import is_public_key
from sgpu_magic.wire import codec
from sgpu_magic.wire.client import Cancel, ClientMessage, Detach, RestartRanks, StopPool, Submit
from sgpu_magic.wire.decoding import decode_toml
from sgpu_magic.wire.events import Event
from sgpu_magic.wire.pool_status import PoolStatus

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_BEGINS = '# Users of this pool: name = "public key". `sgpu pool authorize` and `revoke` write this file.\n\n'
_MOST_ANSWERS = 256
# executed only once, however often a client repeats the request after a broken connection
_ONCE = (Submit, Cancel, Detach, RestartRanks, StopPool)
# limits of one turn, before other work gets the loop
_TURN_MESSAGES = 100
_TURN_S = 0.01


class AuthorizedClient(msgspec.Struct, frozen=True):
    """The user that a key belongs to.

    Args:
        user: The user's name.
        admin: Whether the user may cancel all users' runs and stop the pool.
    """

    user: str
    admin: bool = False


class AuthorizedClients:
    """The current content of `clients.toml`.

    Args:
        path: The file; without it no client is authorized.

    Attributes:
        users: The listed keys with their users.
        problem: Why no client is authorized although the file exists; "" otherwise.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] | None = None
        self.users: Mapping[str, AuthorizedClient] = {}
        self.problem = ""

    def is_changed(self) -> bool:
        """Read the file again if it has changed. An unreadable file authorizes no client; `problem` says why.

        Returns:
            Whether it has changed.
        """
        try:
            status = os.stat(self._path)
            # a change of permissions alters only the ctime
            seen = (status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino, status.st_size)
        except OSError:
            seen = None
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            self.users, self.problem = read_clients(self._path), ""
        except UsageError as error:
            self.users, self.problem = {}, error.message
        return True


def read_clients(path: Path) -> dict[str, AuthorizedClient]:
    """Return the listed keys and their users; empty without a file.

    Raises:
        UsageError: The file can't be read, other users can write it, or its content is invalid.
    """
    return _clients(_text(path), path)


def authorize(path: Path, name: str, key: str, *, admin: bool = False) -> None:
    """Authorize a key.

    Args:
        path: The file.
        name: The user's name.
        key: The public key.
        admin: Whether the user may cancel all users' runs and stop the pool.

    Raises:
        UsageError: The name or the key is invalid, the key is already listed, or the file can't be read or written.
    """
    if _NAME.fullmatch(name) is None:
        raise UsageError(f"{name[:40]!r} is not a user name: use letters, digits, `_`, `-` and `.`, at most 64.")
    if not is_public_key(key):
        raise UsageError(
            f"{key[:60]!r} is not a public key: `sgpu pool keygen` prints one, with 40 characters. Quote it in a "
            "shell: '...'."
        )
    text = _text(path)
    listed = _clients(text, path)
    if (known := listed.get(key)) is not None:
        raise UsageError(f"this key is already listed, for user {known.user}.")
    keys = [each for each, client in listed.items() if client.user == name] + [key]
    admin |= any(client.admin for client in listed.values() if client.user == name)
    value = json.dumps(keys[0]) if len(keys) == 1 else json.dumps(keys)
    quoted = json.dumps(name) if "." in name else name
    line = f"{quoted} = {{key = {value}, admin = true}}\n" if admin else f"{quoted} = {value}\n"
    text = _without(text, name) if len(keys) > 1 else text or _BEGINS
    _write(path, text if text.endswith("\n") else text + "\n", line)


def revoke(path: Path, name: str) -> int:
    """Remove a user's keys, and return how many there were.

    Raises:
        UsageError: There is no such user, or the file can't be read or written.
    """
    text = _text(path)
    listed = _clients(text, path)
    if not (keys := [key for key, client in listed.items() if client.user == name]):
        names = ", ".join(sorted({client.user for client in listed.values()})) or "nobody"
        raise UsageError(f"{path} has no user {name[:40]!r}. It has: {names}.")
    _write(path, _without(text, name), "")
    return len(keys)


# ---------------------------------------------------------------- internals


def _text(path: Path) -> str:
    return read_trusted(
        path,
        "the list of clients",
        f"{path} can be written by other users, who could authorize anybody, so no user is authorized. "
        f"Make it yours: chmod 600 {path} (and check who owns it).",
    )


def _clients(text: str, path: Path) -> dict[str, AuthorizedClient]:
    clients: dict[str, AuthorizedClient] = {}
    try:
        for name, value in decode_toml(text).items():
            if _NAME.fullmatch(name) is None:
                raise ValueError(f"{name[:40]!r} is not a user name")
            keys, admin = _keys_of(value)
            for key in keys:
                if not isinstance(key, str) or not is_public_key(key):
                    raise ValueError(f"{name}: {str(key)[:60]!r} is not a public key")
                if key in clients:
                    raise ValueError(f"{name}: its key already belongs to {clients[key].user}")
                clients[key] = AuthorizedClient(name, admin)
    except (msgspec.DecodeError, ValueError) as error:
        raise UsageError(f"the list of clients {path} can't be read: {error}. Fix it.") from None
    return clients


def _keys_of(value: object) -> tuple[list[object], bool]:
    admin = False
    if isinstance(value, dict):
        table = cast("dict[str, object]", value)
        if (unknown := sorted(table.keys() - {"key", "admin"})) or not isinstance(table.get("admin", False), bool):
            raise ValueError(f"{unknown[0] if unknown else 'admin'!r} is not valid; use key and admin = true")
        value, admin = table.get("key"), bool(table.get("admin", False))
    return (cast("list[object]", value) if isinstance(value, list) else [value]), admin


def _without(text: str, name: str) -> str:
    """Return the text without a user's line or table."""
    kept: list[str] = []
    dropping = False
    for line in text.splitlines(keepends=True):
        if (header := re.match(r"\s*\[\s*\"?([^\"\]\s]+)\"?\s*\]", line)) is not None:
            dropping = header[1] == name
        if not dropping and re.match(rf"\s*\"?{re.escape(name)}\"?\s*=", line) is None:
            kept.append(line)
    return "".join(kept)


def _write(path: Path, text: str, line: str) -> None:
    # insert before the first table header: below it, the line would belong to that table
    table = re.search(r"^\s*\[", text, re.MULTILINE)
    new = text + line if table is None else text[: table.start()] + line + text[table.start() :]
    _clients(new, path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, new.encode())
    except OSError as error:
        raise UsageError(f"the list of clients {path} can't be written: {error.strerror}.") from error


class ConnectedClient(msgspec.Struct, eq=False):
    """A process that has sent `Hello`.

    Args:
        identity: Its ZeroMQ identity; a remote client gets a new one at each reconnection.
        pid: Its process ID.
        pidfd: Readable when the process is dead; None for a remote client, and where the system has no pidfds.
        user: Its user in the pool.
        same_host: Whether it is on the service's machine and sees its files. A relay there stands for a client
            elsewhere.
        shares_pids: Whether it has the same PID namespace: memory files are found by pid.
        connection: The connection whose end counts as the process's, where that can't be seen; -1 elsewhere.
        admin: Whether it may end other users' runs.
        same_files: Whether its machine's files and Pythons are at the same paths here.
        instance: Identifies a remote client across its connections.
        key: Its public key; "" on the service's machine, and of a client that logs in there.
        received_at: Monotonic time of a remote client's last message.
        behind: Whether messages to it were dropped because it reads too slowly.
        unsent: Replies that a local client's connection has not accepted yet.
        answers: The replies to its newest requests that must be executed only once; None before the reply.
        status: The last status sent to it; None before.
    """

    identity: bytes
    pid: int
    pidfd: int | None = None
    user: str = ""
    same_host: bool = True
    shares_pids: bool = True
    connection: int = -1
    admin: bool = False
    same_files: bool = True
    instance: str = ""
    key: str = ""
    received_at: float = msgspec.field(default_factory=time.monotonic)
    behind: bool = False
    unsent: deque[Sequence[bytes]] = msgspec.field(default_factory=deque["Sequence[bytes]"])
    answers: dict[int, Sequence[bytes] | None] = msgspec.field(default_factory=dict[int, "Sequence[bytes] | None"])
    status: PoolStatus | None = None

    @property
    def is_relayed(self) -> bool:
        """Whether it is elsewhere, and a relay on the service's machine passes its messages on."""
        return bool(self.instance) and not self.key

    def may_see(self, user: str) -> bool:
        """Whether it may see the content of this user's runs. A client on the service's machine owns all files."""
        return self.same_host or self.user == user

    def may_end(self, user: str) -> bool:
        return self.admin or self.may_see(user)

    def is_new(self, request: int) -> bool:
        """Whether this request is new; marks it as seen."""
        if request in self.answers:
            return False
        self.answers[request] = None
        while len(self.answers) > _MOST_ANSWERS:
            del self.answers[next(iter(self.answers))]
        return True

    def answer_of(self, message: ClientMessage) -> tuple[bool, Sequence[bytes] | None]:
        """Return whether a message is repeated and must not be executed again, and the answer that it has by now."""
        request = getattr(message, "request", 0)
        if not isinstance(message, _ONCE) or not request or self.is_new(request):
            return False, None
        return True, self.answers[request]


OnMessage = Callable[[ConnectedClient, ClientMessage, Sequence[bytes]], None]
OnDisconnect = Callable[[ConnectedClient], None]


class Router(ABC):
    """The ZeroMQ router of clients' connections. Used from the loop's thread only.

    Args:
        on_message: Called with the client, the message and its raw frames.
        on_disconnect: Called when a client is gone without a goodbye.
        received_ahead: Messages that are queued here per client; further ones wait at the client. 0 for no limit.
        sent_ahead: Messages that ZeroMQ queues for one client.
        linger_ms: How long a stopping pool still sends queued messages, in milliseconds.
    """

    def __init__(
        self,
        on_message: OnMessage,
        on_disconnect: OnDisconnect,
        *,
        received_ahead: int,
        sent_ahead: int,
        linger_ms: int,
    ) -> None:
        self._on_message = on_message
        self._on_disconnect = on_disconnect
        self._loop = asyncio.get_running_loop()
        self._by_identity: dict[bytes, ConnectedClient] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = linger_ms
        self._socket.rcvhwm = received_ahead
        self._socket.sndhwm = sent_ahead
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._drain_scheduled = False

    def offer(self, client: ConnectedClient, event: Event, frames: Sequence[bytes]) -> bool:
        """Send an event; return False when the client's connection accepts no more for now.

        An event for a disconnected client is dropped: the client asks for it again.
        """
        return self._try_send(client, [codec.encode(event), *frames])

    def _try_send(self, client: ConnectedClient, parts: Sequence[bytes]) -> bool:
        """Send unless the client is gone; return False when its connection accepts no more for now."""
        try:
            self._socket.send_multipart([client.identity, *parts], zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        # sending may have consumed the edge-triggered readiness of the socket
        self._drain_soon()
        return True

    def _drain_soon(self) -> None:
        if not self._drain_scheduled:
            self._drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Handle received messages within the limits of one turn. ZeroMQ reads from the clients in turns."""
        self._drain_scheduled = False
        until = time.monotonic() + _TURN_S
        for _ in range(_TURN_MESSAGES):
            if self._socket.closed:
                return
            try:
                identity, *parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                message = codec.client_messages.decode(parts[0].bytes if parts else b"")
            except zmq.Again:
                return
            except msgspec.DecodeError:
                # not our protocol: ignore it
                continue
            try:
                self._on_client_message(identity.bytes, message, parts)
            except Exception as error:  # noqa: BLE001  whatever a client sends costs only its own message
                write_log(f"a message of a client was dropped ({type(message).__name__}): ", error)
            if time.monotonic() > until:
                break
        self._drain_soon()

    @abstractmethod
    def _on_client_message(self, identity: bytes, message: ClientMessage, parts: Sequence[zmq.Frame]) -> None:
        """Handle a message, whose parts include its own text."""
