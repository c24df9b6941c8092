"""What a rank displays takes its place among what it prints; what its widgets say is bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sgpu_magic.agent.ranks.group import RankProcess
from sgpu_magic.wire.events import CommsMoved, DisplayPublished, EventBody, Noted, OutputCleared
from sgpu_magic.wire.rank_messages import Cleared, CommsSaid, Displayed, InPlace

# of one run, of all its ranks: events are kept on disk
MOST_COMM_BYTES = 256 << 20


def show(process: RankProcess, message: Displayed | Cleared, say: Callable[[EventBody], None]) -> None:
    """Tell of a display or a clearing after all that the rank had printed before it, and let the rank go on.

    Args:
        process: The rank, which waits for the answer.
        message: What it displayed, or that it cleared its output.
        say: Tells what happened.
    """
    process.output.drain()
    if isinstance(message, Cleared):
        say(OutputCleared(rank=process.rank, wait=message.wait))
    else:
        say(
            DisplayPublished(
                rank=process.rank,
                bundle=message.bundle,
                metadata=message.metadata,
                display_id=message.display_id,
                update=message.update,
            )
        )
    if process.stream is not None:
        process.stream.send(InPlace())


class CommReports:
    """Tells what the widgets of one run's ranks say, up to a number of bytes.

    Args:
        say: Tells what happened, with raw frames.
    """

    def __init__(self, say: Callable[[EventBody, Sequence[bytes]], None]) -> None:
        self._say = say
        self._bytes = 0

    def told(self, rank: int, message: CommsSaid, frames: Sequence[bytes]) -> None:
        """A rank's widgets said something."""
        had = self._bytes
        self._bytes += sum(len(each.data) + len(each.metadata) for each in message.messages) + sum(map(len, frames))
        if self._bytes <= MOST_COMM_BYTES:
            self._say(CommsMoved(rank=rank, messages=message.messages), frames)
        elif had <= MOST_COMM_BYTES:
            text = f"widgets of this run's ranks have sent {MOST_COMM_BYTES >> 20} MB and are updated no further"
            self._say(Noted(text=text), ())
