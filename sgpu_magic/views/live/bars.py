"""Progress bars in ranks' output (tqdm's, rich's, Keras', `epoch 7/10`), and the progress of the run. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from sgpu_magic.views import ansi
from sgpu_magic.views.live.schema import Bar
from sgpu_magic.wire.rank_events import OutputWritten

_MAX_CHARS = 400
_MAX_LABEL = 40

# `epoch 7/10:  62%|██████▏   | 61/98 [00:02<00:01, 25.1it/s]`, cut off anywhere after the first `|`
_TQDM = re.compile(r"(?P<label>[^|]*?)(?<![\d.])(?P<percent>\d{1,3})%\|[^|]*(?:\|\s*(?P<counts>[^\s/\[]+/[^\s\[]+))?")
# `epoch 7: 57it [00:03, 18.9it/s]`: the total is unknown
_TQDM_ENDLESS = re.compile(r"(?P<label>.*?)(?P<count>\d[\d.]*[kMGTPEZ]?[^\W\d]*) \[\d+:\d\d(?::\d\d)?, ")
# `Training ━━━━━━━━━╸━━━━━━  62% 0:00:12`
_RICH = re.compile(r"(?P<label>[^━╸╺]*)[━╸╺]{3,}\s+(?P<percent>\d{1,3})%")
# `61/98 [=======>....] - ETA: 3s`, `61/98 ━━━━━━━━━━━━ 3s 50ms/step`
_KERAS = re.compile(r"(?P<label>.*?)(?<![\d./])(?P<done>\d+)/(?P<total>\d+)\s+(?:\[[=>.]{3,}\]|[━╸╺]{3,})")
# `epoch 7/10`, `Epoch [7/10]`, `step 3 of 8`
_WORDS = re.compile(
    r"\b(?P<label>epoch|step|iter|iteration|batch|round|fold|trial|chunk|shard|file)s?[\s:=#]*[\[(]?"
    r"(?P<done>\d+)\s*(?:/|\bof\b)\s*(?P<total>\d+)(?![\d./])",
    re.IGNORECASE,
)
# names of outer loops, which contain the others
_OUTER_WORDS = ("epoch", "round", "fold", "trial")

_DRAWN = re.compile(r"(?<=%)\|[^|]*(?:\||$)|[━╸╺]{3,}|\[[=>.]{3,}\]")
# omitted before counts, which are more precise
_PERCENT = re.compile(r"(?<![\d.])\d{1,3}%\s+(?=[^\s/\[]+/[^\s\[]+ \[)")
# only the end of a batch is parsed: a flood has no progress bars
_READ_CHARS = 4_000
_MAX_PIECES = 8
_PIECES = re.compile(r"[\r\n]+")
_NAME = re.compile(r"[^\W\d_]+")
# a bar below `_NEW` that was above `_NEARLY_FULL` before has restarted
_NEARLY_FULL = 0.9
_NEW = 0.5
_MAX_BARS = 20


class _Found(NamedTuple):
    """A progress bar in a line, or words that say the same.

    Args:
        label: What it counts, "" without a label.
        fraction: 0 to 1, None when the total is unknown.
        text: As in `Bar`.
        counts: The number of items that are done, and of all; None when they are not given as whole numbers.
        words: The words, such as `epoch 7/10`; None for a bar.
    """

    label: str
    fraction: float | None
    text: str
    counts: tuple[int, int] | None = None
    words: re.Match[str] | None = None


def bar_of(line: str) -> Bar | None:
    """Return the progress bar in a line, None without one; of several bars the first, which is the outer one.

    Args:
        line: A line without escape sequences.
    """
    found = _found(line)
    fraction = None if found is None or found.fraction is None else round(found.fraction, 4)
    return None if found is None else Bar(fraction=fraction, text=found.text)


def without_bar(line: str) -> str:
    """Return a progress bar's own text without the drawn bar: `epoch 7/10: 61/98 [00:02<00:01, 25.1it/s]`.

    Other lines are returned as they are.
    """
    text, bars = _DRAWN.subn(" ", line) if bar_of(line) is not None else (line, 0)
    return " ".join(_PERCENT.sub("", text).split()) if bars else line


def _found(line: str) -> _Found | None:
    text = line[:_MAX_CHARS]
    if not any(mark in text for mark in "%/[━") and " of " not in text:
        return None
    for pattern in (_TQDM, _RICH):
        found = pattern.match(text)
        if found is not None and int(found["percent"]) <= 100:
            percent, label = int(found["percent"]), _label(found["label"])
            given = found.groupdict().get("counts") or ""
            counts = _whole(*given.partition("/")[::2])
            fraction = percent / 100 if counts is None else counts[0] / counts[1]
            return _Found(label, fraction, _joined(label or given, f"{percent} %"), counts)
    found = _KERAS.match(text)
    if found is not None and (counts := _whole(found["done"], found["total"])):
        fraction, label = counts[0] / counts[1], _label(found["label"])
        return _Found(label, fraction, _joined(label or f"{counts[0]}/{counts[1]}", f"{int(fraction * 100)} %"), counts)
    if found := _TQDM_ENDLESS.match(text):
        label = _label(found["label"])
        return _Found(label, None, _joined(label, found["count"]))
    found = _WORDS.search(text)
    if found is not None and (counts := _whole(found["done"], found["total"])):
        label = found["label"].lower()
        return _Found(label, counts[0] / counts[1], f"{label} {counts[0]}/{counts[1]}", counts, found)
    return None


def _whole(done: str, total: str) -> tuple[int, int] | None:
    """Return whole numbers of `61/98`; `12.3M/45.0M` are none."""
    if done.isdecimal() and total.isdecimal() and 0 <= int(done) <= int(total) > 0:
        return int(done), int(total)
    return None


def _label(text: str) -> str:
    text = " ".join(text.split()).rstrip(":").rstrip()
    return text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL - 1]}…"


def _joined(label: str, rest: str) -> str:
    return f"{label} · {rest}" if label else rest


# ---------------------------------------------------------------- the progress of a run


class RunProgress:
    """The progress of a run by the bars of its ranks. It does not fall back at each epoch.

    An epoch's bar counts as a part of all epochs where their number is known: from the bar's label (`epoch 2/3`), from
    a bar around it, or from lines (`Epoch 2/3`).
    """

    def __init__(self) -> None:
        self._ranks: dict[int, _RankProgress] = {}
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
            self._take(body.rank, rest, bars=False)
        *pieces, unfinished = _PIECES.split(text if text.startswith(("\r", "\n")) else rest + text)
        for piece in [piece for piece in pieces if piece][-_MAX_PIECES:]:
            self._take(body.rank, piece)
        if len(unfinished) <= _MAX_CHARS:
            self._rest[key] = unfinished
        self._take(body.rank, unfinished, words=False)

    def _take(self, rank: int, piece: str, *, bars: bool = True, words: bool = True) -> None:
        found = _found(ansi.plain(piece[:_MAX_CHARS]))
        if found is not None and (bars if found.words is None else words):
            self._ranks.setdefault(rank, _RankProgress()).take(found)

    def start_again(self) -> None:
        """Discard everything, as a new attempt starts."""
        self._ranks, self._rest = {}, {}

    def bar(self, ranks: Sequence[int]) -> Bar | None:
        """Return `epoch 2 of 3, 43 %`: the mean of the ranks if more than half of them have a bar, else None.

        The label is that of the slowest rank. Without a fraction, the number of epochs is unknown.
        """
        known = [progress for rank in ranks if (progress := self._ranks.get(rank)) is not None and progress.is_known]
        if 2 * len(known) <= len(ranks):
            return None
        last = min(known, key=lambda progress: progress.total if progress.total is not None else -1.0)
        fractions = [progress.total for progress in known if progress.total is not None]
        if len(fractions) < len(known):
            return Bar(fraction=None, text=_with_percent(last.label, last.part))
        fraction = sum(fractions) / len(fractions)
        return Bar(fraction=round(fraction, 4), text=_with_percent(last.label, fraction))


def _with_percent(label: str, fraction: float) -> str:
    return ", ".join(filter(None, [label, f"{int(fraction * 100 + 0.5)} %"]))


class _Outer(NamedTuple):
    """The loop that contains the inner bar: `name` such as `epoch`, how many of them are done, and of how many."""

    name: str
    done: int
    of: int


class _RankProgress:
    """The progress of one rank.

    Attributes:
        total: 0 to 1; None while a bar repeats an unknown number of times.
        part: 0 to 1, the bar that is being drawn.
    """

    def __init__(self) -> None:
        self.total: float | None = None
        self.part = 0.0
        self._outer: _Outer | None = None
        # the bar that contains the inner one; "" if only lines or labels name the outer loop
        self._outer_bar: str = ""
        self._bar: str = ""
        self._label = ""
        self._counts: tuple[int, int] | None = None
        # number of starts of each bar
        self._passes: dict[str, int] = {}
        # lines report finished epochs, not starting ones
        self._is_said_afterwards = False

    @property
    def is_known(self) -> bool:
        return bool(self._bar) or self._outer is not None

    @property
    def label(self) -> str:
        """`epoch 2 of 3`, without an outer count the bar's own label."""
        outer = self._outer
        if outer is not None:
            # without a bar inside it, a line may be the first or the last of its epoch
            at = outer.done if not self._bar else min(outer.done + 1, outer.of)
            return f"{outer.name} {at} of {outer.of}".strip()
        passes = self._passes.get(self._bar, 1)
        return ", ".join(filter(None, [self._label, f"pass {passes}" if passes > 1 else ""]))

    def take(self, found: _Found) -> None:
        """Update it from a bar or words."""
        if found.fraction is None:
            return
        words = found.words or _WORDS.search(found.label)
        name = words["label"].lower() if words is not None else ""
        if words is None or name not in _OUTER_WORDS:
            self._drawn(found, _key(found) if found.words is None else found.label)
        elif (counts := _whole(words["done"], words["total"])) is not None:
            rest = _WORDS.search(words.string, words.end()) if found.words is not None else None
            inner = _whole(rest["done"], rest["total"]) if rest is not None else None
            if found.words is None or inner is not None:
                # `epoch 2/3` with a bar in it
                self._is_in(_Outer(name, max(counts[0] - 1, 0), counts[1]))
                self._bar, self.part = "in words", found.fraction if inner is None else inner[0] / inner[1]
            else:
                self._said(name, *counts)
        self._add_up()

    def _said(self, name: str, done: int, of: int) -> None:
        """Update it from a line about an epoch: its first or its last one."""
        if self._outer is None and self._bar:
            self._is_said_afterwards = self.part >= _NEARLY_FULL
        done -= 1 if self._bar and not self._is_said_afterwards else 0
        self._is_in(_Outer(name, max(done, 0), of))

    def _is_in(self, outer: _Outer) -> None:
        before, self._outer = self._outer, outer
        if before is None or (before.name, before.of) != (outer.name, outer.of):
            self.total = None
        if before is None or before.done != outer.done:
            self.part = 0.0

    def _drawn(self, found: _Found, bar: str) -> None:
        """Update it from a bar without an epoch in its label."""
        fraction = found.fraction or 0.0
        if self._outer_bar and bar == self._outer_bar:
            if found.counts is not None:
                self._is_in(_Outer(found.label, *found.counts))
            return
        if not self._bar:
            if self._outer is not None:
                # the epoch of the line `Epoch 1/3` begins
                self._outer = self._outer._replace(done=max(self._outer.done - 1, 0))
                self.total = None
        elif bar == self._bar or self._is_renamed(found):
            if self.part >= _NEARLY_FULL and fraction < _NEW:
                self._passes[bar] = self._passes.get(bar, 0) + 1
        elif self._outer is None:
            self.total = None
            if self.part == 0.0 and self._counts is not None and bar not in self._passes:
                # a bar that is followed by another one before its first step contains it
                self._outer_bar, self._outer = self._bar, _Outer(self._label, *self._counts)
            elif bar in self._passes:
                self._passes[bar] += 1
        if bar in self._passes or len(self._passes) < _MAX_BARS:
            self._passes.setdefault(bar, 1)
        self._bar, self._label, self._counts, self.part = bar, found.label, found.counts, fraction

    def _is_renamed(self, found: _Found) -> bool:
        """Whether it is the bar drawn before with another label, as `set_description` does."""
        if found.counts is None or self._counts is None or found.counts[1] != self._counts[1]:
            return False
        return found.counts[0] > self._counts[0] or not (found.label and self._label)

    def _add_up(self) -> None:
        now = self.part
        if self._outer is not None:
            inside = min(self.part, 1.0) if self._bar else 0.0
            now = min((self._outer.done + inside) / self._outer.of, 1.0)
        is_unknown = self._outer is None and any(passes > 1 for passes in self._passes.values())
        self.total = None if is_unknown else max(self.total or 0.0, now)


def _key(found: _Found) -> str:
    """Return what sets a bar apart from others: words and total, but no numbers such as a loss in its label."""
    total = found.counts[1] if found.counts is not None else ""
    return f"{' '.join(_NAME.findall(found.label))} {total}"
