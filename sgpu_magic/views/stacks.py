"""Stacks of the ranks: grouped by what ranks are doing, and which ranks have not reached a collective."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.formatting import ends, format_ranks, format_seconds
from sgpu_magic.views import ansi
from sgpu_magic.views.html_style import BOX, LINE, MONO, PANEL, PRE, SOFT, WARN, safe, sentences
from sgpu_magic.views.run_notes import limit_of
from sgpu_magic.views.tracebacks import NO_FUNCTION, Sources, caller_at, cut_lines
from sgpu_magic.views.units import aligned
from sgpu_magic.wire.base import RunState, short
from sgpu_magic.wire.rank_events import Collective, Failure, RankStack, StackFrame, Stalled
from sgpu_magic.wire.run import CellSource

if TYPE_CHECKING:
    from sgpu_magic.views.fold import RunView

# functions of torch.distributed that block until the other ranks call them too
_MEETINGS = re.compile(
    r"(monitored_)?barrier|(all_)?reduce(_coalesced)?|broadcast(_object_list)?|(all_)?gather(_object|_into_tensor)?|"
    r"scatter(_object_list)?|reduce_scatter(_tensor)?|all_to_all(_single)?|send|recv|(send|recv)_object_list|"
    r"init_process_group|new_group"
)
_MAX_FRAMES = 60
_MAX_STALL_CHARS = 8_000
_MAX_GROUPS = 16


class Activity(msgspec.Struct, frozen=True):
    """What a rank is doing.

    Args:
        name: Such as `all_reduce #41` or `load_batch`; "" when its stack is not available.
        waits: It waits in a collective.
        collective: The flight recorder's entry of it; None when it was inferred from the stack.
        frame: The notebook's innermost frame, else that of the called function's file, else the innermost of all.
    """

    name: str
    waits: bool = False
    collective: Collective | None = None
    frame: StackFrame | None = None


class StackGroup(msgspec.Struct, frozen=True):
    """Ranks that are at the same point.

    Args:
        ranks: The ranks in ascending order.
        activity: What they are doing.
        location: Such as `Cell In[7], line 15`; "" when unknown.
        source: The notebook's source line there.
        whole: The first rank's stack as a traceback, the most recent call last, or why there is none.
        problem: Why there is no stack; None if there is one.
    """

    ranks: tuple[int, ...]
    activity: Activity
    location: str
    source: str
    whole: Sequence[str]
    problem: str | None = None

    @property
    def doing(self) -> str:
        """Return `wait in all_reduce #41`, `is in load_batch`."""
        if not self.activity.name:
            return "can't be inspected" if self.problem else "have no Python stack"
        one, several = ("waits", "wait") if self.activity.waits else ("is", "are")
        return f"{one if len(self.ranks) == 1 else several} in {self.activity.name}"


def activity_of(stack: RankStack, sources: Sources) -> Activity:
    """Return what a rank is doing.

    A pending collective in the flight recorder takes precedence while the rank is in torch or the collective is queued
    on a device: it is also right when a thread of autograd is in it, which the main thread's stack does not show. A
    rank that has called a collective of gloo asynchronously, and executes other code, does not wait. Next comes the
    outermost torch function called by the notebook's innermost line, then the innermost function of the notebook's own
    code.
    """
    frames = stack.frames
    at = next((at for at, frame in enumerate(frames) if sources.is_notebook(frame)), None)
    caller = caller_at(frames)
    if at is not None and 0 < caller < at:
        # the innermost notebook frame only calls into a file: use the innermost frame of that file
        at = next(at for at, frame in enumerate(frames) if frame.file == frames[caller - 1].file)
    frame = frames[at or 0] if frames else None
    collective = stack.collective
    called = list(reversed(frames[:at])) if at is not None else []
    in_torch = not frames or any(map(_is_torch, called))
    if collective is not None and collective.pending and (collective.queued or in_torch):
        return Activity(collective.label, True, collective, frame)
    if frame is None:
        return Activity("")
    torch_function = next((each.function.strip("_") for each in called if _is_torch(each)), "")
    if torch_function:
        return Activity(torch_function, _MEETINGS.fullmatch(torch_function) is not None, None, frame)
    # at the cell's top level name the function that it called
    own = next((each.function for each in called), "the cell") if frame.function in NO_FUNCTION else frame.function
    return Activity(own, frame=frame)


def group_stacks(stacks: Iterable[RankStack], cell: CellSource) -> list[StackGroup]:
    """Group ranks that are at the same point: the same activity and the same lines of the notebook.

    Args:
        stacks: One for each rank.
        cell: The run's cell.

    Returns:
        The largest group first, then by rank.
    """
    sources = Sources(cell)
    found: dict[object, list[tuple[RankStack, Activity]]] = {}
    for stack in sorted(stacks, key=lambda stack: stack.rank):
        activity = activity_of(stack, sources)
        lines = tuple(frame for frame in stack.frames if sources.is_notebook(frame)) or stack.frames
        found.setdefault((activity, lines, stack.problem), []).append((stack, activity))
    groups: list[StackGroup] = []
    for members in found.values():
        (first, activity), ranks = members[0], tuple(stack.rank for stack, _ in members)
        frame = activity.frame
        location, source = (
            (first.problem or "", "") if frame is None else (sources.location(frame), sources.source(frame))
        )
        whole = stack_lines(first.frames, cell) or [first.problem or "no Python stack"]
        groups.append(StackGroup(ranks, activity, location, source, whole, first.problem))
    return sorted(groups, key=lambda group: (-len(group.ranks), group.ranks))


def group_lines(groups: Sequence[StackGroup]) -> list[str]:
    """Return a line for each of the first groups, in columns, and one for the ranks of all others."""
    listed = groups[:_MAX_GROUPS]
    lines = aligned([(format_ranks(group.ranks), group.doing, group.location, group.source) for group in listed])
    return lines + _others_line(groups)


def _others_line(groups: Sequence[StackGroup]) -> list[str]:
    """Return the line about the ranks of all groups that are left out, if there are any."""
    left_out = [rank for group in groups[_MAX_GROUPS:] for rank in group.ranks]
    return [f"{format_ranks(left_out)} elsewhere"] if left_out else []


def group_sentences(stacks: Sequence[RankStack], cell: CellSource) -> list[str]:
    """Return the lines of `group_lines` as `ranks 1, 2 wait in barrier #2 (Cell In[7], line 6: dist.barrier())`."""
    groups = group_stacks(stacks, cell)
    found: list[str] = []
    for group in groups[:_MAX_GROUPS]:
        at = ": ".join(filter(None, (group.location, group.source)))
        found.append(f"{format_ranks(group.ranks)} {group.doing}" + (f" ({at})" if at else ""))
    return found + _others_line(groups)


def verdict(stacks: Sequence[RankStack], cell: CellSource) -> list[str]:
    """Return which ranks have not reached a collective that others wait in; empty without recorder entries."""
    sources = Sources(cell)
    waiting: dict[tuple[str, int], dict[str, list[int]]] = {}
    for stack in stacks:
        entry = stack.collective
        if entry is not None and entry.pending and activity_of(stack, sources).waits:
            waiting.setdefault((entry.group, entry.seq), {}).setdefault(entry.label, []).append(stack.rank)
    found: list[str] = []
    for (group, number), names in sorted(waiting.items()):
        name, ranks = next(iter(names.items()))
        absent = [stack.rank for stack in stacks if _has_not_come(stack, group, number, name, sources)]
        if len(names) > 1:
            parts = [f"{format_ranks(ranks)} in {name}" for name, ranks in sorted(names.items())]
            found.append(f"{', '.join(parts)}: they wait for each other, because their collectives differ")
        elif absent:
            verb = "has" if len(absent) == 1 else "have"
            found.append(f"{format_ranks(absent)} {verb} not reached {name}")
        elif len(ranks) == len(stacks) > 1:
            found.append(f"all ranks are in {name}")
    return found


def hang_heading(failure: Failure, stacks: Sequence[RankStack], cell: CellSource) -> str:
    """Return `rank 1 has not reached all_reduce #7: ` for a failure in a collective that timed out, else ""."""
    found = [] if failure.collective_timeout is None else verdict(stacks, cell)
    return f"{found[0]}: " if found else ""


def stack_lines(frames: Sequence[StackFrame], cell: CellSource) -> list[str]:
    """Return a stack as in a traceback, the most recent call last, starting at the notebook's first line."""
    sources = Sources(cell)
    entries = [sources.entry(frame) for frame in reversed(sources.own_frames(frames))]
    # the beginning and the end of a recursion are enough
    left_out = [f"... {len(entries) - _MAX_FRAMES:,} more frames ..."]
    return [line for entry in ends(entries, _MAX_FRAMES, left_out) for line in entry]


