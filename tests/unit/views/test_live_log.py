"""The lines of a run: the messages to a front end and the replies to its requests together equal the logs."""

from __future__ import annotations

import asyncio
import io
import os
import random
import re
import tempfile
import tracemalloc
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from live_log import FrontEnd, LiveRun, lines_of
from tqdm import tqdm

from sgpu_magic.agent.ranks.rank_output import RankOutput
from sgpu_magic.views import ansi
from sgpu_magic.views.html import render_html
from sgpu_magic.views.html_style import STDERR
from sgpu_magic.views.live import log_index, log_reader
from sgpu_magic.views.live.log_index import LogOrder
from sgpu_magic.views.live.log_reader import MAX_JSON_BYTES, MAX_RAW_CHARS, LogReader, line_text
from sgpu_magic.views.live.messages import AskFind, AskLines, AskLog, FindAnswer, LinesAnswer, LogAnswer, json_bytes
from sgpu_magic.views.output_buffer import LineItem
from sgpu_magic.wire import events as ev
from sgpu_magic.wire import rank_events
from sgpu_magic.wire.codec import STDERR_BEGIN, STDERR_END

PARTS = st.sampled_from(
    [b"\n", b"\n", b"\r", b"\r\n", b"a", b"loss 0.3", b"\x1b[31m", b"\x1b[0m", b"\x1b[2K", "é中🎉".encode(), b"\b",
     b"\t", b"x" * 30, b"\xff", b"\x1b[A\n\r", b"step 17\n", b"one\ntwo\nthree\n"]
)  # fmt: skip
DATA = st.lists(PARTS, min_size=1, max_size=8).map(b"".join)
# rank, written data, number of bytes left out of the event, whether the front end gets a message afterwards
WRITES = st.lists(
    st.tuples(st.integers(0, 2), DATA, st.one_of(st.just(0), st.just(0), st.integers(1, 60)), st.booleans()),
    max_size=40,
)


