"""Outputs below a cell that are updated in place: the parts of a run, the progress of a sweep."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Sequence
from html import escape
from typing import TextIO

import msgspec
from msgspec.structs import replace

from sgpu_magic.formatting import count_of, format_seconds
from sgpu_magic.views import ansi
from sgpu_magic.views.bundle import caption_bundle, mime_bundle
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.html_style import BAD, BOX, GOOD, LINE, MONO, SANS, SOFT
from sgpu_magic.views.output import Caption, Part, ShownDisplay, TextSegment, last_text, segments
from sgpu_magic.views.output_buffer import DisplayItem

_INTERVAL_S = 0.25
_FIRST_AFTER_S = 0.1
_MAX_FAILURES = 10
_BAR_CHARS = 24


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
        self._published: dict[int, tuple[dict[str, object], dict[str, object]]] = {}

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
        end = last_text(parts)
        sent = 0
        for at, part in enumerate(parts):
            if budget is not None and sent >= budget:
                return sent, False
            if not isinstance(part, TextSegment):
                sent += self._show_rich(part, final=limit is None)
            else:
                # a following display moves the footer to a later segment, so that only one has it at the end
                bundle = mime_bundle(self._view, part, at == 0, at == end, limit)
                if at == 0 and remark:
                    bundle["text/html"] = f'{bundle["text/html"]}<div style="{SOFT};{SANS}">{escape(remark)}</div>'
                    bundle["text/plain"] = f"{bundle['text/plain']}\n{remark}"
                if bundle["text/html"] or part.slot in self._published:
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
        _, *below = segments(self._view)
        if below and isinstance(below[-1], TextSegment):
            # the live view has the run's end
            below.pop()
        live, *parts = self._fold_strays([TextSegment(()), *below])
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
        *others, end = parts
        is_bare = isinstance(end, TextSegment) and not end.items and end.slot not in self._published
        return others if is_bare and others else parts

    def _fold_strays(self, parts: list[Part]) -> list[Part]:
        """Merge text that would need a new output above an existing one into the text before it."""
        last_shown = max((at for at, part in enumerate(parts) if part.slot in self._published), default=-1)
        kept: list[Part] = []
        text_at = 0
        for at, part in enumerate(parts):
            before = kept[text_at] if kept else None
            stray = at < last_shown and part.slot not in self._published
            if stray and isinstance(part, TextSegment) and isinstance(before, TextSegment):
                kept[text_at] = TextSegment((*before.items, *part.items), before.slot)
                continue
            if isinstance(part, TextSegment):
                text_at = len(kept)
            kept.append(part)
        return kept

    def _empty_others(self, parts: Sequence[Part]) -> int:
        """Clear outputs whose part no longer exists; return the number of messages."""
        wanted = {part.slot for part in parts}
        return sum(self._show(slot, {"text/plain": ""}) for slot in self._published.keys() - wanted)

    def _static(self, item: DisplayItem, final: bool) -> dict[str, object]:
        return self._view.models.static(item.rank, item.bundle)

    def _show_rich(self, part: Caption | ShownDisplay, *, final: bool) -> int:
        if isinstance(part, Caption):
            return self._show(part.slot, caption_bundle(part))
        return self._show(part.slot, self._bundle(part.item, final), part.item.metadata)

    def _show(self, slot: int, data: dict[str, object], metadata: dict[str, object] | None = None) -> int:
        """Publish or update one output; return the number of messages sent."""
        before, content = self._published.get(slot), (data, metadata or {})
        if before == content:
            return 0
        self._published[slot] = content
        _publish(f"sgpu-{self._view.run_id}-{self._token}-{slot}", *content, update=before is not None)
        return 1


def _publish(display_id: str, data: dict[str, object], metadata: dict[str, object], *, update: bool) -> None:
    # IPython declares no types here
    from IPython.display import publish_display_data  # pyright: ignore[reportUnknownVariableType]

    publish_display_data(data, metadata, transient={"display_id": display_id}, update=update)


# ---------------------------------------------------------------- a sweep


class SweepView(msgspec.Struct, frozen=True):
    """The data of a sweep that its progress display shows.

    Args:
        name: The function's name.
        done: Number of items that have a result.
        running: Number of items whose ranks run.
        failed: Number of items that failed.
        total: Number of all items, None while unknown.
        seconds: Seconds since its start.
        failures: A line for each of the first failures.
        ending: Why it ended early, "" while it runs or when all items are done.
        is_final: It has ended.
    """

    name: str
    done: int = 0
    running: int = 0
    failed: int = 0
    total: int | None = None
    seconds: float = 0.0
    failures: tuple[str, ...] = ()
    ending: str = ""
    is_final: bool = False

    @property
    def begun(self) -> int:
        """Items that have started."""
        return self.done + self.failed + self.running

    @property
    def waiting(self) -> int:
        """Items that have not started."""
        return max(0, (self.total or 0) - self.begun)

    @property
    def whole(self) -> int:
        """The number of all items, or of those that have started while the total is unknown; at least 1."""
        return max(self.total or self.begun, 1)


def progress_line(sweep: SweepView) -> str:
    """Return `tune · 7 of 20 done · 4 running · 9 waiting · 1 failed · 12.4 s`."""
    of = f" of {sweep.total:,}" if sweep.total is not None else ""
    parts = [sweep.name, f"{sweep.done:,}{of} done"]
    counts = {} if sweep.is_final else {"running": sweep.running, "waiting": sweep.waiting}
    parts += [f"{count:,} {word}" for word, count in {**counts, "failed": sweep.failed}.items() if count]
    return " · ".join(filter(None, [*parts, sweep.ending, format_seconds(sweep.seconds)]))


def failure_list(sweep: SweepView) -> list[str]:
    """Return a line for each of the first failures, and one with the number of others."""
    listed = [ansi.plain(line) for line in sweep.failures[:_MAX_FAILURES]]
    more = sweep.failed - len(listed)
    return [*listed, *([f"and {count_of(more, 'more failure')}: .failures lists them all"] if more > 0 else [])]


def progress_html(sweep: SweepView) -> str:
    """Return the bar, the line and the failures as HTML."""

    def part(count: int, colour: str) -> str:
        return f'<div style="width:{100 * count / sweep.whole:.2f}%;background:{colour}"></div>' if count else ""

    bar = (
        f'<div style="display:flex;height:4px;background:{LINE}">'
        f"{part(sweep.done, GOOD)}{part(sweep.failed, BAD)}"
        f"{part(sweep.running, f'{GOOD};opacity:.35') if not sweep.is_final else ''}</div>"
    )
    name, *rest = progress_line(sweep).split(" · ")
    line = f'<b>{escape(name)}</b><span style="{SOFT}"> · {escape(" · ".join(rest))}</span>'
    failures = "".join(f"<div>{escape(text)}</div>" for text in failure_list(sweep))
    block = f'<div style="padding:4px 12px 6px;{MONO};font-size:12px;color:{BAD}">{failures}</div>' if failures else ""
    return f'<div style="{BOX}">{bar}<div style="padding:6px 12px">{line}</div>{block}</div>'


class SweepProgress:
    """Shows the progress of a sweep; its final form stays.

    Args:
        stream: Where text goes.
        is_notebook: There is a front end that renders HTML.
        ui: `none` shows nothing, `text` no HTML.
    """

    def __init__(self, stream: TextIO, *, is_notebook: bool, ui: str = "auto") -> None:
        self._stream = stream
        self._html = is_notebook and ui != "text"
        self._silent = ui == "none"
        self._is_terminal = stream.isatty()
        self._display_id = ""
        self._began: float | None = None
        self._published_at = 0.0
        self._published: SweepView | None = None

    def is_due(self, now: float) -> bool:
        """Whether an update is due: at most 4 times a second, and not in the first 100 ms."""
        self._began = now if self._began is None else self._began
        return now - self._began >= _FIRST_AFTER_S and now - self._published_at >= _INTERVAL_S

    def show(self, sweep: SweepView, now: float) -> None:
        """Show the progress; if only the time has changed, at most once a second.

        Args:
            sweep: The progress.
            now: Monotonic time in seconds.
        """
        same = self._published is not None and replace(sweep, seconds=self._published.seconds) == self._published
        if self._silent or (same and now - self._published_at < 1.0):
            return
        self._published, self._published_at = sweep, now
        if self._html:
            self._publish(sweep)
        elif self._is_terminal or sweep.is_final:
            self._write(sweep)

    def _write(self, sweep: SweepView) -> None:
        over = "\r\x1b[K" if self._is_terminal else ""
        line = ansi.plain(progress_line(sweep))
        if self._is_terminal and not sweep.is_final:
            # a wrapped line could not be overwritten
            columns = shutil.get_terminal_size().columns - 1
            full = round(_BAR_CHARS * (sweep.done + sweep.failed) / sweep.whole)
            self._stream.write(over + f"[{'#' * full}{'.' * (_BAR_CHARS - full)}] {line}"[:columns])
        else:
            self._stream.write("".join(f"{text}\n" for text in (over + line, *failure_list(sweep))))
        self._stream.flush()

    def _publish(self, sweep: SweepView) -> None:
        update = bool(self._display_id)
        self._display_id = self._display_id or f"sgpu-sweep-{secrets.token_hex(4)}"
        text = ansi.plain("\n".join((progress_line(sweep), *failure_list(sweep))))
        _publish(self._display_id, {"text/plain": text, "text/html": progress_html(sweep)}, {}, update=update)


def failure_line(index: int, run: str, error: BaseException) -> str:
    """Return `item 3 · run 7f3a · ValueError: bad batch`."""
    lines = str(getattr(error, "message", "") or error).strip().splitlines()
    line = ": ".join([type(error).__name__, *lines[:1]])
    return " · ".join(filter(None, [f"item {index}", f"run {run}" if run else "", line]))
