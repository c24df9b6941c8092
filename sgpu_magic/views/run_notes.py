"""A run's name, a session's state, and the sentences that events produce: notes and failures. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sgpu_magic.formatting import clipped, count_of, format_ranks, format_seconds
from sgpu_magic.system.processes import signal_name
from sgpu_magic.views import ansi
from sgpu_magic.wire.base import CancelReason, FailureKind, RunKind, RunLimit, short
from sgpu_magic.wire.devices import Lease, SharedCores, backend
from sgpu_magic.wire.events import WARNING, AttemptFailed, GroupRenewed, RanksRestarted, RunEnded, SessionMoved
from sgpu_magic.wire.pool_status import RunSummary
from sgpu_magic.wire.rank_events import Death, Failure, RankUnfinished
from sgpu_magic.wire.run import RunSpec

_MOST_NOTES = 50
_MOST_WORK = 4
_MAX_MESSAGE = 300
# to be removed when `tests/gpu/test_many_gpus.py` has passed on two GPUs
_UNTRIED = "over NCCL this is untried: check the next results, or start new ranks with %sgpu_restart"


def run_name(spec: RunSpec | RunSummary) -> str:
    """Return `train_digits` for a cell, `train(...)` for a call, `session work` for a session."""
    match spec.kind:
        case RunKind.SESSION:
            return session_name(spec.run_id, spec.name)
        case RunKind.CALL if spec.name and "(" not in spec.name:
            return f"{spec.name}(...)"
        case kind:
            return spec.name or f"{kind}"


def stop_texts(spec: RunSpec | RunSummary) -> tuple[CancelReason, str]:
    """Return the reason recorded when a view's button stops the run, and the sentence shown to the user."""
    if spec.kind is RunKind.SESSION:
        return CancelReason.END_BUTTON, f"{run_name(spec)} is being ended"
    return CancelReason.CANCEL_BUTTON, f"run {short(spec.run_id)} is being stopped"


def session_name(run_id: str, name: str) -> str:
    """Return `session walk`, or `session 7f3a` without a name."""
    return f"session {name or short(run_id)}"


def cancelled_sentence(run_id: str, reason: str) -> str:
    """Return `Run 9173 was cancelled with the Cancel button.`

    Args:
        run_id: The run.
        reason: Why it was cancelled, as its final event says: a `CancelReason` or another text.
    """
    match reason:
        case CancelReason.INTERRUPT:
            how = "was interrupted"
        case CancelReason.SECOND_INTERRUPT:
            how = "was interrupted twice, and its ranks were killed"
        case CancelReason.CANCEL_BUTTON | CancelReason.END_BUTTON:
            how = f"was cancelled with the {reason}"
        case CancelReason.COMMAND:
            how = f"was cancelled by {reason}"
        case _:
            how = f"was cancelled: {reason}"
    return f"Run {short(run_id)} {how}."


