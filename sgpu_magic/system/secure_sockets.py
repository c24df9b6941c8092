"""Keys, and ZeroMQ sockets that only holders of a listed key can use.

Between machines ZeroMQ uses CurveZMQ (rfc.zeromq.org/spec/25): both sides have a key pair, and every connection creates
its own session keys, so recorded traffic can't be decrypted later or replayed. A server authenticates clients by ZAP
(rfc.zeromq.org/spec/27) before any message of the connection reaches the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import stat
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from sgpu_magic.errors import UsageError
from sgpu_magic.wire.decoding import decode_toml

MAX_FRAME_BYTES = 16 << 20
"""A larger frame closes its connection. Files are sent in far smaller chunks of 256 KiB."""

_HEARTBEAT_MS = 3000
# long enough for a frame of the largest size on a slow connection
_HEARTBEAT_TIMEOUT_MS = 20_000
_HANDSHAKE_MS = 5000
_CONNECT_MS = 3000
_ZAP_DOMAIN = b"sgpu"
_ZAP_VERSION = b"1.0"
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
# ZeroMQ reports an IPv4 address as an IPv4-mapped IPv6 one
_MAPPED = re.compile(r"\[::ffff:([0-9.]+)\]")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, each half in Z85: 40 characters.

    Args:
        public: The public key.
        secret: The secret key; never part of the repr.
    """

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address at which a pool listens.

    Args:
        address: `ipc://path` or `tcp://host:port`.
        server_key: The pool's public key; "" if the directory's permissions protect the socket.
    """

    address: str
    server_key: str = ""


# ---------------------------------------------------------------- keys and their files


def new_key_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    while public.startswith(b"-"):
        # a leading dash would make it an option on command lines
        public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def is_public_key(text: str) -> bool:
    """Whether the text is a well-formed key in Z85."""
    try:
        return len(z85.decode(text.encode())) == 32
    except (ValueError, KeyError, struct.error):
        # five characters can encode more than four bytes hold
        return False


def write_key_pair(path: Path, pair: KeyPair, *, replace: bool = False) -> None:
    """Write a pair to a new file of mode 0600, creating its directory with mode 0700.

    Args:
        path: The file.
        pair: The pair.
        replace: Replace an existing file.

    Raises:
        UsageError: The file exists already, or can't be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    text = (
        "# A key of sgpu-magic. Whoever has the secret half can act as its owner.\n"
        f'public = "{pair.public}"\nsecret = "{pair.secret}"\n'
    )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "w") as file:
                file.write(text)
            if replace:
                os.replace(temporary, path)
            else:
                # fails if the file exists; a partly written file is never visible
                os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError:
        raise UsageError(f"there is already a key in {path}; those who know it would refuse a new one.") from None
    except OSError as error:
        raise UsageError(f"the key file {path} can't be written: {error.strerror}.") from error


def read_key_pair(path: Path) -> KeyPair:
    """Read a pair that `write_key_pair` has written.

    Raises:
        FileNotFoundError: There is no such file.
        UsageError: The file belongs to another user, is accessible to others, or contains no valid pair.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"the key file {path} can't be read: {error.strerror}.") from error
    with open(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid():
            raise UsageError(f"the key file {path} belongs to another user and is not used. Create a key of your own.")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise UsageError(
                f"the key file {path} can be read or written by other users, so others may know the key. Create a "
                "new one, or if you are sure that nobody has read it: chmod 600 " + str(path)
            )
        data = file.read(4096)
    try:
        content = decode_toml(data.decode())
        pair = KeyPair(str(content["public"]), str(content["secret"]))
        if not is_public_key(pair.secret) or zmq.curve_public(pair.secret.encode()).decode() != pair.public:
            raise ValueError("its halves do not match")
    except (ValueError, KeyError, UnicodeDecodeError) as error:
        raise UsageError(f"the key file {path} does not contain a key pair ({error}). Create a new one.") from None
    return pair


def kept_key_pair(path: Path) -> KeyPair:
    """Return the pair in a file; create it if there is none.

    Raises:
        UsageError: As for `read_key_pair`, or the file can't be written.
    """
    try:
        return read_key_pair(path)
    except FileNotFoundError:
        pair = new_key_pair()
        write_key_pair(path, pair)
        return pair


# ---------------------------------------------------------------- sockets


def secure_client(socket: zmq.Socket[bytes], endpoint: Endpoint, own: KeyPair) -> None:
    """Configure a socket to accept only this server, before it connects. It does not reconnect by itself.

    Args:
        socket: The socket.
        endpoint: The server's address and key.
        own: The client's key pair.
    """
    socket.setsockopt(zmq.CURVE_SERVERKEY, endpoint.server_key.encode())
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    # every connection must begin with the client's greeting, so only the program may reconnect
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    _set_common(socket, own)


def secure_server(socket: zmq.Socket[bytes], own: KeyPair) -> None:
    """Configure a socket to authenticate clients by ZAP, before it binds. Without an `Admission` it admits nobody.

    Args:
        socket: The socket.
        own: The server's key pair.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.BACKLOG, 512)
    _set_common(socket, own)


