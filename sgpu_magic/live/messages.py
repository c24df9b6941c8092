"""Records between a run's view in the browser and the kernel (or the Jupyter server), as JSON.

Their TypeScript twins are in `labextension/src/run_view/messages.ts`; a test holds the two together. No record has a
key `id`: ipykernel 7.4.0 leaks memory for kernel-to-front-end messages that have one.
"""

from __future__ import annotations

from typing import Literal

import msgspec

VERSION = 1
"""Of these records. A front end draws only its own version."""

Tone = Literal["plain", "busy", "good", "bad", "warn"]

LineRow = tuple[int, int, str]
"""One line of the log: its rank, its number in the rank's log (from 0), its text with colour codes."""

LineSkip = tuple[int, int, int]
"""Lines that are in the log and not in the message: their rank, the first one's number, how many."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the records: immutable; every field is there on the wire."""


# ------------------------------------------------------------------ snapshot


class Bar(Message, frozen=True):
    """A progress bar.

    Args:
        fraction: 0 to 1, None when the total is not known.
        text: What it says, such as `epoch 7/10 · 62 %`.
    """

    fraction: float | None
    text: str


class Curve(Message, frozen=True):
    """A value over time, evenly spaced.

    Args:
        name: `GPU`, `memory`, `power`, `temperature`, `CPU`.
        unit: `%`, `GB`, `W`, `°C`, `cores`.
        values: Oldest first; None where nothing was told.
        began_s: When the first was measured: seconds since the ranks started.
        step_s: Seconds between two.
        top: What the axis ends at; None when the largest value shall be taken.
    """

    name: str
    unit: str
    values: tuple[float | None, ...]
    began_s: float
    step_s: float
    top: float | None


class RankCard(Message, frozen=True):
    """One rank in the grid.

    Args:
        rank: The rank.
        state: A word: `waiting`, `running`, `done`, `failed`, `released`, `ended`.
        tone: Its colour.
        label: Its device, "" when it has none of its own.
        last: Its last line, without colours.
        bar: Its progress bar, None without one.
        use: What it uses, in words: `94 % · 18.2 GB`; marked `CPU` where no GPU is; "" before the first sample.
        details: Everything that was measured, a line each, for those who look closer; absent values say so.
        curves: The first is drawn in the grid.
        idle: Why it stands out, "" when it does not: `GPU under 5 % for 60 s: it waits in the DataLoader`.
    """

    rank: int
    state: str
    tone: Tone
    label: str
    last: str
    bar: Bar | None
    use: str
    details: tuple[str, ...]
    curves: tuple[Curve, ...]
    idle: str


class FailureLine(Message, frozen=True):
    """One line of a failure: `kind` is `title`, `code`, `culprit` (the line that failed), `error` or `text`."""

    text: str
    kind: Literal["title", "code", "culprit", "error", "text"]


class FailureBlock(Message, frozen=True):
    """The first failure of a run, its cell's lines first.

    Args:
        rank: The culprit, None when it is no rank's doing.
        lines: What is always shown.
        whole: The whole traceback when it is longer than that, else empty.
    """

    rank: int | None
    lines: tuple[FailureLine, ...]
    whole: tuple[FailureLine, ...]


class Snapshot(Message, frozen=True):
    """Everything that is drawn of a run but its log's lines. All texts are plain; the front end escapes them.

    Args:
        version: `VERSION`.
        seq: Grows with each; one that is not newer than what is drawn is old.
        run_id: The run.
        short_id: As people write it.
        name: Its name.
        state: The word in the header: a run's state, or `goes on` when it is not followed any more.
        tone: The header's colour.
        final: Nothing changes any more.
        devices: `4 ranks · cpu, gloo` or `4 x A10, nccl`, and that they are simulated.
        pool: The pool's name.
        host: Where it runs, "" until known.
        attempt: `attempt 2 of 3`, "" for the first.
        elapsed_s: Seconds since its ranks started, when this was made.
        ticking: The clock goes on.
        meta: Further words for the header, such as the time that is left and why it was cancelled.
        preparing: What is going on before the ranks run, a line each; empty then.
        bar: The progress of the run as a whole, None when no rank has a bar.
        ranks: The grid; empty before there is anything to say.
        idle: GPUs that stand out, a line each.
        notes: Sentences for the user.
        stall: Where the ranks wait for each other, a line each.
        failure: The first failure, None while there is none.
        others: What became of the other ranks, a line each.
        footer: What was shipped and returned, what to do next.
        lines: Lines of each rank's log so far.
        can_cancel: Cancel means something.
        attach: The command that brings the run back after its kernel was restarted.
    """

    version: int
    seq: int
    run_id: str
    short_id: str
    name: str
    state: str
    tone: Tone
    final: bool
    devices: str
    pool: str
    host: str
    attempt: str
    elapsed_s: float
    ticking: bool
    meta: tuple[str, ...]
    preparing: tuple[str, ...]
    bar: Bar | None
    ranks: tuple[RankCard, ...]
    idle: tuple[str, ...]
    notes: tuple[str, ...]
    stall: tuple[str, ...]
    failure: FailureBlock | None
    others: tuple[str, ...]
    footer: tuple[str, ...]
    lines: tuple[int, ...]
    can_cancel: bool
    attach: str


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


def to_json(message: Message) -> bytes:
    """Return a record as JSON."""
    return _encoder.encode(message)


def to_builtins(message: Message) -> dict[str, object]:
    """Return a record as what a comm's own encoder takes."""
    return msgspec.to_builtins(message)


def question_of(content: object) -> Question:
    """Check what a front end has sent.

    Raises:
        msgspec.ValidationError: It is no question.
    """
    return msgspec.convert(content, Question)
