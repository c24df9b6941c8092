"""`%sgpu_who` as text and as HTML: the variables of a session's ranks, with those that differ between ranks marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import msgspec
from msgspec.structs import replace

from sgpu_magic.formatting import count_of, format_bytes, format_ranks, numbers_text
from sgpu_magic.views import ansi
from sgpu_magic.views.html_style import SOFT, WARN, sentences, table, titled_box
from sgpu_magic.views.units import Row, aligned
from sgpu_magic.wire.run import RankAnswer, Variable

DIFFERS = "\u2260"
"""The mark of a variable that is not alike on all ranks."""

_MARK, _NAME, _TYPE, _SIZE = "", "name", "type", "size"
_HEADS: Row = (_MARK, _NAME, _TYPE, "shape", "dtype", "device", _SIZE, "ranks")
_NOT_SET: Row = ("not set", "", "", "", "")
_OTHERS: Row = ("others", "", "", "", "")
# in place of a rank's own GPU when ranks are compared
_OWN_DEVICE = "cuda:rank"
_MOST_NAMES = 500
# rows of one variable
_MOST_GROUPS = 8
_TEXT_CHARS = 80
_LEAST_CHARS = 8
_BETWEEN_CHARS = 3


class VariableListing(msgspec.Struct, frozen=True, kw_only=True):
    """What `%sgpu_who` shows.

    Args:
        session: The session's name.
        ranks: Number of its ranks.
        patterns: The requested names and patterns; empty for all.
        by_rank: The variables of each rank that answered, by name.
        left_out: Number of further variables, on the rank that has most of them.
        notes: Why ranks are missing.
    """

    session: str
    ranks: int
    patterns: tuple[str, ...]
    by_rank: Mapping[int, Mapping[str, Variable]]
    left_out: int = 0
    notes: tuple[str, ...] = ()

    def with_notes(self, *notes: str) -> Self:
        return replace(self, notes=(*self.notes, *notes))

    def with_answers(self, answers: Mapping[int, RankAnswer]) -> Self:
        """Return the listing with the ranks' answers, up to the name at which the first bounded answer ends.

        Beyond that name, a variable may be missing from an answer although its rank has it.
        """
        ends = [answer.variables[-1].name for answer in answers.values() if answer.left_out and answer.variables]
        names = sorted({variable.name for answer in answers.values() for variable in answer.variables})
        listed = frozenset([name for name in names if not ends or name <= min(ends)][:_MOST_NAMES])
        kept = {
            rank: {each.name: each for each in answer.variables if each.name in listed}
            for rank, answer in answers.items()
        }
        left_out = [len(each.variables) + each.left_out - len(kept[rank]) for rank, each in answers.items()]
        return replace(self, by_rank=kept, left_out=max(left_out, default=0))


def variable_rows(listing: VariableListing) -> dict[str, list[Row]]:
    """Return each variable's rows by its name: type, shape, dtype, device, size and ranks.

    There is one row, without ranks, if all ranks have the same.
    """
    return {
        ansi.plain(name): [row[2:] for row in _rows(name, _groups(listing.by_rank, name))] for name in _names(listing)
    }


def variables_text(listing: VariableListing) -> str:
    """Return the variables as text, in 80 columns if long names and types can be cut to that."""
    title, facts, rows = _content(listing)
    lines = [" · ".join((title, *facts)), *listing.notes]
    if len(rows) > 1:
        if rows[0][0] == _MARK:
            rows = [(f"{mark or ' '} {name}", *others) for mark, name, *others in rows]
        fitted = _fitted(rows)
        right = tuple(at for at, head in enumerate(rows[0]) if head == _SIZE)
        lines += ["", *aligned(fitted, right)]
    return "\n".join([*lines, *_more(listing)])


def variables_html(listing: VariableListing) -> str:
    """Return the variables as a table with inline style."""
    title, facts, (heads, *rows) = _content(listing)
    body = sentences(listing.notes, f"color:{WARN}")
    if rows:
        right = [at for at, head in enumerate(heads) if head == _SIZE]
        breaks = [at for at, head in enumerate(heads) if head in (_NAME, _TYPE)]
        body += table(heads, rows, right, breaks) + sentences(_more(listing), SOFT)
    return titled_box(title, " · ".join(facts), body)


def _content(listing: VariableListing) -> tuple[str, list[str], list[Row]]:
    """Return the title, the facts beside it, and the table with its heads."""
    by_name = {name: _groups(listing.by_rank, name) for name in _names(listing)}
    rows: list[Row] = []
    for name, groups in by_name.items():
        rows += _rows(name, groups)
    differing = sum(len(groups) > 1 for groups in by_name.values())
    ranks = count_of(listing.ranks, "rank")
    if 0 < len(listing.by_rank) < listing.ranks:
        ranks = f"{format_ranks(listing.by_rank)} of {listing.ranks}"
    facts = [ranks, _count(listing, len(by_name))]
    if differing:
        facts.append(f"{differing:,} {'differs' if differing == 1 else 'differ'} between ranks ({DIFFERS})")
    return f"session {listing.session}", facts, _without_empty_columns([_HEADS, *rows])


def _names(listing: VariableListing) -> list[str]:
    return sorted({name for variables in listing.by_rank.values() for name in variables})


def _count(listing: VariableListing, names: int) -> str:
    if names or not listing.patterns:
        return count_of(names + listing.left_out, "variable") if names else "no variables yet"
    return f"no variable matches {', '.join(listing.patterns)}"


def _groups(by_rank: Mapping[int, Mapping[str, Variable]], name: str) -> dict[Row, list[int]]:
    """Return the ranks by what they have under this name: type, shape, dtype, device and size."""
    found = {rank: variables.get(name) for rank, variables in by_rank.items()}
    having = {rank: variable for rank, variable in found.items() if variable is not None}
    has_own = all(variable.device == f"cuda:{rank}" for rank, variable in having.items())
    groups: dict[Row, list[int]] = {}
    for rank in sorted(found):
        variable = found[rank]
        described = _NOT_SET
        if variable is not None:
            described = _described(variable, _OWN_DEVICE if has_own else variable.device)
        groups.setdefault(described, []).append(rank)
    return groups


def _described(variable: Variable, device: str) -> Row:
    shape = ""
    if variable.shape is not None:
        shape = str(variable.shape)
    elif variable.length is not None:
        shape = f"len {variable.length:,}"
    size = "" if variable.size_bytes is None else format_bytes(variable.size_bytes)
    return variable.type, shape, variable.dtype, device, size


def _rows(name: str, groups: Mapping[Row, list[int]]) -> list[Row]:
    """Return a row for each group of ranks, of many the largest ones."""
    if len(groups) == 1:
        return [_row("", name, described, ranks, "") for described, ranks in groups.items()]
    listed = sorted(groups, key=lambda described: len(groups[described]), reverse=True)[:_MOST_GROUPS]
    listed.sort(key=lambda described: groups[described])
    rows: list[Row] = []
    for described in listed:
        ranks = groups[described]
        rows.append(_row("" if rows else DIFFERS, "" if rows else name, described, ranks, numbers_text(ranks)))
    others = [rank for described, ranks in groups.items() if described not in listed for rank in ranks]
    return [*rows, _row("", "", _OTHERS, others, numbers_text(others))] if others else rows


def _row(mark: str, name: str, described: Row, ranks: Sequence[int], in_column: str) -> Row:
    kind, shape, dtype, device, size = described
    device = f"cuda:{_span(ranks)}" if device == _OWN_DEVICE else device
    row = (mark, name, kind, shape, dtype, device, size, in_column)
    return tuple(" ".join(ansi.plain(text).split()) for text in row)


def _span(ranks: Sequence[int]) -> str:
    """Return `0-3` for consecutive ranks; other ranks in the usual form."""
    first, last = ranks[0], ranks[-1]
    return f"{first}-{last}" if 1 < len(ranks) == last - first + 1 else numbers_text(ranks)


def _without_empty_columns(rows: list[Row]) -> list[Row]:
    kept = [
        column for column, head in enumerate(_HEADS) if head in (_NAME, _TYPE) or any(row[column] for row in rows[1:])
    ]
    return [tuple(row[column] for column in kept) for row in rows]


def _fitted(rows: list[Row]) -> list[Row]:
    """Return the rows with names and types cut so far that they fit into 80 columns if that is possible."""
    # types, then names
    for column in (1, 0):
        widths = [max(map(len, texts)) for texts in zip(*rows, strict=True)]
        excess = sum(widths) + _BETWEEN_CHARS * (len(widths) - 1) - _TEXT_CHARS
        most = max(widths[column] - excess, _LEAST_CHARS)
        if excess > 0:
            rows = [(*row[:column], _cut(row[column], most), *row[column + 1 :]) for row in rows]
    return rows


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _more(listing: VariableListing) -> list[str]:
    if not listing.left_out:
        return []
    return [f"and {listing.left_out:,} more: %sgpu_who with names or patterns, such as loss*, lists those"]
