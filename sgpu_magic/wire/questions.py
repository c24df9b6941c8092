"""Records of what is asked of an idle rank, and what it answers."""

from __future__ import annotations

from sgpu_magic.wire.record import Record


class RankQuestion(Record, frozen=True, kw_only=True):
    """What is asked of a rank while it is idle.

    Args:
        rank: The rank.
        what: `complete` (names at `cursor` in `code`), `inspect` (the object there) or `names` (what its cells have
            set).
        code: The code.
        cursor: Position in it, in characters.
        detail: 0, or 1 for the source too, as in Jupyter's `inspect_request`.
    """

    rank: int
    what: str
    code: str = ""
    cursor: int = 0
    detail: int = 0


class Match(Record, frozen=True):
    """One completion: the text, and what it is (`function`, `module`, "" when unknown)."""

    text: str
    type: str = ""


class RankAnswer(Record, frozen=True, kw_only=True):
    """What a rank answers.

    Args:
        problem: Why it does not, such as that it is busy; "" when it does.
        matches: For `complete`.
        start: Where in the code the matches begin, in characters.
        end: Where they end.
        bundle: For `inspect`: a MIME bundle, JSON; empty when there is no such object.
        names: For `names`: names in its namespace that it did not have when it was new.
    """

    problem: str = ""
    matches: tuple[Match, ...] = ()
    start: int = 0
    end: int = 0
    bundle: bytes = b""
    names: tuple[str, ...] = ()
