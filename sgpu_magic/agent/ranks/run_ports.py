"""Connections from clients to ports that a run's processes listen on, on this node."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Collection, Sequence

from sgpu_magic.agent import faults
from sgpu_magic.agent.background_call import call_in_background
from sgpu_magic.agent.ranks.run_processes import processes_of, sockets_of, tcp_sockets
from sgpu_magic.agent.runs.node_run import NodeRun
from sgpu_magic.system.byte_stream import ByteStream, Send
from sgpu_magic.wire.files import OpenStream, StreamClosed, StreamMessage, StreamOpened
from sgpu_magic.wire.ids import short

_CONNECT_S = 10.0
_LISTENS = "0A"


class RunPorts:
    """The open ones, by number. Used from the loop's thread only.

    Args:
        find: A run of this node by its id, None when there is none.
        send: Sends a message to the pool.
    """

    def __init__(self, find: Callable[[str], NodeRun | None], send: Send) -> None:
        self._find = find
        self._send = send
        self._streams: dict[int, ByteStream] = {}
        self._opening: dict[int, asyncio.Task[None]] = {}

    def opens(self, message: OpenStream) -> None:
        """Connect, if the port is the run's; the answer follows."""
        task = faults.in_background(self._open(message))
        self._opening[message.stream] = task
        task.add_done_callback(lambda _: self._opening.pop(message.stream, None))

    def heard(self, message: StreamMessage, frames: Sequence[bytes]) -> None:
        """Take what the client says of a stream."""
        stream = self._streams.get(message.stream)
        if stream is not None:
            stream.heard(message, frames)
        elif isinstance(message, StreamClosed) and (task := self._opening.get(message.stream)) is not None:
            task.cancel()

    def close(self) -> None:
        """The pool service is gone, and with it the clients; or this program ends."""
        for task in list(self._opening.values()):
            task.cancel()
        for stream in list(self._streams.values()):
            stream.close("the pool is gone")

    async def _open(self, message: OpenStream) -> None:
        number, run_id = message.stream, message.run
        run = self._find(run_id)
        if run is None or run.gone:
            self._send(StreamClosed(stream=number, problem=f"run {short(run_id)} has no ranks on this node"), ())
            return
        ranks = set(run.pids)
        address, problem = await call_in_background(lambda: address_of(run_id, ranks, message.port), "sgpu-ports")
        if message.watches:
            self._send(StreamOpened(stream=number, run_id=run_id, problem=problem), ())
            return
        if problem:
            self._send(StreamClosed(stream=number, problem=problem), ())
            return
        try:
            connecting = asyncio.open_connection(address, message.port)
            reader, writer = await asyncio.wait_for(connecting, _CONNECT_S)
        except OSError as error:
            why = error.strerror or "it does not answer"
            self._send(StreamClosed(stream=number, problem=f"port {message.port} can't be connected to: {why}"), ())
            return
        self._send(StreamOpened(stream=number, run_id=run_id), ())
        self._streams[number] = ByteStream(
            number, reader, writer, self._send, lambda _: self._streams.pop(number, None) and None
        )


def address_of(run_id: str, ranks: Collection[int], port: int) -> tuple[str, str]:
    """Find where a process of the run listens on a port.

    Only then it is the run's: whoever else listens on this machine is none of its user's business.

    Args:
        run_id: The run; what it has started is known by a variable.
        ranks: Its ranks' pids, each the id of its session.
        port: The TCP port.

    Returns:
        The address to connect to, and a sentence about why there is none, one of them "".
    """
    end = f":{port:04X}"
    addresses = {
        inode: _reachable(local.removesuffix(end)) for local, _, inode in tcp_sockets(_LISTENS) if local.endswith(end)
    }
    if not addresses:
        return "", f"nothing listens on port {port} there"
    for pid in processes_of(run_id, ranks):
        for inode in sockets_of(pid):
            if inode in addresses:
                return addresses[inode], ""
    return "", f"no process of the run listens on port {port} there"


def _reachable(local: str) -> str:
    """The kernel writes addresses as words in the machine's byte order."""
    words = [bytes.fromhex(local[at : at + 8])[::-1] for at in range(0, len(local), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    address = mapped or address
    if not address.is_unspecified:
        return str(address)
    return "127.0.0.1" if address.version == 4 else "::1"
