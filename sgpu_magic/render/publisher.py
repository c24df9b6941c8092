"""Where a run is shown while it goes on: a notebook's outputs, or nowhere; `terminal` is beside it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Protocol, TextIO

from sgpu_magic.render.bundle import mime_bundle
from sgpu_magic.render.items import DisplayItem
from sgpu_magic.render.segments import TextSegment, segments
from sgpu_magic.render.terminal import TerminalPublisher
from sgpu_magic.render.view import RunView

__all__ = ["NotebookPublisher", "Publisher", "SilentPublisher", "TerminalPublisher", "publisher_for"]

FIRST_AFTER_S = 0.1
MESSAGE_INTERVAL_S = 0.1
MAX_MESSAGES_PER_TICK = 10
MAX_LIVE_BYTES = 40_000  # HTML; with its text and JSON's escapes a message stays under 64 kB
CLOCK_S = 1.0


class Publisher(Protocol):
    """Shows a view. Call `tick` whenever events were applied and about every 50 ms."""

    def tick(self, now: float, final: bool = False) -> None:
        """Bring what is shown up to date.

        Args:
            now: Monotonic time in seconds.
            final: The run is over, or will not be followed further: show the final form. Once.
        """
        ...


class SilentPublisher:
    """Shows nothing (`--ui none`)."""

    def tick(self, now: float, final: bool = False) -> None:
        pass


def publisher_for(ui: str, view: RunView, stream: TextIO, notebook: bool) -> Publisher:
    """Return the publisher of `--ui`: `none`, `text`, or what suits the place (`auto`, `widget`).

    Args:
        ui: The option's value.
        view: The run.
        stream: Where text goes.
        notebook: Whether the kernel has a front end that draws HTML.
    """
    if ui == "none":
        return SilentPublisher()
    if ui == "text" or not notebook:
        return TerminalPublisher(view, stream)
    return NotebookPublisher(view)


@dataclass(slots=True)
class _Published:
    """What an output of the cell shows now."""

    display_id: str
    content: object


class NotebookPublisher:
    """Shows a run as outputs of the cell: text and displays in place, each updated by its display id.

    Nothing appears in the first 100 ms unless the run has ended. While it goes on there are at most 10
    messages a second of at most 64 kB; at the end every output takes its final form.
    """

    def __init__(self, view: RunView) -> None:
        self._view = view
        # the same run may be shown in two cells
        self._token = secrets.token_hex(4)
        self._began: float | None = None
        self._next_at = 0.0
        self._drawn_at = 0.0
        self._drawn_version = -1
        self._shown: dict[int, _Published] = {}
        self._finished = False

    def tick(self, now: float, final: bool = False) -> None:
        if self._began is None:
            self._began, self._next_at = now, now + FIRST_AFTER_S
        if self._finished or (not final and now < self._next_at):
            return
        if not final and self._view.version == self._drawn_version and now - self._drawn_at < CLOCK_S:
            return
        self._finished = final
        self._drawn_version, self._drawn_at = self._view.version, now
        sent, complete = self._draw(None if final else MAX_MESSAGES_PER_TICK)
        self._next_at = now + MESSAGE_INTERVAL_S * max(sent, 1)
        if not complete:
            self._drawn_version = -1

    def _draw(self, budget: int | None) -> tuple[int, bool]:
        """Publish what differs; return the number of messages and whether all was said."""
        parts = self._fold_strays(segments(self._view))
        sent = 0
        wanted: set[int] = set()
        for at, part in enumerate(parts):
            slot = _slot(part)
            wanted.add(slot)
            if budget is not None and sent >= budget:
                return sent, False
            first, last = at == 0, at == len(parts) - 1
            if isinstance(part, DisplayItem):
                sent += self._show(slot, part, part.bundle, part.metadata)
            else:
                # a display that comes next moves the footer on: at the end only one segment has it
                limit = None if self._finished else MAX_LIVE_BYTES
                bundle = mime_bundle(self._view, part, first, last, limit)
                if bundle["text/html"]:
                    sent += self._show(slot, bundle, bundle, {})
        for slot in self._shown.keys() - wanted:
            sent += self._show(slot, None, {"text/plain": ""}, {})
        return sent, True

    def _fold_strays(self, parts: list[TextSegment | DisplayItem]) -> list[TextSegment | DisplayItem]:
        """Join text that would need a new output before one that is already there to the text before it."""
        there = [at for at, part in enumerate(parts) if _slot(part) in self._shown]
        last_shown = there[-1] if there else -1
        kept: list[TextSegment | DisplayItem] = []
        for at, part in enumerate(parts):
            stray = at < last_shown and isinstance(part, TextSegment) and _slot(part) not in self._shown
            if not stray:
                kept.append(part)
                continue
            before = next((i for i in reversed(range(len(kept))) if isinstance(kept[i], TextSegment)), None)
            text = kept[before] if before is not None else None
            if before is not None and isinstance(text, TextSegment) and isinstance(part, TextSegment):
                kept[before] = TextSegment((*text.items, *part.items), text.after, text.next_rank)
        return kept

    def _show(self, slot: int, content: object, data: dict[str, object], metadata: dict[str, object]) -> int:
        """Publish or update one output; return the number of messages that took."""
        # IPython declares no types here
        from IPython.display import publish_display_data  # pyright: ignore[reportUnknownVariableType]

        shown = self._shown.get(slot)
        if shown is not None and shown.content == content:
            return 0
        update = shown is not None
        if shown is None:
            shown = self._shown[slot] = _Published(f"sgpu-{self._view.run_id}-{self._token}-{slot}", content)
        shown.content = content
        publish_display_data(data, metadata, transient={"display_id": shown.display_id}, update=update)
        return 1


def _slot(part: TextSegment | DisplayItem) -> int:
    """Return a number for an output that stays its own: displays odd, the text after each even."""
    return 2 * part.serial - 1 if isinstance(part, DisplayItem) else 2 * part.after
