"""The way to one node's agent, as an engine of many nodes uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sgpu_magic.wire.node_messages import ToAgent


class NodeChannel(Protocol):
    """A link to an agent. What is sent while it is interrupted is lost: who comes back is told again what matters."""

    node: str
    """The node's id, as in `NodeShare.node`."""

    def send(self, message: ToAgent, frames: Sequence[bytes] = (), descriptors: Sequence[int] = ()) -> None:
        """Send, or do nothing when the link is over."""
        ...

    def close(self) -> None:
        """End the link."""
        ...
