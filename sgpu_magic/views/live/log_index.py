"""Maps the n-th line of a run to a rank and its line, in compact arrays; also keeps the newest lines. Pure."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sgpu_magic.views.live.log_reader import MAX_RAW_CHARS, last_rewrite, line_text
from sgpu_magic.views.live.log_streams import LogStreams, is_stderr_text
from sgpu_magic.views.live.messages import LineRow, LineSkip, json_bytes
from sgpu_magic.wire.rank_events import OutputWritten

_BLOCK = 1024
_MOST_IN_ONE = (1 << 32) - 1
_KEPT_CHARS = 1 << 18
_MAX_ROWS_BYTES = 42_000
_MAX_SKIPS = 200


class Piece(NamedTuple):
    """Consecutive lines of one rank: the number of the first in the rank's log, and their count."""

    rank: int
    first: int
    lines: int


class LogOrder:
    """The order in which lines of all ranks arrived, folded from output events.

    A line counts when its newline arrives. The index keeps a rank and a count for each sequence of consecutive lines
    of one rank (6 bytes), and for every 1,024 sequences the number of lines of each rank before them.

    Attributes:
        totals: Number of lines of each rank.
        total: Number of lines of all ranks.
        streams: The stream of each line.
    """

    def __init__(self, ranks: int) -> None:
        self.totals = [0] * ranks
        self.total = 0
        self.streams = LogStreams(ranks)
        self._open = [False] * ranks
        # the stream of each rank's last batch
        self._stream = ["stdout"] * ranks
        self._ranks = array("H")
        self._counts = array("I")
        # number of lines before each block: of all ranks, and of each rank
        self._before_block: list[int] = []
        self._rank_before_block: list[Sequence[int]] = []

    def write(self, body: OutputWritten) -> int:
        """Count the lines that a batch completes; return their number."""
        text = body.text
        lines = text.count("\n") + body.skipped_lines
        self._stream[body.rank] = body.stream
        if lines:
            self._add(body.rank, lines)
        if text:
            self._open[body.rank] = not text.endswith("\n")
        elif body.end - body.start > body.skipped_bytes:
            # the first bytes of an incomplete character
            self._open[body.rank] = True
        elif body.skipped_bytes:
            # skipped bytes that are followed by no text end with a newline
            self._open[body.rank] = False
        return lines

    def finish(self) -> list[int]:
        """Count unfinished lines as lines, as the run has ended; return their ranks."""
        begun = [rank for rank, is_open in enumerate(self._open) if is_open]
        for rank in begun:
            self._add(rank, 1)
            self._open[rank] = False
        return begun

    def locate(self, first: int, count: int, most: int | None = None) -> list[Piece]:
        """Return which lines of which ranks are the `count` lines from `first` on, fewer at the log's end.

        Args:
            first: The number of the first line among all lines.
            count: Number of lines.
            most: Maximum number of pieces; None for no limit.
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

        Lines that the rank does not have yet are skipped.
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

    def _add(self, rank: int, lines: int) -> None:
        self.streams.add(rank, self.totals[rank], self._stream[rank])
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
    last = pieces[-1] if pieces else Piece(-1, 0, 0)
    if (last.rank, last.first + last.lines) == piece[:2]:
        pieces[-1] = Piece(last.rank, last.first, last.lines + piece.lines)
    else:
        pieces.append(piece)


Rows = list[LineRow | LineSkip]


class _Batch(NamedTuple):
    """Lines of one rank that arrived together.

    Args:
        rank: The rank.
        first: The number of the first line in the rank's log.
        at: The number of the first line among all lines.
        lines: Number of lines.
        head: The part of the first line that had arrived before; None when unknown.
        text: The rest of the first line, and the other lines.
    """

    rank: int
    first: int
    at: int
    lines: int
    head: str | None
    text: str


class RecentLines:
    """Keeps the newest 256 thousand characters, and the unfinished line of each rank.

    A batch costs two searches for newlines; a line costs nothing until it is shown.

    One thread writes. Other threads must hold the lock while they read.

    Attributes:
        order: The order of all lines.
        lock: Held during writes.
    """

    def __init__(self, ranks: int) -> None:
        self.lock = threading.Lock()
        self.order = LogOrder(ranks)
        self._begun: list[str | None] = [""] * ranks
        self._batches: deque[_Batch] = deque()
        self._chars = 0

    def write(self, body: OutputWritten) -> None:
        """Add a batch."""
        rank, text = body.rank, body.text
        # after skipped bytes the position of the text within its line is unknown
        head = None if body.skipped_bytes else self._begun[rank]
        with self.lock:
            at, first, skipped = self.order.total, self.order.totals[rank], body.skipped_lines
            lines = self.order.write(body) - skipped
            end = text.rfind("\n") + 1 if lines else 0
            if lines and len(text) > _KEPT_CHARS:
                cut = text.find("\n", max(end - _KEPT_CHARS, 0)) + 1
                left_out = text.count("\n", 0, cut)
                skipped, lines, head, text, end = skipped + left_out, lines - left_out, "", text[cut:], end - cut
            if end:
                self._keep(_Batch(rank, first + skipped, at + skipped, lines, head, text))
                head = ""
            begun = None if head is None else last_rewrite(head + text[end:])
            self._begun[rank] = None if begun is not None and len(begun) > MAX_RAW_CHARS else begun

    def finish(self) -> None:
        """Count unfinished lines as lines, as the run has ended."""
        with self.lock:
            total = self.order.total
            for at, rank in enumerate(self.order.finish(), total):
                self._keep(_Batch(rank, self.order.totals[rank] - 1, at, 1, self._begun[rank], "\n"))
                self._begun[rank] = ""

    def rows_since(self, first: int) -> tuple[int, Rows]:
        """Return the lines from number `first` among all lines on: the newest ones that fit, and skips for the others.

        The returned number is that of the first row: larger than `first` if even the skips would be too many.
        """
        rows: Rows = []
        size = 0
        end = self.order.total
        for row_at, row in self._newest_first(first):
            size += json_bytes(row) + 1
            if size > _MAX_ROWS_BYTES:
                break
            _put_before(rows, row)
            end = row_at
        before = self.order.locate(first, end - first, _MAX_SKIPS)
        if sum(piece.lines for piece in before) < end - first:
            return end, rows[::-1]
        for piece in reversed(before):
            _put_before(rows, piece)
        return first, rows[::-1]

    def _keep(self, batch: _Batch) -> None:
        self._batches.append(batch)
        self._chars += len(batch.text)
        while self._chars > _KEPT_CHARS and len(self._batches) > 1:
            self._chars -= len(self._batches.popleft().text)

    def _newest_first(self, first: int) -> Iterator[tuple[int, LineRow | LineSkip]]:
        """Yield the rows from the last line back to `first`, each with its first line's number among all lines."""
        end = self.order.total
        for batch in reversed(self._batches):
            yield from self._skipped(max(batch.at + batch.lines, first), end)
            if batch.at + batch.lines <= first:
                return
            lines = ((batch.head or "") + batch.text).split("\n")
            for index in range(batch.lines - 1, max(first - batch.at, 0) - 1, -1):
                number, raw = batch.first + index, lines[index]
                raw = last_rewrite(raw) if len(raw) > MAX_RAW_CHARS else raw
                is_in_log_only = (index == 0 and batch.head is None) or len(raw) > MAX_RAW_CHARS
                row = (batch.rank, number, 1) if is_in_log_only else self._row(batch.rank, number, line_text(raw))
                yield batch.at + index, row
            end = batch.at

    def _row(self, rank: int, number: int, text: str) -> LineRow:
        return rank, number, text, self.order.streams.is_stderr(rank, number) and is_stderr_text(text)

    def _skipped(self, begin: int, end: int) -> Iterator[tuple[int, LineSkip]]:
        """Yield skips for lines between two batches, from the last to the first."""
        for piece in reversed(self.order.locate(begin, end - begin)):
            end -= piece.lines
            yield end, piece


def _put_before(rows: Rows, row: LineRow | LineSkip) -> None:
    """Add a row to rows in reverse order; adjacent skips are merged."""
    rank, first, what = row[:3]
    after = rows[-1] if rows else (-1, 0, 0)
    if not isinstance(what, str) and not isinstance(after[2], str) and after[:2] == (rank, first + what):
        rows[-1] = (rank, first, what + after[2])
    else:
        rows.append(row)