def last_python_line(frames: Sequence[StackFrame], cell: CellSource) -> str:
    """Return `Cell In[9], line 6, in build: cache[key] = x.clone()`, "" without a stack."""
    sources = Sources(cell)
    frame = next((frame for frame in frames if sources.is_notebook(frame)), frames[0] if frames else None)
    if frame is None:
        return ""
    where = "" if frame.function in NO_FUNCTION else f", in {frame.function}"
    source = sources.source(frame)
    return f"{sources.location(frame)}{where}" + (f": {source}" if source else "")


def stall_note(stalled: Stalled, cell: CellSource) -> str:
    """Return the sentence that keeps a stall after it is over."""
    where = "; ".join([*verdict(stalled.stacks, cell), *group_sentences(stalled.stacks, cell)])
    return ansi.plain(
        f"there was no progress for {format_seconds(stalled.seconds)}{taken_at_text(stalled.stacks)}: {where}"
    )


def cancelled_note(stacks: Sequence[RankStack], cell: CellSource) -> str:
    """Return where the ranks of a cancelled run waited for each other, "" if none was in a collective."""
    sources = Sources(cell)
    if not any(activity_of(stack, sources).waits for stack in stacks):
        return ""
    where = "; ".join([*verdict(stacks, cell), *group_sentences(stacks, cell)])
    return ansi.plain(f"when it was cancelled{taken_at_text(stacks)}: {where}")


