"""Escape sequences in the output of ranks: colours become styled spans or stay, everything else is removed.

Sequences follow ECMA-48; colours follow xterm's 256-colour table, the first sixteen those of JupyterLab.
"""

from __future__ import annotations

import re
from html import escape

# CSI; strings (OSC, DCS ...) with their ends; other escapes; a cut-off sequence; control characters
_SEQUENCE = re.compile(
    r"\x1b\[(?P<params>[0-?]*)[ -/]*(?P<final>[@-~])"
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\|$)"
    r"|\x1b[PX^_][^\x1b]*(?:\x1b\\|$)"
    r"|\x1b\[[0-?]*[ -/]*$|\x1b[ -/]*[0-Z\\-~]|\x1b"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SGR = re.compile(r"[0-9;:]*")

_BASIC = (
    "#3e424d", "#e75c58", "#00a250", "#ba8b00", "#208ffb", "#d160c4", "#2aa5a8", "#a09c90",
    "#6b7280", "#d84a4a", "#00903e", "#b27d12", "#3b82f6", "#b546a8", "#258f8f", "#a1a6b2",
)  # fmt: skip
_LEVELS = (0, 95, 135, 175, 215, 255)
_COLOURS = (
    *_BASIC,
    *(f"#{red:02x}{green:02x}{blue:02x}" for red in _LEVELS for green in _LEVELS for blue in _LEVELS),
    *(f"#{grey:02x}{grey:02x}{grey:02x}" for grey in range(8, 239, 10)),
)

# by code: the property that it sets, and its value
_SETS = {
    1: ("weight", "font-weight:bold"),
    2: ("dim", "opacity:.65"),
    3: ("italic", "font-style:italic"),
    4: ("line", "text-decoration:underline"),
    7: ("inverse", ""),
    9: ("line", "text-decoration:line-through"),
}
for _at, _colour in enumerate(_BASIC):
    # 30 to 37 and 90 to 97; backgrounds are ten higher
    _code = _at + (30 if _at < 8 else 82)
    _SETS.update({_code: ("color", _colour), _code + 10: ("background", _colour)})
_UNSETS = {
    22: ("weight", "dim"), 23: ("italic",), 24: ("line",), 27: ("inverse",), 29: ("line",), 39: ("color",),
    49: ("background",),
}  # fmt: skip


def plain(text: str) -> str:
    """Return `text` without escape sequences and control characters."""
    return _SEQUENCE.sub("", text) if _CONTROL.search(text) else text


def colours_only(text: str) -> str:
    """Return `text` for a terminal: colours are kept and reset at its end, other sequences removed."""
    if not _CONTROL.search(text):
        return text
    kept = _SEQUENCE.sub(lambda m: m[0] if m["final"] == "m" and _SGR.fullmatch(m["params"]) else "", text)
    return kept + "\x1b[0m" if "\x1b" in kept else kept


def to_html(text: str) -> str:
    """Return `text` escaped for HTML, with colours as inline styles."""
    if not _CONTROL.search(text):
        return escape(text, quote=False)
    pieces: list[str] = []
    style = _Style()
    at = 0
    for match in _SEQUENCE.finditer(text):
        pieces.append(style.wrap(text[at : match.start()]))
        at = match.end()
        if match["final"] == "m":
            style.change(match["params"])
    pieces.append(style.wrap(text[at:]))
    return "".join(pieces)


class _Style:
    """The current graphic rendition (SGR)."""

    def __init__(self) -> None:
        self._set: dict[str, str] = {}

    def wrap(self, text: str) -> str:
        if not text:
            return ""
        flags = dict(self._set)
        front, back = flags.pop("color", ""), flags.pop("background", "")
        if flags.pop("inverse", None) is not None:
            front, back = back or "#ffffff", front or "#6b7280"
        if back and front in (_BASIC[7], _BASIC[15]):
            front = "#ffffff"  # the grey is readable on a page of either theme, but not on a coloured background
        parts = [f"color:{front}"] if front else []
        parts += [f"background:{back}"] if back else []
        parts += flags.values()
        safe = escape(text, quote=False)
        return f'<span style="{";".join(parts)}">{safe}</span>' if parts else safe

    def change(self, params: str) -> None:
        if not _SGR.fullmatch(params):
            return
        codes = [int(code) if code.isdecimal() else 0 for code in re.split("[;:]", params)]
        while codes:
            code = codes.pop(0)
            if code == 0:
                self._set.clear()
            elif code in (38, 48):
                colour, used = _extended(codes)
                self._set["color" if code == 38 else "background"] = colour
                del codes[:used]
            elif code in _SETS:
                name, value = _SETS[code]
                self._set[name] = value
            for name in _UNSETS.get(code, ()):
                self._set.pop(name, None)


def _extended(codes: list[int]) -> tuple[str, int]:
    """Return the colour given by the codes after 38 or 48, "" if unknown, and the number of codes used."""
    match codes:
        case [5, index, *_]:
            return _COLOURS[min(index, 255)], 2
        case [2, red, green, blue, *_]:
            return f"#{min(red, 255):02x}{min(green, 255):02x}{min(blue, 255):02x}", 4
        case _:
            return "", len(codes)
