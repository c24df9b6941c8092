"""A snapshot that is small enough for one message, however many ranks there are."""

from __future__ import annotations

from typing import TypeVar

from msgspec.structs import replace

from sgpu_magic.views.live.messages import json_bytes
from sgpu_magic.views.live.schema import Curve, FailureLine, RankCard, Snapshot
from sgpu_magic.views.usage import thinned

MAX_SNAPSHOT_BYTES = 60_000
# the rest is for the cards
_MAX_TEXT_BYTES = 30_000
# lines of each list, characters of each line
_TEXT_LEVELS = ((200, 400), (60, 200), (20, 120), (8, 80))

T = TypeVar("T")


def fitted(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with as much of its texts and cards as one message takes."""
    for lines, characters in _TEXT_LEVELS:
        if json_bytes(replace(snapshot, ranks=())) <= _MAX_TEXT_BYTES:
            break
        snapshot = _shorter(snapshot, lines, characters)
    for smaller in (_as_it_is, _first_curves, _coarse_curves, _coarser_curves, _no_details, _bare):
        snapshot = replace(snapshot, ranks=tuple(map(smaller, snapshot.ranks)))
        if json_bytes(snapshot) <= MAX_SNAPSHOT_BYTES:
            return snapshot
    return _fewer(snapshot)


def _shorter(snapshot: Snapshot, lines: int, characters: int) -> Snapshot:
    """Cut every list of texts to its beginning and its end, and every text to its beginning."""

    def cut(texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_cut(text, characters) for text in _ends(texts, lines, "..."))

    def cut_failure(block: tuple[FailureLine, ...]) -> tuple[FailureLine, ...]:
        kept = _ends(block, lines, FailureLine(text="...", kind="text"))
        return tuple(replace(line, text=_cut(line.text, characters)) for line in kept)

    failure = snapshot.failure
    if failure is not None:
        failure = replace(failure, lines=cut_failure(failure.lines), whole=cut_failure(failure.whole))
    return replace(
        snapshot,
        failure=failure,
        meta=cut(snapshot.meta),
        preparing=cut(snapshot.preparing),
        idle=cut(snapshot.idle),
        notes=cut(snapshot.notes),
        stall=cut(snapshot.stall),
        others=cut(snapshot.others),
        footer=cut(snapshot.footer),
    )


def _ends(items: tuple[T, ...], most: int, between: T) -> tuple[T, ...]:
    if len(items) <= most:
        return items
    return (*items[: most // 2], between, *items[-(most // 2) :])


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[:characters]} ..."


def _as_it_is(card: RankCard) -> RankCard:
    return card


def _first_curves(card: RankCard) -> RankCard:
    return replace(card, curves=card.curves[:2])


def _coarse_curves(card: RankCard) -> RankCard:
    return replace(card, curves=tuple(_coarse(curve, 60) for curve in card.curves[:1]), last=card.last[:100])


def _coarser_curves(card: RankCard) -> RankCard:
    return replace(card, curves=tuple(_coarse(curve, 30) for curve in card.curves))


def _no_details(card: RankCard) -> RankCard:
    return replace(card, details=())


def _bare(card: RankCard) -> RankCard:
    return replace(card, curves=(), last=card.last[:40])


def _fewer(snapshot: Snapshot) -> Snapshot:
    """Leave out cards from the end until it fits, those that have something to say last."""
    cards = list(snapshot.ranks)
    while len(cards) > 1:
        dull = [card for card in cards if card.tone not in ("bad", "warn") and not card.idle]
        gone = {card.rank for card in (dull or cards)[-max(len(cards) // 8, 1) :]}
        cards = [card for card in cards if card.rank not in gone]
        left_out = len(snapshot.ranks) - len(cards)
        note = f"{left_out} of {len(snapshot.ranks)} ranks are not drawn: they are too many for one view"
        smaller = replace(snapshot, ranks=tuple(cards), notes=(*snapshot.notes, note))
        if json_bytes(smaller) <= MAX_SNAPSHOT_BYTES:
            return smaller
    return replace(snapshot, ranks=tuple(cards))


def _coarse(curve: Curve, most: int) -> Curve:
    """Return a curve of at most `most` points, each the mean of several."""
    means, every = thinned(curve.values, most)
    if every == 1:
        return curve
    values = tuple(None if mean is None else round(mean, 1) for mean in means)
    return replace(curve, values=values, step_s=curve.step_s * every)
