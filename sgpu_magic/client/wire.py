"""What carries a link's messages: to this machine's pool, or to one of another machine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from sgpu_magic.client.outgoing import Outgoing
from sgpu_magic.errors import PoolError
from sgpu_magic.wire.messages import PoolMessage
from sgpu_magic.wire.record import Record


class Receiver(Protocol):
    """The link, called in its thread."""

    def received(self, parts: Sequence[bytes]) -> PoolMessage | None:
        """Take what the pool has sent: a message and its raw frames. Returns the message, None when it is not one."""
        ...

    def failed(self, error: PoolError) -> None:
        """Say why the pool can't be reached, to whoever waits for its welcome."""
        ...

    def awaited(self) -> Collection[int]:
        """Requests that somebody waits for."""
        ...

    def questions_after_gap(self) -> Sequence[Record]:
        """What makes the pool send again what may have been lost."""
        ...


class Wire(Protocol):
    """One way to a pool. `carry` runs in the link's thread; the rest may be asked by any.

    Attributes:
        title: The pool as sentences name it.
        says_hello: It greets the pool itself, on each connection that it makes.
    """

    title: str
    says_hello: bool

    @property
    def silent_s(self) -> float:
        """Seconds since the pool was heard, 0 as long as that is no cause for a word."""
        ...

    def carry(self, outgoing: Outgoing, receiver: Receiver) -> None:
        """Carry messages until `outgoing` ends or the pool's process is gone for good."""
        ...

    def answered(self, request: int) -> None:
        """A request was answered; called in the link's thread."""
        ...

    def lost(self) -> str:
        """Say that the pool went away while something was asked of it."""
        ...

    def mute(self) -> PoolError:
        """Return the error that the pool does not answer at all."""
        ...
