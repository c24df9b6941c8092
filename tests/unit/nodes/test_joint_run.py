"""One run assembled from its nodes' events in any order: across lost links, lost nodes and restarted services."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from sgpu_magic.nodes.engine_reports import JointStacks, PartEnd, join_ends, join_releases
from sgpu_magic.nodes.joint_run import JointRun, JointStalls, MergedEvent
from sgpu_magic.wire.attachments import InlinePayload, PackedLayout, Payload
from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.events import EnvironmentMoved, EventBody, Noted, PayloadReleased, RanksStarted, RunEnded
from sgpu_magic.wire.node import RunEvent
from sgpu_magic.wire.rank_events import Failure, OutputWritten, RankFailed, RankStack, Resumed, Stalled
from sgpu_magic.wire.run import RankResult

NODES = 3
RANKS_EACH = 2
LAYOUT = PackedLayout(pickle_size=1, buffers=(), mac=b"")


def output(rank: int, start: int) -> OutputWritten:
    return OutputWritten(rank=rank, stream="stdout", text="x", start=start, end=start + 1)


def result(rank: int) -> RankResult:
    return RankResult(rank=rank, payload=Payload(source=InlinePayload(), layout=LAYOUT))


def failure(rank: int, at: float, *, victim: bool = False, packed: bool = False) -> Failure:
    return Failure(
        kind=FailureKind.USER_CODE,
        message=f"of rank {rank}",
        rank=rank,
        at=at,
        is_consequence=victim,
        exception=LAYOUT if packed else None,
    )


def story(part: int, lines: int, *, builds: bool = False) -> list[EventBody]:
    """A node's events for its part of a run that succeeds."""
    ranks = range(part * RANKS_EACH, (part + 1) * RANKS_EACH)
    reported: list[EventBody] = [EnvironmentMoved(host=f"n{part}", ready=True)] if builds else []
    reported.append(RanksStarted(pids=tuple(100 + rank for rank in ranks), warm="zygote" if part else "standby"))
    reported += [output(rank, start) for start in range(lines) for rank in ranks]
    released = PayloadReleased(kept=part == 1, reason="no room" if part == 0 else "")
    reported.insert(len(reported) - part % len(reported), released)
    reported.append(RunEnded(state=RunState.SUCCEEDED, results=tuple(map(result, ranks)), running_s=1.0 + part))
    return reported


def numbered(bodies: Sequence[EventBody], at: float = 100.0) -> list[RunEvent]:
    return [RunEvent(run_id="r", number=number, at=at, body=body) for number, body in enumerate(bodies, 1)]


def newest(log: Sequence[RunEvent]) -> dict[int, int]:
    """The newest event numbers, as a pool service reads them from its log."""
    numbers: dict[int, int] = {}
    for event in log:
        for part, number in ((event.part, event.number), *event.joined):
            numbers[part] = max(numbers.get(part, 0), number)
    return numbers


def bodies(log: Sequence[RunEvent], kind: type[EventBody]) -> list[EventBody]:
    return [event.body for event in log if isinstance(event.body, kind)]


class Cluster:
    """Nodes that send their events, and a service that may die and restart."""

    def __init__(self, stories: Sequence[Sequence[EventBody]]) -> None:
        self.rest = [list(bodies) for bodies in stories]
        self.sent: list[list[RunEvent]] = [[] for _ in stories]
        self.at = [0] * len(stories)
        self.log: list[RunEvent] = []
        self.frames: list[Sequence[bytes]] = []
        self.joint = JointRun(len(stories))

    def apply(self, part: int) -> None:
        """Deliver the node's next event, or one that it sends again."""
        sent = self.sent[part]
        if self.at[part] == len(sent):
            if not self.rest[part]:
                return
            self.say(part, self.rest[part].pop(0))
        event = sent[self.at[part]]
        self.at[part] += 1
        self.keep(self.joint.on_event(part, event, (f"{part}".encode(),), now=100.0))

    def say(self, part: int, body: EventBody) -> None:
        sent = self.sent[part]
        sent.append(RunEvent(run_id="r", number=len(sent) + 1, at=100.0, body=body))

    def keep(self, reported: Sequence[MergedEvent]) -> None:
        for event, frames in reported:
            self.log.append(event)
            self.frames.append(frames)

    def restart_service(self) -> None:
        """The agents still have the events that are not on disk, and send them again."""
        numbers = newest(self.log)
        self.joint = JointRun(len(self.sent), numbers)
        for part in range(len(self.sent)):
            self.adopt(part, numbers.get(part, 0))

    def break_link(self, part: int) -> None:
        """The node sends the events again that were not passed on."""
        self.adopt(part, self.joint.parts[part].passed)

    def adopt(self, part: int, number: int) -> None:
        """Act as an adopted agent, which reports the state of the payload again."""
        self.at[part] = number
        released = [event.body for event in self.sent[part] if isinstance(event.body, PayloadReleased)]
        if released:
            self.say(part, released[0])

    def finish(self) -> None:
        while any(map(len, self.rest)) or any(at < len(sent) for at, sent in zip(self.at, self.sent, strict=True)):
            for part in range(len(self.sent)):
                self.apply(part)


