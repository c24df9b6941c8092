"""Messages between the pool service and a node, over the standard streams of a login.

A link lasts as long as its login. Nothing is retransmitted: the next link begins with the agent's report of what it
holds, and the messages that matter are numbered per run on a higher level.
"""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from sgpu_magic.system.part_stream import PipeStream
from sgpu_magic.wire import codec
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.decoding import MsgpackDecoder
from sgpu_magic.wire.devices import Lease

M = TypeVar("M")
_MOST_MESSAGES = 64


class NodeOrder(Record, frozen=True, tag="node-order", kw_only=True):
    """The first message to a node.

    Args:
        settings: The pool's settings as JSON; the node's own directories replace the pool's.
        pool: The pool's name, for the node's directories.
        node: The node's id.
        is_first: Whether the pool service is on this node: the agent starts another one if it dies.
    """

    settings: bytes
    pool: str
    node: str
    is_first: bool = False


class LockDevices(Record, frozen=True, tag="lock-devices", kw_only=True):
    """Lock devices of the node for a run; those that are locked already are kept."""

    run_id: str
    uuids: tuple[str, ...]


class UnlockDevices(Record, frozen=True, tag="unlock-devices", kw_only=True):
    """No run of the pool uses these devices any more."""

    uuids: tuple[str, ...]


class DevicesLocked(Record, frozen=True, tag="devices-locked", kw_only=True):
    """The answer to `LockDevices`.

    Args:
        run_id: The run.
        obstructed: Devices that can't be locked; then none is locked for the run.
        why: The reason, in sentences.
    """

    run_id: str
    obstructed: tuple[str, ...] = ()
    why: str = ""


class Carried(Record, frozen=True, tag="carried", kw_only=True):
    """A message to or from the agent: the next part is the message, and its raw frames follow."""


class AgentEnded(Record, frozen=True, tag="agent-ended", kw_only=True):
    """The agent has exited, and with it its ranks, or can't be started. The link ends.

    Args:
        why: Why it can't be started, a clause; "" if it has exited.
    """

    why: str = ""


ToNode = NodeOrder | LockDevices | UnlockDevices | Carried
FromNode = DevicesLocked | Carried | AgentEnded

to_node = MsgpackDecoder[ToNode](ToNode)
from_node = MsgpackDecoder[FromNode](FromNode)


def lockable(lease: Lease, node: str) -> tuple[str, ...]:
    """Return the devices of a lease on a node that have locks; simulated ones have none."""
    own = (share.uuids for share in lease.shares if share.node == node)
    return tuple(uuid for uuids in own for uuid in uuids if not uuid.startswith("SIM-"))


class NodeLink(Generic[M]):
    """One end of a link. Use it from the loop's thread only.

    Args:
        reading: The descriptor to read; not blocking from now on, as `writing`.
        writing: The descriptor to write.
        stream: The stream over both.
        decoder: The decoder of the other side's messages.
        on_message: Called with each message, and the parts after it.
        on_closed: Called once when the other side has closed it, or sent what is no message; not after `close`.
    """

    def __init__(
        self,
        reading: int,
        writing: int,
        stream: PipeStream,
        decoder: MsgpackDecoder[M],
        on_message: Callable[[M, Sequence[bytes]], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._reading, self._writing, self._stream = reading, writing, stream
        self._decoder, self._on_message, self._on_closed = decoder, on_message, on_closed
        self._loop = asyncio.get_running_loop()
        self._closed = self._is_writing = False
        self._loop.add_reader(reading, self._readable)

    def send(self, message: Record, parts: Sequence[bytes] = ()) -> None:
        """Send a message, unless the link is closed."""
        if not self._closed:
            self._stream.put([codec.encode(message), *parts])
            self._write()

    def send_all(self, within_s: float) -> None:
        """Send what is queued now, blocking, for at most `within_s` seconds."""
        until = time.monotonic() + within_s
        while not self._closed and self._stream.has_unsent and (left_s := until - time.monotonic()) > 0:
            select.select([], [self._writing], [], left_s)
            self._write()

    def close(self) -> None:
        """Stop reading and writing; the descriptors stay open."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._reading)
            self._loop.remove_writer(self._writing)

    def _write(self) -> None:
        try:
            self._stream.send()
        except OSError:
            self._end()
            return
        if self._stream.has_unsent != self._is_writing:
            self._is_writing = not self._is_writing
            if self._is_writing:
                self._loop.add_writer(self._writing, self._write)
            else:
                self._loop.remove_writer(self._writing)

    def _readable(self) -> None:
        try:
            for head, *parts in self._stream.receive(_MOST_MESSAGES):
                if not self._closed:
                    self._on_message(self._decoder.decode(head), parts)
        except (OSError, msgspec.DecodeError):
            self._end()

    def _end(self) -> None:
        if not self._closed:
            self.close()
            # deferred: the caller may be sending
            self._loop.call_soon(self._on_closed)
