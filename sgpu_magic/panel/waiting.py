"""When devices will be free, guessed from what earlier runs have taken. Pure.

A run that holds devices is thought to end when half of those like it had: of its name, else of its kind on its type
of device, else all there; only those count that took longer than it has until now, and one that has outlasted them all
is thought to take as long again. Then those that wait get theirs, first come, first served, where they fit.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sgpu_magic.views.pool_words import HOLDING
from sgpu_magic.wire.device_types import CPU
from sgpu_magic.wire.pool_status import RunSummary
from sgpu_magic.wire.states import RunKind, RunState

# nothing that is not free now is free at once
_LEAST_S = 1.0
# nobody reads such a guess to the second: up to so many seconds, in steps of so many
_STEPS = ((60.0, 10.0), (600.0, 30.0), (float("inf"), 60.0))


@dataclass(frozen=True, slots=True)
class Held:
    """Devices that a run has.

    Args:
        count: Their number.
        left_s: Seconds until it gives them back, None when nobody knows.
    """

    count: int
    left_s: float | None


@dataclass(frozen=True, slots=True)
class Queued:
    """A run that waits.

    Args:
        count: Devices that it asks for.
        takes_s: Seconds for which it will have them, None when nobody knows.
    """

    count: int
    takes_s: float | None


class Durations:
    """For how long runs had their devices.

    Args:
        runs: The ledger's rows; those that have not ended, never began or ran on a session's devices do not count.
    """

    def __init__(self, runs: Iterable[RunSummary]) -> None:
        self._of: dict[tuple[str, ...], list[float]] = {}
        for run in runs:
            began = run.metered_at if run.metered_at is not None else run.started_at
            if run.session or began is None or run.ended_at is None or not run.state.is_final:
                continue
            took = max(0.0, run.ended_at - began)
            for key in _keys(run.device_type, run):
                bisect.insort(self._of.setdefault(key, []), took)

    def left_s(self, run: RunSummary, device_type: str, elapsed_s: float) -> float | None:
        """Return how much longer a run has its devices, None when none like it has ended before.

        Args:
            run: It goes on, or waits.
            device_type: Of its devices.
            elapsed_s: For how long it has had them.
        """
        known = next((found for key in _keys(device_type, run) if (found := self._of.get(key))), None)
        if known is None:
            return None
        longer = known[bisect.bisect_right(known, elapsed_s) :]
        return max(_LEAST_S, _median(longer) - elapsed_s if longer else elapsed_s)


def _keys(device_type: str, run: RunSummary) -> Sequence[tuple[str, ...]]:
    """Return what a run is like, the closest first."""
    kind = "session" if run.kind is RunKind.SESSION else "run"
    return (device_type, kind, run.name), (device_type, kind), (device_type,)


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def waits(total: int, free: int, held: Iterable[Held], queue: Iterable[Queued]) -> tuple[float | None, ...]:
    """Return for each number of devices from 1 to `total` how many seconds it will be until so many are free.

    Args:
        total: Devices of the type.
        free: Of these, now.
        held: What runs have of them.
        queue: Who waits for them, the first one first.

    Returns:
        0 for as many as are free now, never less for more devices than for fewer, None when nobody knows.
    """
    found: list[float | None] = [0.0] * free + [None] * (total - free)
    ends = sorted((max(_LEAST_S, one.left_s), one.count) for one in held if one.left_s is not None)
    waiting = [one for one in queue if one.count <= total]
    now, most = 0.0, free
    while True:
        free, waiting = _placed(free, waiting, now, ends)
        for number in range(most, min(free, total)):
            found[number] = now
        most = max(most, min(free, total))
        if not ends:
            return tuple(None if wait is None else _in_steps(wait) for wait in found)
        now = ends[0][0]
        while ends and ends[0][0] <= now:
            free += ends.pop(0)[1]
        free = min(free, total)


def _placed(free: int, waiting: list[Queued], now: float, ends: list[tuple[float, int]]) -> tuple[int, list[Queued]]:
    """Give those that fit their devices; returns what is left, and who still waits."""
    left: list[Queued] = []
    for one in waiting:
        if one.count > free:
            left.append(one)
            continue
        free -= one.count
        if one.takes_s is not None:
            bisect.insort(ends, (now + max(_LEAST_S, one.takes_s), one.count))
    return free, left


def _in_steps(wait_s: float) -> float:
    step = next(step for until, step in _STEPS if wait_s <= until)
    return -(-wait_s // step) * step


def holders_of(
    device_type: str, runs: Iterable[RunSummary], durations: Durations, now: float, uuids: frozenset[str]
) -> list[Held]:
    """Return what runs have of a type's devices.

    Args:
        device_type: As in `--type`.
        runs: The pool's.
        durations: What earlier ones took.
        now: Wall-clock time, seconds since the epoch.
        uuids: The type's devices; empty for CPU slots.
    """
    found: list[Held] = []
    for run in runs:
        if run.state not in HOLDING or run.session:
            continue
        count = len(uuids.intersection(run.uuids)) if uuids else 0 if run.uuids else run.ranks
        if not count:
            continue
        began = run.metered_at if run.metered_at is not None else run.started_at
        left_s = durations.left_s(run, device_type, 0.0 if began is None else max(0.0, now - began))
        if run.idle_ends_at is not None:
            # it may be used again; but as things are, it is gone then
            idle_s = max(_LEAST_S, run.idle_ends_at - now)
            left_s = idle_s if left_s is None else min(left_s, idle_s)
        found.append(Held(count, left_s))
    return found


def queue_of(device_type: str, runs: Iterable[RunSummary], durations: Durations, main_type: str = CPU) -> list[Queued]:
    """Return who waits for devices of a type, the first one first.

    Args:
        device_type: As in `--type`.
        runs: The pool's.
        durations: What earlier ones took.
        main_type: What the pool chooses for those that name no type.
    """
    waiting = [run for run in runs if run.state is RunState.QUEUED and not run.session]
    waiting = [run for run in waiting if (main_type if run.device_type == "any" else run.device_type) == device_type]
    waiting.sort(key=lambda run: (run.position is None, run.position or 0, run.submitted_at))
    return [Queued(run.ranks, durations.left_s(run, device_type, 0.0)) for run in waiting]