class Notes:
    """A run's notes, each once, in order of arrival.

    Args:
        texts: The first notes; those that ask the user for something begin with `WARNING`.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._is_warning: dict[str, bool] = {}
        for text in texts:
            self.add(text)

    @property
    def texts(self) -> list[str]:
        return list(self._is_warning)

    @property
    def warnings(self) -> list[str]:
        """Those that ask the user for something."""
        return [text for text, is_warning in self._is_warning.items() if is_warning]

    def add(self, text: str, *, is_warning: bool = False) -> None:
        """Add a note unless it is empty or known, or there are too many."""
        is_warning |= text.startswith(WARNING)
        text = text.removeprefix(WARNING)
        if text and text not in self._is_warning and len(self._is_warning) < _MOST_NOTES:
            self._is_warning[text] = is_warning


class SessionState:
    """A session's cells and ranks.

    Attributes:
        cells: Number of cells started in it so far.
        running: The names of running cells.
        dead: Dead ranks, which need `%sgpu_restart`.
        idle_at: When its last cell ended, seconds since the epoch; None while one runs, and before the first.
    """

    def __init__(self) -> None:
        self.cells = 0
        self.running: tuple[str, ...] = ()
        self.dead: tuple[int, ...] = ()
        self.idle_at: float | None = None

    def apply_move(self, body: SessionMoved, at: float) -> None:
        """Apply an event that happened at `at`."""
        if body.running:
            self.idle_at = None
        elif body.cells and (self.running or body.cells != self.cells):
            self.idle_at = at
        self.cells, self.running, self.dead = body.cells, body.running, body.dead


def renewal_note(body: GroupRenewed, lease: Lease | None) -> str:
    """Return a sentence about renewed process groups and the objects that use them, or why they are not renewed.

    Args:
        body: The renewal.
        lease: The devices of the ranks; None if they are not known.
    """
    if body.problem:
        failed = f"the process groups could not be reconnected ({body.reason}): {body.problem}"
        return f"{failed}; %sgpu_restart restarts the ranks"
    kept = body.lost or "models in DDP and FSDP, and your own groups, still work"
    untried = f"; {_UNTRIED}" if lease is not None and lease.ranks > 1 and backend(lease) == "nccl" else ""
    return f"the process groups were reconnected: {body.reason}; {kept}{untried}"


def restart_note(body: RanksRestarted) -> str:
    """Return `rank 2 restarted (pid 4711): its variables are lost`."""
    lost = f": {body.lost}" if body.lost else ""
    return f"{format_ranks(body.ranks)} restarted (pid {', '.join(map(str, body.pids))}){lost}"


def restart_command(ranks: Sequence[int]) -> str:
    """Return `%sgpu_restart --rank 2`."""
    return f"%sgpu_restart --rank {','.join(map(str, ranks))}"


def unstopped_note(ranks: tuple[int, ...]) -> str:
    """Return a sentence about ranks that still run a stopped cell, and what to do."""
    it, has, runs = ("it", "has", "runs") if len(ranks) == 1 else ("them", "have", "run")
    return (
        f"{format_ranks(ranks)} {has} not stopped and still {runs} this cell: the session's next cell waits for {it}. "
        f"Interrupt again within 5 s to kill {it}, or {restart_command(ranks)}, which replaces {it}"
    )


def finishing_text(ranks: Sequence[RankUnfinished]) -> str:
    """Return `rank 1 finishes thread upload; ranks 2 and 3 finish exit function wandb.finish`, "" for no ranks."""
    parts: list[str] = []
    for work, numbers in _by_work(ranks).items():
        finish, leave = ("finishes", "exits") if len(numbers) == 1 else ("finish", "exit")
        parts.append(f"{format_ranks(numbers)} {f'{finish} {work}' if work else leave}")
    return "; ".join(parts)


def cut_off_text(body: RunEnded) -> str:
    """Return `cut off after 5 min: thread upload of rank 1`, "" if nothing was cut off."""
    parts = [f"{work or 'the exit'} of {format_ranks(numbers)}" for work, numbers in _by_work(body.cut_off).items()]
    return f"cut off after {format_seconds(body.finish_s)}: {', '.join(parts)}" if parts else ""


def cut_off_note(body: RunEnded) -> str:
    """Return a sentence about what ranks had no time to finish after their cell, and how to give them more."""
    return (
        f"{cut_off_text(body)}. The cell had ended, but not what it has started. Wait for it in the cell, or let the "
        f"pool wait longer: the setting finish_timeout_s"
    )


def _by_work(ranks: Sequence[RankUnfinished]) -> dict[str, list[int]]:
    """Return the ranks by what they finish, in words."""
    found: dict[str, list[int]] = {}
    for each in ranks:
        named = [f"{one.kind} {ansi.plain(one.name)}" for one in each.work[:_MOST_WORK]]
        more = len(each.work) - len(named)
        work = ", ".join([*named, *([f"{more} more"] if more else [])])
        found.setdefault(work, []).append(each.rank)
    return found


# ---------------------------------------------------------------- failures


class Limit(NamedTuple):
    """A limit that ended a run: the word for its state, and the heading above the stacks of its ranks."""

    word: str
    then: str


_LIMITS = {
    RunLimit.TIME: Limit("timed out", "when its time limit was reached:"),
    RunLimit.COST: Limit("cost limit reached", "when its cost limit was reached:"),
    RunLimit.BUDGET: Limit("budget used up", "when the pool's budget was used up:"),
}


def limit_of(failure: Failure | None, limit: RunLimit | None) -> Limit:
    """Return the words for the limit that ended a run: that of a collective, else the run's or the pool's.

    Args:
        failure: The run's failure.
        limit: `RunEnded.limit`.
    """
    if failure is not None and failure.collective_timeout is not None:
        collective = failure.collective_timeout.collective
        return Limit("timed out", f"when {'a collective' if collective is None else collective.label} timed out:")
    return _LIMITS[limit or RunLimit.TIME]


def last_part(type_name: str) -> str:
    """Return `ValueError` for `builtins.ValueError`."""
    return type_name.rsplit(".", 1)[-1]


def error_line(failure: Failure) -> str:
    """Return `ValueError: NaN in batch 118`, one line of at most 300 characters."""
    return clipped(error_text(failure, failure.message.strip()).split("\n", 1)[0], _MAX_MESSAGE)


def error_text(failure: Failure, message: str) -> str:
    """Return `ValueError: NaN in batch 118`: the type and a form of the failure's message, which may name the type."""
    name = last_part(failure.type_name)
    if not name or message.startswith((f"{name}:", f"{failure.type_name}:")) or message == name:
        return message or name or f"{failure.kind}"
    return f"{name}: {message}" if message else name