def _set_common(socket: zmq.Socket[bytes], own: KeyPair) -> None:
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    # drop a disconnected peer, with the messages queued for it
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, _HEARTBEAT_TIMEOUT_MS)


def bound_to(socket: zmq.Socket[bytes]) -> str:
    """Return the address that a socket is bound to, `tcp://host:port`."""
    return _MAPPED.sub(r"\1", socket.get_string(zmq.LAST_ENDPOINT))


def reached_at(address: str, host: str) -> str:
    """Return the address at which others reach a server; `host` replaces a wildcard address such as 0.0.0.0."""
    parsed = urlsplit(address)
    if parsed.hostname not in ("0.0.0.0", "::", "*", None):
        host = parsed.hostname
    return f"tcp://{f'[{host}]' if ':' in host else host}:{parsed.port}"


def sender_of(frame: zmq.Frame) -> str:
    """Return the public key of a frame's sender, "" if the socket has no keys. Receive with `copy=False`."""
    try:
        user = frame.get("User-Id")
    except zmq.ZMQError:
        return ""
    return user.decode() if isinstance(user, bytes) else str(user)


class LoopSocket:
    """A ZeroMQ socket in an asyncio loop's thread: calls back for each message.

    Args:
        socket: The socket, owned from now on.
        received: Called with the frames of each message.
    """

    def __init__(self, socket: zmq.Socket[bytes], received: Callable[[Sequence[zmq.Frame]], None]) -> None:
        self._socket = socket
        self._received = received
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket.fileno(), self.drain)
        self._drain_scheduled = False
        self._drain_soon()

    def send(self, parts: Sequence[bytes]) -> None:
        """Send a message; drop it if the peer is not connected or its queue is full."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        # the descriptor is edge-triggered, and a send can consume the event of arrived messages
        self._drain_soon()

    def drain(self) -> None:
        """Receive all messages that have arrived."""
        self._drain_scheduled = False
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._received(frames)

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _drain_soon(self) -> None:
        if not self._drain_scheduled:
            self._drain_scheduled = True
            self._loop.call_soon(self.drain)


class Admission:
    """The ZAP handler for all servers of a context, in the loop's thread: admits clients with a listed key only.

    Args:
        context: The context; it can have one handler.
        admits: Whether a public key (Z85) is listed; called for each connection.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], admits: Callable[[str], bool]) -> None:
        self._admits = admits
        socket = context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.bind(_ZAP_ADDRESS)
        self._socket = LoopSocket(socket, self._answer)

    def close(self) -> None:
        self._socket.close()

    def _answer(self, frames: Sequence[zmq.Frame]) -> None:
        parts = [frame.bytes for frame in frames]
        # [peer, "", version, request, domain, address, identity, mechanism, credentials]
        if len(parts) < 8 or parts[2] != _ZAP_VERSION:
            return
        key = z85.encode(parts[8]).decode() if parts[7] == b"CURVE" and len(parts) == 9 else ""
        admitted = parts[4] == _ZAP_DOMAIN and bool(key) and self._admits(key)
        status, user = (b"200", key.encode()) if admitted else (b"400", b"")
        self._socket.send([parts[0], b"", _ZAP_VERSION, parts[3], status, b"", user, b""])
