"""Stacks of the ranks: grouped by what ranks are doing, and which ranks have not reached a collective."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence

import msgspec

from sgpu_magic.views import ansi
from sgpu_magic.views.html_style import BOX, LINE, MONO, PANEL, SOFT, WARN, safe
from sgpu_magic.views.units import aligned, format_ranks, format_seconds
from sgpu_magic.wire.failures import Collective, RankStack, StackFrame
from sgpu_magic.wire.rank_events import Stalled
from sgpu_magic.wire.record import short
from sgpu_magic.wire.run import CellSource

_CELL_FILE = re.compile(r"<ipython-input-(\d+)-")
# names of code outside functions: a module or a cell
_NO_FUNCTION = ("<module>", "<cell line: 0>", "")
# functions of torch.distributed that return when the other ranks have called them too
_MEETINGS = re.compile(
    r"(monitored_)?barrier|(all_)?reduce(_coalesced)?|broadcast(_object_list)?|(all_)?gather(_object|_into_tensor)?|"
    r"scatter(_object_list)?|reduce_scatter(_tensor)?|all_to_all(_single)?|send|recv|(send|recv)_object_list|"
    r"init_process_group|new_group"
)
_MAX_SOURCE = 80
# width of a line number with its arrow
_NUMBER_CHARS = 7
_MAX_FRAMES = 60
_MAX_GROUPS = 16


class Sources:
    """Maps frames of a stack to the notebook's lines.

    Args:
        cell: The run's cell, with the sources of other cells whose functions were shipped.
    """

    def __init__(self, cell: CellSource) -> None:
        self._number = cell.execution_count
        # line numbers as in a rank: the magic's line comes first, unless the body starts with another magic
        inner = cell.body.lstrip().startswith("%%")
        above = [] if inner or not cell.magic_line else [cell.magic_line]
        self._cell = [*above, *cell.body.splitlines()]
        self._others = {name: (source.splitlines(), number) for name, source, number in cell.linecache}
        self._script = cell.file or None

    def is_notebook(self, frame: StackFrame) -> bool:
        return frame.file in self._others or self._is_own(frame)

    def _is_own(self, frame: StackFrame) -> bool:
        return frame.file == self._script or _CELL_FILE.match(frame.file) is not None

    def place(self, frame: StackFrame) -> str:
        """Return `Cell In[7], line 15`, or the file's name and the line."""
        return f"{self._file(frame, os.path.basename(frame.file))}, line {frame.line}"

    def source(self, frame: StackFrame) -> str:
        """Return the notebook's line without its indent, "" for other files."""
        lines = self._lines(frame)
        text = lines[frame.line - 1].strip() if 0 < frame.line <= len(lines) else ""
        return text if len(text) <= _MAX_SOURCE else f"{text[:_MAX_SOURCE]} ..."

    def context(self, frame: StackFrame, around: int = 2) -> list[str]:
        """Return a frame in the notebook as IPython's tracebacks have it: its place, its line and those around it.

        Args:
            frame: The frame.
            around: The number of lines before and after it.

        Returns:
            The lines; empty for other files.
        """
        lines = self._lines(frame)
        if not 0 < frame.line <= len(lines):
            return []
        drawn = self.entry(frame)[:1]
        for number in range(max(frame.line - around, 1), min(frame.line + around, len(lines)) + 1):
            digits = f"{number}"
            mark = f"{'-' * (_NUMBER_CHARS - 2 - len(digits))}> {digits}" if number == frame.line else digits
            drawn.append(f"{mark:>{_NUMBER_CHARS}} {lines[number - 1]}".rstrip())
        return drawn

    def entry(self, frame: StackFrame) -> list[str]:
        """Return a frame as in a traceback: its place, and its source line if it is in the notebook."""
        where = "" if frame.function in _NO_FUNCTION else f", in {frame.function}"
        source = self.source(frame)
        head = f"{self._file(frame, f'File {frame.file}')}, line {frame.line}{where}"
        return [head, f"  {source}"] if source else [head]

    def own_frames(self, frames: Sequence[StackFrame]) -> Sequence[StackFrame]:
        """Return the frames without those that started the cell; innermost first."""
        outermost = max((at for at, frame in enumerate(frames) if self.is_notebook(frame)), default=len(frames) - 1)
        return frames[: outermost + 1]

    def _lines(self, frame: StackFrame) -> Sequence[str]:
        own = self._cell if self._is_own(frame) else []
        return self._others.get(frame.file, (own, None))[0]

    def _file(self, frame: StackFrame, otherwise: str) -> str:
        if frame.file in self._others:
            number = self._others[frame.file][1]
            unnumbered = otherwise if os.path.isabs(frame.file) else "the notebook"
            return unnumbered if number is None else f"Cell In[{number}]"
        if _CELL_FILE.match(frame.file):
            return f"Cell In[{self._number}]" if self._number is not None else "the cell"
        return otherwise


