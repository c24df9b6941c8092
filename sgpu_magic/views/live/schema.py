"""Records of what is drawn of a run but its log's lines, as JSON. `messages` has those that are told and asked."""

from __future__ import annotations

from typing import Literal

import msgspec

VERSION = 3
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
        state: A word: `waiting`, `running`, `done`, `failed`, `released`, `ended`; of a session `alive`, `dead`.
        tone: Its colour.
        label: Its device, "" when it has none of its own.
        last: Its last line, without colours.
        bar: Its progress bar, None without one.
        use: What it uses, in words: `94 % · 18.2 GB`; marked `CPU` where no GPU is; "" before the first sample.
        details: Everything that was measured, a line each, for those who look closer; absent values say so.
        curves: The first is drawn in the grid.
        idle: Why it stands out, "" when it does not: `GPU under 5 % for 60 s: it waits in the DataLoader`.
        host: The node that it and the ranks after it are on, "" where that is the one of the rank before, or where all
            are on one node.
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
    host: str


class FailureLine(Message, frozen=True):
    """One line of a failure: `kind` is `title`, `code`, `culprit` (the line that failed), `error` or `text`."""

    text: str
    kind: Literal["title", "code", "culprit", "error", "text"]


class MemoryCard(Message, frozen=True):
    """What held a rank's memory when an allocation failed.

    Args:
        rank: The rank.
        cells: Its device, then used, reserved, free and total in words.
        shares: Of the total, each 0 to 1: what tensors hold, what torch's allocator keeps besides, what others hold.
        culprit: Its allocation failed first.
    """

    rank: int
    cells: tuple[str, ...]
    shares: tuple[float, ...]
    culprit: bool


class MemoryTensor(Message, frozen=True):
    """A tensor that held memory: its name, then shape, dtype and size in words."""

    name: str
    cells: tuple[str, ...]


class MemoryBlock(Message, frozen=True):
    """What held the memory when an allocation failed.

    Args:
        title: Above the table.
        heads: Of its columns: rank, device, used, reserved, free, total.
        rows: The culprit first.
        more: What is left out, "" when nothing is.
        largest: Above the tensors, "" when there are none.
        tensors: The culprit's largest.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[MemoryCard, ...]
    more: str
    largest: str
    tensors: tuple[MemoryTensor, ...]


class FailureBlock(Message, frozen=True):
    """The first failure of a run, its cell's lines first.

    Args:
        rank: The culprit, None when it is no rank's doing.
        lines: What is always shown.
        whole: The whole traceback when it is longer than that, else empty.
        memory: What held the memory when an allocation failed, None for other failures.
    """

    rank: int | None
    lines: tuple[FailureLine, ...]
    whole: tuple[FailureLine, ...]
    memory: MemoryBlock | None


class Cost(Message, frozen=True):
    """What a run that goes on has cost, so that a front end's own clock can go on with it.

    Args:
        text: When this was made: `$0.37`.
        per_s: What it costs in a second; 0 when only `text` is to be drawn.
        seconds: For how long its meter had run when this was made. Each second that has begun counts whole.
        currency: Such as `USD`.
        mark: What follows the sum, such as ` (simulated)`.
    """

    text: str
    per_s: float
    seconds: float
    currency: str
    mark: str


class Link(Message, frozen=True):
    """A page elsewhere: `http` or `https`, checked."""

    text: str
    url: str


class Snapshot(Message, frozen=True):
    """Everything that is drawn of a run but its log's lines. All texts are plain; the front end escapes them.

    Args:
        version: `VERSION`.
        seq: Grows with each; one that is not newer than what is drawn is old.
        run_id: The run.
        short_id: As people write it.
        name: Its name.
        mark: A word before all others, such as `auto` for a cell that `%sgpu_auto` has sent; "" without one.
        state: The word in the header: a run's state, a session's, or `goes on` when it is not followed any more.
        tone: The header's colour.
        final: Nothing changes any more.
        devices: `4 ranks · cpu, gloo` or `4 x A10, nccl`, and that they are simulated; of a cell in a session
            `3 of 4 ranks · session work`.
        pool: The pool's name, "" where the session says it.
        host: Where it runs, "" until known, and where the session says it.
        attempt: `attempt 2 of 3`, "" for the first.
        elapsed_s: Seconds since its ranks started, when this was made.
        ticking: The clock goes on.
        cost: What it has cost so far, None without a price and when it is over: then `meta` says it.
        meta: Further words for the header, such as the time that is left and why it was cancelled.
        preparing: What is going on before the ranks run, a line each; empty then.
        bar: The progress of the run as a whole, None when no rank has a bar.
        ranks: The grid; empty before there is anything to say.
        only: The ranks that take part, ascending; empty means all that `lines` has.
        idle: GPUs that stand out, a line each.
        notes: Sentences for the user.
        stall: Where the ranks wait for each other, a line each.
        failure: The first failure, None while there is none.
        others: What became of the other ranks, a line each.
        footer: What was shipped and returned, what to do next.
        tracked: Its page in MLflow, None where there is none.
        lines: Lines of each rank's log so far, by rank number, also of ranks that do not take part.
        can_cancel: Cancel means something.
        stop: What the button says that ends it: `Cancel`, or `Disconnect` for a session.
        attach: The command that brings the run back after its kernel was restarted.
    """

    version: int
    seq: int
    run_id: str
    short_id: str
    name: str
    mark: str
    state: str
    tone: Tone
    final: bool
    devices: str
    pool: str
    host: str
    attempt: str
    elapsed_s: float
    ticking: bool
    cost: Cost | None
    meta: tuple[str, ...]
    preparing: tuple[str, ...]
    bar: Bar | None
    ranks: tuple[RankCard, ...]
    only: tuple[int, ...]
    idle: tuple[str, ...]
    notes: tuple[str, ...]
    stall: tuple[str, ...]
    failure: FailureBlock | None
    others: tuple[str, ...]
    footer: tuple[str, ...]
    tracked: Link | None
    lines: tuple[int, ...]
    can_cancel: bool
    stop: str
    attach: str
