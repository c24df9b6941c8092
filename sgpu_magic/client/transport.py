"""What carries the messages of a link to its pool: `LocalTransport` on this machine, others to another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Protocol

from sgpu_magic.client.send_queue import SendQueue
from sgpu_magic.errors import PoolError
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.client import PoolMessage
from sgpu_magic.wire.files import CHUNK_BYTES


class LinkEnd(Protocol):
    """What a transport uses of its link, in the link's thread."""

    def received(self, parts: Sequence[bytes]) -> PoolMessage | None:
        """Dispatch a message and its raw frames; return it, or None if it can't be decoded."""
        ...

    def failed(self, error: PoolError) -> None:
        """Take the reason why the pool can't be reached."""
        ...

    def awaited(self) -> Collection[int]:
        """Return the numbers of the pending requests."""
        ...

    def questions_after_gap(self) -> Sequence[Record]:
        """Return the requests that make the pool resend events that may have been lost."""
        ...


class Transport(ABC):
    """Carries a link's messages to its pool. `carry` runs in the link's thread; the rest is thread-safe.

    Attributes:
        title: The pool's name for use in messages.
        is_network: Whether connections break and are remade. Each then begins with a greeting that the transport
            sends itself, and events may be lost between two.
        hello_timeout_s: Seconds until the pool's answer to the first greeting.
    """

    title: str
    is_network: bool
    hello_timeout_s: float = 10.0

    @property
    def silent_s(self) -> float:
        """Seconds since the pool last sent anything; 0 until the silence is long enough to report."""
        return 0.0

    @property
    def chunk_bytes(self) -> int:
        """Size of the chunks of file data."""
        return CHUNK_BYTES

    @property
    def slow_why(self) -> str:
        """Why file data takes a slower route than it could; "" if it does not."""
        return ""

    @abstractmethod
    def lost_message(self) -> str:
        """Return the error message for a pool that ended while a request was pending."""

    @abstractmethod
    def mute(self) -> PoolError:
        """Return the error for a pool that does not answer at all."""

    @abstractmethod
    def answered(self, request: int) -> None:
        """Note that a request was answered and need not be resent. Called in the link's thread."""

    @abstractmethod
    def carry(self, outgoing: SendQueue, link: LinkEnd) -> None:
        """Carry messages until `outgoing` ends or the pool is lost."""
