"""The text forms: for terminals, headless runs, and the text/plain of every saved output."""

from __future__ import annotations

from collections.abc import Iterable

from sgpu_magic.protocol.records import Lease, Payload
from sgpu_magic.protocol.states import FailureKind, RunState
from sgpu_magic.render import ansi
from sgpu_magic.render.failure import (
    cell_excerpt,
    death_sentence,
    error_line,
    last_words,
    other_lines,
    place,
    timeout_sentence,
    traceback_body,
)
from sgpu_magic.render.items import (
    HEAD_SHARE,
    DisplayItem,
    GapItem,
    LineItem,
    display_text,
    gap_lines,
    line_bytes,
    trim,
)
from sgpu_magic.render.measured import busy_text, idle_sentences
from sgpu_magic.render.segments import TextSegment, segments
from sgpu_magic.render.stacks import group_lines, group_stacks, summary, verdict
from sgpu_magic.render.units import TIMES, count_of, format_bytes, format_seconds
from sgpu_magic.render.view import RunView

__all__ = [
    "attempt_text",
    "backend",
    "culprits_last_words",
    "device_text",
    "device_words",
    "display_lines",
    "ending_stacks",
    "error_line",
    "failure_lines",
    "failure_sentence",
    "format_bytes",
    "format_seconds",
    "header_line",
    "live_line",
    "render_segment_text",
    "render_text",
    "returned_bytes",
    "returned_text",
    "shipped_text",
    "stall_lines",
    "summary_line",
]

_MAX_TRACEBACK_LINES = 400


def render_text(view: RunView) -> str:
    """Return the whole run as text: header, lines with their ranks, summary or failure."""
    parts = segments(view)
    drawn: list[str] = []
    for at, part in enumerate(parts):
        if isinstance(part, DisplayItem):
            drawn.append(display_lines(part))
        else:
            drawn.append(render_segment_text(view, part, at == 0, at == len(parts) - 1))
    return "\n".join(text for text in drawn if text)


def render_segment_text(view: RunView, segment: TextSegment, first: bool, last: bool, limit: int | None = None) -> str:
    """Return one segment: the first has the header and the notes, the last the summary.

    Args:
        view: The run.
        segment: One of `segments(view)`.
        first: It is the first of them.
        last: It is the last of them.
        limit: Bytes allowed for a live form, which shows the newest lines.
    """
    lines: list[str] = []
    if first:
        lines.append(header_line(view))
        idle = idle_sentences(view.usage) if view.is_final else view.usage.idle_sentences
        lines.extend(f"note: {note}" for note in [*view.notes, *idle])
    items = segment.items
    sizes = [line_bytes(item.text) if isinstance(item, LineItem) else 0 for item in items]
    bound, head_share = (view.output_limit, HEAD_SHARE) if limit is None else (limit, 0.0)
    for item in trim(items, sizes, bound, head_share):
        if isinstance(item, GapItem):
            lines.extend(gap_lines(item, view.short_id))
        elif isinstance(item, LineItem):
            lines.append(f"[{item.rank}] {ansi.plain(item.text)}")
    if last:
        lines.extend(_ending(view))
    return "\n".join(lines)


def header_line(view: RunView) -> str:
    """Return `train_digits · 4 ranks on local (cpu, gloo) · shipped model (45.1 MB in 38 ms)`."""
    ranks = count_of(view.ranks, "rank")
    if view.lease is None:
        where = f"{ranks} on {view.pool}"
    else:
        device = device_text(view.lease)
        joint = f", {device}" if view.lease.simulated else f" ({device}"
        where = f"{ranks} on {view.pool}{joint}, {backend(view.lease)}{'' if view.lease.simulated else ')'}"
    parts = [view.name, where, attempt_text(view), shipped_text(view)]
    return " · ".join(part for part in parts if part)


def backend(lease: Lease) -> str:
    """Return the process group's backend: `nccl` on real GPUs, else `gloo`."""
    return "gloo" if lease.simulated or lease.device_type == "cpu" else "nccl"


