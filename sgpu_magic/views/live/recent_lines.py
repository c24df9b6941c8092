"""The newest lines of a run, kept as they came, and rows made of them only when somebody is told. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from sgpu_magic.views.live.line_text import MAX_RAW_CHARS, json_bytes, last_rewrite, line_text
from sgpu_magic.views.live.log_order import LogOrder
from sgpu_magic.views.live.messages import LineRow, LineSkip
from sgpu_magic.wire.events import OutputWritten

_KEPT_CHARS = 1 << 18
_MAX_ROWS_BYTES = 42_000
_MAX_SKIPS = 200

Rows = list[LineRow | LineSkip]


class _Batch(NamedTuple):
    """Lines of one rank as they came.

    Args:
        rank: The rank.
        first: The number of the first of them in the rank's log.
        at: Its number among all lines.
        lines: How many.
        head: What the rank had written of the first of them before; None when that is not known.
        text: The rest of it, and the others.
    """

    rank: int
    first: int
    at: int
    lines: int
    head: str | None
    text: str


class RecentLines:
    """Keeps what came last: 256 thousand characters, and of each rank the line that it has begun.

    A batch costs two searches for newlines; a line costs something only when it is drawn.

    Attributes:
        order: The order of all lines.
    """

    def __init__(self, ranks: int) -> None:
        self.order = LogOrder(ranks)
        self._begun: list[str | None] = [""] * ranks
        self._batches: deque[_Batch] = deque()
        self._chars = 0

    def write(self, body: OutputWritten) -> None:
        """Fold a batch in."""
        rank, text = body.rank, body.text
        head = self._begun[rank]
        skipped = body.skipped_lines
        if body.skipped_bytes:
            # where the text begins within its line is not known
            head = None
        at, first = self.order.total, self.order.totals[rank]
        lines = self.order.write(body) - skipped
        end = text.rfind("\n") + 1 if lines else 0
        if lines:
            if len(text) > _KEPT_CHARS:
                cut = text.find("\n", end - _KEPT_CHARS if end > _KEPT_CHARS else 0) + 1
                left_out = text.count("\n", 0, cut)
                skipped, lines, head, text, end = skipped + left_out, lines - left_out, "", text[cut:], end - cut
            self._keep(_Batch(rank, first + skipped, at + skipped, lines, head, text))
            head = ""
        begun = None if head is None else last_rewrite(head + text[end:])
        self._begun[rank] = None if begun is not None and len(begun) > MAX_RAW_CHARS else begun

    def finish(self) -> None:
        """The run is over: lines that were begun are lines."""
        at = self.order.total
        for rank in self.order.finish():
            self._keep(_Batch(rank, self.order.totals[rank] - 1, at, 1, self._begun[rank], "\n"))
            self._begun[rank] = ""
            at += 1

    def rows_since(self, first: int) -> tuple[int, Rows]:
        """Return the lines from number `first` among all on; what would not fit is skipped, and the newest are there.

        The number that is returned is that of the first row: a later one than `first` when even the skips would be
        too many.
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
        if first >= end:
            return first, rows[::-1]
        before = self.order.locate(first, end - first, _MAX_SKIPS)
        if sum(piece.lines for piece in before) < end - first:
            return end, rows[::-1]
        for piece in reversed(before):
            _put_before(rows, (piece.rank, piece.first, piece.lines))
        return first, rows[::-1]

    def _keep(self, batch: _Batch) -> None:
        if batch.lines:
            self._batches.append(batch)
            self._chars += len(batch.text)
        while self._chars > _KEPT_CHARS and len(self._batches) > 1:
            self._chars -= len(self._batches.popleft().text)

    def _newest_first(self, first: int) -> Iterator[tuple[int, LineRow | LineSkip]]:
        """Yield the rows from the last line back to `first`, each with the number among all where it begins."""
        end = self.order.total
        for batch in reversed(self._batches):
            yield from self._skipped(max(batch.at + batch.lines, first), end)
            if batch.at + batch.lines <= first:
                return
            lines = ((batch.head or "") + batch.text).split("\n")
            for index in range(batch.lines - 1, max(first - batch.at, 0) - 1, -1):
                number, raw = batch.first + index, lines[index]
                if (index == 0 and batch.head is None) or (
                    len(raw) > MAX_RAW_CHARS and len(raw := last_rewrite(raw)) > MAX_RAW_CHARS
                ):
                    yield batch.at + index, (batch.rank, number, 1)
                else:
                    yield batch.at + index, (batch.rank, number, line_text(raw))
            end = batch.at

    def _skipped(self, begin: int, end: int) -> Iterator[tuple[int, LineSkip]]:
        """Yield what came between two batches, from its end on: lines that no event has brought."""
        for piece in reversed(self.order.locate(begin, end - begin)):
            end -= piece.lines
            yield end, (piece.rank, piece.first, piece.lines)


def _put_before(rows: Rows, row: LineRow | LineSkip) -> None:
    """Add a row to rows that go from the last to the first; skips that touch become one."""
    rank, first, what = row
    if rows and not isinstance(what, str):
        after = rows[-1]
        if not isinstance(after[2], str) and (after[0], after[1]) == (rank, first + what):
            rows[-1] = (rank, first, what + after[2])
            return
    rows.append(row)
