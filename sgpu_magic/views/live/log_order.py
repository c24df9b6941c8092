"""Which line of which rank is the n-th line of all: the order in which lines arrived, in compact arrays. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from sgpu_magic.wire.events import OutputWritten

_BLOCK = 1024
_MOST_IN_ONE = (1 << 32) - 1


class Piece(NamedTuple):
    """Consecutive lines of one rank: the number of the first in the rank's log, and how many."""

    rank: int
    first: int
    lines: int


class LogOrder:
    """Folds what ranks have written into the order of their lines.

    A line counts where its newline arrives. What is kept is a rank and a number for every run of lines of one rank (6
    bytes), and for every 1,024 of those how many lines of each rank came before them.

    Attributes:
        totals: Lines of each rank.
        total: Lines of all.
    """

    def __init__(self, ranks: int) -> None:
        self.totals = [0] * ranks
        self.total = 0
        self._open = [False] * ranks
        self._ranks = array("H")
        self._counts = array("I")
        # what came before the blocks: lines of all, and of each rank
        self._before_block: list[int] = []
        self._rank_before_block: list[Sequence[int]] = []

    def write(self, body: OutputWritten) -> int:
        """Count the lines that a batch finishes and return how many."""
        text = body.text
        lines = text.count("\n") + body.skipped_lines
        if lines:
            self._add(body.rank, lines)
        if text:
            self._open[body.rank] = not text.endswith("\n")
        elif body.end - body.start > body.skipped_bytes:
            # the beginning of a character
            self._open[body.rank] = True
        elif body.skipped_bytes:
            # what is left out ends with a newline where nothing is left
            self._open[body.rank] = False
        return lines

    def finish(self) -> list[int]:
        """The run is over: lines that were begun are lines. Return their ranks."""
        begun = [rank for rank, is_open in enumerate(self._open) if is_open]
        for rank in begun:
            self._add(rank, 1)
            self._open[rank] = False
        return begun

    def locate(self, first: int, count: int, most: int | None = None) -> list[Piece]:
        """Return which lines of which ranks are those from `first` on, fewer than `count` where the log ends.

        Args:
            first: The number of the first among all lines.
            count: How many lines.
            most: Pieces after which the rest is left out; None is all of them.
        """
        first, end = max(first, 0), min(first + count, self.total)
        pieces: list[Piece] = []
        if first >= end:
            return pieces
        block = bisect_right(self._before_block, first) - 1
        at, behind = self._before_block[block], list(self._rank_before_block[block])
        for index in range(block * _BLOCK, len(self._ranks)):
            rank, lines = self._ranks[index], self._counts[index]
            skipped = max(first - at, 0)
            taken = min(at + lines, end) - at - skipped
            if taken > 0:
                _join(pieces, Piece(rank, behind[rank] + skipped, taken))
            at += lines
            behind[rank] += lines
            if at >= end or len(pieces) == most:
                break
        return pieces

    def numbers_of(self, rank: int, lines: Sequence[int]) -> list[int]:
        """Return the numbers among all lines of a rank's lines, which are given in ascending order.

        Lines that the rank does not have yet are left out.
        """
        numbers: list[int] = []
        index = at = behind = 0
        for line in lines:
            if not 0 <= line < self.totals[rank]:
                continue
            block = bisect_right(self._rank_before_block, line, key=lambda before: before[rank]) - 1
            if block * _BLOCK > index or not numbers:
                index = block * _BLOCK
                at, behind = self._before_block[block], self._rank_before_block[block][rank]
            while self._ranks[index] != rank or behind + self._counts[index] <= line:
                at += self._counts[index]
                behind += self._counts[index] if self._ranks[index] == rank else 0
                index += 1
            numbers.append(at + line - behind)
        return numbers

    @property
    def used_bytes(self) -> int:
        """Memory that the order takes, about."""
        of_blocks = len(self._before_block) * (56 + 8 * len(self.totals))
        return len(self._ranks) * (self._ranks.itemsize + self._counts.itemsize) + of_blocks

    def _add(self, rank: int, lines: int) -> None:
        if self._ranks and self._ranks[-1] == rank and self._counts[-1] + lines <= _MOST_IN_ONE:
            self._counts[-1] += lines
        else:
            if len(self._ranks) % _BLOCK == 0:
                self._before_block.append(self.total)
                self._rank_before_block.append(array("Q", self.totals))
            self._ranks.append(rank)
            self._counts.append(lines)
        self.totals[rank] += lines
        self.total += lines


def _join(pieces: list[Piece], piece: Piece) -> None:
    last = pieces[-1] if pieces else None
    if last is not None and last.rank == piece.rank and last.first + last.lines == piece.first:
        pieces[-1] = Piece(last.rank, last.first, last.lines + piece.lines)
    else:
        pieces.append(piece)
