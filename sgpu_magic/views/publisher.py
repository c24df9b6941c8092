"""Shows an active run in outputs below the cell, or nowhere. `TerminalPublisher` is in `text`."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Sequence
from html import escape
from typing import Protocol, TextIO

from sgpu_magic.views.bundle import caption_bundle, mime_bundle
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.html_style import SANS, SOFT
from sgpu_magic.views.output import Caption, Part, ShownDisplay, TextSegment, segments
from sgpu_magic.views.output_buffer import DisplayItem
from sgpu_magic.views.text import TerminalPublisher

FIRST_AFTER_S = 0.1
MESSAGE_INTERVAL_S = 0.1
MAX_MESSAGES_PER_TICK = 10
MAX_LIVE_BYTES = 40_000  # HTML; with its text and JSON's escapes a message stays under 64 kB
CLOCK_S = 1.0


class Publisher(Protocol):
    """Shows a view. Call `tick` after events were applied and about every 50 ms."""

    def tick(self, now: float, final: bool = False) -> None:
        """Update what is shown.

        Args:
            now: Monotonic time in seconds.
            final: Show the final form, as the run has ended or is not followed further. Pass True only once.
        """
        ...


class SilentPublisher:
    """Shows nothing (`--ui none`)."""

    def tick(self, now: float, final: bool = False) -> None:
        pass


def publisher_for(ui: str, view: RunView, stream: TextIO, notebook: bool) -> Publisher:
    """Return the publisher for `--ui`: `none`, `text`, `streams`, or the one that suits the front end.

    Args:
        ui: The option's value; `auto` and `widget` choose by `notebook`.
        view: The run.
        stream: Where text goes.
        notebook: The kernel has a front end that renders HTML.
    """
    if ui == "none":
        return SilentPublisher()
    if ui == "streams":
        return TerminalPublisher(view, stream, sys.stderr)
    if ui == "text" or not notebook:
        return TerminalPublisher(view, stream)
    return NotebookPublisher(view)


class NotebookPublisher:
    """Shows a run as outputs of the cell: text and displays in order, each updated by its display id.

    Nothing appears in the first 100 ms unless the run has ended. An active run sends at most 10 messages a second of
    at most 64 kB; at the end every output gets its final form.

    Args:
        view: The run.
        slots: Its outputs, if some were published already.
        pace: Limits the rate of messages, if some were sent already.

    Attributes:
        remark: A sentence below the live form that is not about the run, "" for none.
    """

    def __init__(self, view: RunView, slots: OutputSlots | None = None, pace: Pace | None = None) -> None:
        self._view = view
        self._slots = slots or OutputSlots(view)
        self.remark = ""
        self._pace = pace or Pace()
        self._drawn_at = 0.0
        self._drawn_version = -1
        self._finished = False

    def tick(self, now: float, final: bool = False) -> None:
        due = self._pace.is_due(now)
        if self._finished or not (final or due):
            return
        if not final and self._view.version == self._drawn_version and now - self._drawn_at < CLOCK_S:
            return
        self._finished = final
        self._drawn_version, self._drawn_at = self._view.version, now
        if final:
            sent, complete = self._slots.draw()
        else:
            sent, complete = self._slots.draw(MAX_MESSAGES_PER_TICK, MAX_LIVE_BYTES, self.remark)
        self._pace.sent(now, sent)
        if not complete:
            self._drawn_version = -1


class Pace:
    """Limits the rate of messages: none in the first 100 ms, then at most 10 a second."""

    def __init__(self) -> None:
        self._next_at: float | None = None

    def is_due(self, now: float) -> bool:
        """Whether a message may be sent now; the first call starts the 100 ms."""
        if self._next_at is None:
            self._next_at = now + FIRST_AFTER_S
        return now >= self._next_at

    def sent(self, now: float, messages: int) -> None:
        """Note that `messages` messages were sent now."""
        self._next_at = now + MESSAGE_INTERVAL_S * max(messages, 1)


class OutputSlots:
    """Publishes a run's parts, each in its own output that is updated by its display id.

    Args:
        view: The run.
        bundle: Returns the MIME bundle to publish for a display, given whether the run has ended; by default the
            static form.
    """

    def __init__(self, view: RunView, bundle: Callable[[DisplayItem, bool], dict[str, object]] | None = None) -> None:
        self._view = view
        self._bundle = bundle or self._static
        # the same run may be shown in two cells
        self._token = secrets.token_hex(4)
        # the current bundle and metadata of each output
        self._shown: dict[int, tuple[dict[str, object], dict[str, object]]] = {}

    def draw(self, budget: int | None = None, limit: int | None = None, remark: str = "") -> tuple[int, bool]:
        """Publish the outputs that have changed.

        Args:
            budget: Messages allowed; None for no limit.
            limit: Bytes of HTML allowed for a live form's segment; None for the final form.
            remark: A sentence below the first text, "" for none.

        Returns:
            The number of messages, and whether everything was published.
        """
        parts = self._fold_strays(segments(self._view))
        if limit is not None:
            parts = self._without_bare_end(parts)
        last_text = max(at for at, part in enumerate(parts) if isinstance(part, TextSegment))
        sent = 0
        for at, part in enumerate(parts):
            if budget is not None and sent >= budget:
                return sent, False
            first, last = at == 0, at == last_text
            if not isinstance(part, TextSegment):
                sent += self._show_rich(part, final=limit is None)
            else:
                # a following display moves the footer to a later segment, so that only one has it at the end
                bundle = mime_bundle(self._view, part, first, last, limit)
                if first and remark:
                    bundle["text/html"] = f'{bundle["text/html"]}<div style="{SOFT};{SANS}">{escape(remark)}</div>'
                    bundle["text/plain"] = f"{bundle['text/plain']}\n{remark}"
                if bundle["text/html"] or part.slot in self._shown:
                    sent += self._show(part.slot, bundle)
        return sent + self._empty_others(parts), True

    def open(self, bundle: dict[str, object]) -> None:
        """Publish a live view in the place of the run's first text."""
        self._show(0, bundle)

    def draw_displays(self, budget: int) -> tuple[int, bool]:
        """Publish displays and captions, and empty outputs for the text between them, below an open live view.

        Args:
            budget: Messages allowed.

        Returns:
            As `draw`.
        """
        live, *parts = self._fold_strays([TextSegment(()), *segments(self._view)[1:-1]])
        sent = 0
        for part in parts:
            if sent >= budget:
                return sent, False
            if not isinstance(part, TextSegment):
                sent += self._show_rich(part, final=False)
            else:
                sent += self._show(part.slot, {"text/html": "", "text/plain": ""})
        return sent + self._empty_others([live, *parts]), True

    def _without_bare_end(self, parts: list[Part]) -> list[Part]:
        """Leave out a last text without lines: the text before it has the footer until the run has ended."""
        end = parts[-1]
        is_bare = isinstance(end, TextSegment) and not end.items and end.slot not in self._shown
        return parts[:-1] if is_bare and len(parts) > 1 else parts

    def _fold_strays(self, parts: list[Part]) -> list[Part]:
        """Merge text that would need a new output above an existing one into the text before it."""
        there = [at for at, part in enumerate(parts) if part.slot in self._shown]
        last_shown = there[-1] if there else -1
        kept: list[Part] = []
        for at, part in enumerate(parts):
            stray = at < last_shown and isinstance(part, TextSegment) and part.slot not in self._shown
            if not stray:
                kept.append(part)
                continue
            before = next((i for i in reversed(range(len(kept))) if isinstance(kept[i], TextSegment)), None)
            text = kept[before] if before is not None else None
            if before is not None and isinstance(text, TextSegment) and isinstance(part, TextSegment):
                kept[before] = TextSegment((*text.items, *part.items), text.slot)
        return kept

    def _empty_others(self, parts: Sequence[Part]) -> int:
        """Clear outputs whose part no longer exists; return the number of messages."""
        wanted = {part.slot for part in parts}
        return sum(self._show(slot, {"text/plain": ""}) for slot in self._shown.keys() - wanted)

    def _static(self, item: DisplayItem, final: bool) -> dict[str, object]:
        return self._view.models.static(item.rank, item.bundle)

    def _show_rich(self, part: Caption | ShownDisplay, *, final: bool) -> int:
        if isinstance(part, Caption):
            return self._show(part.slot, caption_bundle(part))
        return self._show(part.slot, self._bundle(part.item, final), part.item.metadata)

    def _show(self, slot: int, data: dict[str, object], metadata: dict[str, object] | None = None) -> int:
        """Publish or update one output; return the number of messages sent."""
        # IPython declares no types here
        from IPython.display import publish_display_data  # pyright: ignore[reportUnknownVariableType]

        shown, content = self._shown.get(slot), (data, metadata or {})
        if shown == content:
            return 0
        self._shown[slot] = content
        display_id = f"sgpu-{self._view.run_id}-{self._token}-{slot}"
        publish_display_data(*content, transient={"display_id": display_id}, update=shown is not None)
        return 1
