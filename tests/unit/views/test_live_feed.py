"""Messages that a front end gets unrequested: small, rare, and immediate when it matters."""

from __future__ import annotations

import threading
import tracemalloc
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from live_log import FrontEnd, LiveRun

from sgpu_magic.errors import PoolError
from sgpu_magic.views.live.answers import Answers
from sgpu_magic.views.live.log_reader import LogReader
from sgpu_magic.views.live.messages import (
    Answer,
    AskFind,
    AskHello,
    AskLines,
    AskLog,
    FindAnswer,
    HelloAnswer,
    LinesAnswer,
    LogAnswer,
    NewLines,
    Question,
    Refusal,
    TextAnswer,
    json_bytes,
)
from sgpu_magic.views.live.schema import Snapshot
from sgpu_magic.wire import events as ev
from sgpu_magic.wire import rank_events
from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.events import OwnSession, QueueMoved, StateChanged
from sgpu_magic.wire.rank_events import Failure, RankSample

MOST_BYTES = 64_000


class Clock:
    """Collects the feed's messages in virtual time, each with its time."""

    def __init__(self, run: LiveRun) -> None:
        self.run = run
        self.now = 0.0
        self.reported: list[tuple[float, NewLines | Snapshot]] = []

    def tick(self) -> list[NewLines | Snapshot]:
        fresh: list[NewLines | Snapshot] = [
            each for each in self.run.feed.updates(self.now) if isinstance(each, NewLines)
        ]
        snapshot = self.run.feed.snapshot(self.now)
        fresh += [snapshot] if snapshot is not None else []
        self.reported += [(self.now, message) for message in fresh]
        return fresh

    def pass_s(self, seconds: float, step_s: float = 0.01) -> None:
        end = self.now + seconds
        while self.now < end:
            self.tick()
            self.now += step_s

    @property
    def lines(self) -> list[NewLines]:
        return [message for _, message in self.reported if isinstance(message, NewLines)]

    @property
    def snapshots(self) -> list[Snapshot]:
        return [message for _, message in self.reported if isinstance(message, Snapshot)]

    def check_budget(self) -> None:
        times = [at for at, _ in self.reported]
        for index, at in enumerate(times):
            assert sum(at <= other < at + 0.9999 for other in times[index:]) <= 10
        lines = [at for at, message in self.reported if isinstance(message, NewLines)]
        assert all(later - earlier > 0.0999 for earlier, later in pairwise(lines))
        assert max(json_bytes(message) for _, message in self.reported) <= MOST_BYTES
        seqs = [snapshot.seq for snapshot in self.snapshots]
        assert seqs == sorted(set(seqs))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 64])
