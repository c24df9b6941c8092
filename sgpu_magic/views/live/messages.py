"""Messages between a run's view in the browser and the kernel or the Jupyter server, as JSON.

Their TypeScript twins are generated: `labextension/src/run_view/records.ts`. No message has a key `id`: ipykernel
7.4.0 leaks memory for kernel-to-front-end messages that have one.
"""

from __future__ import annotations

import msgspec

from sgpu_magic.views.live.schema import Message, Snapshot
from sgpu_magic.wire.decoding import JsonDecoder

LineRow = tuple[int, int, str, bool]
"""One line of the log: its rank, its number in the rank's log (from 0), its text with colour codes, and whether it is
set apart as stderr, which progress bars are not."""

LineSkip = tuple[int, int, int]
"""Lines that are in the log but not in the message: their rank, the first one's number, their count."""

MAX_LINES = 500
"""Maximum number of lines in one reply."""
MAX_MATCHES = 1000
"""Maximum number of matches in one reply."""
MAX_LOG_BYTES = 48_000
"""Maximum bytes of the log in one reply, which keeps the message under 64 kB."""


# ------------------------------------------------------------------ updates


class NewLines(Message, frozen=True, tag_field="kind", tag="lines"):
    """Lines that ranks have written, in order of arrival.

    Args:
        seq: 1, 2, 3 ... A front end that misses a number requests the missing lines with `AskLines`.
        first: The number of the first line among the lines of all ranks, from 0. Earlier lines that were not sent are
            in the log only, as even their skips would have been too many.
        rows: Lines, and skips for lines that would not fit.
        ranks: Number of lines in each rank's log after these.
    """

    seq: int
    first: int
    rows: tuple[LineRow | LineSkip, ...]
    ranks: tuple[int, ...]


class NoMoreUpdates(Message, frozen=True, tag_field="kind", tag="gone"):
    """This view gets no more updates; `text` says why and what to do."""

    text: str


# ------------------------------------------------------------------ requests and replies


class AskHello(Message, frozen=True, tag_field="kind", tag="hello"):
    """A view has opened or resumes after a pause, and requests the run's current state.

    Args:
        n: The request's number, chosen by the front end.
        over: The channel that it uses: `subshell`, `control`, `shell` or `server`.
    """

    n: int
    over: str = ""


class AskLines(Message, frozen=True, tag_field="kind", tag="lines"):
    """Request lines of the log.

    Args:
        n: The request's number.
        first: The first line's number, among all lines or in the rank's log.
        count: Number of lines, at most `MAX_LINES`.
        rank: The rank; None for all ranks in order of arrival.
    """

    n: int
    first: int
    count: int
    rank: int | None = None


class AskFind(Message, frozen=True, tag_field="kind", tag="find"):
    """Find lines that contain a text, ignoring case.

    Args:
        n: The request's number.
        text: The text to find; not empty.
        rank: The rank; None for all.
    """

    n: int
    text: str
    rank: int | None = None


class AskLog(Message, frozen=True, tag_field="kind", tag="log"):
    """Request a piece of the whole log as text, for copying and downloading.

    Args:
        n: The request's number.
        offset: Where it begins: 0, then the `next_offset` of the previous reply.
        rank: The rank whose raw log to read; None for the lines of all ranks, each prefixed with its rank.
    """

    n: int
    offset: int
    rank: int | None = None


class AskCancel(Message, frozen=True, tag_field="kind", tag="cancel"):
    """Stop the run."""

    n: int


class AskEndSession(Message, frozen=True, tag_field="kind", tag="end-session"):
    """End a session that holds devices for which the run waits.

    Args:
        n: The request's number.
        session: The session's run id, one of the snapshot's `own_sessions`.
    """

    n: int
    session: str


class AskStacks(Message, frozen=True, tag_field="kind", tag="stacks"):
    """Request the stacks of all ranks."""

    n: int


Question = AskHello | AskLines | AskFind | AskLog | AskCancel | AskEndSession | AskStacks


class HelloAnswer(Message, frozen=True, tag_field="kind", tag="hello"):
    """The run's current state.

    Args:
        n: The request's number.
        snapshot: The current snapshot.
        seq: Number of the last `NewLines` that is included in `snapshot.lines`.
    """

    n: int
    snapshot: Snapshot
    seq: int


class LinesAnswer(Message, frozen=True, tag_field="kind", tag="lines-answer"):
    """Lines, fewer than requested at the log's end or at the message's size limit; `total` is the number of all."""

    n: int
    first: int
    rows: tuple[LineRow, ...]
    total: int


class FindAnswer(Message, frozen=True, tag_field="kind", tag="find-answer"):
    """Ascending numbers of the last matching lines, at most `MAX_MATCHES`; `total` is the number of all matches."""

    n: int
    matches: tuple[int, ...]
    total: int


class LogAnswer(Message, frozen=True, tag_field="kind", tag="log-answer"):
    """A piece of the log; `next_offset` is None at its end."""

    n: int
    text: str
    next_offset: int | None


class TextAnswer(Message, frozen=True, tag_field="kind", tag="text"):
    """The result of a button, as lines of text."""

    n: int
    lines: tuple[str, ...]


class Refusal(Message, frozen=True, tag_field="kind", tag="refusal"):
    """A sentence about why the request can't be answered."""

    n: int
    text: str


Answer = HelloAnswer | LinesAnswer | FindAnswer | LogAnswer | TextAnswer | Refusal
FeedUpdate = NewLines | NoMoreUpdates

questions = JsonDecoder[Question](Question)
_encoder = msgspec.json.Encoder()


def json_bytes(value: object) -> int:
    """Return the size of a value as JSON in bytes."""
    return len(_encoder.encode(value))
