"""A run's output in order of arrival, kept within bounds by dropping and counting lines in the middle."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, takewhile
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from sgpu_magic.formatting import count_of

HEAD_SHARE = 0.4
SHOWN_LINES = 40
"""Lines shown of the beginning and of the end of a long output where nothing scrolls."""
MIN_BYTES = 500
"""Bytes of a segment's lines, however little is left."""
_TEXT_SHARE = 0.25
LINE_OVERHEAD = 5  # bytes of "[0] " and the newline
MAX_DISPLAYS = 1000
MAX_DISPLAY_BYTES = 64_000_000
_MERGE_BYTES = 4096


class LineItem(NamedTuple):
    """One finished line of a rank; colour codes are kept in `text`."""

    rank: int
    stream: str
    text: str


class DisplayItem(msgspec.Struct, frozen=True):
    """A rich output that a rank displayed.

    Args:
        rank: The rank.
        bundle: The MIME bundle, for Jupyter's own renderers only.
        metadata: Its metadata.
        display_id: The rank's id for updates, "" for none.
        serial: Unique in the run: 1, 2, 3 ...; kept when an update replaces the bundle. 0 before one is assigned.
    """

    rank: int
    bundle: dict[str, object]
    metadata: dict[str, object]
    display_id: str
    serial: int = 0


class GapItem(NamedTuple):
    """The counts of dropped output: lines, which are in the log, their ranks, and old displays, which are not."""

    lines: int
    ranks: int
    displays: int = 0


Item = LineItem | DisplayItem | GapItem


def display_text(item: DisplayItem) -> str:
    """Return a display's plain text, or its MIME types when it has none."""
    text = item.bundle.get("text/plain")
    return text if isinstance(text, str) and text else f"<{', '.join(item.bundle) or 'an empty display'}>"


def html_limit(output_limit: int) -> int:
    """Return the bytes of a saved output's HTML; its text gets the rest of `output_limit`."""
    return output_limit - text_limit(output_limit)


def text_limit(output_limit: int) -> int:
    """Return the bytes of a saved output's text."""
    return int(output_limit * _TEXT_SHARE)


def gap_lines(gap: GapItem, short_id: str, files: str = "") -> list[str]:
    """Return the sentences shown in place of a gap.

    Args:
        gap: The gap.
        short_id: The run.
        files: Its ranks' log files, "" when their place is unknown.
    """
    texts: list[str] = []
    if gap.lines:
        command = f"sgpu logs {short_id}" + (f" · {files}" if files else "")
        lines, ranks = count_of(gap.lines, "line"), count_of(gap.ranks, "rank")
        texts.append(f"... {lines} of {ranks} in the run's log: {command}")
    if gap.displays:
        texts.append(f"... the first {gap.displays:,} displays were dropped: there are too many to keep")
    return texts


def trim(items: Sequence[Item], sizes: Sequence[int], limit: int, head_share: float = HEAD_SHARE) -> list[Item]:
    """Return items of at most `limit` bytes; lines in the middle are merged into the gap.

    Args:
        items: Lines and at most one gap; no displays.
        sizes: Rendered size of each in bytes.
        limit: Bytes allowed.
        head_share: The share of `limit` for the beginning; 0 keeps only the end.
    """
    if sum(sizes) <= limit:
        return list(items)
    at = next((at for at, item in enumerate(items) if isinstance(item, GapItem)), None)
    head = count_fitting(sizes[:at], int(limit * head_share))
    after = sizes if at is None else sizes[at + 1 :]
    tail = count_fitting(reversed(after), limit - sum(sizes[:head]))
    dropped = items[head : len(items) - tail]
    lines = [item.rank for item in dropped if isinstance(item, LineItem)]
    known = next((item for item in dropped if isinstance(item, GapItem)), GapItem(0, 0))
    merged = GapItem(known.lines + len(lines), max(known.ranks, len({*lines})), known.displays)
    return [*items[:head], merged, *items[len(items) - tail :]]


def count_fitting(sizes: Iterable[int], limit: int) -> int:
    """Return how many of `sizes`, from the first one, fit into `limit`."""
    return sum(1 for _ in takewhile(lambda total: total <= limit, accumulate(sizes)))


def text_bytes(text: str) -> int:
    """Return a text's size in UTF-8; for ASCII, the common case, without encoding it."""
    return len(text) if text.isascii() else len(text.encode())


def line_bytes(text: str) -> int:
    return text_bytes(text) + LINE_OVERHEAD


class _Lines(msgspec.Struct):
    """Consecutive lines of one stream of one rank, as one object for a whole batch."""

    rank: int
    stream: str
    lines: list[str]
    size: int


_Chunk = _Lines | int
"""Lines, or the serial of a display."""


