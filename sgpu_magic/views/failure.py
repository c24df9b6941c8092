"""How views describe a run's failure: its traceback, where its ranks wait or waited, and what held the memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sgpu_magic.config import host_name
from sgpu_magic.system.byte_sizes import format_bytes
from sgpu_magic.views import ansi
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.live.schema import FailureBlock, FailureLine, MemoryBlock, MemoryCard, MemoryTensor
from sgpu_magic.views.run_notes import death_sentence, error_line, last_part, limit_of, other_lines, timeout_sentence
from sgpu_magic.views.stacks import group_lines, group_stacks, last_python_line, stall_note, summary, taken, verdict
from sgpu_magic.views.tracebacks import (
    beginning,
    clipped,
    cut_lines,
    excerpt_of,
    line_of_cell,
    source_of,
    split_traceback,
    traceback_body,
)
from sgpu_magic.views.units import aligned, count_of, format_gb, format_seconds
from sgpu_magic.wire.failures import Failure, RankMemory, StackFrame, TensorUse
from sgpu_magic.wire.states import FailureKind, RunState

# of the frames, and of the message
_MAX_TRACEBACK_LINES = 80
_MAX_TRACEBACK_CHARS = 8_000
_MAX_OTHERS = 40
_LAST_LINE = "its last Python line"

_LineKind = Literal["title", "code", "culprit", "error", "text"]


def failure_block(view: RunView, failure: Failure, most_chars: int, most_whole_chars: int) -> FailureBlock:
    """Return a failure for the static HTML and the live view, the cell's own lines first.

    What failed is never cut: the exception's type, its rank, the cell's line and the beginning of the message.

    Args:
        view: The run.
        failure: Its root cause, or a rank's failure while the run is still stopping.
        most_chars: Maximum characters of the ranks' stacks.
        most_whole_chars: Maximum characters of the whole traceback and message.
    """
    if failure.kind is FailureKind.USER_CODE:
        name = clipped(last_part(failure.type_name)) or "error"
        where = [f"on rank {failure.rank}" if failure.rank is not None else "", clipped(failure.host)]
        lines = [_line(f"{name} {' · '.join(filter(None, where))}".rstrip(), "title")]
        excerpt = excerpt_of(failure, source_of(view.spec))
        lines += [_line(line, _kind(line)) for line in excerpt.code]
        lines += [_line(line, "text" if at else "error") for at, line in enumerate(excerpt.message)]
        whole = [] if excerpt.is_whole else traceback_body(failure) or failure.message.split("\n")
    else:
        sentence = failure_sentence(view) if view.is_final else death_sentence(failure, view.ranks)
        (title, *rest), is_all = beginning(sentence.split("\n"))
        lines = [_line(title, "title"), *(_line(line, "text") for line in rest)]
        lines += _place_of_death(view, failure) if view.is_final else []
        body = traceback_body(failure)
        whole = [*([] if is_all else [*sentence.split("\n"), ""]), *body]
    lines += [_line(line, "text") for line in cut_lines(ending_stacks(view), most_chars)]
    return FailureBlock(
        rank=failure.rank,
        lines=tuple(lines),
        whole=tuple(_line(line, _kind(ansi.plain(line))) for line in cut_lines(whole, most_whole_chars)),
        memory=memory_block(view, failure),
    )


def _place_of_death(view: RunView, failure: Failure) -> list[FailureLine]:
    """Return the last line that a dead rank executed, with the lines around it, and its last output."""
    words = last_words(view, failure)
    context = line_of_cell(failure, source_of(view.spec)) if failure.rank is not None else []
    lines: list[FailureLine] = []
    if context:
        at, *code = context
        has_said_place = bool(words) and words[0].startswith(_LAST_LINE)
        lines = [_line(f"{_LAST_LINE}: {at}" if has_said_place else at, "text")]
        lines += [_line(clipped(line), _kind(line)) for line in code]
        words = words[1:] if has_said_place else words
    return [*lines, *(_line(clipped(word), "text") for word in words)]


def place(failure: Failure, ranks: int) -> str:
    """Return `rank 1 of 4 (this machine)`, "" for a failure without a rank."""
    if failure.rank is None:
        return ""
    here = "this machine" if failure.host.split(".")[0] == host_name() else failure.host
    return f"rank {failure.rank} of {ranks}" + (f" ({here})" if here else "")


def _kind(line: str) -> _LineKind:
    if line.startswith("--"):
        return "culprit"
    name, colon, _ = line.partition(":")
    if colon and name and name[0].isalpha() and name.replace(".", "").replace("_", "").isalnum():
        return "error"
    return "code"


def _line(text: str, kind: _LineKind) -> FailureLine:
    return FailureLine(text=ansi.plain(text), kind=kind)


def stall_lines(view: RunView, *, has_buttons: bool = False) -> list[str]:
    """Return where the ranks of a stalled run wait; empty for a run that makes progress.

    Args:
        view: The run.
        has_buttons: The view has the run's buttons; otherwise a command is named that works while the kernel is busy.
    """
    if view.stalled is None or view.is_final or view.left:
        return []
    stacks, cell = view.stalled.stacks, view.spec.cell
    groups = [f"  {ansi.plain(line)}" for line in group_lines(group_stacks(stacks, cell))]
    everything = "the Stacks button" if has_buttons else f"`sgpu stacks {view.short_id}`"
    told = [*map(ansi.plain, verdict(stacks, cell)), f"{everything} shows everything"]
    return [f"no progress for {format_seconds(view.stalled.seconds)}{taken(stacks)}", *groups, " · ".join(told)]


def ending_stacks(view: RunView) -> list[str]:
    """Return where the ranks were when the run ended: several lines after a limit, one line after a stall."""
    if view.ended is None:
        return []
    if view.ended.stacks:
        return [limit_of(view.failure).then, *summary(view.ended.stacks, view.spec.cell)]
    return [] if view.stalled is None else [stall_note(view.stalled, view.spec.cell)]


def failure_lines(view: RunView) -> list[str]:
    """Return the culprit with its whole traceback and the other ranks in single lines, without the run's id."""
    lines = [failed_line(view)]
    failure = view.failure
    if failure is not None:
        frames, message = split_traceback(failure)
        if frames or message:
            lines.extend(cut_lines(_bounded(frames), _MAX_TRACEBACK_CHARS))
            lines.extend(cut_lines(_bounded(message), _MAX_TRACEBACK_CHARS))
        elif failure.kind is FailureKind.USER_CODE:
            lines.append(error_line(failure))
        elif failure.kind is FailureKind.WORKER_DIED:
            lines.extend(last_words(view, failure))
        lines.extend(memory_lines(view, failure))
    lines.extend(ending_stacks(view))
    lines.extend(ends_of_others(view, _MAX_OTHERS))
    return lines


