"""Records between a run's view in the browser and the kernel (or the Jupyter server), as JSON.

The front end's half of them is generated: `labextension/src/run_view/records.ts`. No record has a key `id`: ipykernel
7.4.0 leaks memory for kernel-to-front-end messages that have one.
"""

from __future__ import annotations

import msgspec

from sgpu_magic.views.live.schema import Message, Snapshot

LineRow = tuple[int, int, str]
"""One line of the log: its rank, its number in the rank's log (from 0), its text with colour codes."""

LineSkip = tuple[int, int, int]
"""Lines that are in the log and not in the message: their rank, the first one's number, how many."""


# ------------------------------------------------------------------ told without being asked


class NewLines(Message, frozen=True, tag_field="kind", tag="lines"):
    """Lines that ranks have written, in order of arrival.

    Args:
        seq: 1, 2, 3 ... A front end that misses one asks for what it lacks with `AskLines`.
        first: The number of the first of them among the lines of all ranks, from 0. Lines before it that were not told
            are in the log: even their skips would have been too many.
        rows: Lines, and skips for what would not fit.
        ranks: Lines of each rank's log after these.
    """

    seq: int
    first: int
    rows: tuple[LineRow | LineSkip, ...]
    ranks: tuple[int, ...]


class Gone(Message, frozen=True, tag_field="kind", tag="gone"):
    """Nobody feeds this view any more; `text` says why and what to do."""

    text: str


# ------------------------------------------------------------------ questions and answers


class AskHello(Message, frozen=True, tag_field="kind", tag="hello"):
    """A view has opened, or comes back after a pause: it wants to know where the run is.

    Args:
        n: The question's number, chosen by the front end.
        over: How it asks: `subshell`, `control`, `shell` or `server`.
    """

    n: int
    over: str = ""


class AskLines(Message, frozen=True, tag_field="kind", tag="lines"):
    """Lines of the log.

    Args:
        n: The question's number.
        first: The first one's number, among all or in the rank's log.
        count: How many, at most `MAX_LINES`.
        rank: Whose; None is all ranks in order of arrival.
    """

    n: int
    first: int
    count: int
    rank: int | None = None


class AskFind(Message, frozen=True, tag_field="kind", tag="find"):
    """Lines that contain a text, whatever its case.

    Args:
        n: The question's number.
        text: What to look for; not empty.
        rank: Whose; None is all.
    """

    n: int
    text: str
    rank: int | None = None


class AskLog(Message, frozen=True, tag_field="kind", tag="log"):
    """A piece of the whole log as text, for copying and downloading.

    Args:
        n: The question's number.
        offset: Where it begins: 0, then the `next_offset` of the answer before.
        rank: Whose log as it is; None is all ranks' lines with their rank before each.
    """

    n: int
    offset: int
    rank: int | None = None


class AskCancel(Message, frozen=True, tag_field="kind", tag="cancel"):
    """Stop the run."""

    n: int


class AskStacks(Message, frozen=True, tag_field="kind", tag="stacks"):
    """Where is every rank now?"""

    n: int


Question = AskHello | AskLines | AskFind | AskLog | AskCancel | AskStacks

MAX_LINES = 500
"""Lines in one answer."""
MAX_MATCHES = 1000
"""Matches in one answer."""
MAX_LOG_BYTES = 48_000
"""Bytes of the log in one answer: a message stays under 64 kB."""


class HelloAnswer(Message, frozen=True, tag_field="kind", tag="hello"):
    """Where the run is.

    Args:
        n: The question's number.
        snapshot: What is drawn.
        seq: Number of the last `NewLines` that counts in `snapshot.lines`.
    """

    n: int
    snapshot: Snapshot
    seq: int


class LinesAnswer(Message, frozen=True, tag_field="kind", tag="lines-answer"):
    """Lines, fewer than asked where the log ends or the message would grow too large; `total` is all there are."""

    n: int
    first: int
    rows: tuple[LineRow, ...]
    total: int


class FindAnswer(Message, frozen=True, tag_field="kind", tag="find-answer"):
    """Numbers of the lines that match, ascending, at most `MAX_MATCHES` (the last ones); `total` is all there are."""

    n: int
    matches: tuple[int, ...]
    total: int


class LogAnswer(Message, frozen=True, tag_field="kind", tag="log-answer"):
    """A piece of the log; `next_offset` is None at its end."""

    n: int
    text: str
    next_offset: int | None


class TextAnswer(Message, frozen=True, tag_field="kind", tag="text"):
    """What came of a button, a line each."""

    n: int
    lines: tuple[str, ...]


class Refusal(Message, frozen=True, tag_field="kind", tag="refusal"):
    """Why there is no answer, in a sentence."""

    n: int
    text: str


Answer = HelloAnswer | LinesAnswer | FindAnswer | LogAnswer | TextAnswer | Refusal
Told = NewLines | Gone

questions = msgspec.json.Decoder[Question](Question)
_encoder = msgspec.json.Encoder()


def json_bytes(value: object) -> int:
    """Return how long a value is as JSON."""
    return len(_encoder.encode(value))


def to_builtins(message: Message) -> dict[str, object]:
    """Return a record as what a comm's own encoder takes."""
    return msgspec.to_builtins(message)


def question_of(content: object) -> Question:
    """Check what a front end has sent.

    Raises:
        msgspec.ValidationError: It is no question.
    """
    return msgspec.convert(content, Question)