class Activity(msgspec.Struct, frozen=True):
    """What a rank is doing.

    Args:
        name: Such as `all_reduce #41` or `load_batch`; "" when its stack is not available.
        waits: It waits in a collective.
        collective: The flight recorder's entry of it; None when it was inferred from the stack.
        frame: The notebook's innermost frame, else the innermost of all.
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
        place: Such as `Cell In[7], line 15`; "" when unknown.
        source: The notebook's source line there.
        stack: The first rank's stack as a traceback, the most recent call last.
        problem: Why there is no stack.
    """

    ranks: tuple[int, ...]
    activity: Activity
    place: str
    source: str
    stack: tuple[str, ...]
    problem: str = ""

    @property
    def doing(self) -> str:
        """Return `wait in all_reduce #41`, `is in load_batch`."""
        if not self.activity.name:
            return "can't be inspected" if self.problem else "have no Python stack"
        one = len(self.ranks) == 1
        verb = ("waits" if one else "wait") if self.activity.waits else ("is" if one else "are")
        return f"{verb} in {self.activity.name}"


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
    frame = frames[at] if at is not None else frames[0] if frames else None
    collective = stack.collective
    called = list(reversed(frames[:at])) if at is not None else []
    in_torch = not frames or any(map(_is_torch, called))
    if collective is not None and collective.pending and (collective.queued or in_torch):
        return Activity(_numbered(collective), True, collective, frame)
    if frame is None:
        return Activity("")
    torch_function = next((each.function.strip("_") for each in called if _is_torch(each)), "")
    if torch_function:
        return Activity(torch_function, _MEETINGS.fullmatch(torch_function) is not None, None, frame)
    if frame.function not in _NO_FUNCTION:
        return Activity(frame.function, False, None, frame)
    # at the cell's top level name the function that it called
    return Activity(next((each.function for each in called), "the cell"), False, None, frame)


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
        key = (activity.name, activity.waits, activity.collective, lines, stack.problem)
        found.setdefault(key, []).append((stack, activity))
    groups: list[StackGroup] = []
    for members in found.values():
        first, activity = members[0]
        frame = activity.frame
        groups.append(
            StackGroup(
                ranks=tuple(stack.rank for stack, _ in members),
                activity=activity,
                place=sources.place(frame) if frame is not None else first.problem,
                source=sources.source(frame) if frame is not None else "",
                stack=tuple(stack_lines(first.frames, cell)),
                problem=first.problem,
            )
        )
    return sorted(groups, key=lambda group: (-len(group.ranks), group.ranks))


def group_lines(groups: Sequence[StackGroup]) -> list[str]:
    """Return a line for each of the first groups, in columns, and one for the ranks of all others."""
    shown = groups[:_MAX_GROUPS]
    rows = [(format_ranks(group.ranks), group.doing, group.place, group.source) for group in shown]
    lines = aligned(rows)
    left_out = [rank for group in groups[_MAX_GROUPS:] for rank in group.ranks]
    return [*lines, f"{format_ranks(left_out)} elsewhere"] if left_out else lines


def verdict(stacks: Sequence[RankStack], cell: CellSource) -> list[str]:
    """Return which ranks have not reached a collective that others wait in; empty without recorder entries."""
    sources = Sources(cell)
    waiting: dict[tuple[str, int], dict[str, list[int]]] = {}
    for stack in stacks:
        entry = stack.collective
        if entry is not None and entry.pending and activity_of(stack, sources).waits:
            waiting.setdefault((entry.group, entry.seq), {}).setdefault(_numbered(entry), []).append(stack.rank)
    told: list[str] = []
    for (group, number), names in sorted(waiting.items()):
        if len(names) > 1:
            parts = [f"{format_ranks(ranks)} in {name}" for name, ranks in sorted(names.items())]
            told.append(f"{', '.join(parts)}: they wait for each other, because their collectives differ")
            continue
        name, ranks = next(iter(names.items()))
        absent = [stack.rank for stack in stacks if _has_not_come(stack, group, number, name, sources)]
        if absent:
            verb = "has" if len(absent) == 1 else "have"
            told.append(f"{format_ranks(absent)} {verb} not reached {name}")
        elif len(ranks) == len(stacks) > 1:
            told.append(f"all ranks are in {name}")
    return told


