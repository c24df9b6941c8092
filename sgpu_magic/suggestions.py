"""Similar names, for errors about a name that does not exist."""

from __future__ import annotations

from collections.abc import Iterable

# above difflib's 0.6, by which `restart` is similar to `status`
_CUTOFF = 0.65
# that all options and magics begin with them makes none of them similar
_MARKS = "-%"


def did_you_mean(given: str, known: Iterable[str], most: int = 1) -> str | None:
    """Return ``Did you mean `logs`?``, None if no known name is similar.

    Args:
        given: The name that does not exist.
        known: The names that do.
        most: How many names are suggested, the most similar first.
    """
    # imported late because ranks import this module too, and need it only for an error
    import difflib

    names: dict[str, str] = {}
    for name in known:
        names.setdefault(_compared(name), name)
    near = [f"`{names[match]}`" for match in difflib.get_close_matches(_compared(given), names, most, _CUTOFF)]
    if not near:
        return None
    *others, last = near
    return f"Did you mean {', '.join(others)} or {last}?" if others else f"Did you mean {last}?"


def _compared(name: str) -> str:
    return name.lower().lstrip(_MARKS)
