"""Messages with file data over TLS 1.3, beside a ZeroMQ link that has authenticated both sides.

ZeroMQ's CURVE uses libsodium, which in pyzmq's wheels encrypts about 60 MB a second on one core. OpenSSL's AES-GCM uses
the processor's AES instructions and encrypts more than 1 GB a second. Over the ZeroMQ link the client gets a token and
the server's certificate, which is new at each start of the pool; it accepts no other certificate.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import socket
import ssl
import tempfile
from collections.abc import Generator, Sequence

from sgpu_magic.system.part_stream import PartStream

MAX_PART_BYTES = 4 << 20
"""A larger part ends its connection, before memory is allocated for it."""

_MAX_PARTS = 2
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


class BulkStream(PartStream):
    """One TLS connection, which never blocks. Use it from one thread: call `turn` when its socket is ready.

    Args:
        connection: The connected socket, owned from now on.
        context: What `server_context` or `client_context` returns.
        certificate: For a client: the only certificate (DER) that it accepts; b"" for a server.

    Attributes:
        ready: Whether the handshake is complete.

    Raises:
        OSError: The connection has ended already.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, certificate: bytes = b"") -> None:
        super().__init__(MAX_PART_BYTES, _MAX_PARTS)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._certificate = certificate
        self._tls = context.wrap_socket(connection, server_side=not certificate, do_handshake_on_connect=False)
        self.ready = False
        self._wants_write = False

    def fileno(self) -> int:
        return self._tls.fileno()

    def events(self, *, reads: bool = True) -> int:
        """Return the events (of `select.poll`) to wait for.

        Args:
            reads: Whether further messages are wanted.
        """
        writes = self._wants_write if not self.ready else self.has_unsent
        return (select.POLLIN if reads or not self.ready else 0) | (select.POLLOUT if writes else 0)

    @property
    def has_more(self) -> bool:
        """Whether decrypted data is buffered, for which the socket reports no event."""
        return self.ready and self._tls.pending() > 0

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

    def _write(self, data: memoryview) -> int:
        return self._tls.send(data)

    def _read_into(self, data: memoryview) -> int:
        return self._tls.recv_into(data)
