"""How failures are worded: the culprit whole, everybody else in a line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from sgpu_magic.config import host_name
from sgpu_magic.system.processes import signal_name
from sgpu_magic.views.units import format_ranks, format_seconds
from sgpu_magic.wire.events import AttemptFailed
from sgpu_magic.wire.failures import Failure
from sgpu_magic.wire.states import BUDGET, COST_LIMIT, FailureKind

_RULE = re.compile(r"-{5,}")
_HEADING = re.compile(r"[\w.]+ +Traceback \(most recent call last\):?")
_FRAME = re.compile(r"(Cell In\[|File |<)")
_CELL_FRAME = re.compile(r"Cell In\[")
_SUBJECT = re.compile(r"^rank \d+( of \d+)?")
_MAX_MESSAGE = 300


class Limit(NamedTuple):
    """A limit that ended a run: what the run is then, and what stands above where its ranks were."""

    word: str
    then: str


_TIME = Limit("timed out", "when its time was over:")
_COSTS = {
    COST_LIMIT: Limit("cost limit reached", "when its cost limit was reached:"),
    BUDGET: Limit("budget used up", "when the pool's budget was used up:"),
}


def limit_of(failure: Failure | None) -> Limit:
    """Return which limit ended a run whose state is `TIMED_OUT`: of its time, of its cost, or its pool's budget."""
    message = failure.message if failure is not None else ""
    return next((limit for start, limit in _COSTS.items() if message.startswith(start)), _TIME)


def last_part(type_name: str) -> str:
    """Return `ValueError` for `builtins.ValueError`."""
    return type_name.rsplit(".", 1)[-1]


def error_line(failure: Failure) -> str:
    """Return `ValueError: NaN in batch 118`, one line of at most 300 characters."""
    name = last_part(failure.type_name)
    message = failure.message.strip()
    if not name or message.startswith((f"{name}:", f"{failure.type_name}:")) or message == name:
        line = message or name or f"{failure.kind}"
    else:
        line = f"{name}: {message}" if message else name
    line = line.split("\n", 1)[0]
    return line if len(line) <= _MAX_MESSAGE else line[:_MAX_MESSAGE] + " ..."


def place(failure: Failure, ranks: int) -> str:
    """Return `rank 1 of 4 (this machine)`, "" when no rank is meant."""
    if failure.rank is None:
        return ""
    here = "this machine" if failure.host.split(".")[0] == host_name() else failure.host
    return f"rank {failure.rank} of {ranks}" + (f" ({here})" if here else "")


def traceback_body(failure: Failure) -> list[str]:
    """Return the lines of the plain traceback without IPython's rule and heading."""
    lines = failure.traceback_text.strip("\n").split("\n") if failure.traceback_text.strip() else []
    while lines and (_RULE.fullmatch(lines[0].strip()) or _HEADING.fullmatch(lines[0].strip())):
        lines.pop(0)
    return lines


def cell_excerpt(failure: Failure) -> tuple[list[str], bool]:
    """Return the traceback with the cell's own frames only, and whether frames were left out.

    A traceback without such frames, or with chained exceptions, is returned whole.
    """
    body = traceback_body(failure)
    blocks: list[list[str]] = [[]]
    for line in body:
        if line.strip():
            blocks[-1].append(line)
        elif blocks[-1]:
            blocks.append([])
    blocks = [block for block in blocks if block]
    is_frame = [bool(_FRAME.match(block[0])) for block in blocks]
    is_cell = [bool(_CELL_FRAME.match(block[0])) for block in blocks]
    # frames first, then the message: any other order is a chain of exceptions
    if not any(is_cell) or is_frame != sorted(is_frame, reverse=True) or all(is_frame):
        return body, False
    kept = [block for block, frame, cell in zip(blocks, is_frame, is_cell, strict=True) if cell or not frame]
    return [line for block in kept for line in block], len(kept) < len(blocks)


def died_of(failure: Failure) -> str:
    """Return `was killed by SIGKILL` or `ended with exit code 3`."""
    status = failure.exit_status
    if status is None:
        return "died"
    if status >= 0:
        return f"ended with exit code {status}"
    return f"was killed by {signal_name(-status)}"


def death_sentence(failure: Failure, ranks: int) -> str:
    """Return `rank 2 of 4 was killed by SIGKILL: most likely out of memory`."""
    message = failure.message.strip()
    pid = f" (process {failure.pid})" if failure.pid and f"{failure.pid}" not in message else ""
    if message.startswith(("rank ", "the ")):
        return _SUBJECT.sub(lambda found: f"{found[0]}{pid}", message)
    subject = f"rank {failure.rank} of {ranks}{pid}" if failure.rank is not None else ""
    if failure.kind is not FailureKind.WORKER_DIED:
        return f"{subject}: {message}" if subject and message else message or subject or f"{failure.kind}"
    died = died_of(failure)
    if not message:
        return f"{subject} {died}".strip()
    if message.startswith(("was ", "died", "ended", "exited")):
        return f"{subject} {message}".strip()
    return f"{subject} {died}: {message}".strip()


def other_lines(others: Iterable[Failure], culprit: int | None = None) -> list[str]:
    """Return one line for each way in which further ranks ended, ranks of the same way together."""
    ways: dict[str, list[int]] = {}
    for other in others:
        if other.rank is not None and other.rank != culprit:
            ways.setdefault(_way(other), []).append(other.rank)
    lines: list[str] = []
    for way, ranks in ways.items():
        verb = "" if way.startswith(":") else " was " if len(set(ranks)) == 1 else " were "
        lines.append(f"{format_ranks(ranks)}{verb}{way}")
    return lines


def attempt_note(body: AttemptFailed, seconds: float) -> str:
    """Return `attempt 1 of 3 failed after 9 s: rank 2 was killed by SIGKILL; started again`."""
    failure = body.failure
    if failure.kind is FailureKind.WORKER_DIED and failure.rank is not None:
        why = f"rank {failure.rank} {died_of(failure)}"
    else:
        why = (f"rank {failure.rank}: " if failure.rank is not None else "") + error_line(failure)
    after = f" after {format_seconds(seconds)}" if seconds else ""
    return f"attempt {body.attempt} of {body.attempts} failed{after}: {why}; started again"


def _way(other: Failure) -> str:
    at = f" (line {other.line})" if other.line is not None else ""
    if other.is_consequence:
        return f"released from {other.where}{at}" if other.where else f"released{at}"
    if last_part(other.type_name) == "KeyboardInterrupt":
        # what the stop path sends to those that a collective does not hold
        return f"stopped{at}"
    if other.kind is FailureKind.WORKER_DIED:
        first, _, _ = other.message.strip().partition("\n")
        said = re.sub(r"^rank \d+ of \d+ (\(process \d+\) )?", "", first)
        return f": {said or died_of(other)}{at}"
    return f": {error_line(other)}{at}"


def timeout_sentence(seconds: float) -> str:
    return f"its time limit of {format_seconds(seconds)} is over (--timeout)"
