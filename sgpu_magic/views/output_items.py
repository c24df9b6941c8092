"""What a run's output is made of, in order of arrival: lines, displays, and at most one gap; cut at its displays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sgpu_magic.views.fold import RunView

HEAD_SHARE = 0.4
LINE_OVERHEAD = 5  # bytes of "[0] " and the newline


class LineItem(NamedTuple):
    """One finished line of a rank; colour codes are kept in `text`."""

    rank: int
    stream: str
    text: str


@dataclass(frozen=True, slots=True)
class DisplayItem:
    """Something rich that a rank displayed.

    Args:
        rank: The rank.
        bundle: The MIME bundle, for Jupyter's own renderers only.
        metadata: Its metadata.
        display_id: The rank's id for updates, "" when none.
        serial: Unique in the run, 1, 2, 3 ...; stays when an update replaces the bundle.
    """

    rank: int
    bundle: dict[str, object]
    metadata: dict[str, object]
    display_id: str
    serial: int


class GapItem(NamedTuple):
    """What is left out: lines of so many ranks (they are in the log), old displays (they are not)."""

    lines: int
    ranks: int
    displays: int = 0


Item = LineItem | DisplayItem | GapItem


def display_text(item: DisplayItem) -> str:
    """Return the plain form of a display, or its types where it has none."""
    text = item.bundle.get("text/plain")
    return text if isinstance(text, str) and text else f"<{', '.join(item.bundle) or 'an empty display'}>"


def gap_lines(gap: GapItem, short_id: str) -> list[str]:
    """Return the sentences that stand for what a gap leaves out."""
    told: list[str] = []
    if gap.lines:
        lines = f"{gap.lines:,} line{'' if gap.lines == 1 else 's'}"
        ranks = f"{gap.ranks} rank{'' if gap.ranks == 1 else 's'}"
        told.append(f"... {lines} of {ranks} in the run's log: sgpu logs {short_id}")
    if gap.displays:
        told.append(f"... the first {gap.displays:,} displays were dropped: there are too many to keep")
    return told


def trim(items: Sequence[Item], sizes: Sequence[int], limit: int, head_share: float = HEAD_SHARE) -> list[Item]:
    """Return `items` of at most `limit` bytes: the middle's lines join the one gap.

    Args:
        items: Lines and at most one gap; no displays.
        sizes: Bytes of each as drawn.
        limit: Bytes allowed.
        head_share: The share of `limit` that the beginning gets; 0 keeps only the end.
    """
    if sum(sizes) <= limit:
        return list(items)
    at = next((i for i, item in enumerate(items) if isinstance(item, GapItem)), None)
    gap = items[at] if at is not None else None
    known = gap if isinstance(gap, GapItem) else GapItem(0, 0)
    before = range(len(items)) if at is None else range(at)
    after = range(len(items)) if at is None else range(at + 1, len(items))
    head = count_fitting((sizes[i] for i in before), int(limit * head_share))
    head_bytes = sum(sizes[i] for i in before[:head])
    tail = min(count_fitting((sizes[i] for i in reversed(after)), limit - head_bytes), len(after))
    dropped = [items[i] for i in range(head, len(items) - tail) if i != at]
    ranks = {item.rank for item in dropped if isinstance(item, LineItem)}
    merged = GapItem(known.lines + len(dropped), max(known.ranks, len(ranks)), known.displays)
    return [*items[:head], merged, *items[len(items) - tail :]]


def count_fitting(sizes: Iterable[int], limit: int) -> int:
    """Return how many of `sizes`, from the first on, fit into `limit`."""
    count = 0
    for total in accumulate(sizes):
        if total > limit:
            break
        count += 1
    return count


def line_bytes(text: str) -> int:
    return (len(text) if text.isascii() else len(text.encode())) + LINE_OVERHEAD


_BEFORE_FIRST = -1


@dataclass(frozen=True, slots=True)
class TextSegment:
    """Lines (and perhaps the gap) between two displays, or the first display's caption.

    Args:
        items: Lines and at most one gap.
        after: The serial of the display before it, 0 for the first segment, -1 for the first display's caption.
        next_rank: The rank whose display follows, None when none does or there is one rank only.
    """

    items: tuple[LineItem | GapItem, ...]
    after: int
    next_rank: int | None = None


def segments(view: RunView) -> list[TextSegment | DisplayItem]:
    """Cut a run's output at its displays. The first and the last are text, for the header and the footer.

    The first display's caption is a segment of its own. A live view stands where the first text will stand, the caption
    below it; so a run is cut alike whether its displays were shown while it went on or not.
    """
    cut: list[TextSegment | DisplayItem] = []
    lines: list[LineItem | GapItem] = []
    after = 0
    for item in view.items:
        if isinstance(item, DisplayItem):
            next_rank = item.rank if len(view.rank_numbers) > 1 else None
            if not cut and next_rank is not None:
                cut += [TextSegment(tuple(lines), 0), TextSegment((), _BEFORE_FIRST, next_rank)]
            elif lines or not cut or next_rank is not None:
                cut.append(TextSegment(tuple(lines), after, next_rank))
            cut.append(item)
            lines, after = [], item.serial
        else:
            lines.append(item)
    cut.append(TextSegment(tuple(lines), after))
    return cut