def test_a_flood_of_400_000_lines_is_at_most_ten_small_messages_a_second(ranks: int, tmp_path: Path) -> None:
    run = LiveRun(tmp_path, ranks).start()
    clock = Clock(run)
    front = FrontEnd(run)
    per_batch = 400_000 // ranks // 25
    for batch in range(25):
        for rank in range(ranks):
            first = batch * per_batch
            run.write(rank, "".join(f"{at:06d} of rank {rank}\n" for at in range(first, first + per_batch)).encode())
            if rank % 8 == 0:
                clock.tick()
                clock.now += 0.04 / max(ranks // 8, 1)
        samples = tuple(RankSample(rank=rank, kind="cpu", cpu_cores=1.0, rss_bytes=10**9) for rank in range(ranks))
        run.apply(rank_events.Sampled(seconds=0.04, samples=samples))
    clock.pass_s(1.5)
    clock.check_budget()
    for message in clock.lines:
        front.take(message)
    assert sum(front.ranks) == 400_000
    assert front.ranks == (400_000 // ranks,) * ranks
    assert len(clock.lines) >= 5
    last = run.all_lines()[-100:]
    assert [front.rows[number] for number in range(400_000 - 100, 400_000)] == last, "the newest are told"
    front.fetch_missing(range(200_000, 200_020))
    assert [front.rows[number] for number in range(200_000, 200_020)] == run.all_lines()[200_000:200_020]


@pytest.mark.slow
def test_a_flood_that_nobody_is_told_of_costs_no_memory(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    tracemalloc.start()
    for step in range(1_000):
        text = "".join(f"{step:06d} of {at}\n" for at in range(500))
        body = rank_events.OutputWritten(rank=step % 4, stream="stdout", text=text, start=0, end=len(text))
        run.view.log.write(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert run.feed.totals == (125_000,) * 4
    assert peak < 2_000_000
    (message,) = run.feed.updates(0.0)
    assert json_bytes(message) <= MOST_BYTES


def test_what_is_skipped_in_too_many_places_is_not_told_at_all(tmp_path: Path) -> None:
    run = LiveRun(tmp_path).start().write(0, b"first\n")
    assert run.feed.updates(0.0)
    for step in range(40_000):
        body = rank_events.OutputWritten(rank=step % 4, stream="stdout", text="x\n", start=0, end=2)
        run.view.log.write(body)
    (message,) = run.feed.updates(1.0)
    assert isinstance(message, NewLines)
    assert json_bytes(message) <= MOST_BYTES
    assert 1 < message.first < 40_001
    assert message.first + len(message.rows) == 40_001


def test_a_trickle_of_lines_is_told_at_once_and_whole(tmp_path: Path) -> None:
    run = LiveRun(tmp_path).start()
    clock = Clock(run)
    clock.pass_s(2.0)
    before = len(clock.reported)
    run.write(2, b"loss 0.3\n")
    (message,) = [each for each in clock.tick() if isinstance(each, NewLines)]
    assert message == NewLines(seq=1, first=0, rows=((2, 0, "loss 0.3", False),), ranks=(0, 0, 1, 0))
    run.write(2, b"begun")
    clock.pass_s(3.0)
    assert len(clock.reported) <= before + 3, "the line that was begun is told with the snapshot"
    assert clock.snapshots[-1].ranks[2].last == "begun"
    run.write(2, b" and ended\n")
    clock.pass_s(0.5)
    assert clock.lines[-1].rows == ((2, 1, "begun and ended", False),)


def test_nothing_is_told_when_nothing_happens(tmp_path: Path) -> None:
    run = LiveRun(tmp_path).start().write(0, b"line\n")
    clock = Clock(run)
    clock.pass_s(2.0)
    reported = len(clock.reported)
    clock.pass_s(60.0, step_s=0.25)
    assert len(clock.reported) == reported


def test_a_change_of_state_is_told_at_once(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    clock = Clock(run)
    clock.pass_s(0.1)
    states = [RunState.PREPARING, RunState.STARTING, RunState.RUNNING, RunState.CANCELLING]
    for state in states:
        run.apply(ev.StateChanged(state=state))
        (snapshot,) = clock.tick()
        assert isinstance(snapshot, Snapshot)
        assert snapshot.state == f"{state}"
        clock.now += 0.01
    run.end(RunState.CANCELLED)
    (snapshot,) = clock.tick()
    assert isinstance(snapshot, Snapshot)
    assert snapshot.final


def test_ranks_that_fail_one_after_the_other_keep_within_the_budget(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, 64).start()
    clock = Clock(run)
    for rank in range(64):
        failure = Failure(kind=FailureKind.USER_CODE, message="no", rank=rank, type_name="builtins.ValueError")
        run.write(rank, b"failing\n").apply(rank_events.RankFailed(failure=failure))
        clock.pass_s(0.02)
    clock.pass_s(2.0)
    clock.check_budget()
    assert {card.state for card in clock.snapshots[-1].ranks} == {"failed"}


def test_hello_and_what_is_told_next_fit_together(tmp_path: Path) -> None:
    run = LiveRun(tmp_path).start()
    for step in range(100):
        run.write(step % 4, b"before\n")
    hello = run.feed.hello(7)
    assert (hello.n, hello.seq, hello.snapshot.lines) == (7, 0, (25, 25, 25, 25))
    run.write(1, b"one\n")
    assert run.feed.hello(8).snapshot.lines == (25, 26, 25, 25), "nobody was told of any line yet"
    run.write(1, b"two\n")
    (message,) = run.feed.updates(1.0)
    assert isinstance(message, NewLines)
    assert (message.first, message.rows) == (101, ((1, 26, "two", False),))
    run.write(1, b"three\n")
    later = run.feed.hello(9)
    assert (later.seq, later.snapshot.lines) == (1, (25, 27, 25, 25)), "the third line is told by the next message"
    (message,) = run.feed.updates(2.0)
    assert isinstance(message, NewLines)
    assert (message.seq, message.first) == (2, 102)
    assert later.snapshot.seq > hello.snapshot.seq


def test_the_clock_of_a_hello_is_not_that_of_the_last_snapshot(tmp_path: Path) -> None:
    run = LiveRun(tmp_path).start(at=1000.0)
    run.apply(ev.Noted(text="note"), at=1010.0)
    assert run.feed.snapshot(0.0) is not None
    run.at = 1042.0
    assert run.feed.hello(1).snapshot.elapsed_s == 42.0


def test_pages_that_ask_again_and_again_get_what_they_lack(tmp_path: Path) -> None:
    run = LiveRun(tmp_path).start().write(0, b"a\nb\n")
    first = run.feed.since(0)
    assert first is not None
    assert first.rows == ((0, 0, "a", False), (0, 1, "b", False))
    assert run.feed.since(2) is None
    run.write(3, b"c\n")
    second, other = run.feed.since(2), run.feed.since(0)
    assert second is not None
    assert other is not None
    assert (second.first, second.rows) == (2, ((3, 0, "c", False),))
    assert other.rows == (*first.rows, *second.rows)


# ------------------------------------------------------------ requests


def ask(run: LiveRun, kind: str, **fields: object) -> Answer:
    """Send a request as a front end does, and check the number and size of the reply."""
    question = msgspec.convert({"kind": kind, "n": 5, **fields}, Question)
    answer = run.answers.answer(question)
    assert answer.n == 5
    assert json_bytes(answer) <= MOST_BYTES
    return answer


def refused(answer: Answer) -> str:
    assert isinstance(answer, Refusal), answer
    return answer.text


def test_lines_are_answered_by_rank_and_in_order_of_arrival(tmp_path: Path) -> None:
    run = LiveRun(tmp_path).start().write(0, b"a\nb\n").write(1, b"c\n").write(0, b"d\n")
    assert ask(run, "lines", first=0, count=500) == LinesAnswer(
        n=5, first=0, rows=((0, 0, "a", False), (0, 1, "b", False), (1, 0, "c", False), (0, 2, "d", False)), total=4
    )
    assert ask(run, "lines", first=1, count=1, rank=0) == LinesAnswer(n=5, first=1, rows=((0, 1, "b", False),), total=3)
    assert ask(run, "lines", first=4, count=9) == LinesAnswer(n=5, first=4, rows=(), total=4)


@pytest.mark.slow
def test_answers_are_as_large_as_a_message_may_be_and_no_larger(tmp_path: Path) -> None:
    run = LiveRun(tmp_path).start()
    run.write(0, b"".join(b"%d \x1b[1m%s\n" % (step, b"\x1b[31m" * (step % 200)) for step in range(2_000)))
    run.write(1, ("🎉" * 16_384 + "\n").encode() * 3 + b"\x1b" * 48_000 + b"\n" * 60_000)
    answer = ask(run, "lines", first=0, count=100_000, rank=0)
    assert isinstance(answer, LinesAnswer)
    assert 50 < len(answer.rows) <= 500
    assert [row[1] for row in answer.rows] == list(range(len(answer.rows)))
    answer = ask(run, "lines", first=0, count=3, rank=1)
    assert isinstance(answer, LinesAnswer)
    assert len(answer.rows) == 1
    for rank in (0, 1, None):
        text, offset = "", 0
        while offset is not None:
            piece = ask(run, "log", offset=offset, rank=rank)
            assert isinstance(piece, LogAnswer)
            assert piece.next_offset is None or piece.next_offset > offset
            text, offset = text + piece.text, piece.next_offset
        if rank is None:
            assert text.count("\n") == sum(run.feed.totals)
        else:
            assert text.encode() == run.log(rank)


def test_what_can_not_be_answered_says_why_and_where_to_look(tmp_path: Path) -> None:
    run = LiveRun(tmp_path).start().write(0, b"a\n" * 5_000)
    text = "line 1 is not in the log: rank 3 has 0 so far. `sgpu logs 7f3a` shows what there is."
    assert refused(ask(run, "lines", first=1, count=1, rank=3)) == text
    assert "line 5,001 is not in the log" in refused(ask(run, "lines", first=5_001, count=1))
    assert refused(ask(run, "lines", first=0, count=1, rank=4)) == "run 7f3a has ranks 0 to 3, not 4."
    assert "1 to 1,000 characters" in refused(ask(run, "find", text=""))
    assert "1 to 1,000 characters" in refused(ask(run, "find", text="x" * 1_001))
    assert "starts at offset 0" in refused(ask(run, "log", offset=-1))
    (tmp_path / "rank-0.log").write_bytes(b"a\n" * 10)
    text = f"line 100 of rank 0 is not in its log {tmp_path}/rank-0.log, which ends before it."
    assert refused(ask(run, "lines", first=100, count=1)).startswith(text)
    (tmp_path / "rank-0.log").unlink()
    gone = f"the log of rank 0 is gone: {tmp_path}/rank-0.log. `sgpu logs 7f3a` shows what there is."
    assert refused(ask(run, "lines", first=0, count=1, rank=0)) == gone
    assert refused(ask(run, "log", offset=0, rank=0)) == gone
    assert refused(ask(run, "log", offset=0)) == gone
    (tmp_path / "rank-0.log").mkdir()
    assert "can't be read: Is a directory" in refused(ask(run, "lines", first=0, count=1, rank=0))


def test_what_is_no_question_is_refused_where_it_is_read() -> None:
    for content in ({}, {"kind": "lines"}, {"kind": "sing", "n": 1}, {"kind": "lines", "n": 1, "first": "0"}, 7):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(content, Question)


def test_a_session_that_holds_the_devices_is_ended_from_the_view(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)

    def end(session: str) -> object:
        return run.answers.answer(msgspec.convert({"kind": "end-session", "n": 5, "session": session}, Question))

    held = (OwnSession("5e550000", "walk"), OwnSession("5e560000", ""))
    run.apply(QueueMoved(position=1, reason="needs 2 more A10; 2 are held by session walk", own_sessions=held))
    shown = run.feed.snapshot(1000.0)
    assert shown is not None
    assert [each.name for each in shown.own_sessions] == ["session walk", "session 5e56"]
    assert end("5e550000") == TextAnswer(n=5, lines=("session walk is being ended",))
    assert run.ended_sessions == ["5e550000"]
    # a page can end no other run
    assert "does not wait for that session" in refused(end("7f3a0000"))
    run.apply(StateChanged(state=RunState.STARTING))
    run.feed.snapshot(1010.0)
    assert "does not wait for that session" in refused(end("5e550000"))
    assert run.ended_sessions == ["5e550000"]


def test_the_buttons_say_what_came_of_them(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    assert ask(run, "cancel") == TextAnswer(n=5, lines=("cancelled",))
    assert ask(run, "stacks") == TextAnswer(n=5, lines=("rank 0",))

    def fail() -> str:
        raise PoolError("the pool does not answer.")

    many = [f"\x1b[31mframe {number}" for number in range(20_000)]
    run.answers = Answers(run.view, run.feed, LogReader(tmp_path), fail, lambda _: None, lambda: many)
    assert refused(ask(run, "cancel")) == "the pool does not answer."
    answer = ask(run, "stacks")
    assert isinstance(answer, TextAnswer)
    assert answer.lines[0] == "frame 0"
    assert answer.lines[-1].endswith("more lines")


def test_answers_in_other_threads_are_right_while_events_come(tmp_path: Path) -> None:
    run = LiveRun(tmp_path).start()
    problems: list[object] = []
    answered: list[str] = []
    over = threading.Event()

    def look(question: Question) -> None:
        match run.answers.answer(question):
            case HelloAnswer(snapshot=snapshot):
                assert sum(snapshot.lines) <= sum(run.feed.totals)
            case LinesAnswer(rows=rows, first=first):
                for index, (rank, number, text, _) in enumerate(rows):
                    assert text == f"{rank}:{number}"
                    assert isinstance(question, AskLines)
                    assert question.rank is None or number == first + index
            case FindAnswer(matches=matches, total=total):
                assert list(matches) == sorted(set(matches))
                assert len(matches) == min(total, 1_000)
            case LogAnswer(text=text):
                assert text.startswith("0:0\n")
            case Refusal() | TextAnswer() as other:
                raise AssertionError(other)
        answered.append(question.__class__.__name__)

    def asking() -> None:
        try:
            while True:
                was_over = over.is_set()
                total = sum(run.feed.totals)
                for question in (
                    AskHello(n=1),
                    AskLines(n=2, first=max(total - 200, 0), count=200),
                    AskLines(n=3, first=0, count=500, rank=1),
                    AskFind(n=4, text=":7"),
                    AskLog(n=5, offset=0, rank=0),
                ):
                    look(question)
                if was_over:
                    return
        except AssertionError as problem:
            problems.append(problem)

    threads = [threading.Thread(target=asking) for _ in range(3)]
    run.write(0, b"0:0\n")
    written = [1, 0, 0, 0]
    for thread in threads:
        thread.start()
    now = 0.0
    try:
        for step in range(1_500):
            rank = step % 4
            lines = [f"{rank}:{number}\n" for number in range(written[rank], written[rank] + step % 50)]
            written[rank] += len(lines)
            run.write(rank, "".join(lines).encode(), skip=3 if step % 5 == 0 else 0)
            now += 0.01
            run.feed.updates(now)
            run.feed.snapshot(now)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert problems == []
    assert {"AskHello", "AskLines", "AskFind", "AskLog"} <= set(answered)
    assert list(run.feed.totals) == written
