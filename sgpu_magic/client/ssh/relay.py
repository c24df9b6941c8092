"""`python -m sgpu_magic.client.ssh.relay MARK start`: the far end of a login, between ssh and this machine's pool.

Starts the pool if none runs (with `find` in place of `start` it does not), and prints a line with the mark: `ready`, or
why it failed. From then on standard input and output carry messages. It ends when the other side or the pool is gone;
both then continue without it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from sgpu_magic.client.connector import LocalConnector
from sgpu_magic.client.this_machine import find_pool
from sgpu_magic.config import load_settings
from sgpu_magic.errors import PoolError, SgpuError
from sgpu_magic.system.part_stream import PipeStream
from sgpu_magic.system.secure_sockets import MAX_FRAME_BYTES
from sgpu_magic.wire import codec
from sgpu_magic.wire.pool_status import socket_file

# the other side asks for a sign of life every few seconds: after this, its machine is gone or asleep
_SILENT_S = 60.0
# while so much is unsent, the pool keeps what follows, and serves it from the runs' logs
_MOST_UNSENT_BYTES = 1 << 20
_MOST_MESSAGES = 64
_LINGER_MS = 500


def main() -> None:
    """Run as the far end of a login until one of the two sides is gone."""
    mark, starts = sys.argv[1], sys.argv[2] == "start"
    # nothing else may print on the stream
    writing = os.dup(1)
    os.dup2(2, 1)
    try:
        path = _pool_socket(starts=starts)
    except SgpuError as error:
        _say(writing, mark, f"failed pool {' '.join(error.message.split())}")
        return
    if path is None:
        _say(writing, mark, "failed idle")
        return
    _say(writing, mark, "ready")
    relay(0, writing, path)


def _say(descriptor: int, mark: str, text: str) -> None:
    os.write(descriptor, f"\n{mark} {text}\n".encode("utf-8", "replace"))


def _pool_socket(*, starts: bool) -> Path | None:
    """Return the socket of this machine's pool; None if none runs and none is to be started.

    Raises:
        SgpuError: It can't be started, or is in use and of another version.
    """
    settings = load_settings()
    if not starts and find_pool(settings) is None:
        return None
    connector = LocalConnector(settings, on_lost=lambda: None, on_notice=lambda text: None)
    connector.get_link(start=True)
    address = find_pool(settings)
    connector.close()
    if address is None:
        raise PoolError("the pool has ended right after its start; `sgpu doctor` there looks for the reason.")
    return socket_file(Path(address.runtime) if address.runtime else settings.runtime_path)


def relay(reading: int, writing: int, path: Path) -> None:
    """Pass messages between a stream and a pool's socket, until one of them is gone.

    Args:
        reading: The stream's descriptor to read.
        writing: Its descriptor to write.
        path: The socket.
    """
    stream = PipeStream(reading, writing, MAX_FRAME_BYTES, codec.MAX_PARTS)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = _LINGER_MS
    dealer.sndhwm = 0
    # ZeroMQ would silently connect to another pool at the path
    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
    dealer.connect(f"ipc://{path}")
    heard_at = time.monotonic()
    try:
        while time.monotonic() - heard_at < _SILENT_S:
            poller = zmq.Poller()
            poller.register(reading, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            if stream.unsent_bytes < _MOST_UNSENT_BYTES:
                poller.register(dealer, zmq.POLLIN)
            if stream.has_unsent:
                poller.register(writing, zmq.POLLOUT)
            ready = dict(poller.poll(1000))
            if reading in ready:
                heard_at = time.monotonic()
                for parts in stream.receive(_MOST_MESSAGES):
                    dealer.send_multipart(parts, copy=True)
            if dealer in ready:
                _take(dealer, stream)
            stream.send()
            if monitor in ready:
                return
    except OSError:
        # the other side is gone
        return
    finally:
        dealer.disable_monitor()
        monitor.close(0)
        dealer.close()
        context.term()


def _take(dealer: zmq.Socket[bytes], stream: PipeStream) -> None:
    """Queue what the pool has sent, until enough is queued."""
    while stream.unsent_bytes < _MOST_UNSENT_BYTES:
        try:
            parts: Sequence[bytes] = dealer.recv_multipart(zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return
        stream.put(parts)


if __name__ == "__main__":
    main()