class OutputStore:
    """Holds head, gap and tail. Displays are kept longer than the lines around them.

    Args:
        limit: Bytes of lines kept: 40 % for the head, the rest for the tail.
    """

    def __init__(self, limit: int) -> None:
        self._head_limit = int(limit * HEAD_SHARE)
        self._tail_limit = limit - self._head_limit
        self._reset()
        self._serial = 0
        # by serial, the oldest first, each with its size in bytes
        self._displays: dict[int, tuple[DisplayItem, int]] = {}
        self._display_bytes = 0

    def _reset(self) -> None:
        # once sealed, the head gets only displays that leave the tail
        self._head: list[_Chunk] = []
        self._head_size = 0
        self._sealed = False
        # number of dropped lines of each rank
        self._gap: Counter[int] = Counter()
        self._gap_displays = 0
        self._tail: deque[_Chunk] = deque()
        self._tail_size = 0

    def add_lines(self, rank: int, stream: str, lines: list[str]) -> None:
        size = _size(lines)
        if not self._sealed:
            if self._head_size + size <= self._head_limit:
                self._head.append(_Lines(rank, stream, lines, size))
                self._head_size += size
                return
            fitting = count_fitting(map(line_bytes, lines), self._head_limit - self._head_size)
            if fitting:
                self._head.append(_Lines(rank, stream, lines[:fitting], 0))
                lines = lines[fitting:]
                size = _size(lines)
            self._sealed = True
        last = self._tail[-1] if self._tail else None
        if isinstance(last, _Lines) and last.rank == rank and last.stream == stream and last.size < _MERGE_BYTES:
            last.lines.extend(lines)
            last.size += size
        else:
            self._tail.append(_Lines(rank, stream, lines, size))
        self._tail_size += size
        self._evict()

    def add_skip(self, rank: int, lines: int) -> None:
        """Count lines that never arrived, and drop the rank's earlier lines in the tail with them."""
        self._sealed = True
        dropped = [chunk for chunk in self._tail if isinstance(chunk, _Lines) and chunk.rank == rank]
        self._tail = deque(chunk for chunk in self._tail if isinstance(chunk, int) or chunk.rank != rank)
        self._tail_size -= sum(chunk.size for chunk in dropped)
        self._gap[rank] += lines + sum(len(chunk.lines) for chunk in dropped)

    def display(self, new_item: DisplayItem, size: int, *, update: bool) -> list[DisplayItem]:
        """Add a display, or replace the rank's displays with the same id; updating an unknown id changes nothing.

        Args:
            new_item: The display; its serial is assigned here.
            size: Its size in bytes.
            update: It replaces earlier displays.

        Returns:
            The displays that were added or changed.
        """
        if update:
            whose = (new_item.rank, new_item.display_id)
            serials = [item.serial for item, _ in self._displays.values() if (item.rank, item.display_id) == whose]
        else:
            self._serial += 1
            serials = [self._serial]
            (self._tail if self._sealed else self._head).append(self._serial)
        changed = [replace(new_item, serial=serial) for serial in serials]
        for new_item in changed:
            _, before = self._displays.get(new_item.serial, (new_item, 0))
            self._displays[new_item.serial] = new_item, size
            self._display_bytes += size - before
        while not update and (
            len(self._displays) > MAX_DISPLAYS or (self._display_bytes > MAX_DISPLAY_BYTES and len(self._displays) > 1)
        ):
            self._forget([next(iter(self._displays))])
            self._gap_displays += 1
        return changed

    def clear(self, rank: int) -> None:
        """Remove all output of one rank (`clear_output`)."""
        self._forget([serial for serial, (item, _) in self._displays.items() if item.rank == rank])
        self._keep(lambda chunk: isinstance(chunk, int) or chunk.rank != rank)
        self._head_size = sum(chunk.size for chunk in self._head if isinstance(chunk, _Lines))
        self._tail_size = sum(chunk.size for chunk in self._tail if isinstance(chunk, _Lines))
        self._gap.pop(rank, None)
        if not (self._head or self._tail or self._gap or self._gap_displays):
            self._reset()

    def items(self) -> list[Item]:
        """Return the kept items, with exactly one gap if anything was dropped."""
        items: list[Item] = [item for chunk in self._head for item in self._expand(chunk)]
        gap = self._gap.copy()
        excess = self._tail_size - self._tail_limit
        rest: list[Item] = []
        for chunk in self._tail:
            if excess <= 0:
                rest += self._expand(chunk)
            elif isinstance(chunk, int):
                items += self._expand(chunk)
            else:
                dropped = _covering(chunk.lines, excess)
                excess -= _size(chunk.lines[:dropped])
                gap[chunk.rank] += dropped
                rest += self._expand(chunk)[dropped:]
        if gap or self._gap_displays:
            items.append(GapItem(gap.total(), len(gap), self._gap_displays))
        return [*items, *rest]

    def _expand(self, chunk: _Chunk) -> Sequence[LineItem | DisplayItem]:
        if isinstance(chunk, int):
            return [self._displays[chunk][0]]
        rank, stream = chunk.rank, chunk.stream
        return [LineItem(rank, stream, text) for text in chunk.lines]

    def _keep(self, is_kept: Callable[[_Chunk], bool]) -> None:
        self._head = [*filter(is_kept, self._head)]
        self._tail = deque(filter(is_kept, self._tail))

    def _evict(self) -> None:
        while self._tail and self._tail_size > self._tail_limit:
            front = self._tail[0]
            if isinstance(front, int):
                self._head.append(front)
            elif self._tail_size - front.size < self._tail_limit:
                return
            else:
                self._tail_size -= front.size
                self._gap[front.rank] += len(front.lines)
            self._tail.popleft()

    def _forget(self, serials: Sequence[int]) -> None:
        for serial in serials:
            self._display_bytes -= self._displays.pop(serial)[1]
        if serials:
            self._keep(lambda chunk: isinstance(chunk, _Lines) or chunk in self._displays)


def _size(lines: Sequence[str]) -> int:
    return text_bytes("".join(lines)) + LINE_OVERHEAD * len(lines)


def _covering(lines: Sequence[str], excess: int) -> int:
    """Return how many of the first lines must be dropped to free `excess` bytes; `excess` is positive."""
    freed = accumulate(map(line_bytes, lines))
    return next((count for count, size in enumerate(freed, 1) if size >= excess), len(lines))
