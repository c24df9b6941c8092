"""The progress of a sweep: one line, with a bar in a notebook, and updated in place in a terminal."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from html import escape
from typing import TextIO

import msgspec
from msgspec.structs import replace

from sgpu_magic.views import ansi
from sgpu_magic.views.html_style import BAD, BOX, GOOD, LINE, MONO, SOFT
from sgpu_magic.views.units import count_of, format_seconds

_INTERVAL_S = 0.25
_FIRST_AFTER_S = 0.1
_MAX_FAILURES = 10
_BAR_CHARS = 24


class SweepPicture(msgspec.Struct, frozen=True):
    """What is shown of a sweep.

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
    def waiting(self) -> int:
        """Items that have not started."""
        return max(0, (self.total or 0) - self.done - self.failed - self.running)


def progress_line(picture: SweepPicture) -> str:
    """Return `tune · 7 of 20 done · 4 running · 9 waiting · 1 failed · 12.4 s`."""
    of = f" of {picture.total:,}" if picture.total is not None else ""
    parts = [picture.name, f"{picture.done:,}{of} done"]
    if not picture.is_final:
        parts += [
            f"{count:,} {word}" for count, word in ((picture.running, "running"), (picture.waiting, "waiting")) if count
        ]
    parts += [f"{picture.failed:,} failed"] if picture.failed else []
    return " · ".join([*parts, *([picture.ending] if picture.ending else []), format_seconds(picture.seconds)])


def failure_list(picture: SweepPicture) -> list[str]:
    """Return a line for each of the first failures, and one with the number of others."""
    shown = [ansi.plain(line) for line in picture.failures[:_MAX_FAILURES]]
    more = picture.failed - len(shown)
    return [*shown, *([f"and {count_of(more, 'more failure')}: .failures lists them all"] if more > 0 else [])]


def progress_html(picture: SweepPicture) -> str:
    """Return the bar, the line and the failures as HTML."""
    total = max(picture.total or picture.done + picture.failed + picture.running, 1)

    def part(count: int, colour: str) -> str:
        return f'<div style="width:{100 * count / total:.2f}%;background:{colour}"></div>' if count else ""

    bar = (
        f'<div style="display:flex;height:4px;background:{LINE}">'
        f"{part(picture.done, GOOD)}{part(picture.failed, BAD)}"
        f"{part(picture.running, f'{GOOD};opacity:.35') if not picture.is_final else ''}</div>"
    )
    name, *rest = progress_line(picture).split(" · ")
    line = f'<b>{escape(name)}</b><span style="{SOFT}"> · {escape(" · ".join(rest))}</span>'
    failures = "".join(f"<div>{escape(text)}</div>" for text in failure_list(picture))
    told = f'<div style="padding:4px 12px 6px;{MONO};font-size:12px;color:{BAD}">{failures}</div>' if failures else ""
    return f'<div style="{BOX}">{bar}<div style="padding:6px 12px">{line}</div>{told}</div>'


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
        self._drawn_at = 0.0
        self._drawn: SweepPicture | None = None

    def is_due(self, now: float) -> bool:
        """Whether an update is due: at most 4 times a second, and not in the first 100 ms."""
        self._began = now if self._began is None else self._began
        return now - self._began >= _FIRST_AFTER_S and now - self._drawn_at >= _INTERVAL_S

    def show(self, picture: SweepPicture, now: float) -> None:
        """Show the progress; if only the time has changed, at most once a second.

        Args:
            picture: The progress.
            now: Monotonic time in seconds.
        """
        same = self._drawn is not None and replace(picture, seconds=self._drawn.seconds) == self._drawn
        if self._silent or (same and now - self._drawn_at < 1.0):
            return
        self._drawn, self._drawn_at = picture, now
        if self._html:
            self._publish(picture)
        elif self._is_terminal or picture.is_final:
            self._write(picture)

    def _write(self, picture: SweepPicture) -> None:
        over = "\r\x1b[K" if self._is_terminal else ""
        line = ansi.plain(progress_line(picture))
        if self._is_terminal and not picture.is_final:
            # a wrapped line could not be overwritten
            columns = shutil.get_terminal_size().columns - 1
            self._stream.write(over + f"{_bar(picture)} {line}"[:columns])
        else:
            self._stream.write("".join(f"{text}\n" for text in (over + line, *failure_list(picture))))
        self._stream.flush()

    def _publish(self, picture: SweepPicture) -> None:
        # IPython declares no types here
        from IPython.display import publish_display_data  # pyright: ignore[reportUnknownVariableType]

        update = bool(self._display_id)
        self._display_id = self._display_id or f"sgpu-sweep-{secrets.token_hex(4)}"
        text = "\n".join((progress_line(picture), *failure_list(picture)))
        publish_display_data(
            {"text/plain": ansi.plain(text), "text/html": progress_html(picture)},
            transient={"display_id": self._display_id},
            update=update,
        )


def _bar(picture: SweepPicture) -> str:
    total = max(picture.total or picture.done + picture.failed + picture.running, 1)
    full = round(_BAR_CHARS * (picture.done + picture.failed) / total)
    return f"[{'#' * full}{'.' * (_BAR_CHARS - full)}]"


def failure_line(index: int, run: str, error: BaseException, traceback_lines: Sequence[str] = ()) -> str:
    """Return `item 3 · run 7f3a · ValueError: bad batch`."""
    said = str(getattr(error, "message", "") or error).strip().splitlines()
    kind = type(error).__name__
    told = f"{kind}: {said[0]}" if said else kind
    return " · ".join(part for part in (f"item {index}", f"run {run}" if run else "", told, *traceback_lines) if part)
