"""A line of a log as it is drawn: the same whether it comes from an event or from the log itself. Pure."""

from __future__ import annotations

import msgspec

from sgpu_magic.views import ansi
from sgpu_magic.views.output import MAX_LINE_CHARS, collapse

MAX_RAW_CHARS = 1 << 18
"""A raw line longer than this, after what `\\r` has begun again is taken away, is told by its log only."""

MAX_JSON_BYTES = 40_000
"""One line as JSON."""
# shorter ones can't reach that: what takes most is four bytes a character
_SURELY_SMALL_CHARS = MAX_JSON_BYTES // 4


def line_text(raw: str) -> str:
    """Return what stands between two newlines of a log as a terminal shows it: colours stay, nothing else does."""
    text = collapse(raw).rstrip("\b")
    if len(text) <= _SURELY_SMALL_CHARS:
        return ansi.colours_only(text)
    return cut_line(text, len(text))


def cut_line(text: str, length: int) -> str:
    """Return the beginning of a long line and how much is left out.

    Args:
        text: The line, at least its first `MAX_LINE_CHARS`.
        length: Its characters.
    """
    keep = min(MAX_LINE_CHARS, len(text))
    while True:
        shown = ansi.colours_only(text[:keep])
        if keep < length:
            shown += f" ... {length - keep:,} more characters of this line in the log"
        if json_bytes(shown) <= MAX_JSON_BYTES:
            return shown
        keep = keep * 3 // 4


def last_rewrite(raw: str) -> str:
    """Return the part of an unfinished line that can still be seen, however it goes on."""
    return raw[raw.rstrip("\r").rfind("\r") + 1 :] if "\r" in raw else raw


_encoder = msgspec.json.Encoder()


def json_bytes(value: object) -> int:
    """Return how long a value is as JSON."""
    return len(_encoder.encode(value))