moves = st.lists(
    st.tuples(
        st.sampled_from(["tell", "tell", "tell", "tell", "break", "restart"]),
        st.integers(min_value=0, max_value=NODES - 1),
    ),
    max_size=40,
)


@settings(max_examples=examples(300), deadline=None)
@given(moves=moves, lines=st.lists(st.integers(0, 1), min_size=NODES, max_size=NODES), builds=st.booleans())
def test_whatever_the_order_a_run_is_told_once(moves: list[tuple[str, int]], lines: list[int], builds: bool):
    cluster = Cluster([story(part, lines[part], builds=builds) for part in range(NODES)])
    for move, part in moves:
        match move:
            case "tell":
                cluster.apply(part)
            case "break":
                cluster.break_link(part)
            case _:
                cluster.restart_service()
        assert all(cluster.joint.parts[part].passed >= number for part, number in newest(cluster.log).items())
    restarted = any(move == "restart" for move, _ in moves)
    cluster.finish()
    log = cluster.log
    (started,) = bodies(log, RanksStarted)
    assert started == RanksStarted(pids=tuple(range(100, 100 + NODES * RANKS_EACH)), warm="zygote")
    (ended,) = bodies(log, RunEnded)
    assert isinstance(ended, RunEnded)
    assert [own.rank for own in ended.results] == list(range(NODES * RANKS_EACH))
    assert ended.running_s == NODES
    for part in range(NODES):
        sent = [event.body for event in log if event.part == part and isinstance(event.body, OutputWritten)]
        assert sent == [body for body in story(part, lines[part]) if isinstance(body, OutputWritten)]
    kinds = [type(event.body) for event in log]
    assert all(
        kinds.index(RanksStarted) < at < kinds.index(RunEnded) for at, kind in enumerate(kinds) if kind is OutputWritten
    )
    released = bodies(log, PayloadReleased)
    assert released
    assert set(released) == {PayloadReleased(kept=True)}
    assert len(released) == 1 or restarted
    assert cluster.frames[kinds.index(RunEnded)] == tuple(f"{part}".encode() for part in range(NODES))


@settings(max_examples=examples(200), deadline=None)
@given(moves=moves, lost=st.integers(0, NODES - 1), when=st.integers(0, 60))
def test_of_a_run_that_lost_a_node_nobody_says_how_it_ended(moves: list[tuple[str, int]], lost: int, when: int):
    cluster = Cluster([story(part, 2) for part in range(NODES)])
    ended_before = False
    for at, (_, part) in enumerate(moves):
        if at == when:
            break
        cluster.apply(part)
    ended_before = bool(bodies(cluster.log, RunEnded))
    cluster.keep(cluster.joint.part_lost(lost))
    known = len([event for event in cluster.log if event.part == lost])
    cluster.finish()
    assert bool(bodies(cluster.log, RunEnded)) is ended_before
    assert (
        len([event for event in cluster.log if event.part == lost and isinstance(event.body, OutputWritten)]) <= known
    )
    for part in range(NODES):
        if part != lost:
            assert not cluster.joint.has_exited
            cluster.keep(cluster.joint.part_exited(part))
    assert cluster.joint.has_exited
    assert cluster.joint.is_lost


def test_what_follows_an_event_that_waits_waits_too():
    """Otherwise a service that is killed at that moment would never get the joint event."""
    joint = JointRun(2)
    first = numbered([RanksStarted(pids=(1,), warm="zygote"), output(0, 0)])
    assert [reported for event in first for reported in joint.on_event(0, event, (), 100.0)] == []
    assert joint.parts[0].passed == 0
    reported = joint.on_event(1, numbered([RanksStarted(pids=(2,), warm="zygote")])[0], (), 100.0)
    assert [type(event.body) for event, _ in reported] == [RanksStarted, OutputWritten]
    assert reported[0][0].joined == ((0, 1),)


def test_a_node_whose_ranks_never_met_the_others_ends_the_run_with_them():
    joint = JointRun(2)
    failed = RunEnded(state=RunState.FAILED, failure=failure(1, 100.0))
    assert joint.on_event(1, numbered([failed])[0], (), 100.0) == []
    (event, _), *rest = joint.on_event(0, numbered([RunEnded(state=RunState.FAILED)])[0], (), 100.0)
    assert rest == []
    assert isinstance(event.body, RunEnded)
    assert event.body.failure is not None
    assert event.body.failure.rank == 1
    assert joint.ended


def test_failures_are_told_at_once():
    joint = JointRun(2)
    reported: list[MergedEvent] = []
    for part in (0, 1):
        reported += joint.on_event(part, numbered([RanksStarted(pids=(part,), warm="zygote")])[0], (), 100.0)
    failed = RunEvent(run_id="r", number=2, at=100.0, body=RankFailed(failure=failure(1, 100.0)))
    reported += joint.on_event(1, failed, (), 100.0)
    assert [type(event.body) for event, _ in reported] == [RanksStarted, RankFailed]