def device_words(view: RunView) -> str:
    """Return `4 ranks · cpu, gloo` or `4 x A10, nccl`, and that they are simulated: the header's words."""
    lease = view.lease
    if lease is None:
        return count_of(view.ranks, "rank")
    if lease.device_type == "cpu":
        return f"{count_of(view.ranks, 'rank')} · cpu, {backend(lease)}"
    simulated = " (simulated on cpu)" if lease.simulated else ""
    return f"{lease.ranks} {TIMES} {lease.device_type.upper()}{simulated}, {backend(lease)}"


def device_text(lease: Lease) -> str:
    """Return `cpu`, `4 x a10` or `4 x a10 (simulated on cpu)`."""
    if lease.device_type == "cpu":
        return "cpu"
    return f"{lease.ranks} x {lease.device_type}" + (" (simulated on cpu)" if lease.simulated else "")


def shipped_text(view: RunView) -> str:
    """Return `shipped model, loader, cfg (45.1 MB in 38 ms)`, "" when nothing was."""
    shipped = view.spec.shipped
    if not shipped.names:
        return ""
    cost = f"{format_bytes(shipped.total_bytes)} in {format_seconds(shipped.seconds)}"
    return f"shipped {_names(shipped.names)} ({cost})"


def returned_text(view: RunView) -> str:
    """Return `returned history (1.2 kB)`, "" when nothing was asked for."""
    outputs = view.spec.outputs
    if view.state is not RunState.SUCCEEDED or not outputs:
        return ""
    return f"returned {_names([name.name for name in outputs])} ({format_bytes(returned_bytes(view))})"


def returned_bytes(view: RunView) -> int:
    """Return the bytes of what was brought back: rank 0's, or every rank's when one name is asked of all."""
    everywhere = any(name.all_ranks for name in view.spec.outputs)
    payloads = [result.payload for result in view.results if everywhere or result.rank == 0]
    return sum(_payload_bytes(payload) for payload in payloads if payload is not None)


def summary_line(view: RunView) -> str:
    """Return the run's last line, or where it stands while it goes on."""
    if not view.is_final:
        return live_line(view)
    run = f"run {view.short_id}"
    duration = format_seconds(view.elapsed_s())
    if view.state is RunState.SUCCEEDED:
        parts = (f"succeeded in {duration}", busy_text(view.usage), returned_text(view), run)
        return " · ".join(part for part in parts if part)
    return f"{_failed_line(view, brief=True)} · {run}"


def live_line(view: RunView) -> str:
    """Return one line about a run that goes on: its place in the queue, or its state and time."""
    if view.left:
        return view.left
    run = f"run {view.short_id}"
    if view.state is RunState.QUEUED:
        position = f", position {view.position}" if view.position else ""
        return " · ".join(part for part in (f"queued{position}", view.waiting_for or view.reason, run) if part)
    elapsed = view.elapsed_s()
    since = f" for {format_seconds(elapsed)}" if elapsed else ""
    return " · ".join(part for part in (f"{view.state}{since}", attempt_text(view), view.reason, run) if part)


def attempt_text(view: RunView) -> str:
    """Return `attempt 2 of 3`, "" for the first."""
    return f"attempt {view.attempt} of {view.attempts}" if view.attempt > 1 else ""


def stall_lines(view: RunView) -> list[str]:
    """Return where the ranks of a run wait in which nothing moves; empty while it moves."""
    if view.stalled is None or view.is_final or view.left:
        return []
    stacks, cell = view.stalled.stacks, view.spec.cell
    groups = [f"  {ansi.plain(line)}" for line in group_lines(group_stacks(stacks, cell))]
    told = [*map(ansi.plain, verdict(stacks, cell)), "%sgpu_stacks shows everything", f"run {view.short_id}"]
    return [f"no progress for {format_seconds(view.stalled.seconds)}", *groups, " · ".join(told)]


