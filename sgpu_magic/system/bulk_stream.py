"""Messages with file data over TLS 1.3, beside a ZeroMQ link that has authenticated both sides.

ZeroMQ's CURVE uses libsodium, which in pyzmq's wheels encrypts about 60 MB a second on one core. OpenSSL's AES-GCM uses
the processor's AES instructions and encrypts more than 1 GB a second. Over the ZeroMQ link the client gets a token and
the server's certificate, which is new at each start of the pool; it accepts no other certificate.

A message is the number of its parts (u32), the size of each (u32), little-endian, then the parts.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import socket
import ssl
import struct
import tempfile
from collections import deque
from collections.abc import Generator, Sequence
from typing import cast

MAX_PART_BYTES = 4 << 20
"""A larger part ends its connection, before memory is allocated for it."""

_MAX_PARTS = 2
_COUNT = struct.Struct("<I")
# limit per turn for one connection, so that others get their turn
_TURN_BYTES = 1 << 20
# unacknowledged data for this long means that the connection is dead, as for ZeroMQ's heartbeats
_DEAD_MS = 20_000
# firewalls forget idle connections after minutes
_KEEP_ALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", _DEAD_MS))
_ALWAYS = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC), datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)


def server_context() -> tuple[ssl.SSLContext, bytes]:
    """Return a server's context with a new key, and its certificate in DER. The key is not stored anywhere else."""
    # imported late: only a served pool needs it, and the import takes 40 ms
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sgpu-magic")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # the certificate is pinned and ends with the process: wrong clocks on other machines must not matter
        .not_valid_before(_ALWAYS[0])
        .not_valid_after(_ALWAYS[1])
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # sessions are never resumed: each connection has its own token
    context.num_tickets = 0
    with _unnamed_file(certificate.public_bytes(serialization.Encoding.PEM) + secret) as path:
        context.load_cert_chain(path)
    return context, certificate.public_bytes(serialization.Encoding.DER)


@contextlib.contextmanager
def _unnamed_file(data: bytes) -> Generator[str]:
    """Yield a path from which the data can be read: `ssl` loads keys from paths only."""
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("sgpu-key", os.MFD_CLOEXEC), "wb") as file:
            file.write(data)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
        return
    # a file of mode 0600, removed once the key is loaded
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        yield file.name


def client_context(certificate: bytes) -> ssl.SSLContext:
    """Return a client's context that trusts this certificate (DER) only.

    Raises:
        ValueError: It is not a certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # the certificate names no host; it is pinned instead
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=certificate)
    except ssl.SSLError as error:
        raise ValueError(f"the pool's certificate can't be read: {error.reason}") from None
    return context


class BulkStream:
    """One TLS connection, which never blocks. Use it from one thread: call `turn` when its socket is ready.

    Args:
        connection: The connected socket, owned from now on.
        context: What `server_context` or `client_context` returns.
        certificate: For a client: the only certificate (DER) that it accepts; b"" for a server.

    Attributes:
        most_bytes: The largest part that is accepted.
        ready: Whether the handshake is complete.
        unsent_bytes: The number of queued bytes that the connection has not accepted yet.

    Raises:
        OSError: The connection has ended already.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, certificate: bytes = b"") -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._certificate = certificate
        self._tls = context.wrap_socket(connection, server_side=not certificate, do_handshake_on_connect=False)
        self.ready = False
        self.most_bytes = MAX_PART_BYTES
        self._outgoing: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self._wants_write = False
        # sizes of the parts of the message being received, and the complete parts
        self._sizes: Sequence[int] | None = None
        self._parts: list[bytes] = []
        self._expect(_COUNT.size)

    def fileno(self) -> int:
        return self._tls.fileno()

    def events(self, *, reads: bool = True) -> int:
        """Return the events (of `select.poll`) to wait for.

        Args:
            reads: Whether further messages are wanted.
        """
        writes = self._wants_write if not self.ready else bool(self._outgoing)
        return (select.POLLIN if reads or not self.ready else 0) | (select.POLLOUT if writes else 0)

    @property
    def has_more(self) -> bool:
        """Whether decrypted data is buffered, for which the socket reports no event."""
        return self.ready and self._tls.pending() > 0

    def put(self, parts: Sequence[bytes]) -> None:
        """Queue a message, to be sent by the next calls of `turn`."""
        header = struct.pack(f"<I{len(parts)}I", len(parts), *map(len, parts))
        # join the header and the first part, so that a small message is one TLS record
        for part in (header + parts[0], *parts[1:]):
            if part:
                self._outgoing.append(memoryview(part))
                self.unsent_bytes += len(part)

    def turn(self, most: int) -> list[Sequence[bytes]]:
        """Continue the handshake, send and receive without blocking, and return the complete messages.

        Args:
            most: The most messages to receive.

        Raises:
            OSError: The connection has ended, has another certificate, or carries an invalid message.
        """
        messages: list[Sequence[bytes]] = []
        self._wants_write = False
        with contextlib.suppress(ssl.SSLWantReadError):
            try:
                if not self.ready:
                    self._shake()
                self._send()
            except ssl.SSLWantWriteError:
                self._wants_write = True
        if self.ready:
            with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self._receive(messages, most)
        return messages

    def close(self) -> None:
        self._tls.close()

    # ------------------------------------------------------------ internals

    def _shake(self) -> None:
        self._tls.do_handshake()
        if self._certificate and self._tls.getpeercert(binary_form=True) != self._certificate:
            raise ConnectionError("it has another certificate than the pool told over the link")
        self.ready = True

    def _send(self) -> None:
        sent = 0
        while self._outgoing and sent < _TURN_BYTES:
            view = self._outgoing[0]
            count = self._tls.send(view)
            sent += count
            self.unsent_bytes -= count
            if count == len(view):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = view[count:]

    def _receive(self, messages: list[Sequence[bytes]], most: int) -> None:
        got = 0
        while got < _TURN_BYTES and len(messages) < most:
            count = self._tls.recv_into(self._rest)
            if not count:
                raise ConnectionResetError("the other side closed it")
            got += count
            self._rest = self._rest[count:]
            if not self._rest:
                self._complete(messages)

    def _complete(self, messages: list[Sequence[bytes]]) -> None:
        """Handle the bytes that are complete now, and set how many to receive next."""
        whole = self._whole
        if self._sizes is None:
            if len(whole) == _COUNT.size:
                (count,) = _COUNT.unpack(whole)
                if not 1 <= count <= _MAX_PARTS:
                    raise ConnectionError(f"a message of {count} parts")
                # next, receive the sizes after the count; together they are always longer than the count
                self._expect(_COUNT.size * (count + 1), whole)
                return
            self._sizes = [size for (size,) in _COUNT.iter_unpack(whole)][1:]
            if max(self._sizes) > self.most_bytes:
                raise ConnectionError(f"a message part of {max(self._sizes)} bytes")
        else:
            # no other reference to the bytearray exists, so it can stand in for `bytes` without a copy
            self._parts.append(cast("bytes", whole))
        while len(self._parts) < len(self._sizes):
            size = self._sizes[len(self._parts)]
            if size:
                self._expect(size)
                return
            self._parts.append(b"")
        messages.append(self._parts)
        self._sizes, self._parts = None, []
        self._expect(_COUNT.size)

    def _expect(self, size: int, begun: bytes | bytearray = b"") -> None:
        self._whole = bytearray(size)
        self._whole[: len(begun)] = begun
        self._rest = memoryview(self._whole)[len(begun) :]