def test_what_all_nodes_remark_is_one_remark():
    joint = JointRun(2)
    reported = [
        event.body
        for part in (0, 1)
        for event, _ in joint.on_event(part, numbered([Noted(text="slow disk")])[0], (), 100.0)
    ]
    assert reported == [Noted(text="slow disk")]


def test_the_payload_is_released_once_the_last_node_has_it_no_more():
    joint = JointRun(2)
    (one,), (other,) = numbered([PayloadReleased(kept=False, reason="no room")]), numbered([PayloadReleased(kept=True)])
    assert joint.on_event(0, one, (), 100.0) == []
    ((event, _),) = joint.on_event(1, other, (), 100.0)
    assert event.body == PayloadReleased(kept=True)
    assert join_releases([PayloadReleased(kept=False, reason="no room")] * 2).reason == "no room"


# ---------------------------------------------------------------- the end


def end_of(*failures: Failure, frames: Sequence[bytes] = (), ahead_s: float = 0.0) -> PartEnd:
    head, *others = failures
    return PartEnd(RunEnded(state=RunState.FAILED, failure=head, others=tuple(others)), frames, ahead_s)


def test_the_cause_is_found_over_all_nodes_and_its_exception_travels():
    ended, frames = join_ends(
        [
            end_of(failure(0, 100.2, victim=True), failure(1, 100.1, victim=True)),
            end_of(failure(3, 100.3, packed=True), failure(2, 100.4, packed=True), frames=(b"of 3",)),
        ]
    )
    assert ended.failure is not None
    assert ended.failure.rank == 3
    assert frames == (b"of 3",)
    assert [other.rank for other in ended.others] == [1, 0, 2]
    assert all(other.exception is None for other in ended.others)


def test_a_clock_that_goes_ahead_blames_nobody():
    """Rank 2 failed first, on a node whose clock is 10 s ahead."""
    ended, _ = join_ends([end_of(failure(0, 105.0)), end_of(failure(2, 110.0), ahead_s=10.0)])
    assert ended.failure is not None
    assert (ended.failure.rank, ended.failure.at) == (2, 110.0)


@pytest.mark.parametrize(
    ("states", "whole"),
    [
        ((RunState.SUCCEEDED, RunState.SUCCEEDED), RunState.SUCCEEDED),
        ((RunState.SUCCEEDED, RunState.FAILED), RunState.FAILED),
        ((RunState.FAILED, RunState.CANCELLED), RunState.CANCELLED),
        ((RunState.CANCELLED, RunState.TIMED_OUT), RunState.TIMED_OUT),
    ],
)
def test_what_it_was_stopped_as_counts_before_how_nodes_ended(states: tuple[RunState, ...], whole: RunState):
    ends = [PartEnd(RunEnded(state=state, reason=str(state), results=(result(0),)), (b"x",)) for state in states]
    ended, frames = join_ends(ends)
    assert (ended.state, ended.reason) == (whole, str(whole))
    assert bool(ended.results) is bool(frames) is (whole is RunState.SUCCEEDED)


# ---------------------------------------------------------------- stalls and stacks


def still(*ranks: int, seconds: float = 5.0) -> Stalled:
    return Stalled(seconds=seconds, stacks=tuple(RankStack(rank=rank) for rank in ranks))


def test_a_run_stands_still_where_every_node_does_or_is_done():
    stalls = JointStalls(3)
    assert stalls.merge(0, still(0, 1), ()) is None
    assert stalls.merge(2, still(4, 5, seconds=3.0), ()) is None
    reported = stalls.merge(1, still(2, 3), ())
    assert isinstance(reported, Stalled)
    assert [stack.rank for stack in reported.stacks] == [0, 1, 2, 3, 4, 5]
    assert reported.seconds == 3.0
    assert isinstance(stalls.merge(1, Resumed(), ()), Resumed)
    assert stalls.merge(0, Resumed(), ()) is None
    done = JointStalls(2)
    assert done.merge(0, still(0, 1), (1,)) is not None


def test_stacks_are_told_once_all_nodes_have_answered_or_are_gone():
    stacks = JointStacks()
    stacks.ask(7, "r", [0, 1, 2])
    assert stacks.take_part(7, 2, (RankStack(rank=4),)) is None
    assert stacks.part_silent("r", 1) == []
    assert stacks.take_part(7, 0, (RankStack(rank=0),)) == (RankStack(rank=0), RankStack(rank=4))
    assert stacks.take_part(7, 1, (RankStack(rank=2),)) is None
    stacks.ask(8, "r", [0, 1])
    assert stacks.take_part(8, 0, (RankStack(rank=0),)) is None
    assert stacks.part_silent("r", 1) == [(8, (RankStack(rank=0),))]