def ending_stacks(view: RunView) -> list[str]:
    """Return where the ranks were when the run ended: all of it when its time was over, a line when it had stalled."""
    if view.ended is None:
        return []
    if view.ended.stacks:
        return ["when its time was over:", *summary(view.ended.stacks, view.spec.cell)]
    if view.stalled is None:
        return []
    groups = "; ".join(
        " ".join(line.split()) for line in group_lines(group_stacks(view.stalled.stacks, view.spec.cell))
    )
    return [ansi.plain(f"nothing had moved for {format_seconds(view.stalled.seconds)}: {groups}")]


def failure_lines(view: RunView, whole: bool = True) -> list[str]:
    """Return the culprit with its own lines and the others in a line each, without the run's id.

    Args:
        view: A run that has ended badly.
        whole: All frames of the traceback, else the cell's own.
    """
    lines = [_failed_line(view)]
    failure = view.failure
    if failure is not None:
        body, left_out = cell_excerpt(failure)
        if whole and left_out:
            body = traceback_body(failure)
        if body:
            lines.extend(_bounded(body))
        elif failure.kind is FailureKind.USER_CODE:
            lines.append(error_line(failure))
        elif failure.kind is FailureKind.WORKER_DIED:
            lines.extend(culprits_last_words(view))
    lines.extend(ending_stacks(view))
    lines.extend(other_lines(view.others, failure.rank if failure else None))
    return lines


def culprits_last_words(view: RunView) -> list[str]:
    """Return the last Python line and the last output of a rank that died without a traceback."""
    failure = view.failure
    if failure is None or failure.rank is None:
        return []
    return last_words(failure, view.spec.cell, ansi.plain(view.last_lines.get(failure.rank, "")))


def display_lines(item: DisplayItem) -> str:
    """Return a display's text with its rank before every line."""
    return "\n".join(f"[{item.rank}] {ansi.plain(line)}" for line in display_text(item).split("\n"))


def _ending(view: RunView) -> list[str]:
    if not view.is_final:
        live = [f"[{rank}] {ansi.plain(text)}" for rank, text in view.live_lines.items()]
        return [*live, *stall_lines(view), summary_line(view)]
    problems = [
        f"rank {result.rank}: the last expression's value stayed there: {result.value_problem}"
        for result in view.results
        if result.value_problem
    ]
    if view.state is RunState.SUCCEEDED or view.failure is None:
        return [*problems, summary_line(view)]
    lines = failure_lines(view)
    if len(lines) == 1 or other_lines(view.others, view.failure.rank)[-1:] == lines[-1:]:
        lines[-1] += f" · run {view.short_id}"
    else:
        lines.append(f"run {view.short_id}")
    return lines


def _failed_line(view: RunView, brief: bool = False) -> str:
    """Return the first line of a failure, with the error in it when `brief` or when there is no traceback."""
    duration = format_seconds(view.elapsed_s())
    start = f"{view.name} · {view.state} after {duration}"
    failure = view.failure
    if view.state is RunState.CANCELLED or failure is None:
        return f"{start} · {view.reason}" if view.reason else start
    if failure.kind is FailureKind.USER_CODE:
        where = place(failure, view.ranks)
        return " · ".join(part for part in (start, where, error_line(failure) if brief else "") if part)
    sentence = failure_sentence(view)
    return f"{start} · {sentence.split(chr(10), 1)[0] if brief else sentence}"


def failure_sentence(view: RunView) -> str:
    """Return why a run whose failure has no traceback of the user's code ended."""
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


def _names(names: Iterable[str], most: int = 8) -> str:
    listed = list(names)
    if len(listed) <= most:
        return ", ".join(listed)
    return f"{', '.join(listed[:most])} and {len(listed) - most} more"


def _payload_bytes(payload: Payload) -> int:
    return payload.layout.pickle_size + sum(size for _, size in payload.layout.buffers)
