"""Reports comparisons of the notebook's values with those of a session's ranks that take long."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from sgpu_magic.formatting import format_bytes, names_text

Show = Callable[[str], None]
"""Shows a sentence below the cell in place of the last one; "" removes it."""

_FIRST_S = 1.0
_EVERY_S = 1.0
# a name that took at least this part of the time is mentioned
_MUCH = 0.25


class Comparison:
    """One cell's comparison: each name is hashed in turn.

    Args:
        session: The session's name.
        show: Shows the progress, after a second and then once a second; None shows nothing.
    """

    def __init__(self, session: str, show: Show | None) -> None:
        self._session = session
        self._show = show
        self._begin = self._name_begin = time.monotonic()
        self._due = self._begin + _FIRST_S
        self._shown = False
        self._name = ""
        self._bytes: dict[str, int] = {}
        self._seconds: dict[str, float] = {}

    def name(self, name: str) -> None:
        """Begin with the value of the next name."""
        now = time.monotonic()
        self._seconds[self._name] = now - self._name_begin
        self._name, self._name_begin = name, now
        self._bytes[name] = 0

    def hashed(self, count: int) -> None:
        """Record that `count` bytes of the value were hashed."""
        self._bytes[self._name] += count
        now = time.monotonic()
        if self._show is None or now < self._due:
            return
        self._due, self._shown = now + _EVERY_S, True
        size = format_bytes(self._bytes[self._name])
        self._show(
            f"hashing `{self._name}` to find out whether session {self._session} has it as it is now: {size} so far. "
            f"{_remedy([self._name])}"
        )

    def end(self, known: Collection[str]) -> tuple[tuple[str, ...], str]:
        """End the comparison, and return the names that took long with a sentence about them.

        Args:
            known: Names that an earlier sentence mentioned. The sentence is "" if it would mention no others.
        """
        self.name("")
        if self._shown and self._show is not None:
            self._show("")
        total_s = time.monotonic() - self._begin
        slow = tuple(name for name, seconds in self._seconds.items() if name and seconds >= _MUCH * total_s)
        if total_s < _FIRST_S or not slow or set(slow) <= set(known):
            return (), ""
        size = format_bytes(sum(self._bytes[name] for name in slow))
        named = names_text([f"`{name}`" for name in slow])
        return slow, f"hashing {named} ({size}) to find changes took {total_s:.1f} s before this cell. {_remedy(slow)}"


def _remedy(names: Collection[str]) -> str:
    quoted = ", ".join(f'"{name}"' for name in names)
    return (
        f"--exclude {','.join(names)} spares it for one cell, and session.keep({quoted}) for all: the ranks then keep "
        "the value that they have."
    )