def died_of(failure: Failure) -> str:
    """Return `was killed by SIGKILL` or `ended with exit code 3`."""
    status = failure.exit_status
    if status is None:
        return "died"
    return f"ended with exit code {status}" if status >= 0 else f"was killed by {signal_name(-status)}"


def death_sentence(failure: Failure, ranks: int) -> str:
    """Return `rank 2 of 4 was killed by SIGKILL: most likely out of memory`."""
    message = failure.message.strip()
    if failure.rank is None:
        return message or f"{failure.kind}"
    subject = f"rank {failure.rank} of {ranks}" + (f" (process {failure.pid})" if failure.pid else "")
    if failure.death is not None:
        return "\n".join([f"{subject} {failure.death.what}", *_last_of(failure.death)])
    if failure.kind is FailureKind.WORKER_DIED:
        return f"{subject} {died_of(failure)}" + (f": {message}" if message else "")
    return f"{subject}: {message}" if message else subject


def _last_of(death: Death) -> list[str]:
    """Return the last Python line and the last output of a rank that died, one for each line of text."""
    lines: list[str] = []
    if death.last_line:
        age = f", {death.line_age_s:.1f} s before its end" if death.line_age_s else ""
        lines.append(f"its last Python line{age}: {death.last_line}")
    if death.last_output:
        first, *rest = death.last_output
        lines += [f"its last output: {first}", *(f"  {line}" for line in rest)]
    return lines


def other_lines(others: Iterable[Failure], culprit: int | None = None) -> list[str]:
    """Return lines about how the other ranks ended, one for all ranks that ended in the same way."""
    ways: dict[str, list[int]] = {}
    for other in others:
        if other.rank is not None and other.rank != culprit:
            ways.setdefault(_way(other), []).append(other.rank)
    lines: list[str] = []
    for way, ranks in ways.items():
        verb = " was " if len(set(ranks)) == 1 else " were "
        if way.startswith(":"):
            verb = ""
        lines.append(f"{format_ranks(ranks)}{verb}{way}")
    return lines


def attempt_note(body: AttemptFailed, seconds: float) -> str:
    """Return `attempt 1 of 3 failed after 9 s: rank 2 was killed by SIGKILL; started again`."""
    failure = body.failure
    why = error_line(failure)
    if failure.rank is not None:
        died = failure.kind is FailureKind.WORKER_DIED
        why = f"rank {failure.rank}{f' {died_of(failure)}' if died else f': {why}'}"
    after = f" after {format_seconds(seconds)}" if seconds else ""
    return f"attempt {body.attempt} of {body.attempts} failed{after}: {why}; started again"


def _way(other: Failure) -> str:
    at = f" (line {other.line})" if other.line is not None else ""
    if other.is_consequence:
        return f"released from {other.where}{at}" if other.where else f"released{at}"
    if other.after_stop and last_part(other.type_name) == "KeyboardInterrupt":
        # the stop path interrupts ranks that are not blocked in a collective
        return f"stopped{at}"
    if other.kind is FailureKind.WORKER_DIED:
        return f": {died_of(other) if other.death is None else other.death.what}{at}"
    return f": {error_line(other)}{at}"


def shared_cores_note(ranks: int, shared: SharedCores) -> str:
    return f"{ranks} ranks share {count_of(shared.cores, 'core')}"


def timeout_sentence(seconds: float) -> str:
    return f"reached its {format_seconds(seconds)} time limit"
