"""Records of what is drawn of a run but its log's lines, as JSON. `messages` has those that are told and asked."""

from __future__ import annotations

from typing import Literal

import msgspec

VERSION = 1
"""Of these records. A front end draws only its own version."""

Tone = Literal["plain", "busy", "good", "bad", "warn"]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the records: immutable; every field is there on the wire."""


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
