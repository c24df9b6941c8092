"""A run's output as a notebook holds it: text between the displays that stand in place."""

from __future__ import annotations

from dataclasses import dataclass

from sgpu_magic.views.items import DisplayItem, GapItem, LineItem
from sgpu_magic.views.view import RunView

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