def stack_lines(frames: Sequence[StackFrame], cell: CellSource) -> list[str]:
    """Return a stack as in a traceback, the most recent call last, starting at the notebook's first line."""
    sources = Sources(cell)
    entries = [sources.entry(frame) for frame in reversed(sources.own_frames(frames))]
    if (left_out := len(entries) - _MAX_FRAMES) > 0:
        # recursion: its beginning and its end are enough
        half = _MAX_FRAMES // 2
        entries = [*entries[:half], [f"... {left_out:,} more frames ..."], *entries[-half:]]
    return [line for entry in entries for line in entry]


def last_python_line(frames: Sequence[StackFrame], cell: CellSource) -> str:
    """Return `Cell In[9], line 6, in build: cache[key] = x.clone()`, "" without a stack."""
    sources = Sources(cell)
    frame = next((frame for frame in frames if sources.is_notebook(frame)), frames[0] if frames else None)
    if frame is None:
        return ""
    where = "" if frame.function in _NO_FUNCTION else f", in {frame.function}"
    source = sources.source(frame)
    return f"{sources.place(frame)}{where}" + (f": {source}" if source else "")


def stall_note(stalled: Stalled, cell: CellSource) -> str:
    """Return the sentence that keeps a stall after it is over."""
    groups = "; ".join(" ".join(line.split()) for line in group_lines(group_stacks(stalled.stacks, cell)))
    return ansi.plain(f"there was no progress for {format_seconds(stalled.seconds)}{taken(stalled.stacks)}: {groups}")


def taken(stacks: Sequence[RankStack]) -> str:
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
    lines = [
        f"run {short(run_id)}{taken(stacks)}",
        *(f"  {line}" for line in group_lines(groups)),
        *verdict(stacks, cell),
    ]
    for group in groups:
        lines += ["", f"{format_ranks(group.ranks)} {group.doing}"]
        lines += [f"  {line}" for line in group.stack or (group.problem or "no Python stack",)]
    return "\n".join(ansi.plain(line) for line in lines)


def stacks_html(run_id: str, stacks: Sequence[RankStack], cell: CellSource) -> str:
    """Return the same as HTML: one line for each group, which expands to its whole stack."""
    groups = group_stacks(stacks, cell)
    rows = ""
    for group in groups:
        whole = "\n".join(group.stack or (group.problem or "no Python stack",))
        rows += (
            f'<details style="padding:3px 12px"><summary style="cursor:pointer">'
            f'<b style="font-weight:600">{safe(format_ranks(group.ranks))}</b> {safe(group.doing)} '
            f'<span style="{SOFT}">{safe(group.place)}</span> '
            f'<code style="{MONO};font-size:12px;background:none">{safe(group.source)}</code></summary>'
            f'<pre style="margin:0;padding:4px 0 4px 14px;{MONO};font-size:12px;white-space:pre-wrap">{safe(whole)}'
            "</pre></details>"
        )
    for sentence in verdict(stacks, cell):
        rows += f'<div style="padding:3px 12px;color:{WARN}">{safe(sentence)}</div>'
    head = f"run {short(run_id)}" + (taken(stacks) if groups else " has no ranks now")
    return (
        f'<div style="{BOX}"><div style="padding:6px 12px;background:{PANEL};'
        f'border-bottom:1px solid {LINE}"><b style="font-weight:600">{safe(head)}</b></div>{rows}</div>'
    )


def _numbered(collective: Collective) -> str:
    of_group = f" of group {collective.group}" if collective.group else ""
    return f"{collective.name} #{collective.seq}{of_group}"


def _is_torch(frame: StackFrame) -> bool:
    # exclude torch's logging and gradient-mode wrappers, which users do not call
    return f"{os.sep}torch{os.sep}" in frame.file and frame.function not in ("wrapper", "decorate_context")


def _has_not_come(stack: RankStack, group: str, number: int, name: str, sources: Sources) -> bool:
    entry = stack.collective
    if entry is not None and entry.group == group:
        return entry.seq < number
    # the members of other groups than the default one are unknown
    if group or stack.problem:
        return False
    return activity_of(stack, sources).name != name.partition(" ")[0]
