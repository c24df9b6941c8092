"""Progress bars, read from the text that draws them: tqdm's in all forms, rich's, Keras', and `epoch 7/10`. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sgpu_magic.views.live.picture import Bar

_MAX_CHARS = 400
_MAX_LABEL = 40

# `epoch 7/10:  62%|██████▏   | 61/98 [00:02<00:01, 25.1it/s]`, cut off anywhere after the first `|`
_TQDM = re.compile(r"(?P<label>[^|]*?)(?<![\d.])(?P<percent>\d{1,3})%\|[^|]*(?:\|\s*(?P<counts>[^\s/\[]+/[^\s\[]+))?")
# `epoch 7: 57it [00:03, 18.9it/s]`: nobody knows how many there will be
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


def bar_of(line: str) -> Bar | None:
    """Return the progress bar that a line draws, None when it draws none; of several bars the first, the outer one.

    Args:
        line: A line without escape sequences.
    """
    text = line[:_MAX_CHARS]
    if not any(mark in text for mark in "%/[━") and " of " not in text:
        return None
    for pattern in (_TQDM, _RICH):
        found = pattern.match(text)
        if found is not None and int(found["percent"]) <= 100:
            counts = found.groupdict().get("counts") or ""
            percent = int(found["percent"])
            return _bar(_fraction(counts, percent), _label(found["label"]) or counts, percent)
    found = _KERAS.match(text)
    if found is not None and 0 <= int(found["done"]) <= int(found["total"]) > 0:
        fraction = int(found["done"]) / int(found["total"])
        return _bar(fraction, _label(found["label"]) or f"{found['done']}/{found['total']}", int(fraction * 100))
    found = _TQDM_ENDLESS.match(text)
    if found is not None:
        return Bar(fraction=None, text=_joined(_label(found["label"]), found["count"]))
    found = _WORDS.search(text)
    if found is not None and 0 <= int(found["done"]) <= int(found["total"]) > 0:
        fraction = int(found["done"]) / int(found["total"])
        return Bar(fraction=fraction, text=f"{found['label'].lower()} {found['done']}/{found['total']}")
    return None


def bar_of_all(bars: Sequence[Bar | None]) -> Bar | None:
    """Return the progress of a run from its ranks' bars: their mean when more than half of them tell a fraction."""
    told = [bar for bar in bars if bar is not None and bar.fraction is not None]
    fractions = [bar.fraction for bar in told if bar.fraction is not None]
    if not fractions or 2 * len(fractions) <= len(bars):
        return None
    fraction = sum(fractions) / len(fractions)
    labels = {bar.text.rpartition(" · ")[0] for bar in told}
    label = labels.pop() if len(labels) == 1 else ""
    return _bar(fraction, label, int(fraction * 100 + 0.5))


def _bar(fraction: float, label: str, percent: int) -> Bar:
    return Bar(fraction=round(fraction, 4), text=_joined(label, f"{percent} %"))


def _fraction(counts: str, percent: int) -> float:
    """Prefer `61/98` to the rounded percentage; `12.3M/45.0M` says no more than it."""
    done, _, total = counts.partition("/")
    if done.isdecimal() and total.isdecimal() and 0 <= int(done) <= int(total) > 0:
        return int(done) / int(total)
    return percent / 100


def _label(text: str) -> str:
    text = " ".join(text.split()).rstrip(":").rstrip()
    return text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL - 1]}…"


def _joined(label: str, rest: str) -> str:
    return f"{label} · {rest}" if label else rest