def ends_of_others(view: RunView, most: int) -> list[str]:
    """Return at most `most` lines about how the other ranks ended, and how many are left out."""
    lines = other_lines(view.others, view.failure.rank if view.failure else None)
    rest = len(lines) - most
    return [*lines[:most], f"... and {rest:,} more: sgpu logs {view.short_id}"] if rest > 0 else lines


def last_words(view: RunView, failure: Failure) -> list[str]:
    """Return the last Python line and output of a rank that died without a traceback, unless its message has them."""
    if failure.rank is None:
        return []
    told: list[str] = []
    cell, last_line = view.spec.cell, ansi.plain(view.output.last_lines.get(failure.rank, "")).strip()
    if "last Python line" not in failure.message:
        frames = failure.stack
        if not frames and failure.line is not None:
            file = cell.file or f"<ipython-input-{cell.execution_count or 0}->"
            frames = (StackFrame(file, failure.line, failure.where),)
        at = last_python_line(frames, cell)
        told += [f"{_LAST_LINE}: {at}"] if at else []
    if last_line and "last output" not in failure.message:
        told.append(f"its last output: {last_line}")
    return told


def failed_line(view: RunView, brief: bool = False) -> str:
    """Return the first line of a failure, with the error in it when `brief` or when there is no traceback."""
    # a refused run has no duration
    after = f" after {duration}" if (duration := view.times.text()) else ""
    failure = view.failure
    word = limit_of(failure).word if view.state is RunState.TIMED_OUT else view.state
    start = f"{view.name} · {word}{after}"
    if view.state is RunState.CANCELLED or failure is None:
        return f"{start} · {view.reason}" if view.reason else start
    if failure.kind is FailureKind.USER_CODE:
        where = place(failure, view.ranks)
        return " · ".join(part for part in (start, where, error_line(failure) if brief else "") if part)
    sentence = failure_sentence(view)
    return f"{start} · {sentence.split(chr(10), 1)[0] if brief else sentence}"


