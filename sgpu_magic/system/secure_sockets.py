"""Keys, and ZeroMQ sockets that only those who hold a listed key can use.

Between machines ZeroMQ speaks CurveZMQ (rfc.zeromq.org/spec/25): both sides have a key pair, every connection makes
session keys of its own, so what was recorded can't be read later or played again. A server admits by ZAP
(rfc.zeromq.org/spec/27), before anything of the connection reaches the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import stat
import struct
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from sgpu_magic.errors import UsageError

MAX_FRAME_BYTES = 16 << 20
"""A larger frame ends its connection. What moves files cuts them far smaller: 256 KiB."""

_HEARTBEAT_MS = 3000
# a frame of the largest size has to get through a slow line within it
_HEARTBEAT_TIMEOUT_MS = 20_000
_HANDSHAKE_MS = 5000
_CONNECT_MS = 3000
_ZAP_DOMAIN = b"sgpu"
_ZAP_VERSION = b"1.0"
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
# ZeroMQ tells an IPv4 address as IPv6 does
_MAPPED = re.compile(r"\[::ffff:([0-9.]+)\]")
_Z85_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, each half in Z85: 40 characters.

    Args:
        public: Known to others.
        secret: Known to nobody else; in no text that is shown.
    """

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a pool listens.

    Args:
        address: `ipc://path` or `tcp://host:port`.
        server_key: The pool's public key; "" where the directory's mode protects the socket.
    """

    address: str
    server_key: str = ""


# ---------------------------------------------------------------- keys and their files


def new_key_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    while public.startswith(b"-"):
        # commands would take it for an option
        public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def is_public_key(text: str) -> bool:
    """Whether this can be a key's half in Z85."""
    if _Z85_KEY.fullmatch(text) is None:
        return False
    try:
        return len(z85.decode(text.encode())) == 32
    except (ValueError, struct.error):
        # five characters can say more than four bytes hold
        return False


def write_key_pair(path: Path, pair: KeyPair, *, replace: bool = False) -> None:
    """Write a pair into a new file of mode 0600; its directory is made with mode 0700.

    Args:
        path: The file.
        pair: The pair.
        replace: One that is there makes room for it.

    Raises:
        UsageError: There is one already, or the file can't be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    text = (
        "# A key of sgpu-magic. Who has the secret half can act as its owner.\n"
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
                # fails where a file is; nothing half written is ever seen
                os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError:
        raise UsageError(f"there is a key in {path} already, and who knows it would not know a new one.") from None
    except OSError as error:
        raise UsageError(f"the key file {path} can't be written: {error.strerror}.") from error


def read_key_pair(path: Path) -> KeyPair:
    """Read a pair that `write_key_pair` has written.

    Raises:
        FileNotFoundError: There is no such file.
        UsageError: It is another user's, others can read it, or it holds no pair.
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
            raise UsageError(f"the key file {path} belongs to another user and is not used. Make a key of your own.")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise UsageError(
                f"the key file {path} can be read or written by other users, so the key may not be yours alone. Make a "
                "new one, or if you are sure that nobody has read it: chmod 600 " + str(path)
            )
        data = file.read(4096)
    try:
        content = tomllib.loads(data.decode())
        pair = KeyPair(str(content["public"]), str(content["secret"]))
        if not is_public_key(pair.secret) or zmq.curve_public(pair.secret.encode()).decode() != pair.public:
            raise ValueError("its halves do not belong together")
    except (ValueError, KeyError, UnicodeDecodeError) as error:
        raise UsageError(f"the key file {path} holds no key pair ({error}). Make a new one.") from None
    return pair


def kept_key_pair(path: Path) -> KeyPair:
    """Return the pair in a file; one is made now if there is none.

    Raises:
        UsageError: The file can't be trusted, or written.
    """
    try:
        return read_key_pair(path)
    except FileNotFoundError:
        pair = new_key_pair()
        write_key_pair(path, pair)
        return pair


# ---------------------------------------------------------------- sockets


def secure_client(socket: zmq.Socket[bytes], endpoint: Endpoint, own: KeyPair) -> None:
    """Make a socket speak to this server and no other, before it is connected. It does not connect again by itself.

    Args:
        socket: The socket.
        endpoint: With the server's key.
        own: Who we are.
    """
    socket.setsockopt(zmq.CURVE_SERVERKEY, endpoint.server_key.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    # who connects has to say who it is first: each connection is made, and known, by the program
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    _set_limits(socket)


def secure_server(socket: zmq.Socket[bytes], own: KeyPair) -> None:
    """Make a socket admit by ZAP, before it is bound; without an `Admission` in its context it admits nobody.

    Args:
        socket: The socket.
        own: Who we are.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.BACKLOG, 512)
    _set_limits(socket)


def _set_limits(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    # a peer that is cut off is given up, with what is queued for it
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, _HEARTBEAT_TIMEOUT_MS)


def bound_to(socket: zmq.Socket[bytes]) -> str:
    """Return where a socket listens, `tcp://host:port`."""
    return _MAPPED.sub(r"\1", socket.get_string(zmq.LAST_ENDPOINT))


def reached_at(address: str, host: str) -> str:
    """Return where others reach a server that listens at `address`: at this machine's `host`, if it is at any."""
    place = urlsplit(address)
    if place.hostname not in ("0.0.0.0", "::", "*", None):
        host = place.hostname
    return f"tcp://{f'[{host}]' if ':' in host else host}:{place.port}"


def sender_of(frame: zmq.Frame) -> str:
    """Return the public key of who has sent a frame (received with `copy=False`), "" when the socket knows no keys."""
    try:
        user = frame.get("User-Id")
    except zmq.ZMQError:
        return ""
    return user.decode() if isinstance(user, bytes) else str(user)


class LoopSocket:
    """A ZeroMQ socket in an asyncio loop's thread: calls back for each message.

    Args:
        socket: The socket, which is owned from now on.
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
        """Send a message, or drop it: to whom nobody is connected, or takes no more."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        # a send can swallow the edge that tells of arrived messages
        self._drain_soon()

    def drain(self) -> None:
        """Take what has come."""
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
    """Answers ZAP for all servers of one context, in the loop's thread: a listed key is let in, all else is not.

    Args:
        context: Whose servers; each context has one.
        admits: Whether a public key (Z85) is listed; asked at each connection.
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
