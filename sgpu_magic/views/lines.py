"""From a stream of text to lines, as a terminal would leave them on its screen. Pure."""

from __future__ import annotations

MAX_LINE_CHARS = 16_384


class LineAssembler:
    """Assembles the text of one stream of one rank into lines.

    `\\r` begins the line again, so that a progress bar stays one line; `\\b` steps back; `\\r\\n` is a
    newline. Colour codes stay in the lines.

    Attributes:
        was_rewritten: True when the unfinished line was begun again by `\\r`: it is a progress bar.
    """

    __slots__ = ("_partial", "was_rewritten")

    def __init__(self) -> None:
        self._partial = ""
        self.was_rewritten = False

    def feed(self, text: str) -> list[str]:
        """Return the lines that `text` finishes."""
        if self._partial:
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
        if len(text) > MAX_LINE_CHARS and any(len(line) > MAX_LINE_CHARS for line in lines):
            lines = [_shorten(line) for line in lines]
        return lines

    @property
    def partial(self) -> str:
        """The unfinished line as it stands, "" when there is none."""
        return self._partial.rstrip("\r\b")

    def flush(self) -> str:
        """Return the unfinished line and forget it."""
        line, self._partial, self.was_rewritten = self.partial, "", False
        return line

    def _feed_controls(self, text: str) -> list[str]:
        # nested bars of tqdm go one line up and down again: that is the start of the same line
        lines = text.replace("\x1b[A\n", "\r").replace("\r\n", "\n").split("\n")
        last = lines.pop()
        returned = last.endswith("\r")
        self.was_rewritten = "\r" in last or (self.was_rewritten and not lines)
        last = collapse(last)
        self._partial = last + "\r" if returned else last
        return [collapse(line).rstrip("\b") for line in lines]


def collapse(line: str) -> str:
    """Return what a terminal shows of a line that `\\r` begins again and `\\b` steps back in."""
    line = line.rstrip("\r").rsplit("\r", 1)[-1]
    return _step_back(line) if "\b" in line else line


def _step_back(line: str) -> str:
    """Apply the backspaces of a line; those that nothing has overwritten yet stay at its end."""
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
    if len(line) <= MAX_LINE_CHARS:
        return line
    return f"{line[:MAX_LINE_CHARS]} ... {len(line) - MAX_LINE_CHARS:,} more characters of this line in the log"