def failure_sentence(view: RunView) -> str:
    """Return why a run ended, for a failure without a traceback of the user's code."""
    failure = view.failure
    if failure is None:
        return ""
    if failure.kind is FailureKind.TIMEOUT:
        return failure.message.strip() or timeout_sentence(view.spec.timeout_s)
    return death_sentence(failure, view.ranks)


def _bounded(lines: list[str]) -> list[str]:
    if len(lines) <= _MAX_TRACEBACK_LINES:
        return lines
    half = _MAX_TRACEBACK_LINES // 2
    left_out = len(lines) - 2 * half
    return [*lines[:half], f"... {left_out:,} lines of the traceback ...", *lines[-half:]]


# ---------------------------------------------------------------- memory

_MAX_RANKS = 16
_MAX_TENSORS = 10
_MAX_NAME = 80
_BAR_CHARS = 20
_BAR = "█▓▒░"


def memory_block(view: RunView, failure: Failure | None) -> MemoryBlock | None:
    """Return what held the memory; None for other failures than out of memory, or when it was not recorded.

    Args:
        view: The run.
        failure: Its root cause, or a rank's failure while the run is still stopping.
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
    return MemoryBlock(
        title="memory when it failed",
        heads=("rank", "device", "used", "reserved", "free", "total"),
        rows=tuple(_row(rank, told[rank], rank == failure.rank) for rank in ranks[:_MAX_RANKS]),
        tensors=tuple(map(_tensor, largest[:_MAX_TENSORS])),
        largest=f"largest tensors of rank {failure.rank}" if largest else "",
        more=f"and {count_of(left_out, 'more rank')}" if left_out > 0 else "",
    )


def memory_lines(view: RunView, failure: Failure | None) -> list[str]:
    """Return `memory_block` as text, with a bar: held by tensors, cached by torch, held by others, free."""
    block = memory_block(view, failure)
    if block is None:
        return []
    rows = [(f"{row.rank}", *row.cells, _bar(row.shares)) for row in block.rows]
    lines = [f"{block.title}:", *_indented(aligned([(*block.heads, ""), *rows], right=(2, 3, 4, 5)))]
    lines += [f"  {block.more}"] if block.more else []
    if block.tensors:
        tensors = [(tensor.name, *tensor.cells) for tensor in block.tensors]
        lines += [f"{block.largest}:", *_indented(aligned(tensors, right=(3,)))]
    return lines


def _row(rank: int, memory: RankMemory, culprit: bool) -> MemoryCard:
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
    return MemoryCard(rank=rank, cells=(device, *words), shares=tuple(shares), culprit=culprit)


def _tensor(use: TensorUse) -> MemoryTensor:
    name = ansi.plain(use.name) or "(unnamed)"
    name = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]} ..."
    shape = f"({', '.join(map(str, use.shape))}{',' if len(use.shape) == 1 else ''})"
    cells = (shape[:_MAX_NAME], ansi.plain(use.dtype)[:_MAX_NAME], format_bytes(use.size_bytes))
    return MemoryTensor(name=name, cells=cells)


def _bar(shares: Sequence[float]) -> str:
    drawn = ""
    told = 0.0
    for share, mark in zip(shares, _BAR, strict=False):
        told += share
        drawn += mark * (round(told * _BAR_CHARS) - len(drawn))
    return drawn + _BAR[-1] * (_BAR_CHARS - len(drawn))


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
