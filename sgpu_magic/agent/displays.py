"""What a rank displays takes its place among what it prints."""

from __future__ import annotations

from collections.abc import Callable

from sgpu_magic.agent.group import RankProcess
from sgpu_magic.protocol.events import DisplayPublished, EventBody, OutputCleared
from sgpu_magic.protocol.rank_messages import Cleared, Displayed, InPlace


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
