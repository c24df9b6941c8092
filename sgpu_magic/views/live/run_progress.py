"""The progress of a run, from the last progress bar of each rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from sgpu_magic.views import ansi
from sgpu_magic.views.live.bars import COUNT_WORDS, MAX_CHARS, FoundBar, find_bar, whole_counts
from sgpu_magic.views.live.schema import Bar
from sgpu_magic.wire.rank_events import OutputWritten

# only the end of a batch is parsed: a flood has no progress bars
_READ_CHARS = 4_000
_MAX_PIECES = 8
_PIECES = re.compile(r"[\r\n]+")
# names of outer loops, which contain the others
_OUTER_WORDS = ("epoch", "round", "fold", "trial")


class RankProgress(msgspec.Struct, frozen=True):
    """The progress of a rank.

    Args:
        label: The epoch that its bar names, such as `epoch 2 of 3`, else the bar's own label.
        fraction: 0 to 1: of all epochs where the bar names one, else of the bar.
        in_words: Whether it is from a line such as `epoch 2/3` that has no bar.
    """

    label: str
    fraction: float
    in_words: bool


class RunProgress:
    """The progress of a run. A rank's bar counts as a part of all epochs if its label names one: `epoch 2/3`."""

    def __init__(self) -> None:
        self._ranks: dict[int, RankProgress] = {}
        # unfinished lines, by rank and stream
        self._rest: dict[tuple[int, str], str] = {}

    def write(self, body: OutputWritten) -> None:
        """Parse what a rank has written."""
        key, text = (body.rank, body.stream), body.text[-_READ_CHARS:]
        if not text:
            return
        rest = self._rest.pop(key, "")
        if text.startswith("\n"):
            # completes a line that was parsed for a bar before
            self._read(body.rank, rest, bars=False)
        *pieces, unfinished = _PIECES.split(text if text.startswith(("\r", "\n")) else rest + text)
        for piece in [piece for piece in pieces if piece][-_MAX_PIECES:]:
            self._read(body.rank, piece)
        if len(unfinished) <= MAX_CHARS:
            self._rest[key] = unfinished
        self._read(body.rank, unfinished, words=False)

    def start_again(self) -> None:
        """Discard everything, as a new attempt starts."""
        self._ranks, self._rest = {}, {}

    def bar(self, ranks: Sequence[int], widget_bars: Mapping[int, str]) -> Bar | None:
        """Return `epoch 2 of 3, 43 %`: the mean of the ranks if more than half of them have a bar, else None.

        The label is that of the slowest rank.

        Args:
            ranks: The run's ranks.
            widget_bars: Bars that ranks show as widgets, as text. They count for ranks that print none.
        """
        by_rank = self._ranks.copy()
        for rank, text in widget_bars.items():
            found = find_bar(text)
            if rank not in by_rank and found is not None and found.fraction is not None:
                by_rank[rank] = _progress_of(found, found.fraction)
        known = [by_rank[rank] for rank in ranks if rank in by_rank]
        if 2 * len(known) <= len(ranks):
            return None
        last = min(known, key=lambda progress: progress.fraction)
        fraction = sum(progress.fraction for progress in known) / len(known)
        percent = f"{int(fraction * 100 + 0.5)} %"
        return Bar(fraction=round(fraction, 4), text=f"{last.label}, {percent}" if last.label else percent)

    def _read(self, rank: int, piece: str, *, bars: bool = True, words: bool = True) -> None:
        found = find_bar(ansi.plain(piece[:MAX_CHARS]))
        if found is None or found.fraction is None or not (bars if found.words is None else words):
            return
        before = self._ranks.get(rank)
        if found.words is None or before is None or before.in_words:
            # a rank that draws bars also prints lines about its epochs, which are less precise
            self._ranks[rank] = _progress_of(found, found.fraction)


def _progress_of(found: FoundBar, fraction: float) -> RankProgress:
    words = found.words or COUNT_WORDS.search(found.label)
    in_words = found.words is not None
    name = words["label"].lower() if words is not None else ""
    counts = whole_counts(words["done"], words["total"]) if words is not None else None
    if words is None or counts is None or name not in _OUTER_WORDS:
        return RankProgress(found.label, fraction, in_words)
    done, of = counts
    inner = fraction
    if in_words:
        # a second count in the line, as in `Epoch [2/3], Step [100/600]`; without one, the line ends its epoch
        step = COUNT_WORDS.search(words.string, words.end())
        steps = whole_counts(step["done"], step["total"]) if step is not None else None
        inner = 1.0 if steps is None else steps[0] / steps[1]
    return RankProgress(f"{name} {done} of {of}", (max(done - 1, 0) + inner) / of, in_words)
