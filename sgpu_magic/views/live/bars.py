"""Progress bars in ranks' output (tqdm's, rich's, Keras', `epoch 7/10`). Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from sgpu_magic.formatting import format_seconds
from sgpu_magic.views.live.schema import Bar

MAX_CHARS = 400
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
COUNT_WORDS = re.compile(
    r"\b(?P<label>epoch|step|iter|iteration|batch|round|fold|trial|chunk|shard|file)s?[\s:=#]*[\[(]?"
    r"(?P<done>\d+)\s*(?:/|\bof\b)\s*(?P<total>\d+)(?![\d./])",
    re.IGNORECASE,
)

_DRAWN = re.compile(r"(?<=%)\|[^|]*(?:\||$)|[━╸╺]{3,}|\[[=>.]{3,}\]")
# `[00:02<00:01, 25.1it/s, loss=0.3]`, `[00:06<00:00, 2.09s/it]`, `[00:00<?, ?it/s]`
_TIMES = re.compile(
    r" \[[\d:]+<(?P<left>[\d:]+|\?), *(?:\?|(?P<rate>[\d.]+))(?P<unit>[^\W\d]*/s|s/[^\W\d]+)"
    r"(?:, *(?P<more>[^\]]*))?\]$"
)
# omitted before counts, which are more precise
_PERCENT = re.compile(r"(?<![\d.])\d{1,3}%\s+(?=[^\s/\[]+/[^\s\[]+ \[)")


class FoundBar(NamedTuple):
    """A progress bar in a line, or words with the same meaning.

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
    found = find_bar(line)
    fraction = None if found is None or found.fraction is None else round(found.fraction, 4)
    return None if found is None else Bar(fraction=fraction, text=found.text)


def is_drawn_bar(line: str) -> bool:
    """Return whether a line is a progress bar; words such as `epoch 7/10` are not."""
    found = find_bar(line)
    return found is not None and found.words is None


def without_bar(line: str) -> str:
    """Return a progress bar's own text without the drawn bar: `epoch 7/10: 61/98 · 25.1 it/s · 1 s left`.

    Other lines are returned as they are.
    """
    text, bars = _DRAWN.subn(" ", line) if bar_of(line) is not None else (line, 0)
    return _TIMES.sub(_rate_and_rest, " ".join(_PERCENT.sub("", text).split())) if bars else line


def _rate_and_rest(found: re.Match[str]) -> str:
    """Return what tqdm writes in brackets as ` · 25.1 it/s · 1 s left`."""
    left_s = 0
    for part in found["left"].split(":"):
        left_s = 60 * left_s + int(part) if part.isdecimal() else 0
    left = f"{left_s} s" if left_s < 60 else format_seconds(left_s)
    parts = [f"{found['rate']} {found['unit']}" if found["rate"] else "", f"{left} left" if left_s else ""]
    return "".join(f" · {part}" for part in (*parts, found["more"]) if part)


def find_bar(line: str) -> FoundBar | None:
    text = line[:MAX_CHARS]
    if not any(mark in text for mark in "%/[━") and " of " not in text:
        return None
    for pattern in (_TQDM, _RICH):
        found = pattern.match(text)
        if found is not None and int(found["percent"]) <= 100:
            percent, label = int(found["percent"]), _label(found["label"])
            given = found.groupdict().get("counts") or ""
            counts = whole_counts(*given.partition("/")[::2])
            fraction = percent / 100 if counts is None else counts[0] / counts[1]
            return FoundBar(label, fraction, _join(label or given, f"{percent} %"), counts)
    found = _KERAS.match(text)
    if found is not None and (counts := whole_counts(found["done"], found["total"])):
        fraction, label = counts[0] / counts[1], _label(found["label"])
        text = _join(label or f"{counts[0]}/{counts[1]}", f"{int(fraction * 100)} %")
        return FoundBar(label, fraction, text, counts)
    if found := _TQDM_ENDLESS.match(text):
        label = _label(found["label"])
        return FoundBar(label, None, _join(label, found["count"]))
    found = COUNT_WORDS.search(text)
    if found is not None and (counts := whole_counts(found["done"], found["total"])):
        label = found["label"].lower()
        return FoundBar(label, counts[0] / counts[1], f"{label} {counts[0]}/{counts[1]}", counts, found)
    return None


def whole_counts(done: str, total: str) -> tuple[int, int] | None:
    """Return whole numbers of `61/98`; `12.3M/45.0M` are none."""
    if done.isdecimal() and total.isdecimal() and 0 <= int(done) <= int(total) > 0:
        return int(done), int(total)
    return None


def _label(text: str) -> str:
    text = " ".join(text.split()).rstrip(":").rstrip()
    return text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL - 1]}…"


def _join(label: str, rest: str) -> str:
    return f"{label} · {rest}" if label else rest
