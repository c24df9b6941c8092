"""`python -m sgpu_magic.client.ssh.relay MARK start`: the far end of a login, between ssh and this machine's pool.

Starts the pool if none runs (with `find` in place of `start` it does not), or with one word more the pool of the
machines that the word names, of which this is the first. Prints a line with the mark: `ready`, or
why it failed. From then on standard input and output carry messages. It ends when the other side or the pool is gone;
both then continue without it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from sgpu_magic.client.connector import LocalConnector
from sgpu_magic.client.pool_socket import PoolSocket
from sgpu_magic.client.this_machine import find_pool
from sgpu_magic.config import Settings, load_settings, private_dir, with_directories_of
from sgpu_magic.errors import PoolError, SgpuError
from sgpu_magic.files.atomic_file import write_whole
from sgpu_magic.ssh.far_end import FarEnd
from sgpu_magic.ssh.machines import MACHINES_FILE, Machines, from_word
from sgpu_magic.system.part_stream import PipeStream
from sgpu_magic.system.secure_sockets import MAX_FRAME_BYTES
from sgpu_magic.wire import codec
from sgpu_magic.wire.files import RunFileRead
from sgpu_magic.wire.pool_status import socket_file

# the other side asks for a sign of life every few seconds: after this, its machine is gone or asleep
_SILENT_S = 60.0
# while so much is unsent, file data excepted, the pool keeps what follows, and serves it from the runs' logs
_MOST_UNSENT_BYTES = 1 << 20
_MOST_MESSAGES = 64
# shorter parts of files are not worth a look
_LONG_BYTES = 1 << 14
_LINGER_MS = 500


def main() -> None:
    """Run as the far end of a login until one of the two sides is gone."""
    mark, order, *words = sys.argv[1:]
    far = FarEnd(mark)
    with contextlib.suppress(OSError):
        # says that the environment is in use (`prepare`)
        os.utime(sys.prefix)
    try:
        machines = from_word(words[0]) if words else None
        path = _pool_socket(machines, starts=order == "start")
    except SgpuError as error:
        far.failed(error)
        return
    if path is None:
        far.say("failed", "idle")
        return
    far.say("ready")
    relay(0, far.writing, path)


def _pool_socket(machines: Machines | None, *, starts: bool) -> Path | None:
    """Return the socket of this machine's pool, or of that of several; None if none runs and none is to be started.

    Raises:
        SgpuError: It can't be started, or is in use and of another version.
    """
    wheels = Path(sys.prefix).with_name("wheels")
    if wheels.is_dir():
        # for the environments of runs, too
        os.environ |= {"UV_FIND_LINKS": str(wheels), "UV_OFFLINE": "1"}
    settings = load_settings() if machines is None else machines_settings(load_settings(), machines)
    if not starts and find_pool(settings) is None:
        return None
    if machines is not None:
        write_whole(private_dir(settings.state_path) / MACHINES_FILE, msgspec.json.encode(machines))
    # runs use a Python that is built for them, or that of the kernel
    connector = LocalConnector(settings, on_lost=lambda: None, on_notice=lambda text: None, warms=False)
    connector.get_link(start=True)
    address = find_pool(settings)
    connector.close()
    if address is None:
        raise PoolError("the pool has ended right after its start; `sgpu doctor` there looks for the reason.")
    return socket_file(Path(address.runtime) if address.runtime else settings.runtime_path)


def machines_settings(settings: Settings, machines: Machines) -> Settings:
    """Return the settings of the pool of several machines, on the first of them."""
    return with_directories_of(settings, "pools", machines.name)


def relay(reading: int, writing: int, path: Path) -> None:
    """Pass messages between a stream and a pool's socket, until one of them is gone.

    Args:
        reading: The stream's descriptor to read.
        writing: Its descriptor to write.
        path: The socket.
    """
    stream = PipeStream(reading, writing, MAX_FRAME_BYTES, codec.MAX_PARTS)
    with PoolSocket(path, _LINGER_MS) as pool:
        pool.connect()
        with contextlib.suppress(OSError):
            # an error means that the other side is gone
            _pass_messages(stream, pool, reading, writing)


def _pass_messages(stream: PipeStream, pool: PoolSocket, reading: int, writing: int) -> None:
    heard_at = time.monotonic()
    while time.monotonic() - heard_at < _SILENT_S:
        poller = zmq.Poller()
        poller.register(reading, zmq.POLLIN)
        poller.register(pool.ended, zmq.POLLIN)
        if stream.urgent_bytes < _MOST_UNSENT_BYTES:
            poller.register(pool.dealer, zmq.POLLIN)
        if stream.has_unsent:
            poller.register(writing, zmq.POLLOUT)
        ready = dict(poller.poll(1000))
        if reading in ready:
            heard_at = time.monotonic()
            for parts in stream.receive(_MOST_MESSAGES):
                pool.dealer.send_multipart(parts, copy=True)
        if pool.dealer in ready:
            _take(pool.dealer, stream)
        stream.send()
        if pool.ended in ready:
            return


def _take(dealer: zmq.Socket[bytes], stream: PipeStream) -> None:
    """Queue what the pool has sent, until enough is queued. The client limits how much file data is under way."""
    while stream.urgent_bytes < _MOST_UNSENT_BYTES:
        try:
            parts: Sequence[bytes] = dealer.recv_multipart(zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return
        stream.put(parts, can_wait=_is_file_data(parts))


def _is_file_data(parts: Sequence[bytes]) -> bool:
    """Whether others may overtake a message of the pool: a long part of a file."""
    if len(parts) != 2 or len(parts[1]) < _LONG_BYTES:
        return False
    try:
        return isinstance(codec.pool_messages.decode(parts[0]), RunFileRead)
    except msgspec.DecodeError:
        return False


if __name__ == "__main__":
    main()
