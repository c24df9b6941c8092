"""What held the memory when an allocation failed: a table of ranks, and the culprit's largest tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sgpu_magic.system.byte_sizes import format_bytes
from sgpu_magic.views import ansi
from sgpu_magic.views.units import count_of, format_gb
from sgpu_magic.views.view import RunView
from sgpu_magic.wire.measures import RankMemory, TensorUse
from sgpu_magic.wire.records import Failure

TITLE = "memory when it failed"
RANK_HEADS = ("rank", "device", "used", "reserved", "free", "total")

_MAX_RANKS = 16
_MAX_TENSORS = 10
_MAX_NAME = 80
_BAR_CHARS = 20
_BAR = "█▓▒░"


class MemoryRow(NamedTuple):
    """One rank.

    Args:
        rank: The rank.
        cells: Its device, then used, reserved, free and total in words.
        shares: Of the total, each 0 to 1: what tensors hold, what torch's allocator keeps besides, what others hold.
        is_culprit: Its allocation failed first.
    """

    rank: int
    cells: tuple[str, str, str, str, str]
    shares: tuple[float, float, float]
    is_culprit: bool


class TensorRow(NamedTuple):
    """One tensor: its name, then shape, dtype and size in words."""

    name: str
    cells: tuple[str, str, str]


class MemoryTable(NamedTuple):
    """What is drawn of the memory.

    Args:
        rows: The culprit first, then by rank.
        tensors: The culprit's largest, largest first.
        largest: Heading of the tensors.
        more: What is left out, "" when nothing is.
    """

    rows: tuple[MemoryRow, ...]
    tensors: tuple[TensorRow, ...]
    largest: str
    more: str


def memory_table(view: RunView, failure: Failure | None) -> MemoryTable | None:
    """Return what held the memory, None for a failure that was no allocation's, or when nobody has looked.

    Args:
        view: The run.
        failure: Its root cause, or while it is still stopping what a rank has told.
    """
    if failure is None or not failure.out_of_memory:
        return None
    others = view.others if view.is_final else view.rank_failures.values()
    told: dict[int, RankMemory] = {}
    for each in (failure, *others):
        if each.memory is not None and each.rank is not None:
            told.setdefault(each.rank, each.memory)
    ranks = sorted(told, key=lambda rank: (rank != failure.rank, rank))
    if not ranks:
        return None
    largest = told[failure.rank].largest if failure.rank in told else ()
    left_out = len(ranks) - _MAX_RANKS
    return MemoryTable(
        rows=tuple(_row(rank, told[rank], rank == failure.rank) for rank in ranks[:_MAX_RANKS]),
        tensors=tuple(map(_tensor, largest[:_MAX_TENSORS])),
        largest=f"largest tensors of rank {failure.rank}" if largest else "",
        more=f"and {count_of(left_out, 'more rank')}" if left_out > 0 else "",
    )


def memory_lines(view: RunView, failure: Failure | None) -> list[str]:
    """Return the same as text, with a bar of what tensors hold, torch keeps, others hold and what is free."""
    table = memory_table(view, failure)
    if table is None:
        return []
    rows = [(f"{row.rank}", *row.cells, _bar(row.shares)) for row in table.rows]
    lines = [f"{TITLE}:", *_aligned([(*RANK_HEADS, ""), *rows], right=range(2, 6))]
    lines += [f"  {table.more}"] if table.more else []
    if table.tensors:
        tensors = [(row.name, *row.cells) for row in table.tensors]
        lines += [f"{table.largest}:", *_aligned(tensors, right=(3,))]
    return lines


def _row(rank: int, memory: RankMemory, is_culprit: bool) -> MemoryRow:
    total = memory.total_bytes
    kept = max(memory.reserved_bytes - memory.used_bytes, 0)
    foreign = max(total - memory.free_bytes - memory.used_bytes - kept, 0)
    shares: list[float] = []
    room = 1.0
    for count in (memory.used_bytes, kept, foreign):
        share = min(max(count / total, 0.0), room) if total > 0 else 0.0
        shares.append(round(share, 4))
        room = max(room - share, 0.0)
    reserved = format_gb(memory.reserved_bytes) if memory.reserved_bytes else "-"
    words = (format_gb(memory.used_bytes), reserved, format_gb(memory.free_bytes), format_gb(total) if total else "-")
    device = ansi.plain(memory.device)[:_MAX_NAME]
    return MemoryRow(rank, (device, *words), (shares[0], shares[1], shares[2]), is_culprit)


def _tensor(use: TensorUse) -> TensorRow:
    name = ansi.plain(use.name) or "(no name is known)"
    name = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]} ..."
    shape = f"({', '.join(map(str, use.shape))}{',' if len(use.shape) == 1 else ''})"
    return TensorRow(name, (shape[:_MAX_NAME], ansi.plain(use.dtype)[:_MAX_NAME], format_bytes(use.size_bytes)))


def _bar(shares: Sequence[float]) -> str:
    drawn = ""
    told = 0.0
    for share, mark in zip(shares, _BAR, strict=False):
        told += share
        drawn += mark * (round(told * _BAR_CHARS) - len(drawn))
    return drawn + _BAR[-1] * (_BAR_CHARS - len(drawn))


def _aligned(rows: Sequence[tuple[str, ...]], right: Iterable[int]) -> list[str]:
    aligned = set(right)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "   ".join(
            cell.rjust(width) if column in aligned else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