@pytest.mark.parametrize("small", [pytest.param(False, marks=pytest.mark.slow), True])
@settings(max_examples=examples(150), deadline=None)
@given(writes=WRITES)
def test_what_is_told_and_what_is_fetched_are_the_logs(small: bool, writes: list[tuple[int, bytes, int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as patches:
        if small:
            limits = mock.patch.multiple(log_index, _KEPT_CHARS=150, _MAX_ROWS_BYTES=300, _MAX_SKIPS=3)
            patches.enter_context(limits)
            patches.enter_context(mock.patch.multiple(log_reader, _STEP_BYTES=16, _FIND_BYTES=32))
            patches.enter_context(mock.patch.object(log_index, "_BLOCK", 3))
        run = LiveRun(Path(directory), 3).start()
        front = FrontEnd(run)
        now = 0.0
        for rank, data, skip, reported in writes:
            run.write(rank, data, skip)
            if reported:
                now += 0.2
                for message in run.feed.updates(now):
                    front.take(message)
        run.end()
        for message in run.feed.updates(now + 0.2):
            front.take(message)
        expected = run.all_lines()
        assert sum(run.feed.totals) == len(expected) == sum(front.ranks)
        front.fetch_missing(range(len(expected)))
        assert [front.rows[number] for number in range(len(expected))] == expected
        for rank in range(3):
            lines = run.log_lines(rank)
            assert run.feed.totals[rank] == len(lines)
            assert lines_of(LogReader(Path(directory)), rank, 0, 1000) == lines
            for first in range(0, len(lines), 3):
                assert lines_of(LogReader(Path(directory)), rank, first, 2) == lines[first : first + 2]
            numbers = [number for number, row in enumerate(expected) if row[0] == rank]
            assert run.feed.numbers_of(rank, range(len(lines))) == numbers
        for first in range(len(expected)):
            found = [
                (rank, number)
                for rank, start, count in run.feed.locate(first, 5)
                for number in range(start, start + count)
            ]
            assert found == [row[:2] for row in expected[first : first + 5]]


@settings(max_examples=examples(60), deadline=None)
@given(writes=WRITES)
def test_the_whole_log_comes_in_pieces(writes: list[tuple[int, bytes, int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run = LiveRun(Path(directory), 3).start()
        for rank, data, skip, _ in writes:
            run.write(rank, data, skip)
        run.end()
        for rank in range(3):
            reader = LogReader(Path(directory))
            pieces: list[str] = []
            offset: int | None = 0
            while offset is not None:
                text, following = reader.piece(rank, offset, 7)
                assert following is None or following > offset
                pieces.append(text)
                offset = following
            if b"\xff" not in run.log(rank):
                # for invalid UTF-8, the number of replacement characters may differ at a cut
                assert "".join(pieces) == run.log(rank).decode("utf-8", "replace")
        answer = run.answers.answer(AskLog(n=3, offset=0))
        assert isinstance(answer, LogAnswer)
        assert answer.text == "".join(f"[{rank}] {text}\n" for rank, _, text, _ in run.all_lines())
        assert answer.next_offset is None


def test_an_agents_own_batches_give_the_log_back(tmp_path: Path) -> None:
    """The batches of a rank's real pipe reader, including ends of floods and marked stderr, count as its log."""
    bodies: list[rank_events.OutputWritten] = []

    async def write() -> None:
        output = RankOutput(0, 4_000, bodies.append, lambda _rank, _why: None)
        output.begin_log(str(tmp_path / "rank-0.log"))
        stdout, stderr = output.child_ends
        random.seed(7)
        for step in range(60):
            progress = f"step {step} é\r".encode() * random.randrange(3)
            os.write(stdout, progress + b"done\n" * random.choice([0, 1, 50, 6_000]))
            if step % 7 == 0:
                os.write(stderr, f"warning {step}\n".encode())
            output.drain()
        os.write(stdout, b"no end")
        output.drain(last=True)
        output.close()

    asyncio.run(write())
    assert any(body.skipped_lines for body in bodies)
    run = LiveRun(tmp_path, 1).start()
    front = FrontEnd(run)
    for at, body in enumerate(bodies):
        run.apply(body)
        for message in run.feed.updates(at * 0.2):
            front.take(message)
    run.apply(ev.RunEnded(state=run.view.state))
    for message in run.feed.updates(len(bodies) * 0.2):
        front.take(message)
    lines = run.log_lines(0)
    assert run.feed.totals == (len(lines),)
    front.fetch_missing(range(len(lines)))
    assert [front.rows[number][2] for number in range(len(lines))] == lines
    assert lines[-1] == "no end"


def test_lines_of_stderr_are_set_apart_and_bars_are_not(tmp_path: Path) -> None:
    run = LiveRun(tmp_path).start()
    run.write(0, b"out\n").write(0, b"\x1b[33mwarning\x1b[0m\nin two ", stream="stderr").write(
        0, b"pieces\n", stream="stderr"
    )
    run.write(1, b" 40%|####      | 4/10 [00:01<00:02, 3.0it/s]\n", stream="stderr")
    run.write(1, b"epoch 4/10 is slow\n", stream="stderr").write(1, b"out again\n")
    marked = ["warning", "in two pieces", "epoch 4/10 is slow"]
    (message,) = run.feed.updates(1000.0)
    reported = [(row[2], row[3]) for row in message.rows if len(row) == 4]
    answer = run.answers.answer(AskLines(n=1, first=0, count=50))
    assert isinstance(answer, LinesAnswer)
    for found in (reported, [(text, is_stderr) for _, _, text, is_stderr in answer.rows]):
        assert len(found) == 6
        assert [ansi.plain(text) for text, is_stderr in found if is_stderr] == marked
    run.end()
    html = render_html(run.view)
    for line in ("warning", "in two pieces", "epoch 4/10 is slow"):
        assert re.search(rf"{re.escape(STDERR)}[^\n]*{line}", html), line
    for line in ("out", "out again", "40%"):
        assert not re.search(rf"{re.escape(STDERR)}[^\n]*>{line}<", html), line


def test_tqdm_and_print_have_lines_of_their_own_in_the_log_and_in_the_final_form(tmp_path: Path) -> None:
    bodies: list[rank_events.OutputWritten] = []

    async def write() -> None:
        output = RankOutput(0, 1 << 20, bodies.append, lambda _rank, _why: None)
        output.begin_log(str(tmp_path / "rank-0.log"))

        class Stderr(io.StringIO):
            def write(self, text: str) -> int:
                return os.write(output.child_ends[0], STDERR_BEGIN + text.encode() + STDERR_END)

        os.write(output.child_ends[0], b"training ...")
        for epoch in range(2):
            for step in tqdm(range(100), desc=f"epoch {epoch + 1}/2", file=Stderr(), mininterval=0):
                if step % 25 == 0:
                    os.write(output.child_ends[0], f"step {step} loss 1.9\n".encode())
                    output.drain()
        output.drain(last=True)
        output.close()

    asyncio.run(write())
    run = LiveRun(tmp_path, 1).start()
    front = FrontEnd(run)
    for at, body in enumerate(bodies):
        run.apply(body)
        for message in run.feed.updates(at * 0.2):
            front.take(message)
    for message in run.end().feed.updates(len(bodies) * 0.2):
        front.take(message)
    lines = run.log_lines(0)
    steps = [f"step {step} loss 1.9" for step in range(0, 100, 25)]
    bars = [line for line in lines if "%|" in line]
    assert [line for line in lines if line not in bars] == ["training ...", *steps, *steps]
    assert [(line[:16], line.count("100/100")) for line in bars] == [("epoch 1/2: 100%|", 1), ("epoch 2/2: 100%|", 1)]
    assert [front.rows[number][2] for number in range(len(lines))] == lines
    assert [item.text for item in run.view.items if isinstance(item, LineItem)] == lines


# ------------------------------------------------------------ a line as it is drawn


@pytest.mark.parametrize(
    ("raw", "drawn"),
    [
        ("plain", "plain"),
        ("  0%|\r 50%|\r100%|\r", "100%|"),
        ("dos\r", "dos"),
        ("ab\b\bxy", "xy"),
        ("\x1b[31mred\x1b[0m\x1b[2K", "\x1b[31mred\x1b[0m\x1b[0m"),
        ("\x1b]0;title\x07text\x00", "text"),
    ],
)
def test_a_line_is_drawn_as_on_a_terminal(raw: str, drawn: str) -> None:
    assert line_text(raw) == drawn


@pytest.mark.parametrize("unit", ["x", "中", "🎉", "\x1b[1m", '"\\', "\x1b[m🎉"])
def test_a_long_line_says_how_much_is_left_out_and_fits(unit: str) -> None:
    raw = unit * 20_000
    shown = line_text(raw)
    assert json_bytes(shown) <= MAX_JSON_BYTES
    kept, _, rest = shown.rpartition(" ... ")
    assert rest.endswith(" more characters of this line in the log")
    assert raw.startswith(kept.removesuffix("\x1b[0m")[:100])


def test_of_a_line_of_many_megabytes_only_its_beginning_is_read(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, 1).start()
    run.write(0, b"before\n" + "é".encode() * 3_000_000)
    run.write(0, b"\nprogress 1\r" + b"progress 2\r" * 400_000 + b"\r\nafter\n")
    front = FrontEnd(run)
    (message,) = run.feed.updates(1.0)
    front.take(message)
    tracemalloc.start()
    lines = lines_of(LogReader(tmp_path), 0, 0, 10)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lines[1] == "é" * 16_384 + f" ... {3_000_000 - 16_384:,} more characters of this line in the log"
    assert lines[0::2] == ["before", "progress 2"]
    assert lines[3] == "after"
    assert peak < 8_000_000
    front.fetch_missing(range(4))
    assert [front.rows[number][2] for number in range(4)] == lines
    assert LogReader(tmp_path).find(0, "PROGRESS 2", 10, 10) == ([2], 1)


def test_a_line_that_grows_in_many_batches_costs_no_memory(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, 1).start()
    for _ in range(30):
        run.write(0, b"." * 20_000)
    assert len(run.feed._recent._begun[0] or "") <= MAX_RAW_CHARS
    run.write(0, b"\nnext\n")
    (message,) = run.feed.updates(1.0)
    assert message.rows == ((0, 0, 1), (0, 1, "next", False))


# ------------------------------------------------------------ order


@pytest.mark.slow
def test_the_order_of_a_million_alternating_lines_is_small() -> None:
    order = LogOrder(4)
    bodies = [rank_events.OutputWritten(rank=rank, stream="stdout", text="x\n", start=0, end=2) for rank in range(4)]
    tracemalloc.start()
    for _ in range(250_000):
        for body in bodies:
            order.write(body)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert order.total == 1_000_000
    assert used < 10_000_000
    assert order.locate(777_777, 2) == [(1, 194_444, 1), (2, 194_444, 1)]
    assert order.numbers_of(1, [194_444]) == [777_777]
    assert order.numbers_of(1, [250_000]) == []
    alone = LogOrder(1)
    for _ in range(10_000):
        alone.write(bodies[0])
    assert len(alone._ranks) == len(alone._before_block) == 1
    assert alone.locate(5, 10) == [(0, 5, 10)]


# ------------------------------------------------------------ search


def test_find_sees_what_a_person_sees(tmp_path: Path) -> None:
    text = "Loss 0.1\n\x1b[31mlo\x1b[1mss\x1b[0m 0.2\nloss hidden\rshown\nnothing\nÉTÉ\nÉté with LOSS"
    (tmp_path / "rank-0.log").write_text(text)
    reader = LogReader(tmp_path)
    assert reader.find(0, "loss", 100, 10) == ([0, 1, 5], 3)
    assert reader.find(0, "loss", 100, 2) == ([1, 5], 3)
    assert reader.find(0, "loss", 5, 10) == ([0, 1], 2), "only among the lines that are counted"
    assert reader.find(0, "loss", 1, 10) == ([0], 1)
    assert reader.find(0, "hidden", 100, 10) == ([], 0)
    assert reader.find(0, "été", 100, 10) == ([4, 5], 2)
    assert reader.find(0, "[31m", 100, 10) == ([], 0)
    assert reader.find(7, "loss", 100, 10) == ([], 0), "there is no such log yet"


@settings(max_examples=examples(100), deadline=None)
@given(writes=WRITES, wanted=st.sampled_from(["loss", "A", "step 1", "é", "xx", "zz"]))
def test_find_is_what_looking_at_every_line_finds(writes: list[tuple[int, bytes, int, bool]], wanted: str) -> None:
    with tempfile.TemporaryDirectory() as directory, mock.patch.object(log_reader, "_FIND_BYTES", 50):
        run = LiveRun(Path(directory), 3).start()
        for rank, data, _, _ in writes:
            # text that a backspace removes is still found; empty writes do not occur
            if left := data.replace(b"\b", b""):
                run.write(rank, left)
        run.end()
        plain = [text.replace("\x1b[31m", "").replace("\x1b[0m", "") for _, _, text, _ in run.all_lines()]
        expected = [number for number, text in enumerate(plain) if wanted.lower() in text.lower()]
        answer = run.answers.answer(AskFind(n=1, text=wanted))
        assert answer == FindAnswer(n=1, matches=tuple(expected), total=len(expected))


def test_many_matches_are_the_last_ones(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, 2).start()
    for step in range(2_000):
        run.write(step % 2, b"hit\n" if step % 4 else b"miss\n")
    answer = run.answers.answer(AskFind(n=1, text="HIT"))
    assert isinstance(answer, FindAnswer)
    assert answer.total == 1_500
    assert answer.matches == tuple(step for step in range(2_000) if step % 4)[-1_000:]


# ------------------------------------------------------------ a log that changes


def test_a_log_that_grows_is_read_on(tmp_path: Path) -> None:
    reader = LogReader(tmp_path)
    assert lines_of(reader, 0, 0, 5) == []
    expected: list[str] = []
    for step in range(300):
        with open(tmp_path / "rank-0.log", "a") as log:
            log.write(f"step {step} " + "x" * 700 + "\n")
        expected.append(f"step {step} " + "x" * 700)
        assert lines_of(reader, 0, step, 2) == expected[-1:]
        assert lines_of(reader, 0, step + 1, 2) == []
    assert lines_of(reader, 0, 100, 150) == expected[100:250]


def test_a_log_of_the_same_inode_on_another_disk_is_another_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = LogReader(tmp_path)
    (tmp_path / "rank-0.log").write_text("short\n" * 50_000)
    assert lines_of(reader, 0, 49_999, 1) == ["short"]
    (tmp_path / "rank-0.log").write_text("a longer line\n" * 50_000)
    true, inode = os.fstat, (tmp_path / "rank-0.log").stat().st_ino
    # as after a run directory was moved, or another file system was mounted over it
    monkeypatch.setattr(
        log_reader.os, "fstat", lambda file: mock.Mock(st_ino=inode, st_dev=-1, st_size=true(file).st_size)
    )
    assert lines_of(reader, 0, 49_999, 2) == ["a longer line"]


def test_a_log_that_was_emptied_is_another_log(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, 1).start().write(0, b"old\n" * 50_000)
    assert isinstance(run.answers.answer(AskLines(n=1, first=49_990, count=5, rank=0)), LinesAnswer)
    os.truncate(tmp_path / "rank-0.log", 0)
    answer = run.answers.answer(AskLines(n=2, first=49_990, count=5, rank=0))
    assert f"{answer}".count("is not in its log") == 1
    with open(tmp_path / "rank-0.log", "a") as log:
        log.writelines(f"new line number {number}\n" for number in range(6_000))
    answer = run.answers.answer(AskLines(n=3, first=5_000, count=2, rank=0))
    assert isinstance(answer, LinesAnswer)
    assert [row[2] for row in answer.rows] == ["new line number 5000", "new line number 5001"]
