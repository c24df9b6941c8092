"""The grid of a run's ranks, with progress bars parsed from their lines: tqdm's, rich's, Keras', `epoch 7/10`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sgpu_magic.views import ansi
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.live.schema import Bar, Curve, RankCard, Tone
from sgpu_magic.views.run_notes import died_of, error_line, last_part, restart_command
from sgpu_magic.views.usage import Drawn, detail_lines, use_text
from sgpu_magic.views.words import new_host
from sgpu_magic.wire.failures import Failure
from sgpu_magic.wire.states import FailureKind, RunState

_MAX_LAST_CHARS = 160
_MAX_SEEN_CHARS = 1000
_MAX_LABEL_CHARS = 80
_WITHOUT_RANKS = (RunState.QUEUED, RunState.PREPARING)


def rank_cards(view: RunView) -> tuple[RankCard, ...]:
    """Return a card for each rank; none before the ranks are being started."""
    never_started = view.lease is None and not view.rank_failures
    is_there = view.spec.in_session and view.state is not RunState.QUEUED
    if (view.state in _WITHOUT_RANKS and not is_there) or never_started:
        return ()
    failures = {failure.rank: failure for failure in reversed(view.others) if failure.rank is not None}
    failures |= {rank: failure for rank, failure in view.rank_failures.items() if rank >= 0}
    if view.failure is not None and view.failure.rank is not None and view.state is not RunState.SUCCEEDED:
        failures[view.failure.rank] = view.failure
    said = view.output.last_lines
    return tuple(
        _card(view, at, failures.get(rank), ansi.plain(said.get(rank, "")[:_MAX_SEEN_CHARS]))
        for at, rank in enumerate(view.rank_numbers)
    )


def _card(view: RunView, at: int, failure: Failure | None, last: str) -> RankCard:
    rank = view.rank_numbers[at]
    state, tone = _state(view, rank, failure)
    usage = view.usage.ranks.get(rank)
    latest = usage.latest if usage is not None else None
    return RankCard(
        rank=rank,
        state=state,
        tone=tone,
        label=ansi.plain(view.labels[rank])[:_MAX_LABEL_CHARS] if rank < len(view.labels) else "",
        last=_last(rank, state, failure, last)[:_MAX_LAST_CHARS],
        bar=bar_of(last) if state == "running" else None,
        use=use_text(latest) if latest is not None else "",
        details=tuple(ansi.plain(line)[:200] for line in detail_lines(latest)) if latest is not None else (),
        curves=tuple(map(_curve, usage.curves())) if usage is not None else (),
        idle=ansi.plain(usage.idle_text)[:200] if usage is not None else "",
        host=new_host(view, view.rank_numbers, at),
    )


def _state(view: RunView, rank: int, failure: Failure | None) -> tuple[str, Tone]:
    if view.session is not None and not view.is_final:
        if rank in view.session.dead:
            return "dead", "bad"
        if view.state is RunState.RUNNING:
            return "alive", "good"
    if view.state is RunState.SUCCEEDED:
        return "done", "good"
    if failure is not None:
        if failure.is_consequence:
            return "released", "plain"
        if last_part(failure.type_name) == "KeyboardInterrupt":
            # the stop path interrupts ranks that are not blocked in a collective
            return "ended", "plain"
        return "failed", "bad"
    if view.is_final:
        return "ended", "plain"
    return ("waiting", "plain") if view.state is RunState.STARTING else ("running", "busy")


def _last(rank: int, state: str, failure: Failure | None, last: str) -> str:
    """Return the rank's last line, or its failure or restart command, which take precedence."""
    if state == "dead":
        return restart_command((rank,))
    if failure is None or state != "failed":
        return last
    silent = failure.kind is FailureKind.WORKER_DIED and not failure.message
    return ansi.plain(died_of(failure) if silent else error_line(failure))


def _curve(drawn: Drawn) -> Curve:
    return Curve(
        name=drawn.name,
        unit=drawn.unit,
        values=drawn.series.values,
        began_s=round(drawn.series.began_s, 1),
        step_s=drawn.series.step_s,
        top=drawn.top,
    )


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


def bar_of(line: str) -> Bar | None:
    """Return the progress bar in a line, None without one; of several bars the first, which is the outer one.

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
    """Return the mean of the ranks' bars if more than half of the ranks have a fraction, else None."""
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
    """Return the fraction from `61/98`, more precise than the percentage; `12.3M/45.0M` is not."""
    done, _, total = counts.partition("/")
    if done.isdecimal() and total.isdecimal() and 0 <= int(done) <= int(total) > 0:
        return int(done) / int(total)
    return percent / 100


def _label(text: str) -> str:
    text = " ".join(text.split()).rstrip(":").rstrip()
    return text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL - 1]}…"


def _joined(label: str, rest: str) -> str:
    return f"{label} · {rest}" if label else rest
