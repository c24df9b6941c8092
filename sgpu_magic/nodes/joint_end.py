"""One beginning and one end of a run, made of those of its nodes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from sgpu_magic.agent.failures.reports_of_ranks import find_root_cause
from sgpu_magic.wire.events import PayloadReleased, RanksStarted, RunEnded
from sgpu_magic.wire.records import Failure
from sgpu_magic.wire.states import RunState

# who waited longest says how the ranks came
_WARMTH = ("cold", "zygote", "standby", "session")
# what it was stopped as counts before how single nodes ended
_RANKING = (RunState.TIMED_OUT, RunState.CANCELLED, RunState.FAILED, RunState.SUCCEEDED)


@dataclass(frozen=True, slots=True)
class PartEnd:
    """How one node's part ended.

    Args:
        ended: Its last word.
        frames: The raw frames beside it.
        ahead_s: How far its clock is ahead of this one's.
    """

    ended: RunEnded
    frames: Sequence[bytes]
    ahead_s: float = 0.0


def join_starts(starts: Sequence[RanksStarted]) -> RanksStarted:
    """Join what the nodes say when their ranks are in the group, in order of the parts."""
    known = [start.warm for start in starts if start.warm in _WARMTH]
    warm = min(known, key=_WARMTH.index) if known else starts[0].warm
    return RanksStarted(pids=tuple(pid for start in starts for pid in start.pids), warm=warm)


def join_releases(releases: Sequence[PayloadReleased]) -> PayloadReleased:
    """Join what became of the payload on the nodes: it is kept if it is anywhere."""
    kept = any(release.kept for release in releases)
    reason = "" if kept else next((release.reason for release in releases if release.reason), "")
    return PayloadReleased(kept=kept, reason=reason)


def join_ends(parts: Sequence[PartEnd]) -> tuple[RunEnded, tuple[bytes, ...]]:
    """Join the last words of the nodes, in order of the parts. Returns the run's, and the frames beside it.

    The root cause is found over all nodes, by their clocks as far as those are known to be wrong.
    """
    ends = [part.ended for part in parts]
    state = min((end.state for end in ends), key=_RANKING.index)
    failure: Failure | None = None
    others: tuple[Failure, ...] = ()
    frames: tuple[bytes, ...] = ()
    if state is RunState.FAILED:
        failure, others, frames = _blame(parts)
    elif state is RunState.SUCCEEDED:
        frames = tuple(frame for part in parts for frame in part.frames)
    elif state is RunState.TIMED_OUT:
        failure = next((end.failure for end in ends if end.state is state and end.failure is not None), None)
    return (
        RunEnded(
            state=state,
            failure=failure,
            reason=next((end.reason for end in ends if end.state is state), ""),
            others=others,
            results=tuple(result for end in ends for result in end.results) if state is RunState.SUCCEEDED else (),
            stacks=tuple(stack for end in ends for stack in end.stacks),
            unstopped=tuple(rank for end in ends for rank in end.unstopped),
            starting_s=max(end.starting_s for end in ends),
            running_s=max(end.running_s for end in ends),
        ),
        frames,
    )


def _blame(parts: Sequence[PartEnd]) -> tuple[Failure | None, tuple[Failure, ...], tuple[bytes, ...]]:
    """Return the culprit, the others, and the culprit's packed exception where there is one."""
    told: list[Failure] = []
    own: dict[int, tuple[Failure, Sequence[bytes]]] = {}
    for part in parts:
        head = part.ended.failure
        for failure in ((head,) if head is not None else ()) + part.ended.others:
            by_our_clock = msgspec.structs.replace(failure, at=failure.at - part.ahead_s)
            own[id(by_our_clock)] = (failure, part.frames if failure is head else ())
            told.append(by_our_clock)
    blamed = find_root_cause(told)
    if blamed is None:
        return None, (), ()
    failure, frames = own[id(blamed[0])]
    # only the culprit's exception travels
    others = tuple(msgspec.structs.replace(own[id(other)][0], exception=None) for other in blamed[1])
    return failure, others, tuple(frames[:1]) if failure.exception is not None and failure.rank is not None else ()
