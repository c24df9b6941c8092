"""The output of a run's ranks, folded from its events: lines and displays, split into segments at displays. No I/O."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.views import ansi
from sgpu_magic.views.output_buffer import DisplayItem, GapItem, Item, LineItem, OutputStore
from sgpu_magic.wire.decoding import JsonDecoder
from sgpu_magic.wire.rank_events import DisplayPublished, OutputCleared, OutputWritten

if TYPE_CHECKING:
    from sgpu_magic.views.fold import RunView

MAX_LINE_CHARS = 16_384


class LineAssembler:
    """Assembles the text of one stream of one rank into lines.

    `\\r` restarts the line, so that a progress bar stays one line; `\\b` steps back; `\\r\\n` is a
    newline. Colour codes stay in the lines.

    Attributes:
        was_rewritten: The unfinished line was restarted by `\\r`, as progress bars do.
    """

    __slots__ = ("_partial", "was_rewritten")

    def __init__(self) -> None:
        self._partial = ""
        self.was_rewritten = False

    def feed(self, text: str) -> list[str]:
        """Add text; return the lines that it completes."""
        text = self._partial + text
        if "\r" in text or "\b" in text or "\x1b[A" in text:
            lines = self._feed_controls(text)
        else:
            lines = text.split("\n")
            self._partial = lines.pop()
            if lines:
                self.was_rewritten = False
        if len(self._partial) > MAX_LINE_CHARS:
            lines.append(self.flush())
        return [line if len(line) <= MAX_LINE_CHARS else _shorten(line) for line in lines]

    @property
    def partial(self) -> str:
        """The current unfinished line, "" when there is none."""
        return self._partial.rstrip("\r\b")

    def flush(self) -> str:
        """Return the unfinished line and start a new one."""
        line, self._partial, self.was_rewritten = self.partial, "", False
        return line

    def _feed_controls(self, text: str) -> list[str]:
        # nested bars of tqdm move one line up and down again, which amounts to the start of the same line
        lines = text.replace("\x1b[A\n", "\r").replace("\r\n", "\n").split("\n")
        last = lines.pop()
        returned = last.endswith("\r")
        self.was_rewritten = "\r" in last or (self.was_rewritten and not lines)
        last = collapse(last)
        self._partial = last + "\r" if returned else last
        return [collapse(line).rstrip("\b") for line in lines]


def collapse(line: str) -> str:
    """Return what a terminal shows of a line with `\\r` and `\\b`."""
    line = line.rstrip("\r").rsplit("\r", 1)[-1]
    return _step_back(line) if "\b" in line else line


def _step_back(line: str) -> str:
    """Apply the backspaces of a line; trailing ones stay, as later text may overwrite characters."""
    cells: list[str] = []
    at = 0
    for char in line:
        if char == "\b":
            at = max(at - 1, 0)
        else:
            cells[at : at + 1] = [char]
            at += 1
    return "".join(cells) + "\b" * (len(cells) - at)


def _shorten(line: str) -> str:
    return f"{line[:MAX_LINE_CHARS]} ... {len(line) - MAX_LINE_CHARS:,} more characters of this line in the log"


_mime = JsonDecoder(dict[str, object])


class RunOutput:
    """The output of a run's ranks.

    Args:
        limit: Bytes kept: the first 40 % and the last 60 %; the middle becomes one gap.

    Attributes:
        rank_lines: Number of finished lines of each rank, including dropped ones; ranks without any are absent.
    """

    def __init__(self, limit: int) -> None:
        self.rank_lines: Counter[int] = Counter()
        self._store = OutputStore(limit)
        self._assemblers: defaultdict[tuple[int, str], LineAssembler] = defaultdict(LineAssembler)
        self._last_stream: dict[int, str] = {}
        self._last_finished: dict[int, str] = {}
        self._clear_before_next: set[int] = set()
        self._fresh: list[Item] | None = None

    @property
    def total_lines(self) -> int:
        """Number of finished lines of all ranks, including dropped ones."""
        return self.rank_lines.total()

    @property
    def items(self) -> list[Item]:
        """The output in order of arrival, within the limit. Do not modify the list."""
        return self._store.items()

    @property
    def live_lines(self) -> dict[int, str]:
        """The unfinished line of each rank that has one, such as its progress bar."""
        lines: dict[int, str] = {}
        for rank, last in sorted(self._last_stream.items()):
            texts = [self._assemblers[rank, stream].partial for stream in (last, "stderr", "stdout")]
            if text := next((text for text in texts if ansi.plain(text).strip()), ""):
                lines[rank] = text
        return lines

    @property
    def last_lines(self) -> dict[int, str]:
        """The last line of each rank: its unfinished line, else its last finished one."""
        return dict(sorted({**self._last_finished, **self.live_lines}.items()))

    def take_items(self) -> list[Item]:
        """Return the items since the last call; the first call returns all that are kept.

        An update of a display appears as a separate item.
        """
        taken = list(self.items) if self._fresh is None else self._fresh
        self._fresh = []
        return taken

    def write(self, body: OutputWritten) -> None:
        rank = body.rank
        self._clear_if_due(rank)
        assembler = self._assemblers[rank, body.stream]
        text = body.text
        if body.skipped_lines:
            # the skipped text starts in the unfinished line and ends in the first line of the text
            assembler.flush()
            self._store.add_skip(rank, body.skipped_lines)
            self.rank_lines[rank] += body.skipped_lines
            if self._fresh is not None:
                self._fresh.append(GapItem(body.skipped_lines, 1))
        elif body.skipped_bytes:
            text = f" ... {text}"
        self._last_stream[rank] = body.stream
        self._add_lines(rank, body.stream, assembler.feed(text))

    def display(self, body: DisplayPublished) -> None:
        rank = body.rank
        self._clear_if_due(rank)
        stdout = self._assemblers[rank, "stdout"]
        if stdout.partial and not stdout.was_rewritten and not body.update:
            self._add_lines(rank, "stdout", [stdout.flush()])
        item = DisplayItem(rank, _decode(body.bundle, rank), _decode(body.metadata, rank), body.display_id)
        changed = self._store.display(item, len(body.bundle) + len(body.metadata), update=body.update)
        if self._fresh is not None:
            self._fresh.extend(changed[-1:])

    def clear(self, body: OutputCleared) -> None:
        self._clear_before_next.add(body.rank)
        if not body.wait:
            self._clear_if_due(body.rank)

    def finish_lines(self) -> None:
        """Finish all unfinished lines, as no more output will come."""
        for (rank, stream), assembler in sorted(self._assemblers.items(), key=lambda pair: pair[0]):
            # as in the log, lines of the other stream have replaced a bar that was not drawn again
            is_overwritten = assembler.was_rewritten and stream != self._last_stream.get(rank)
            line = assembler.flush()
            if ansi.plain(line).strip() and not is_overwritten:
                self._add_lines(rank, stream, [line])

    def _add_lines(self, rank: int, stream: str, lines: list[str]) -> None:
        if not lines:
            return
        self.rank_lines[rank] += len(lines)
        self._last_finished[rank] = lines[-1]
        if self._fresh is not None:
            self._fresh.extend([LineItem(rank, stream, text) for text in lines])
        self._store.add_lines(rank, stream, lines)

    def _clear_if_due(self, rank: int) -> None:
        if rank in self._clear_before_next:
            self._clear_before_next.remove(rank)
            self._store.clear(rank)
            self._last_finished.pop(rank, None)
            for stream in ("stdout", "stderr"):
                self._assemblers[rank, stream].flush()


def _decode(raw: bytes, rank: int) -> dict[str, object]:
    try:
        return _mime.decode(raw)
    except msgspec.DecodeError as error:
        return {"text/plain": f"(rank {rank} displayed something that is not a MIME bundle: {error})"}


# displays of several ranks side by side; a table needs more room than a figure
_MOST_FIGURES, _MOST_OTHERS = 4, 2


class TextSegment(msgspec.Struct, frozen=True):
    """Lines, and possibly the gap, in one output.

    Args:
        items: Lines and at most one gap.
        slot: Stable number of the output.
    """

    items: tuple[LineItem | GapItem, ...]
    slot: int = 0


class Caption(msgspec.Struct, frozen=True):
    """The caption of the displays of one rank that follow.

    Args:
        rank: The rank.
        columns: Number of displays side by side.
        slot: As in `TextSegment`.
    """

    rank: int
    columns: int
    slot: int


class ShownDisplay(msgspec.Struct, frozen=True):
    """A display in its place; `slot` as in `TextSegment`."""

    item: DisplayItem
    slot: int


Part = TextSegment | Caption | ShownDisplay


def segments(view: RunView) -> list[Part]:
    """Split a run's output into parts, each of which is an output of the cell. The first is text.

    One rank's displays stay where they are among its lines, as in a notebook, and the last part is text. Lines of
    several ranks stay together in the first part, whose place a live view takes and keeps, and their displays follow
    with captions: while the run is active in order of arrival; then the first display of every rank, in rank order, the
    second of every rank, and so on. Widgets that a rank has closed, such as the bars of inner loops, leave nothing. The
    lines stay in order of arrival, unless the run groups them by rank.
    """
    if len(view.rank_numbers) > 1:
        return _lines_then_displays(view)
    cut: list[Part] = []
    lines: list[LineItem | GapItem] = []
    after = 0
    for item in view.items:
        if isinstance(item, DisplayItem):
            if lines or not cut:
                cut.append(TextSegment(tuple(lines), 2 * after))
            cut.append(ShownDisplay(item, 2 * item.serial - 1))
            lines, after = [], item.serial
        else:
            lines.append(item)
    return [*cut, TextSegment(tuple(lines), 2 * after)]


def _lines_then_displays(view: RunView) -> list[Part]:
    lines = tuple(item for item in view.items if not isinstance(item, DisplayItem))
    if view.is_final and view.spec.grouped:
        lines = tuple(sorted(lines, key=lambda item: item.rank if isinstance(item, LineItem) else len(lines)))
    # (number among its rank's, number among all, display)
    displays: list[tuple[int, int, DisplayItem]] = []
    before: Counter[int] = Counter()
    for at, item in enumerate(item for item in view.items if isinstance(item, DisplayItem)):
        if not view.models.is_closed(item.rank, item.bundle):
            displays.append((before[item.rank], at, item))
            before[item.rank] += 1
    if view.is_final:
        displays.sort(key=lambda each: (each[0], each[2].rank))
    in_row = Counter(row for row, _, _ in displays)
    parts: list[Part] = [TextSegment(lines)]
    for position, (row, at, item) in enumerate(displays):
        # while the run is active, the others keep their outputs when a widget is closed
        number = position if view.is_final else at
        most = _MOST_FIGURES if any(kind.startswith("image/") for kind in item.bundle) else _MOST_OTHERS
        parts += [Caption(item.rank, min(in_row[row], most), 2 * number + 1), ShownDisplay(item, 2 * number + 2)]
    return parts


def last_text(parts: Sequence[Part]) -> int:
    """Return the position of the last text, which has the run's end."""
    return max(at for at, part in enumerate(parts) if isinstance(part, TextSegment))


def share_of(view: RunView, segment: TextSegment, room: int) -> int:
    """Return a segment's share of `room` bytes, by the number of its lines."""
    every = sum(not isinstance(item, DisplayItem) for item in view.items)
    return room * (len(segment.items) + 1) // (every + 1)
