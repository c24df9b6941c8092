"""Progress bars that ranks show as widgets, such as those of `tqdm.notebook`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgpu_magic.views.live.bars import find_bar
from sgpu_magic.views.output_buffer import DisplayItem

if TYPE_CHECKING:
    from sgpu_magic.views.fold import RunView

# displays of one rank that are searched: the first bar is the outer one
_MOST_SEARCHED = 4


def widget_bars(view: RunView) -> dict[int, str]:
    """Return the text of each rank's first widget with a progress bar, in tqdm's form: `epoch: 40%|██  |`."""
    if not view.models.has_widgets:
        return {}
    found: dict[int, str] = {}
    searched: dict[int, int] = {}
    for item in view.items:
        if not isinstance(item, DisplayItem) or item.rank in found or view.models.is_closed(item.rank, item.bundle):
            continue
        searched[item.rank] = searched.get(item.rank, 0) + 1
        if searched[item.rank] <= _MOST_SEARCHED:
            text = str(view.models.static(item.rank, item.bundle).get("text/plain", "")).partition("\n")[0]
            if find_bar(text) is not None:
                found[item.rank] = text
    return found
