"""Unauthorized programs that send arbitrary data to a pool's sockets, and must get nothing from it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from sgpu_magic.system.secure_sockets import KeyPair
from sgpu_magic.wire import codec
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.pool_status import PROTOCOL_VERSION, Hello, Welcome


class Bomb:
    """An object that leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, (str(self.mark),))


class Stranger:
    """A raw ZeroMQ client.

    Args:
        address: The pool's socket.
        server_key: The key that it uses as the pool's; "" connects without encryption.
        own: Its own keys.
    """

    def __init__(self, address: str, server_key: str = "", own: KeyPair | None = None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = self._socket.sndhwm = 0
        if own is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
        self._socket.connect(address)
        self.instance = secrets.token_hex(8)

    def send(self, *parts: bytes) -> None:
        # libzmq drops a connection whose greeting the pool refused, and would block here until the next one
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(list(parts), zmq.NOBLOCK)

    def say(self, message: Record, *frames: bytes) -> None:
        self.send(codec.encode(message), *frames)

    def hello(self) -> Welcome:
        self.say(
            Hello(protocol_version=PROTOCOL_VERSION, package_version="test", pid=os.getpid(), instance=self.instance)
        )
        answer = self.answer()
        assert isinstance(answer, Welcome), answer
        return answer

    def answer(self, timeout_ms: int = 5000) -> object:
        """Return the next message, None if none arrives."""
        if not self._socket.poll(timeout_ms):
            return None
        return codec.pool_messages.decode(self._socket.recv_multipart()[0])

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def junk(bomb: bytes) -> list[Sequence[bytes]]:
    """Return invalid and nearly valid messages."""
    return [
        [bomb],
        [b"", bomb],
        *([os.urandom(size)] for size in (0, 1, 10, 1000, 100_000)),
        [msgspec.msgpack.encode({"type": "submit", "request": 1}), bomb],
        [msgspec.msgpack.encode({"type": "hello"}), bomb],
        [msgspec.msgpack.encode([1, 2, 3])],
        [msgspec.msgpack.encode({"type": "welcome"})],
        [msgspec.msgpack.encode("x" * 100_000)],
        [bomb] * 500,
    ]


def zmtp_greeting(mechanism: bytes = b"CURVE") -> bytes:
    """Return the first 64 bytes of ZMTP 3.1 (rfc.zeromq.org/spec/37)."""
    return b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x01" + mechanism.ljust(20, b"\0") + b"\0" * 32


def say_raw(connection: socket.socket, data: bytes, patience_s: float = 10.0) -> bytes:
    """Send bytes and return the received bytes, until the other side closes the connection.

    Raises:
        TimeoutError: The other side does not close it.
    """
    connection.settimeout(patience_s)
    got = b""
    try:
        connection.sendall(data)
        while piece := connection.recv(65536):
            got += piece
    except (BrokenPipeError, ConnectionResetError):
        pass
    return got


def has_ended(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True
