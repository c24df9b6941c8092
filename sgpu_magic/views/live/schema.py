"""Records of everything that a live view shows except log lines, as JSON. `messages` has updates and requests."""

from __future__ import annotations

from typing import Literal

import msgspec

VERSION = 5
"""Version of these records. A front end renders only its own version."""

Tone = Literal["plain", "busy", "good", "bad", "warn"]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the records: immutable, with every field present on the wire."""


class Bar(Message, frozen=True):
    """A progress bar.

    Args:
        fraction: 0 to 1, None when the total is unknown.
        text: Its text, such as `epoch 7/10 · 62 %`; the run's as in `epoch 2 of 3, 43 %`.
    """

    fraction: float | None
    text: str


class Curve(Message, frozen=True):
    """A value over time, evenly spaced.

    Args:
        name: `GPU`, `memory`, `power`, `temperature`, `CPU`.
        unit: `%`, `GB`, `W`, `°C`, `cores`.
        values: Oldest first; None where nothing was reported.
        began_s: Time of the first value, seconds since the ranks started.
        step_s: Seconds between two values.
        top: End of the axis; None for the largest value.
    """

    name: str
    unit: str
    values: tuple[float | None, ...]
    began_s: float
    step_s: float
    top: float | None


class MetricCurve(Message, frozen=True):
    """What one rank has logged as one metric.

    Args:
        rank: The rank.
        last: Its last value in words: `0.0312`, `NaN`.
        steps: The points' positions on the axis, ascending: steps, or seconds since the first point.
        values: The points' values; None for one that is not finite.
    """

    rank: int
    last: str
    steps: tuple[float, ...]
    values: tuple[float | None, ...]


class MetricChart(Message, frozen=True):
    """A metric that the run's code has logged to MLflow.

    Args:
        name: Its name.
        last: The last value of the first rank that has logged it: `0.0312`.
        range: The smallest and the largest value in words: `0.03 to 2.3`; "" if `last` is the only one.
        low: Lower end of the vertical axis.
        high: Upper end of the vertical axis, above `low`.
        axis: What the positions count.
        begins: The first position in words: `step 0`, or `0 s` for points that all have the same step.
        ends: The last position in words: `step 39`, `12.4 s`; "" if it is the first.
        curves: A curve for each rank that has logged it, at most eight.
        others: A sentence about further ranks, "" without any: `56 more ranks, last 0.03 to 0.04`.
    """

    name: str
    last: str
    range: str
    low: float
    high: float
    axis: Literal["step", "seconds"]
    begins: str
    ends: str
    curves: tuple[MetricCurve, ...]
    others: str


class RankCard(Message, frozen=True):
    """One rank in the grid.

    Args:
        rank: The rank.
        state: `waiting`, `running`, `done`, `failed`, `released` or `ended`; in a session `alive` or `dead`.
        tone: Its colour.
        label: Its device, "" when it has none.
        last: Its last line, without colours and without a drawn progress bar; before the first line where it is in its
            cell, such as `at line 3: import torch`; `waits in barrier` once it has waited there for some seconds.
        bar: Its progress bar, None without one.
        use: Its usage in words: `94 % · 18.2 GB`, without a GPU `1.9 cores · 0.4 GB`; "" before the first sample.
        details: Everything that was measured, one line each; values that are not reported are marked as absent.
        curves: Its curves; the grid shows the first.
        idle: `GPU under 5 % for 60 s: it waits in the DataLoader`, "" when its GPU is not idle.
        host: The node of this rank and the following ones, "" if it is the same as for the rank before, or if all
            ranks are on one node.
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
        shares: Shares of the total, each 0 to 1: held by tensors, cached by torch's allocator, held by others.
        culprit: Whether its allocation failed first.
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
        title: Heading of the table.
        heads: Its column heads: rank, device, used, reserved, free, total.
        rows: Its rows; that of the rank whose allocation failed first comes first.
        more: The number of ranks left out, "" for none.
        largest: Heading of the tensors, "" when there are none.
        tensors: The largest tensors of the rank whose allocation failed first.
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
        rank: The rank that failed first, None for a failure that no rank caused.
        lines: The lines that are always shown.
        whole: The whole traceback if `lines` has only a part of it, else empty.
        memory: What held the memory when an allocation failed, None for other failures.
    """

    rank: int | None
    lines: tuple[FailureLine, ...]
    whole: tuple[FailureLine, ...]
    memory: MemoryBlock | None


class Cost(Message, frozen=True):
    """The running cost of an active run, which a front end continues by its own clock.

    Args:
        text: The cost when this was created: `$0.37`.
        per_s: Cost per second; 0 to show only `text`.
        seconds: Metered seconds when this was created. Each second that has begun counts as a whole.
        currency: Such as `USD`.
        mark: The text after the amount, such as ` (simulated)`.
    """

    text: str
    per_s: float
    seconds: float
    currency: str
    mark: str


class HoldingSession(Message, frozen=True):
    """A session of the run's notebook that holds devices for which the run waits.

    Args:
        run_id: Its run id.
        name: Its name in words: `session walk`.
    """

    run_id: str
    name: str


class Link(Message, frozen=True):
    """A link to a web page; the URL is checked to be `http` or `https`."""

    text: str
    url: str


class Snapshot(Message, frozen=True):
    """Everything that a live view shows except log lines. All texts are plain; the front end escapes them.

    Args:
        version: `VERSION`.
        seq: Grows with each snapshot; ignore a snapshot that is not newer than the current one.
        run_id: The run.
        short_id: The short form of its id.
        name: Its name.
        mark: A word before all others, such as `auto` for a cell that `%sgpu_auto` submitted; "" for none.
        state: The word in the header: a run's or a session's state, or `goes on` when it is not followed any more.
        tone: The header's colour.
        final: The run will not change any more.
        devices: `4 ranks · cpu, gloo` or `4 x A10, nccl`, with a mark for simulated devices; for a cell in a session
            `3 of 4 ranks · session work`.
        pool: The pool's name, "" for a cell in a session.
        host: Where it runs, "" until known and for a cell in a session.
        attempt: `attempt 2 of 3`, "" for the first.
        elapsed_s: Seconds since its ranks had started, or for which they ran, when this was created; 0 before.
        starting_s: Seconds from the lease until its ranks had started; so far, while they have not.
        ticking: The elapsed time is running, or the starting time while the ranks have not started.
        cost: The cost so far; None without a price, and for an ended run, whose cost is in `meta`.
        meta: Further words for the header, such as the remaining time and why it was cancelled.
        preparing: What happens before the ranks run, one line each; empty afterwards.
        bar: The progress of the run as a whole, None without one.
        ranks: The grid; empty before the ranks are being started.
        metrics: The metrics that its code has logged; empty without any.
        metrics_text: The last values of the first ones in words: `loss 0.0312 · and 3 more`.
        more_metrics: How many are not drawn: `and 3 more`, "" if all are.
        only: The ranks that take part, ascending; empty for all ranks.
        idle: Warnings about idle GPUs and other current problems, one line each.
        warnings: Notes that ask the user for something.
        notes: Other notes, which are information.
        stall: Where the ranks of a stalled run wait, one line each.
        failure: The first failure, None while there is none.
        others: How the other ranks ended, one line each.
        footer: What was shipped and returned, and what to do next.
        tracked: A link to its MLflow run, None when there is no web page.
        lines: Number of lines in each rank's log so far, by rank, including ranks that do not take part.
        can_cancel: The run can be cancelled.
        own_sessions: The sessions of its notebook that hold devices for which it waits.
        stop: Label of the button that stops it: `Cancel`, or `End session`.
        attach: The command that shows the run again after a restart of its kernel.
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
    starting_s: float
    ticking: bool
    cost: Cost | None
    meta: tuple[str, ...]
    preparing: tuple[str, ...]
    bar: Bar | None
    ranks: tuple[RankCard, ...]
    metrics: tuple[MetricChart, ...]
    metrics_text: str
    more_metrics: str
    only: tuple[int, ...]
    idle: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    stall: tuple[str, ...]
    failure: FailureBlock | None
    others: tuple[str, ...]
    footer: tuple[str, ...]
    tracked: Link | None
    lines: tuple[int, ...]
    can_cancel: bool
    own_sessions: tuple[HoldingSession, ...]
    stop: str
    attach: str
