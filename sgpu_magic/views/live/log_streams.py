"""Which lines of the ranks' logs were written to stderr, in compact arrays. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_right

from sgpu_magic.views import ansi
from sgpu_magic.views.live.bars import is_drawn_bar

_MAX_BAR_CHARS = 1000


class LogStreams:
    """The stream of each line, kept as the numbers of the lines at which a rank's stream changes, 8 bytes each.

    Args:
        ranks: Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        # ascending; a log begins with stdout, so the first is where stderr begins
        self._changes = [array("Q") for _ in range(ranks)]

    def add(self, rank: int, first: int, stream: str) -> None:
        """Add lines of a rank from number `first` on; call this in the order of the lines."""
        changes = self._changes[rank]
        if (stream == "stderr") != (len(changes) % 2 == 1):
            changes.append(first)

    def is_stderr(self, rank: int, line: int) -> bool:
        return bisect_right(self._changes[rank], line) % 2 == 1


def is_stderr_text(line: str) -> bool:
    """Return whether views set a line of stderr apart: progress bars are written there too, and look as always.

    Args:
        line: A line of stderr; it may have colour codes.
    """
    return not is_drawn_bar(ansi.plain(line[:_MAX_BAR_CHARS]))