def taken_at_text(stacks: Sequence[RankStack]) -> str:
    """Return when stacks were taken, as ` (at 14:03:12)`; "" if it is not known."""
    at = max((stack.taken_at for stack in stacks), default=0.0)
    return time.strftime(" (at %H:%M:%S)", time.localtime(at)) if at else ""


def summary(stacks: Sequence[RankStack], cell: CellSource) -> list[str]:
    """Return the groups and the verdict, as in the view of a stalled run."""
    groups = [f"  {line}" for line in group_lines(group_stacks(stacks, cell))]
    return [ansi.plain(line) for line in (*groups, *verdict(stacks, cell))]


def stacks_text(run_id: str, stacks: Sequence[RankStack], cell: CellSource) -> str:
    """Return what `%sgpu_stacks` prints: the groups, the verdict, then each group's whole stack."""
    groups = group_stacks(stacks, cell)
    if not groups:
        return f"run {short(run_id)} has no ranks now"
    lines = [f"run {short(run_id)}{taken_at_text(stacks)}", *summary(stacks, cell)]
    for group in groups:
        lines += ["", f"{format_ranks(group.ranks)} {group.doing}"]
        lines += [f"  {line}" for line in group.whole]
    return "\n".join(ansi.plain(line) for line in lines)


def stacks_html(run_id: str, stacks: Sequence[RankStack], cell: CellSource) -> str:
    """Return the same as HTML: one line for each group, which expands to its whole stack."""
    groups = group_stacks(stacks, cell)
    rows = ""
    for group in groups:
        rows += (
            f'<details style="padding:3px 12px"><summary style="cursor:pointer">'
            f'<b style="font-weight:600">{safe(format_ranks(group.ranks))}</b> {safe(group.doing)} '
            f'<span style="{SOFT}">{safe(group.location)}</span> '
            f'<code style="{MONO};font-size:12px;background:none">{safe(group.source)}</code></summary>'
            f'<pre style="margin:0;padding:4px 0 4px 14px;{MONO};font-size:12px;white-space:pre-wrap">'
            f"{safe(chr(10).join(group.whole))}</pre></details>"
        )
    rows += sentences(verdict(stacks, cell), f"color:{WARN}")
    head = f"run {short(run_id)}" + (taken_at_text(stacks) if groups else " has no ranks now")
    return (
        f'<div style="{BOX}"><div style="padding:6px 12px;background:{PANEL};'
        f'border-bottom:1px solid {LINE}"><b style="font-weight:600">{safe(head)}</b></div>{rows}</div>'
    )


# ---------------------------------------------------------------- in the view of a run


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
    text = " · ".join([*map(ansi.plain, verdict(stacks, cell)), f"{everything} shows everything"])
    return [f"no progress for {format_seconds(view.stalled.seconds)}{taken_at_text(stacks)}", *groups, text]


def ending_stacks(view: RunView) -> list[str]:
    """Return where the ranks were when the run ended: several lines after a limit, one line after a stall or cancel."""
    if view.ended is None:
        return []
    if view.ended.state is RunState.CANCELLED:
        return [note] if (note := cancelled_note(view.ended.stacks, view.spec.cell)) else []
    if view.ended.stacks:
        return [limit_of(view.failure, view.ended.limit).then, *summary(view.ended.stacks, view.spec.cell)]
    return [] if view.stalled is None else [stall_note(view.stalled, view.spec.cell)]


def stall_html(view: RunView) -> str:
    """Return where the ranks of a stalled run wait, "" for a run that makes progress."""
    lines = [escape(line, quote=False) for line in cut_lines(stall_lines(view), _MAX_STALL_CHARS)]
    if not lines:
        return ""
    text = "\n".join([f'<b style="font-weight:600;color:{WARN}">{lines[0]}</b>', *lines[1:]])
    return (
        f'<div style="border-bottom:1px solid {LINE};border-left:3px solid {WARN}">'
        f'<pre style="{PRE};padding-left:9px">{text}</pre></div>'
    )


def _is_torch(frame: StackFrame) -> bool:
    # exclude torch's logging and gradient-mode wrappers, which users do not call
    return f"{os.sep}torch{os.sep}" in frame.file and frame.function not in ("wrapper", "decorate_context")


def _has_not_come(stack: RankStack, group: str, number: int, name: str, sources: Sources) -> bool:
    entry = stack.collective
    if entry is not None and entry.group == group:
        return entry.seq < number
    # the members of other groups than the default one are unknown
    is_unknown = bool(group or stack.problem)
    return not is_unknown and activity_of(stack, sources).name != name.partition(" ")[0]
