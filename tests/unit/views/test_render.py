"""What a user sees of a run: the view, its text, its HTML, its errors."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import pty
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from status_rows import pool_status, run_summary
from stories import (
    CELL,
    FORMS,
    IN_BACKWARD,
    IN_LOAD,
    LAUNCHER,
    RUN_ID,
    STUCK,
    TRACEBACK,
    Run,
    failed,
    gapped,
    left_alone,
    loading,
    on_two_nodes,
    released,
    render_text,
    result,
    stalled,
    started_again,
    succeeded,
    timed_out,
    value_error,
    waiting,
)

from sgpu_magic import errors
from sgpu_magic.config import host_name
from sgpu_magic.formatting import (
    format_bytes,
    format_duration,
    format_elapsed,
    format_ranks,
    format_seconds,
)
from sgpu_magic.runs.follow.outcome import deliver
from sgpu_magic.runs.follow.run_loop import Subscription
from sgpu_magic.server.runs import cell_outputs
from sgpu_magic.views import ansi, units
from sgpu_magic.views.bundle import RUN_MIME, caption_bundle, mime_bundle, summary_line
from sgpu_magic.views.cell_outputs import OutputSlots
from sgpu_magic.views.failure import failure_html
from sgpu_magic.views.html import render_html
from sgpu_magic.views.live.snapshot import snapshot_of
from sgpu_magic.views.output import Caption, LineAssembler, ShownDisplay, TextSegment, segments
from sgpu_magic.views.output_buffer import DisplayItem, GapItem, LineItem, trim
from sgpu_magic.views.pool_tables import away_html, status_html, status_text
from sgpu_magic.views.publisher import NotebookPublisher, SilentPublisher, TerminalPublisher, publisher_for
from sgpu_magic.views.rank_models import WIDGET_MIME
from sgpu_magic.views.ranks import ended_ranks_html, live_ranks_html, rank_cards
from sgpu_magic.views.remote_error import run_exception
from sgpu_magic.views.stacks import group_stacks, last_python_line, stacks_html, stacks_text, verdict
from sgpu_magic.views.units import RunTimes
from sgpu_magic.wire import events as ev
from sgpu_magic.wire import rank_events
from sgpu_magic.wire.base import FailureKind, RunKind, RunState
from sgpu_magic.wire.devices import Device, Inventory, NodeShare
from sgpu_magic.wire.events import as_warning
from sgpu_magic.wire.pool_status import PoolStatus
from sgpu_magic.wire.rank_events import (
    Collective,
    CollectiveTimeout,
    CommMessage,
    CommsMoved,
    Death,
    Failure,
    RankStack,
    StackFrame,
)
from sgpu_magic.wire.run import CellSource, RunSpec, Shipped

GOLDEN = Path(__file__).parents[2] / "golden"
PNG = "iVBORw0KGgo="


@pytest.mark.parametrize("name", FORMS)
def test_text_is_as_drawn(name: str) -> None:
    run = FORMS[name]()
    text = re.sub(r"running for [^·]* ·", "running for 3.0 s ·", render_text(run.view)) + "\n"
    text = re.sub(r"(runs train|connected) · [^·]* ·", r"\1 · 12 min ·", text)
    text = re.sub(r"idle since [^·]* ·", "idle since 14:05 ·", text)
    text = text.replace(host_name(), "HOST")
    file = GOLDEN / f"render_{name}.txt"
    if os.environ.get("SGPU_UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def raised_for(
    failure: Failure,
    *others: Failure,
    run: Run | None = None,
    seconds: float = 31.0,
    original: BaseException | None = None,
    names: Container[str] = (),
    stacks: tuple[RankStack, ...] = (),
    folder: str = "",
) -> Any:
    """Return the exception that a run with this ending raises in the notebook."""
    run = run or Run()
    ended = ev.RunEnded(
        state=RunState.FAILED, failure=failure, others=others, running_s=seconds, total_s=seconds, stacks=stacks
    )
    return run_exception(run.apply(ended).view, ended, failure, original, names, folder)


# ------------------------------------------------------------ stacks


def test_equal_stacks_are_one_line_and_who_is_missing_is_said() -> None:
    text = stacks_text(RUN_ID, STUCK, CELL)
    assert text.splitlines()[:4] == [
        "run 7f3a",
        "  ranks 0, 2, 3   wait in all_reduce #41   Cell In[7], line 8   loss.backward()",
        "  rank 1          is in load_batch         Cell In[7], line 4   x = f.read()",
        "rank 1 has not reached all_reduce #41",
    ]
    assert text.splitlines()[4:] == [
        "",
        "ranks 0, 2, 3 wait in all_reduce #41",
        "  Cell In[7], line 8",
        "    loss.backward()",
        "  File /env/torch/_tensor.py, line 630, in backward",
        "  File /env/torch/autograd/graph.py, line 841, in _engine_run_backward",
        "",
        "rank 1 is in load_batch",
        "  Cell In[7], line 8",
        "    loss.backward()",
        "  Cell In[7], line 4, in load_batch",
        "    x = f.read()",
    ]
    page = read(stacks_html(RUN_ID, STUCK, CELL)).text
    assert "ranks 0, 2, 3 wait in all_reduce #41" in page
    assert "rank 1 has not reached all_reduce #41" in page


def test_stacks_as_html_are_escaped() -> None:
    frame = StackFrame("<ipython-input-7-0a1b2c>", 2, "<lambda>")
    cell = CellSource(body="x\nf('<script>')", execution_count=7)
    html = stacks_html(RUN_ID, (RankStack(rank=0, frames=(frame,)),), cell)
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "<lambda" not in html


@pytest.mark.parametrize(
    ("stack", "doing"),
    [
        (RankStack(rank=0, frames=IN_BACKWARD), "is in backward"),
        (RankStack(rank=0, frames=IN_LOAD), "is in load_batch"),
        (RankStack(rank=0, frames=IN_LOAD[1:]), "is in the cell"),
        (RankStack(rank=0, frames=(StackFrame("/lib/mine.py", 3, "crunch"), *IN_LOAD[1:])), "is in crunch"),
        (RankStack(rank=0, frames=(StackFrame("/env/torch/distributed/c10d.py", 3, "barrier"), *IN_LOAD[1:])),
         "waits in barrier"),
        (RankStack(rank=0, frames=(StackFrame("/env/torch/x.py", 9, "wrapper"), *IN_LOAD[1:])), "is in wrapper"),
        (RankStack(rank=0, frames=LAUNCHER), "is in run_code"),
        (RankStack(rank=0, problem="it did not answer within 2 s"), "can't be inspected"),
        (waiting(0), "waits in all_reduce #41"),
        (waiting(0, pending=False), "is in backward"),
        # an asynchronous call: the rank continues, unless a device executes the collective
        (loading(0, seq=41, pending=True), "is in load_batch"),
        (loading(0, seq=41, pending=True, queued=True), "waits in all_reduce #41"),
    ],
)  # fmt: skip
def test_what_a_rank_is_in(stack: RankStack, doing: str) -> None:
    (group,) = group_stacks([stack], CELL)
    assert group.doing == doing


def test_functions_of_other_cells_have_their_own_lines() -> None:
    source = "def fit():\n    step()\n"
    cell = CellSource(body="fit()", execution_count=7, linecache=(("/tmp/ipykernel_9/88.py", source, 3),))
    frames = (StackFrame("/tmp/ipykernel_9/88.py", 2, "fit"), StackFrame("<ipython-input-7-a>", 1, "<module>"))
    assert last_python_line(frames, cell) == "Cell In[3], line 2, in fit: step()"
    assert "  Cell In[7], line 1\n    fit()\n  Cell In[3], line 2, in fit\n    step()" in stacks_text(
        RUN_ID, (RankStack(rank=0, frames=frames),), cell
    )


def test_a_function_of_a_file_is_where_its_own_file_is() -> None:
    cell = CellSource(body="__sgpu_result__ = __sgpu_call__()")
    start = (
        StackFrame("/lib/sgpu_magic/payload/call.py", 74, "__call__"),
        StackFrame("<ipython-input-1-a>", 1, "<module>"),
    )
    loads = (StackFrame("/work/train.py", 12, "load"), StackFrame("/work/train.py", 25, "train"), *start)
    waits = (
        StackFrame("/lib/torch/distributed/c10d.py", 9, "barrier"),
        StackFrame("/work/train.py", 30, "train"),
        *start,
    )
    stacks = (RankStack(rank=0, frames=loads), RankStack(rank=1, frames=waits))
    reported = [re.sub(r"(?<=\S) {2,}", "  ", line) for line in stacks_text(RUN_ID, stacks, cell).splitlines()]
    assert reported[1:] == [
        "  rank 0  is in load  train.py, line 12",
        "  rank 1  waits in barrier  train.py, line 30",
        "",
        "rank 0 is in load",
        "  File /work/train.py, line 25, in train",
        "  File /work/train.py, line 12, in load",
        "",
        "rank 1 waits in barrier",
        "  File /work/train.py, line 30, in train",
        "  File /lib/torch/distributed/c10d.py, line 9, in barrier",
    ]


def test_lines_are_grouped_by_rank_when_the_run_asks_for_it() -> None:
    run = Run(grouped=True).start()
    for step in range(2):
        for rank in (1, 0):
            run.say(rank, f"step {step}\n")
    stream = io.StringIO()
    publisher = TerminalPublisher(run.view, stream)
    publisher.tick(0.0)
    assert "step" not in stream.getvalue()
    (live,) = segments(run.view)
    assert [item.rank for item in live.items] == [1, 0, 1, 0]
    run.end()
    publisher.tick(1.0, final=True)
    (final,) = segments(run.view)
    assert [(item.rank, item.text) for item in final.items] == [
        (0, "step 0"),
        (0, "step 1"),
        (1, "step 0"),
        (1, "step 1"),
    ]
    printed = [line for line in stream.getvalue().splitlines() if line.startswith("[")]
    assert printed == ["[0] step 0", "[0] step 1", "[1] step 0", "[1] step 1"]


def test_a_cell_that_begins_with_another_magic_counts_its_lines_without_ours() -> None:
    cell = CellSource(magic_line="%%distributed", body="%%time\nwork()", execution_count=7)
    assert last_python_line((StackFrame("<ipython-input-7-a>", 2, "<module>"),), cell).endswith("line 2: work()")


@pytest.mark.parametrize(
    ("stacks", "reported"),
    [
        (STUCK, ["rank 1 has not reached all_reduce #41"]),
        # it has no collective on record, and its stack shows that it is elsewhere
        ((waiting(0), loading(1, seq=0)), ["rank 1 has not reached all_reduce #41"]),
        # it is ahead of the others
        ((waiting(0), loading(1, seq=41)), []),
        ((waiting(0), waiting(1)), ["all ranks are in all_reduce #41"]),
        ((waiting(0), waiting(1, name="broadcast")),
         ["rank 0 in all_reduce #41, rank 1 in broadcast #41: they wait for each other, because their collectives "
          "differ"]),
        # its position is unknown
        ((waiting(0), RankStack(rank=1, problem="it did not answer")), []),
        ((loading(0), loading(1)), []),
    ],
)  # fmt: skip
def test_who_has_not_come(stacks: tuple[RankStack, ...], reported: list[str]) -> None:
    assert verdict(stacks, CELL) == reported


def test_a_very_deep_stack_is_cut() -> None:
    frames = tuple(StackFrame("<ipython-input-7-a>", 1, f"f{at}") for at in range(5000))
    text = stacks_text(RUN_ID, (RankStack(rank=0, frames=frames),), CELL)
    assert "in f4999" in text
    assert "in f0\n" in text
    assert "4,940 more frames" in text
    assert len(text.splitlines()) < 140


def test_many_groups_are_summed_up() -> None:
    stacks = [
        RankStack(rank=rank, frames=(StackFrame("<ipython-input-7-a>", 1 + rank, "step"),)) for rank in range(100)
    ]
    lines = stacks_text(RUN_ID, stacks, CELL).split("\n\n")[0].splitlines()
    assert len(lines) == 18
    assert lines[-1] == "  ranks 16-99 elsewhere"


def test_a_stall_is_shown_while_it_lasts(front_end: _Captured) -> None:
    run = stalled()
    publisher = NotebookPublisher(run.view)
    publisher.tick(0.0)
    publisher.tick(1.0)
    (output,) = front_end.outputs.values()
    assert "no progress for 30 s" in str(output["text/plain"])
    assert (
        "rank 1 has not reached all_reduce #41 · `sgpu stacks 7f3a` shows everything"
        in read(str(output["text/html"])).text
    )
    run.apply(rank_events.Resumed())
    publisher.tick(2.0)
    (output,) = front_end.outputs.values()
    assert "no progress" not in str(output)
    run.apply(rank_events.Stalled(seconds=31.0, stacks=STUCK)).end()
    publisher.tick(3.0, final=True)
    (output,) = front_end.outputs.values()
    assert "there was no progress for 31 s: rank 1 has not reached all_reduce #41; ranks 0, 2, 3 wait in" in str(
        output["text/plain"]
    )


def test_a_stall_is_told_once_where_nothing_can_be_taken_back() -> None:
    stream = io.StringIO()
    run = stalled()
    publisher = TerminalPublisher(run.view, stream)
    publisher.tick(0.0)
    publisher.tick(1.0)
    run.apply(rank_events.Resumed())
    publisher.tick(2.0)
    run.end()
    publisher.tick(3.0, final=True)
    assert stream.getvalue().count("no progress for 30 s") == 1
    assert "progress resumed\nsucceeded" in stream.getvalue()


def unfinished(rank: int, *names: str) -> rank_events.RankUnfinished:
    work = tuple(rank_events.Unfinished(kind=rank_events.WorkKind.THREAD, name=name) for name in names)
    return rank_events.RankUnfinished(rank=rank, work=work)


def test_what_ranks_finish_after_their_cell_is_shown_while_it_lasts(front_end: _Captured) -> None:
    run = Run(ranks=4).start()
    publisher = NotebookPublisher(run.view)
    publisher.tick(0.0)
    ranks = (unfinished(0), *(unfinished(rank, "upload") for rank in (1, 2)), unfinished(3, *map(str, range(6))))
    run.apply(rank_events.RanksFinishing(ranks=ranks))
    publisher.tick(1.0)
    (output,) = front_end.outputs.values()
    sent = (
        "rank 0 exits; ranks 1, 2 finish thread upload; rank 3 finishes thread 0, thread 1, thread 2, thread 3, 2 more"
    )
    assert sent in str(output["text/plain"])
    assert "finishing" in str(output["text/plain"])
    assert sent in read(str(output["text/html"])).text
    assert sent in snapshot_of(run.view, 1, []).meta
    run.apply(rank_events.RanksFinishing(ranks=(unfinished(1, "<b>other"),)))
    publisher.tick(2.0)
    (output,) = front_end.outputs.values()
    assert "rank 1 finishes thread <b>other" in str(output["text/plain"])
    assert "<b>other" not in str(output["text/html"])
    run.end()
    publisher.tick(3.0, final=True)
    (output,) = front_end.outputs.values()
    assert "finish" not in str(output["text/plain"])


def test_what_was_cut_off_is_never_plain_success() -> None:
    run = Run(ranks=2).start()
    run.apply(rank_events.RanksFinishing(ranks=(unfinished(1, "upload"),)))
    run.apply(ev.RunEnded(state=RunState.SUCCEEDED, cut_off=(unfinished(1, "upload"),), finish_s=300.0))
    snapshot = snapshot_of(run.view, 1, [])
    assert (snapshot.state, snapshot.tone) == ("succeeded, cut off", "warn")
    assert snapshot.warnings[0].startswith("cut off after 5 min 00 s: thread upload of rank 1. ")
    assert "finish_timeout_s" in snapshot.warnings[0]
    assert "· cut off after 5 min 00 s: thread upload of rank 1 ·" in summary_line(run.view)
    assert "cut off after 5 min 00 s" in render_html(run.view)


def test_a_collective_that_timed_out_is_headed_by_who_has_not_reached_it() -> None:
    run = Run(ranks=3).start()
    reduce = Collective(name="all_reduce", seq=7, pending=True, queued=True)
    died = Failure(
        kind=FailureKind.WORKER_DIED,
        message="rank 0 of 3 (process 7) was killed by SIGABRT: torch aborted it",
        pid=7,
        death=Death(what="was killed by SIGABRT: torch aborted it"),
        rank=0,
        is_consequence=True,
        collective_timeout=CollectiveTimeout(collective=reduce, seconds=600.0),
    )
    stacks = (
        RankStack(rank=0, collective=reduce),
        RankStack(rank=1, frames=(StackFrame(file="<ipython-input-7-1>", line=14, function="load"),)),
        RankStack(rank=2, collective=reduce),
    )
    run.end(RunState.FAILED, failure=died, stacks=stacks)
    heading = "rank 1 has not reached all_reduce #7: rank 0 of 3 (process 7) was killed by SIGABRT"
    shown = render_text(run.view)
    assert heading in shown
    assert "when all_reduce #7 timed out:" in shown
    assert run.view.ended is not None
    assert heading in str(run_exception(run.view, run.view.ended, died))


def test_the_stacks_of_a_timeout_are_in_its_error() -> None:
    failure = Failure(kind=FailureKind.TIMEOUT, message="")
    error = raised_for(failure, run=Run(cell=CELL), seconds=90, stacks=STUCK)
    assert isinstance(error, errors.RunTimeout)
    assert "ranks 0, 2, 3 wait in all_reduce #41 (Cell In[7], line 8: loss.backward())" in error.message
    assert "rank 1 has not reached all_reduce #41" in error.message
    assert "\n" not in error.message
    assert "in _engine_run_backward" in error.remote_traceback


def test_a_run_that_hung_when_it_was_cancelled_keeps_who_had_not_come() -> None:
    run = Run(ranks=4, cell=CELL).start()
    run.end(RunState.CANCELLED, stacks=STUCK)
    note = (
        "when it was cancelled: rank 1 has not reached all_reduce #41; ranks 0, 2, 3 wait in all_reduce #41 (Cell In[7]"
    )
    assert note in render_text(run.view)
    assert note in unescape(render_html(run.view))


def test_a_cancelled_run_whose_ranks_waited_for_nothing_says_nothing_about_it() -> None:
    run = Run(ranks=1, cell=CELL).start()
    busy = RankStack(rank=0, frames=(StackFrame(file="<ipython-input-7-1>", line=4, function="<module>"),))
    run.end(RunState.CANCELLED, stacks=(busy,))
    assert "when it was cancelled" not in render_text(run.view) + render_html(run.view)


def test_a_death_tells_where_it_was_and_what_it_had_said() -> None:
    message = "was killed by SIGKILL: out of memory"
    failure = Failure(
        kind=FailureKind.WORKER_DIED,
        message=message,
        death=Death(what=message),
        rank=1,
        exit_status=-9,
        pid=4711,
        stack=IN_LOAD,
    )
    run = Run(cell=CELL).start().say(1, "step 1180  loss 0.22\n").end(RunState.FAILED, 31, failure)
    assert render_text(run.view).splitlines()[-4:] == [
        "train_digits · failed after 31 s · rank 1 of 4 (process 4711) was killed by SIGKILL: out of memory",
        "its last Python line: Cell In[7], line 4, in load_batch: x = f.read()",
        "its last output: step 1180  loss 0.22",
        "run 7f3a",
    ]
    error = raised_for(failure, run=Run(cell=CELL).say(1, "step 1180  loss 0.22\n"))
    assert isinstance(error, errors.WorkerDied)
    assert "its last Python line: Cell In[7], line 4, in load_batch: x = f.read()" in error.message
    assert "its last output: step 1180" in error.message
    assert error.remote_traceback.splitlines() == [
        "Cell In[7], line 8",
        "  loss.backward()",
        "Cell In[7], line 4, in load_batch",
        "  x = f.read()",
    ]


def test_an_attempt_begins_with_a_clean_slate() -> None:
    run = started_again()
    assert run.lines == ["step 7", "from step 5"]
    assert run.view.rank_failures == {}
    assert "attempt 2 of 3" in read(render_html(run.view)).text
    assert summary_line(run.view).split(" · ")[1] == "attempt 2 of 3"


def test_an_attempt_that_fails_before_all_ranks_are_there_has_its_time_too() -> None:
    failure = Failure(kind=FailureKind.WORKER_DIED, message="", rank=2, exit_status=-9)
    run = Run(retries=2).apply(ev.StateChanged(state=RunState.STARTING), at=100.0)
    run.apply(ev.AttemptFailed(attempt=1, attempts=3, failure=failure), at=100.5)
    assert run.view.notes == ["attempt 1 of 3 failed after 0.50 s: rank 2 was killed by SIGKILL; started again"]


# ------------------------------------------------------------ lines


def test_carriage_returns_collapse() -> None:
    lines = LineAssembler()
    assert lines.feed("a\rb\rc\nwin\r\nnext") == ["c", "win"]
    assert lines.partial == "next"
    assert lines.feed("\r") == []
    assert lines.partial == "next"
    assert lines.feed("\nsplit\r") == ["next"]
    assert lines.feed("\nover\r") == ["split"]
    assert lines.feed("done\r\n") == ["done"]
    assert lines.feed("12%\b\b\b") == []
    assert lines.partial == "12%"
    assert lines.feed("13%\nabc\b\bX\n") == ["13%", "aXc"]


def test_tqdm_is_one_line_per_rank() -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    run = Run().start()
    for rank in range(4):
        sink = io.StringIO()
        for _ in tqdm(range(200), file=sink, mininterval=0, desc=f"rank {rank}", ascii=False):
            pass
        text = sink.getvalue()
        assert text.count("\r") > 100
        for at in range(0, len(text), 37):
            run.say(rank, text[at : at + 37], "stderr")
            assert len(run.view.output.live_lines) <= rank + 1
    assert len(run.lines) == 4
    assert all("100%" in line and line.startswith(f"rank {rank}:") for rank, line in enumerate(run.lines))
    assert run.view.output.live_lines == {}


def test_nested_tqdm_does_not_flood() -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    sink = io.StringIO()
    for _ in tqdm(range(3), file=sink, mininterval=0, desc="epoch"):
        for _ in tqdm(range(100), file=sink, mininterval=0, desc="batch", leave=False, position=1):
            pass
    run = Run().start()
    text = sink.getvalue()
    for at in range(0, len(text), 41):
        run.say(0, text[at : at + 41], "stderr")
    assert len(run.end().lines) < 12


def test_order_is_of_arrival_and_equal_lines_are_kept() -> None:
    run = Run().start()
    for rank in (0, 1, 0, 2, 3, 1):
        run.say(rank, "same\n")
    assert [item.rank for item in run.view.items if isinstance(item, LineItem)] == [0, 1, 0, 2, 3, 1]


def test_partial_line_is_live_then_whole() -> None:
    run = Run().start().say(2, "ab").say(1, "x\n").say(2, "cd")
    assert run.view.output.live_lines == {2: "abcd"}
    assert run.view.output.last_lines == {1: "x", 2: "abcd"}
    assert run.lines == ["x"]
    assert run.end().lines == ["x", "abcd"]


def test_colour_codes_stay_in_lines_and_leave_text() -> None:
    run = Run().start().say(0, "\x1b[31mred\x1b[0m \x1b]0;title\x07\x1b[2Kplain\n").end()
    assert run.lines[0].startswith("\x1b[31mred")
    assert "[0] red plain\n" in render_text(run.view)


def test_endless_line_is_cut_into_pieces() -> None:
    run = Run(limit=100_000).start()
    for _ in range(100):
        run.say(0, "." * 16_000)
    assert sum(map(len, run.lines)) <= 100_000
    huge = Run().start().say(0, "x" * 1_000_000 + "\n")
    assert len(huge.lines[0]) < 17_000
    assert "more characters" in huge.lines[0]


# ------------------------------------------------------------ bounds


def test_a_million_lines_stay_bounded() -> None:
    run = Run().start()
    batches = ["".join(f"rank {rank} step {step:07d} loss 0.2200\n" for step in range(500)) for rank in range(4)]
    spent_s: list[float] = []
    for at in range(2000):
        began = time.thread_time()
        run.say(at % 4, batches[at % 4])
        spent_s.append(time.thread_time() - began)
    # the view is full after a few batches; a later one costs no more than those
    early, late = (statistics.median(each) for each in (spent_s[20:520], spent_s[-500:]))
    assert late < 2 * early, f"{early * 1e3:.3f} ms and then {late * 1e3:.3f} ms for 16 kB"
    run.end()
    items = run.view.items
    gaps = [item for item in items if isinstance(item, GapItem)]
    assert len(gaps) == 1
    assert gaps[0].lines + len(run.lines) == run.view.output.total_lines == 1_000_000
    assert gaps[0].ranks == 4
    assert 95_000 < sum(len(line) + 5 for line in run.lines) <= 100_000
    text, html = render_text(run.view), render_html(run.view)
    assert text.count(" loss ") == 80
    assert 55_000 < len(html.encode()) <= 75_000
    assert f"{gaps[0].lines:,}" not in html, "the HTML leaves out more than the view"
    for form, shown in ((text, text), (html, html.partition(">rank 0<")[0])):
        left_out = int(re.search(r"\.\.\. ([\d,]+) lines of 4 ranks", form)[1].replace(",", ""))
        assert left_out + len(re.findall(r"step \d{7}", shown)) == 1_000_000


def test_memory_under_many_lines_is_flat() -> None:
    import tracemalloc

    run = Run().start()
    batch = "".join(f"step {step:07d}\n" for step in range(1000))
    for _ in range(100):
        run.say(0, batch)
    tracemalloc.start()
    for _ in range(300):
        run.say(1, batch)
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert grown < 3_000_000


def test_first_and_last_lines_survive() -> None:
    run = gapped()
    assert run.lines[0] == "step 0000  loss 0.22"
    assert run.lines[-1] == "step 0999  loss 0.22"
    sizes = [len(line) + 5 for line in run.lines]
    assert sum(sizes) <= 400


def test_skipped_lines_count_into_the_one_gap() -> None:
    run = Run(ranks=2).start().say(0, "first\n").say(1, "other\n")
    run.say(0, "tail\n", skipped=1000).say(1, "more\n").say(0, "again\n", skipped=500)
    assert run.view.items == [
        LineItem(0, "stdout", "first"),
        LineItem(1, "stdout", "other"),
        GapItem(1501, 1),
        LineItem(1, "stdout", "more"),
        LineItem(0, "stdout", "again"),
    ]
    assert run.view.output.total_lines == 1505


def test_bytes_skipped_within_a_line_leave_a_mark() -> None:
    run = Run().start().say(0, "begin")
    run.apply(
        rank_events.OutputWritten(rank=0, stream="stdout", text="end\n", start=5, end=50_000, skipped_bytes=49_991)
    )
    assert run.view.items == [LineItem(0, "stdout", "begin ... end")]


def test_trim_keeps_one_gap() -> None:
    lines = [LineItem(0, "stdout", str(at)) for at in range(10)]
    assert trim(lines, [10] * 10, 100) == lines
    assert trim(lines, [10] * 10, 50) == [*lines[:2], GapItem(5, 1), *lines[7:]]
    assert trim(lines, [10] * 10, 30, head_share=0) == [GapItem(7, 1), *lines[7:]]
    with_gap = [*lines[:5], GapItem(90, 3), *lines[5:]]
    assert trim(with_gap, [10] * 5 + [0] + [10] * 5, 50) == [*lines[:2], GapItem(95, 3), *lines[7:]]


def test_displays_outlive_lines_and_are_bounded() -> None:
    run = Run(limit=1000).start().say(0, "before\n").show(0, text_plain="plot")
    for at in range(500):
        run.say(1, f"line {at} of many that push\n")
    assert sum(isinstance(item, DisplayItem) for item in run.view.items) == 1
    for at in range(1500):
        run.show(0, text_plain=f"plot {at}")
    shown = [item for item in run.view.items if isinstance(item, DisplayItem)]
    assert len(shown) == 1000
    assert shown[-1].bundle == {"text/plain": "plot 1499"}
    assert "the first 501 displays were dropped" in render_text(run.end().view)


# ------------------------------------------------------------ displays


def test_displays_stand_in_place_and_update_there() -> None:
    run = Run().start().say(0, "a\n").show(0, "h1", text_plain="one", image_png=PNG).say(0, "b\n")
    run.show(1, "h1", text_plain="rank 1's own").show(0, "h1", update=True, text_plain="two")
    run.show(0, "unknown", update=True, text_plain="nowhere")
    kinds = [
        item.bundle["text/plain"] if isinstance(item, DisplayItem) else item.text
        for item in run.view.items
        if not isinstance(item, GapItem)
    ]
    assert kinds == ["a", "two", "b", "rank 1's own"]
    text, *rest = segments(run.view)
    assert isinstance(text, TextSegment)
    assert [item.text for item in text.items if isinstance(item, LineItem)] == ["a", "b"]
    assert [type(part) for part in rest] == [Caption, ShownDisplay, Caption, ShownDisplay]
    assert "[0] two" in render_text(run.view)


def test_the_displays_of_one_rank_stand_among_its_lines() -> None:
    run = Run(ranks=1).start().say(0, "a\n").show(0, text_plain="one").show(0, text_plain="two").say(0, "b\n")
    assert [type(part) for part in segments(run.view)] == [TextSegment, ShownDisplay, ShownDisplay, TextSegment]


def test_the_displays_of_several_ranks_are_in_rank_order_when_the_run_has_ended() -> None:
    run = Run(ranks=4).start()
    for rank in (2, 0, 3, 1):
        run.show(rank, image_png=PNG)
    run.show(2, text_html="<table>").show(1, text_html="<table>")

    def order() -> list[tuple[int, int]]:
        return [(part.rank, part.columns) for part in segments(run.view) if isinstance(part, Caption)]

    assert [rank for rank, _ in order()] == [2, 0, 3, 1, 2, 1]
    slots = [part.slot for part in segments(run.view)]
    run.end()
    assert order() == [(0, 4), (1, 4), (2, 4), (3, 4), (1, 2), (2, 2)]
    assert [part.slot for part in segments(run.view)] == slots


def test_widgets_that_ranks_have_closed_leave_no_captions() -> None:
    run = Run(ranks=2).start()
    for name in ("outer", "inner"):
        for rank in (1, 0):
            run.apply(CommsMoved(rank=rank, messages=(CommMessage(comm_id=name, kind="open", data=b"{}"),)))
            run.show(rank, **{WIDGET_MIME: {"model_id": name}})

    def captions() -> list[tuple[int, int, int]]:
        return [(part.rank, part.columns, part.slot) for part in segments(run.view) if isinstance(part, Caption)]

    assert captions() == [(1, 2, 1), (0, 2, 3), (1, 2, 5), (0, 2, 7)]
    run.apply(CommsMoved(rank=0, messages=(CommMessage(comm_id="inner", kind="close"),)))
    # the others stay in their outputs
    assert captions() == [(1, 2, 1), (0, 2, 3), (1, 1, 5)]
    run.apply(CommsMoved(rank=1, messages=(CommMessage(comm_id="outer", kind="close"),)))
    assert captions() == [(0, 2, 3), (1, 2, 5)]
    run.end()
    assert captions() == [(0, 2, 1), (1, 2, 3)]


def test_display_comes_after_the_line_begun_before_it() -> None:
    run = Run().start().say(0, "loss: ").say(0, "\r 5%|", "stderr").show(0, text_plain="plot")
    assert [type(item) for item in run.view.items] == [LineItem, DisplayItem]
    assert run.view.output.live_lines == {0: " 5%|"}


def test_clear_output() -> None:
    run = Run().start().say(0, "a\n").say(1, "b\n").show(0, text_plain="plot")
    run.apply(rank_events.OutputCleared(rank=0, wait=True))
    assert len(run.view.items) == 3
    run.say(0, "new\n")
    assert [item.text for item in run.view.items if isinstance(item, LineItem)] == ["b", "new"]
    assert not any(isinstance(item, DisplayItem) for item in run.view.items)
    run.apply(rank_events.OutputCleared(rank=1))
    assert run.lines == ["new"]


def test_a_broken_bundle_says_so() -> None:
    run = Run().start().apply(rank_events.DisplayPublished(rank=3, bundle=b"{nonsense"))
    assert "rank 3 displayed something that is not a MIME bundle" in render_text(run.view)


# ------------------------------------------------------------ HTML


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.names: set[str] = set()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(html: str) -> _Reader:
    reader = _Reader()
    reader.feed(html)
    assert reader.open == []
    return reader


EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>&amp;\"'"


def test_html_escapes_everything_that_ranks_say() -> None:
    failure = Failure(
        kind=FailureKind.USER_CODE,
        message=EVIL,
        rank=0,
        host=EVIL,
        type_name=EVIL,
        traceback_text=f"{EVIL}\n---> 1 {EVIL}\n{EVIL}: {EVIL}",
        where=EVIL,
    )
    other = Failure(kind=FailureKind.USER_CODE, message=EVIL, type_name=EVIL, rank=1)
    run = Run(pool=EVIL, shipped=Shipped(names=(EVIL,), notes=(EVIL,))).start()
    run.say(0, EVIL + "\n").say(1, f"\x1b[31m{EVIL}\x1b[38;2;1;2;3m{EVIL}\n").show(0, text_plain=EVIL)
    run.say(2, f"\x1b[{EVIL}m \x1b]8;;javascript:alert(1)\x07x\n").apply(ev.Noted(text=EVIL))
    run.apply(rank_events.RankFailed(failure=failure)).say(3, EVIL)
    live = read(render_html(run.view))
    ended = read(render_html(run.end(RunState.FAILED, 1, failure, (other,)).view))
    for reader in (live, ended):
        assert reader.tags <= {"div", "b", "span", "pre", "details", "summary", "style"}
        assert reader.names <= {"style", "class", "role", "aria-label", "tabindex"}
        assert "<script>alert(1)</script>" in reader.text


def test_only_large_values_are_named_with_their_size() -> None:
    run = Run(shipped=Shipped(sizes=(("rows", 250_000_000), ("lr", 30)))).start()
    (note,) = run.view.notes
    assert "rows costs 250.0 MB" in note


def test_only_notes_that_ask_for_something_are_warnings() -> None:
    hides = "the notebook's variable rank hides the rank's own"
    run = Run(shipped=Shipped(notes=("on a10, the cheapest type", as_warning(hides)))).start()
    run.apply(ev.Noted(text="4 ranks share 2 cores"), ev.Noted(text=as_warning("the disk is full")))
    run.view.set_silence("reconnecting: the pool team has been silent since 14:05:10")
    sent = re.findall(r'<span style="([^"]*)">([^<]*)</span></div>', render_html(run.view).split("<pre")[0])
    drawn = {unescape(text): "--jp-warn" in style for style, text in sent}
    levels = {
        "on a10, the cheapest type": False,
        hides: True,
        "4 ranks share 2 cores": False,
        "the disk is full": True,
        run.view.silence: False,
    }
    assert {sentence: drawn.get(sentence) for sentence in levels} == levels
    assert run.view.warnings == [hides, "the disk is full"]
    text = render_text(run.view)
    assert [text.count(f"note: {sentence}\n") for sentence in levels] == [1] * 5


def test_a_silent_link_is_reported_once() -> None:
    transport = SimpleNamespace(silent_s=20.0)
    silent = SimpleNamespace(link=SimpleNamespace(title="the pool team", transport=transport))
    view = Run().start().view
    followed = Subscription(silent, view, SilentPublisher(), SimpleNamespace())  # type: ignore[arg-type]
    followed.on_link_change()
    sent, version = view.silence, view.version
    assert re.match(r"reconnecting: the pool team has been silent since \d\d:\d\d:\d\d; the run continues there", sent)
    for seconds in (40.0, 80.0, 3600.0):
        transport.silent_s = seconds
        followed.on_link_change()
    assert (view.silence, view.version) == (sent, version)
    transport.silent_s = 0.0
    followed.on_link_change()
    assert view.silence == ""


def test_html_reads_without_styles() -> None:
    text = read(render_html(failed().view)).text
    for words in (
        "failed",
        "train_digits",
        "ValueError on rank 1",
        "---> 14",
        "ValueError: NaN in batch 118",
    ):
        assert words in text
    assert "ranks 0, 2, 3 were released from all_reduce #118 (line 15)" in text
    assert "sgpu logs 7f40" in text
    assert "simulated on cpu" in read(render_html(timed_out().view)).text


def test_ansi_colours_become_spans() -> None:
    assert ansi.to_html("a \x1b[31mb<\x1b[0m c") == 'a <span style="color:#e75c58">b&lt;</span> c'
    assert 'style="color:#5f87af;background:#010203;font-weight:bold"' in ansi.to_html("\x1b[1;38;5;67;48;2;1;2;3mx")
    assert ansi.to_html("\x1b[2J\x1b[3;4Hx\x07\x00\x1b[") == "x"
    assert ansi.plain("\x1b[1mx\x1b[0m\x1b]0;t\x1b\\y") == "xy"
    assert ansi.colours_only("\x1b[31mx\x1b[2K\x1b]52;c;aGk=\x07") == "\x1b[31mx\x1b[0m"


@pytest.mark.parametrize(
    ("codes", "style"),
    [
        # xterm's table: sixteen basic colours, a cube of 216, 24 greys
        ("38;5;1", "color:#e75c58"),
        ("38;5;21", "color:#0000ff"),
        ("38;5;232", "color:#080808"),
        ("38;5;255", "color:#eeeeee"),
        ("38;5;999", "color:#eeeeee"),
        ("38;2;300;0;1", "color:#ff0001"),
        ("96", "color:#258f8f"),
        ("41", "background:#e75c58"),
        ("104", "background:#3b82f6"),
        # grey text is white on a coloured background
        ("37;41", "color:#ffffff;background:#e75c58"),
        ("97;41", "color:#ffffff;background:#e75c58"),
        ("37", "color:#a09c90"),
        # inverse swaps both colours, with defaults for unset ones
        ("7", "color:#ffffff;background:#6b7280"),
        ("31;7", "color:#ffffff;background:#e75c58"),
        ("31;42;7", "color:#00a250;background:#e75c58"),
        # underline and strikethrough share one property
        ("4", "text-decoration:underline"),
        ("4;9", "text-decoration:line-through"),
        ("2;3", "opacity:.65;font-style:italic"),
        # an end code leaves the other attributes in place
        ("1;3;31;22", "color:#e75c58;font-style:italic"),
        ("31;42;39", "background:#00a250"),
        ("31;42;49", "color:#e75c58"),
        ("31;7;27", "color:#e75c58"),
        ("31;4;24", "color:#e75c58"),
        # no attribute is left
        ("31;1;0", ""),
        ("31;", ""),
        ("3;23", ""),
        # unknown codes, and truncated or unknown colours, are ignored
        ("31;58", "color:#e75c58"),
        ("1;38;9;31", "font-weight:bold"),
        ("1;48;2;3", "font-weight:bold"),
        (">4;1", ""),
    ],
)
def test_ansi_codes_have_the_styles_of_a_terminal(codes: str, style: str) -> None:
    expected = f'<span style="{style}">x</span>' if style else "x"
    assert ansi.to_html(f"\x1b[{codes}mx") == expected


def test_html_shows_the_cells_frames_first_and_keeps_the_rest() -> None:
    trace = (
        "Cell In[7], line 3\n----> 3 step()\n\nFile /lib/torch/nn.py:9, in step()\n      9 boom()\n\n"
        "RuntimeError: boom\n"
    )
    failure = Failure(
        kind=FailureKind.USER_CODE, message="boom", rank=0, type_name="RuntimeError", traceback_text=trace
    )
    html = render_html(Run().start().end(RunState.FAILED, 1, failure).view)
    before, _, after = html.partition("<details")
    assert "nn.py" not in before
    assert "nn.py" in after


def boxed(failure: Failure, *others: Failure, cell: CellSource = CELL) -> tuple[list[str], list[str]]:
    """Return the lines of a failure's box that are always shown, and those behind its summary."""
    html = failure_html(Run(cell=cell).start().say(1, "step 7\n").end(RunState.FAILED, 1, failure, others).view)
    shown, _, folded = html.partition("<details")
    above, below = (f"{shown}</div>", f"<details{folded.removesuffix('</div>')}") if folded else (shown, "")
    return _lines_of(above), _lines_of(below)


def _lines_of(html: str) -> list[str]:
    text = re.sub("</(div|pre|summary)>", r"\n</\1>", html)
    return [line for line in read(text).text.splitlines() if line.strip()]


def long_error(message: str, frames: str = "") -> Failure:
    traceback = f"{frames}\n\nValueError: {message}\n"
    return msgspec.structs.replace(value_error("h"), message=message, traceback_text=traceback)


FRAME = "Cell In[7], line 8\n      7 while True:\n----> 8     loss.backward()"


@pytest.mark.parametrize("message", ["NaN " * 2_000, "\n".join(f"line {at}" for at in range(500))])
def test_a_long_message_is_clamped_to_six_rows_and_whole_behind_its_summary(message: str) -> None:
    shown, folded = boxed(long_error(message, FRAME))
    assert shown[:4] == ["ValueError on rank 1 · h", *FRAME.splitlines()]
    rows = sum(-(-len(line) // 85) for line in shown[4:])
    assert rows <= 7
    assert shown[4].startswith(f"ValueError: {message[:6].strip()}")
    assert shown[-1].endswith(" ...")
    assert "the whole traceback" in folded[0]
    assert " ".join(message.split()) in " ".join(" ".join(folded).split())


def test_a_short_message_has_no_summary() -> None:
    assert boxed(long_error("NaN", FRAME)) == (["ValueError on rank 1 · h", *FRAME.splitlines(), "ValueError: NaN"], [])


def test_of_a_deep_recursion_the_first_and_the_last_frames_of_the_cell_are_shown() -> None:
    frames = "\n\n".join(f"Cell In[7], line 4, in f({at})\n----> 4     f({at + 1})" for at in range(500))
    shown, folded = boxed(long_error("too deep", frames))
    places = [line for line in shown if line.startswith("Cell In")]
    assert places == [f"Cell In[7], line 4, in f({at})" for at in (0, 1, 498, 499)]
    assert shown[-1] == "ValueError: too deep"
    assert folded


def test_without_a_frame_of_the_cell_its_line_comes_from_its_source() -> None:
    failure = msgspec.structs.replace(value_error("h"), traceback_text="", line=4)
    assert boxed(failure)[0] == [
        "ValueError on rank 1 · h",
        "Cell In[7], line 4",
        "      2 def load_batch(f):",
        "      3     # a slow disk",
        "----> 4     x = f.read()",
        "      5     return x",
        "      6",
        "ValueError: NaN in batch 118",
    ]


def test_a_long_line_of_code_is_cut_at_its_end() -> None:
    cell = CellSource(body=f"x = '{'y' * 5_000}'", magic_line="%%distributed", execution_count=7)
    shown, _ = boxed(msgspec.structs.replace(value_error(), traceback_text="", line=2), cell=cell)
    assert shown[3].startswith("----> 2 x = 'yyy")
    assert len(shown[3]) < 210


@pytest.mark.parametrize("long", [False, True])
def test_chained_exceptions_are_shown_if_they_are_short(long: bool) -> None:
    cause = "\n".join(f"line {at}" for at in range(30 if long else 1))
    chain = (
        f"KeyError                 Traceback (most recent call last)\n{FRAME}\n\nKeyError: {cause}\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        f"ValueError               Traceback (most recent call last)\n{FRAME}"
    )
    shown, folded = boxed(msgspec.structs.replace(long_error("no config", chain), line=8))
    assert shown[-1] == "ValueError: no config"
    assert "----> 8     loss.backward()" in shown
    assert any("direct cause" in line for line in shown) == (not long)
    assert any("direct cause" in line for line in folded) == long


def test_a_dead_ranks_box_has_the_lines_around_its_last_one() -> None:
    message = "was killed by SIGKILL: out of memory"
    failure = Failure(
        kind=FailureKind.WORKER_DIED,
        message=message,
        death=Death(what=message),
        rank=1,
        exit_status=-9,
        pid=4711,
        stack=IN_LOAD,
    )
    assert boxed(failure)[0] == [
        "rank 1 of 4 (process 4711) was killed by SIGKILL: out of memory",
        "its last Python line: Cell In[7], line 4, in load_batch",
        "      2 def load_batch(f):",
        "      3     # a slow disk",
        "----> 4     x = f.read()",
        "      5     return x",
        "      6",
        "its last output: step 7",
    ]


def test_how_the_other_ranks_ended_is_in_the_failures_box() -> None:
    shown, _ = boxed(value_error("h"), *released(0, 2, 3))
    assert shown[-1] == "ranks 0, 2, 3 were released from all_reduce (line 15)"
    alone = [msgspec.structs.replace(value_error(), rank=rank, message=f"batch {rank}") for rank in range(2, 20)]
    shown, _ = boxed(value_error("h"), *alone)
    assert shown[-2:] == ["rank 7: ValueError: batch 7 (line 14)", "... and 12 more: sgpu logs 7f3a"]
    page = read(render_html(failed().view)).text
    assert page.count("were released from") == 1
    assert page.index("were released from") < page.index("[0] epoch 1")


def test_rank_numbers_are_aligned() -> None:
    run = Run(ranks=12).start().say(3, "step\n").say(11, "step\n").end()
    for text in (render_text(run.view), read(render_html(run.view)).text):
        assert " [3] step\n[11] step" in text


def test_bundle_has_html_text_and_the_record_once() -> None:
    run = Run(outputs=("history",)).start().say(0, "a\n").show(0, image_png=PNG).say(0, "b\n")
    run.end(results=(result(0, 1200),))
    text, caption, _ = segments(run.view)
    assert isinstance(text, TextSegment)
    assert isinstance(caption, Caption)
    shown, above_display = mime_bundle(run.view, text), caption_bundle(caption)
    assert set(above_display) == {"text/html", "text/plain"}
    record = json.loads(json.dumps(shown[RUN_MIME]))
    assert (record["run_id"], record["state"], record["ranks"]) == (RUN_ID, "succeeded", 4)
    assert record["durations"]["total_s"] == 12.4
    assert record["whole"] is True
    _, a, b, end = str(shown["text/plain"]).splitlines()
    assert (a, b) == ("[0] a", "[0] b")
    assert end.startswith("succeeded")
    assert above_display["text/plain"] == "[0]"
    assert read(str(above_display["text/html"])).text.strip() == "rank 0"


# ------------------------------------------------------------ publishers


class _Captured(DisplayPublisher):
    """Acts as the front end: outputs in order, updates by display id."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[str, dict[str, object]] = {}
        self.messages: list[int] = []

    def publish(self, data, metadata=None, source=None, *, transient=None, update=False, **kwargs):
        display_id = transient["display_id"]
        assert update == (display_id in self.outputs)
        self.outputs[display_id] = data
        self.messages.append(len(json.dumps(data, ensure_ascii=False).encode()))


@pytest.fixture
def front_end() -> Iterator[_Captured]:
    shell = InteractiveShell.instance()
    before, shell.display_pub = shell.display_pub, _Captured()
    yield shell.display_pub
    shell.display_pub = before
    InteractiveShell.clear_instance()


def test_notebook_shows_nothing_at_first_unless_the_run_is_over(front_end: _Captured) -> None:
    run = Run().start()
    publisher = NotebookPublisher(run.view)
    publisher.tick(10.0)
    publisher.tick(10.09)
    assert front_end.messages == []
    publisher.tick(10.11)
    assert "running" in str(front_end.outputs)
    quick = succeeded()
    NotebookPublisher(quick.view).tick(20.0, final=True)
    assert len(front_end.outputs) == 2
    assert front_end.messages[-1] < 10_000


def test_notebook_shows_the_displays_of_several_ranks_after_their_lines(front_end: _Captured) -> None:
    run = Run().start()
    publisher = NotebookPublisher(run.view)
    now = 0.0
    for step in range(6):
        now += 0.5
        run.say(step % 4, f"line {step}\n")
        if step in (1, 3):
            run.show(step, "d", text_plain=f"plot {step}", image_png=PNG)
        if step == 4:
            run.show(1, "d", update=True, text_plain="plot 1b", image_png="new")
        publisher.tick(now)
    run.end()
    publisher.tick(now, final=True)
    publisher.tick(now + 1, final=True)
    outputs = list(front_end.outputs.values())
    assert [output["text/plain"] for output in outputs[1:5]] == ["[1]", "plot 1b", "[3]", "plot 3"]
    assert (outputs[2]["image/png"], outputs[4]["image/png"]) == ("new", PNG)
    assert [f"line {step}" in str(outputs[0]["text/plain"]) for step in range(6)] == [True] * 6
    # the lines have the run's end too: a live view that was shown in their place can stay
    assert [RUN_MIME in output for output in outputs] == [True] + [False] * 4
    assert "running" not in str(outputs[0]["text/html"])
    assert "succeeded" in str(outputs[0]["text/html"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_saved_is_the_same_whenever_something_was_shown(front_end: _Captured, ranks: int) -> None:
    steps: list[Callable[[Run], object]] = [
        lambda run: run.say(0, "before\n"),
        lambda run: run.show(0, text_plain="one"),
        lambda run: run.say(0, "between\n"),
        lambda run: run.show(0, text_plain="two"),
        lambda run: run.show(0, text_plain="three"),
        lambda run: run.say(0, "after\n"),
    ]

    def saved(shown_steps: int, below_a_view: bool) -> list[dict[str, object]]:
        """Return the outputs of a run that was shown after each of its first steps, and then at its end."""
        front_end.outputs.clear()
        run = Run(ranks=ranks).start()
        slots = OutputSlots(run.view)
        if below_a_view:
            slots.open({"text/plain": "a live view"})
        for at, step in enumerate(steps):
            step(run)
            if at < shown_steps:
                slots.draw_displays(100) if below_a_view else slots.draw(100, 40_000)
        run.end()
        slots.draw()
        return list(front_end.outputs.values())

    expected = saved(0, below_a_view=False)
    for count in range(len(steps) + 1):
        assert saved(count, below_a_view=False) == expected
        assert saved(count, below_a_view=True) == expected


def test_notebook_traffic_is_bounded(front_end: _Captured) -> None:
    run = Run(ranks=16).start()
    publisher = NotebookPublisher(run.view)
    batch = "".join(f'step {step:07d} "é" <loss> 0.22\n' for step in range(400))
    for at in range(300):  # 3 s
        run.say(at % 16, batch)
        if at % 10 == 0:
            run.show(0, text_plain=f"plot {at}")
        publisher.tick(at / 100)
    assert 5 < len(front_end.messages) <= 40
    assert max(front_end.messages) < 64_000
    run.end()
    publisher.tick(3.0, final=True)
    total = sum(len(str(output.get("text/html", "")).encode()) for output in front_end.outputs.values())
    assert total < 330_000
    assert not any("● running" in str(output) for output in front_end.outputs.values())


def test_notebook_cleared_displays_vanish(front_end: _Captured) -> None:
    run = Run().start().show(0, text_plain="plot")
    publisher = NotebookPublisher(run.view)
    publisher.tick(0.0)
    publisher.tick(1.0)
    assert {"text/plain": "plot"} in front_end.outputs.values()
    run.apply(rank_events.OutputCleared(rank=0)).end()
    publisher.tick(2.0, final=True)
    assert {"text/plain": "plot"} not in front_end.outputs.values()


def test_terminal_without_tty() -> None:
    stream = io.StringIO()
    run = Run(outputs=("history",))
    publisher = TerminalPublisher(run.view, stream)
    publisher.tick(0.0)
    run.apply(ev.QueueMoved(position=1, reason="needs 1 more A10"))
    publisher.tick(0.2)
    publisher.tick(0.3)
    run.start().say(0, "a\n").say(1, "\r 10%|", "stderr")
    publisher.tick(0.4)
    run.say(1, "\r 99%|", "stderr").show(2, text_plain="x\ny").say(0, "\x1b[31mred\x1b[0m\n")
    publisher.tick(0.5)
    run.end(results=(result(0, 1200),))
    publisher.tick(0.6, final=True)
    assert stream.getvalue() == (
        "train_digits · queued, position 1 · needs 1 more A10 · run 7f3a\n"
        "train_digits · 4 ranks on local (cpu, gloo) · shipped model, loader, cfg (45.1 MB in 38 ms)\n"
        "[0] a\n[2] x\n[2] y\n[0] red\n[1]  99%|\n"
        "succeeded in 12 s · returned history (1.2 kB) · run 7f3a\n"
    )


def test_terminal_writes_every_line() -> None:
    stream = io.StringIO()
    run = Run(limit=1000).start()
    publisher = TerminalPublisher(run.view, stream)
    for at in range(2000):
        run.say(at % 4, f"line {at}\n")
        if at % 100 == 0:
            publisher.tick(at / 1000)
    publisher.tick(3.0, final=True)
    assert len(re.findall(r"line \d+", stream.getvalue())) == 2000


def test_failed_run_ends_with_one_line_in_a_terminal() -> None:
    assert summary_line(failed().view) == (
        "train_digits · failed after 9 s · rank 1 of 4 (this machine) · ValueError: NaN in batch 118 · run 7f40"
    )


def _screen(text: str) -> list[str]:
    """Emulate a terminal: return the lines that stay on its screen."""
    rows, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[\d*[A-Za-z]|.|\n|\r", text):
        if token == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif token == "\r":
            column = 0
        elif token.endswith("A") and token[0] == "\x1b":
            row -= int(token[2:-1])
        elif token == "\x1b[J":
            rows[row:] = [rows[row][:column]]
        elif token[0] != "\x1b":
            rows[row] = rows[row][:column] + token + rows[row][column + 1 :]
            column += 1
    return rows


def test_terminal_with_tty_keeps_live_lines_below() -> None:
    main, side = pty.openpty()
    read_back: list[bytes] = []

    def drain() -> None:
        try:
            while data := os.read(main, 65536):
                read_back.append(data)
        except OSError:
            pass  # the other side was closed

    thread = threading.Thread(target=drain)
    thread.start()
    with open(side, "w", encoding="utf-8") as stream:
        assert stream.isatty()
        run = Run().start()
        publisher = TerminalPublisher(run.view, stream)
        now = 0.0
        for percent in range(0, 101, 5):
            for rank in range(4):
                run.say(rank, f"\r{percent:3d}%|{'█' * percent}", "stderr")
            if percent == 50:
                run.say(0, "half\n")
            now += 0.2
            publisher.tick(now)
        during = len(read_back)
        run.end()
        publisher.tick(now, final=True)
    thread.join(10)
    os.close(main)
    text = b"".join(read_back).decode().replace("\r\n", "\n")
    assert during >= 0
    assert "\x1b[4A" in text
    live = text[: text.rindex("\x1b[4A")]
    assert [line[:8] for line in _screen(live)[-5:-1]] == [f"[{rank}] 100%"[:8] for rank in range(4)]
    screen = _screen(live)
    assert all(len(line) < 80 for line in screen[2:]), "a live line wraps"
    assert screen[0].startswith("train_digits · 4 ranks")
    assert screen[1] == "[0] half"
    final = text[text.rindex("\x1b[4A") :]
    assert final.count("100%") == 4
    assert final.endswith("succeeded in 12 s · run 7f3a\n")


def test_publisher_for_each_ui() -> None:
    view = Run().view
    assert isinstance(publisher_for("none", view, sys.stdout, True), SilentPublisher)
    assert isinstance(publisher_for("text", view, sys.stdout, True), TerminalPublisher)
    assert isinstance(publisher_for("auto", view, sys.stdout, False), TerminalPublisher)
    assert isinstance(publisher_for("auto", view, sys.stdout, True), NotebookPublisher)


# ------------------------------------------------------------ errors


class Frozen(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


class Computed(Exception):
    __slots__ = ()

    @property
    def rank(self) -> int:
        return 99


@dataclasses.dataclass(frozen=True)
class Record(Exception):
    code: int


@pytest.mark.parametrize("original", [ValueError("NaN in batch 118"), Frozen("x"), Computed("y"), Record(3)])
def test_the_users_own_exception_is_raised(original: Exception) -> None:
    kind = type(original)
    raised = raised_for(value_error("node-2"), *released(0, 2, 3), original=original)
    assert raised is original
    assert isinstance(raised, kind)
    assert type(raised).__name__ == kind.__name__
    assert (raised.rank, raised.run_id, raised.remote_traceback) == (1, RUN_ID, TRACEBACK)  # type: ignore[attr-defined]
    drawn = raised._render_traceback_()  # type: ignore[attr-defined]
    assert drawn[0] == "rank 1 of 4 on node-2 · run 7f3a"
    assert "---> 14" in drawn[1]
    assert "\x1b[31m" in drawn[1]
    assert drawn[-2:] == [
        "ranks 0, 2, 3 were released from all_reduce (line 15)",
        errors.see("exception"),
    ]


def test_below_a_view_the_error_is_short() -> None:
    run = Run(cell=CELL)
    run.view.error_follows = True
    name = Failure(
        kind=FailureKind.USER_CODE, message=f"name 'x' is not defined{' at all' * 200}\nmore", rank=1, host="node-2",
        type_name="builtins.NameError", traceback_text=TRACEBACK, line=8,
    )  # fmt: skip
    raised = raised_for(name, *released(0, 2, 3), run=run, original=NameError("x"), names={"x"})
    heading, error, hint, see = raised._render_traceback_()
    assert heading == "rank 1 of 4 on node-2 · run 7f3a · Cell In[7], line 14"
    assert error.startswith("\x1b[31mNameError\x1b[39m: name 'x' is not defined at all")
    assert len(ansi.plain(error)) <= 125
    assert "add --in x" in hint
    assert see == errors.see("exception")
    assert "---> 14" in raised.remote_traceback
    assert "---> 14" in raised.__notes__[-1], "outside IPython nothing else shows it"


@pytest.mark.parametrize("kind", [FailureKind.USER_CODE, FailureKind.INTERNAL])
def test_a_traceback_is_cut_at_output_limit_by_the_kernel_and_by_the_server(kind: FailureKind, tmp_path: Path) -> None:
    lines = [f"line {number} of a long traceback" for number in range(2000)]
    long = "\n".join(lines)
    failure = msgspec.structs.replace(value_error(), kind=kind, traceback_text=long, traceback_ansi=long)
    ended = ev.RunEnded(state=RunState.FAILED, failure=failure)
    view = Run(limit=2000).apply(rank_events.RankFailed(failure=failure), ended).view
    run: Any = SimpleNamespace(run_id=RUN_ID, spec=view.spec, load_exception=lambda *_: None)
    with pytest.raises(Exception, match="NaN") as caught:
        deliver(Subscription(run, view, SilentPublisher(), None), (ended, ()), {})
    assert caught.value.remote_traceback == long, "all of it is there for who asks"  # type: ignore[attr-defined]
    of_kernel = "\n".join(caught.value._render_traceback_())  # type: ignore[attr-defined]
    output = next(one for one in cell_outputs(view, tmp_path) if one["output_type"] == "error")
    for drawn in (of_kernel, "\n".join(output["traceback"]), *getattr(caught.value, "__notes__", ())):
        assert lines[0] in drawn
        assert lines[-1] in drawn
        assert lines[1000] not in drawn
        assert len(drawn) < 3000


def test_ipython_shows_the_ranks_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    raised = raised_for(value_error(), original=ValueError("NaN in batch 118"))
    shell = InteractiveShell.instance(colors="nocolor")
    try:
        shell.push({"raised": raised})
        outcome = shell.run_cell("try:\n    raise raised\nexcept ValueError as e:\n    caught = e.rank\nraise raised")
        assert outcome.error_in_exec is raised
        assert shell.user_ns["caught"] == 1
    finally:
        InteractiveShell.clear_instance()
    shown = capsys.readouterr().out
    assert shown.startswith("rank 1 of 4 on")
    assert "test_render" not in shown
    assert shown.count("---> 14") == 1
    copy = pickle.loads(pickle.dumps(raised))
    assert copy.rank == 1


def test_exceptions_that_end_kernels_are_wrapped() -> None:
    failure = Failure(kind=FailureKind.USER_CODE, message="3", rank=0, type_name="SystemExit")
    for original in (SystemExit(3), KeyboardInterrupt(), None):
        raised = raised_for(failure, original=original)
        assert isinstance(raised, errors.RemoteError)
        assert raised.rank == 0
        assert raised.type_name == "SystemExit"
        assert str(raised) == "SystemExit: 3"


@pytest.mark.parametrize(
    ("kind", "cls"),
    [
        (FailureKind.SERIALIZATION, errors.SerializationError),
        (FailureKind.ENVIRONMENT, errors.EnvironmentFailed),
        (FailureKind.CAPACITY, errors.CapacityError),
        (FailureKind.SESSION, errors.SessionError),
        (FailureKind.WORKER_DIED, errors.WorkerDied),
        (FailureKind.NODE_LOST, errors.NodeLost),
        (FailureKind.TIMEOUT, errors.RunTimeout),
        (FailureKind.INTERNAL, errors.InternalError),
    ],
)
def test_other_failures_have_their_own_class(kind: FailureKind, cls: type[errors.SgpuError]) -> None:
    failure = Failure(kind=kind, message="the reason and the remedy", rank=2)
    raised = raised_for(failure)
    assert type(raised) is cls
    assert (raised.rank, raised.run_id) == (2, RUN_ID)  # type: ignore[attr-defined]
    assert raised._render_traceback_() == [
        f"{cls.__name__}: {raised}",
        errors.see(cls.topic),
    ]
    assert "the reason and the remedy" in str(raised)
    assert "\n" not in str(raised)


def test_signal_death_reads_as_drawn() -> None:
    raised = raised_for(Failure(kind=FailureKind.WORKER_DIED, message="", rank=2, exit_status=-9))
    assert str(raised) == "failed after 31 s · rank 2 of 4 was killed by SIGKILL · run 7f3a"


def test_a_name_the_notebook_has_gives_a_hint() -> None:
    failure = Failure(kind=FailureKind.USER_CODE, message="name 'x' is not defined", rank=0, type_name="NameError")
    raised = raised_for(failure, original=NameError("name 'x' is not defined"), names={"x"})
    hint = "`x` exists in the notebook but the cell's code does not show that it is used: add --in x"
    assert hint in raised._render_traceback_()  # type: ignore[attr-defined]
    silent = raised_for(failure, original=NameError("name 'x' is not defined"), names={"y"})
    assert hint not in silent._render_traceback_()  # type: ignore[attr-defined]


def test_a_module_that_only_the_notebook_has_gives_a_hint() -> None:
    def hints(module: str, environment: str) -> str:
        failure = Failure(
            kind=FailureKind.USER_CODE, message="No module named 'x'", rank=0, type_name="ModuleNotFoundError",
            missing_module=module,
        )  # fmt: skip
        run = Run(environment=environment, environment_label="ai-4")
        raised = raised_for(failure, run=run, original=ModuleNotFoundError("No module named 'x'"))
        return "\n".join(raised._render_traceback_())  # type: ignore[attr-defined]

    hint = "The notebook has `msgspec`, but the packages of the ranks (ai-4) lack it: add it to them"
    assert hint in hints("msgspec.json", "digest")
    # the ranks use the notebook's own packages, or neither side has the module
    assert "lack it" not in hints("msgspec", "")
    assert "lack it" not in hints("there_is_no_such_module", "digest")


def test_a_file_that_only_the_notebook_has_gives_a_hint(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a b.csv").touch()

    def hints(path: str, folder: str = str(tmp_path), **fields: object) -> str:
        failure = Failure(
            kind=FailureKind.USER_CODE, message="[Errno 2] No such file or directory", rank=0,
            type_name="FileNotFoundError", missing_file=path,
        )  # fmt: skip
        run = Run()
        run.view.spec = msgspec.structs.replace(run.view.spec, **{"elsewhere": True, **fields})
        original = FileNotFoundError(2, "No such file or directory")
        return "\n".join(raised_for(failure, run=run, original=original, folder=folder)._render_traceback_())

    assert "is only on the notebook's machine: add --upload 'data/a b.csv'" in hints("data/a b.csv")
    assert "runtime.upload_path" in hints(str(tmp_path / "data"))
    assert "add upload='data'" in hints("data", kind=RunKind.CALL)
    assert "`%%distributed --upload data`" in hints("data", auto=True)
    # the ranks see the notebook's files, neither side has it, or nobody here can look
    assert "--upload" not in hints("data", elsewhere=False)
    assert "--upload" not in hints("data/b.csv")
    assert "--upload" not in hints("")
    assert "--upload" not in hints("data", "")


def cuda_error(words: str, rank: int = 2) -> Failure:
    message = (
        f"CUDA error: {words}\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
        "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    )
    return Failure(kind=FailureKind.USER_CODE, message=message, rank=rank, type_name="torch.AcceleratorError")


def hint_of(failure: Failure, *others: Failure, spec: RunSpec | None = None) -> list[str]:
    """Return the hint in a failure's traceback for a lost CUDA context."""
    run = Run()
    run.view.spec = spec or run.view.spec
    raised = raised_for(failure, *others, run=run, original=RuntimeError("CUDA error"))
    drawn: list[str] = raised._render_traceback_()  # type: ignore[attr-defined]
    hints = [line for line in drawn if "CUDA context" in line]
    assert all(hint in raised.__notes__[-1] for hint in hints)
    return hints


def spec_in_session(*, fresh: bool = False) -> RunSpec:
    return msgspec.structs.replace(succeeded().view.spec, session="5e55", fresh=fresh)


@pytest.mark.parametrize(
    "words",
    ["an illegal memory access was encountered", "device-side assert triggered", "unspecified launch failure"],
)
def test_a_cuda_error_that_destroys_the_context_is_told_as_such(words: str) -> None:
    lost = "This error destroyed the CUDA context of rank 2: every further CUDA call in its process fails."
    late = "CUDA reports errors late, so an earlier line may be the cause;"
    again = "Fix the code and run it again: the next run gets new processes."
    blocking = "with `--env CUDA_LAUNCH_BLOCKING=1` the line is exact."
    assert hint_of(cuda_error(words)) == [f"{lost} {again} {late} {blocking}"]
    restart = "`%sgpu_restart --rank 2` starts a new process in its place; what rank 2 had in GPU memory is lost."
    blocking = "in a session connected with `%sgpu_connect --env CUDA_LAUNCH_BLOCKING=1` the line is exact."
    assert hint_of(cuda_error(words), spec=spec_in_session()) == [f"{lost} {restart} {late} {blocking}"]
    # its standby processes have already created their contexts
    assert hint_of(cuda_error(words), spec=spec_in_session(fresh=True)) == [f"{lost} {again} {late} {blocking}"]


def test_ranks_that_met_the_same_cuda_error_are_restarted_together() -> None:
    words = "device-side assert triggered"
    (hint,) = hint_of(cuda_error(words), cuda_error(words, 0), *released(1, 3), spec=spec_in_session())
    assert "CUDA context of ranks 0, 2: every further CUDA call in their processes fails." in hint
    assert "`%sgpu_restart --rank 0,2` starts new processes in their place" in hint


def test_a_fault_of_the_gpu_is_no_fault_of_the_code() -> None:
    (hint,) = hint_of(cuda_error("uncorrectable ECC error encountered"))
    assert "see `nvidia-smi -q` and the Xid lines in `dmesg`" in hint
    assert "CUDA_LAUNCH_BLOCKING" not in hint


def test_other_cuda_errors_leave_the_context() -> None:
    assert hint_of(cuda_error("invalid device ordinal")) == hint_of(cuda_error("out of memory")) == []
    sent = Failure(kind=FailureKind.USER_CODE, message="no CUDA\nmisaligned address", rank=0, type_name="ValueError")
    assert hint_of(sent) == []
    for message in (
        "Triton Error [CUDA]: an illegal memory access was encountered",
        "cudaErrorIllegalAddress: an illegal memory access was encountered",
    ):
        assert hint_of(msgspec.structs.replace(sent, message=message))


# ------------------------------------------------------------ status and units


def status_as_drawn(gpus: bool) -> PoolStatus:
    devices = tuple(
        Device(
            uuid=f"GPU-{index}",
            type="a10",
            index=index,
            memory_bytes=24_000_000_000,
            used_bytes=18_200_000_000 if index == 0 else 0,
            utilization_pct=94 if index == 0 else 0,
            outside_use="pid 77 (python)" if index == 2 else "",
        )
        for index in range(4)
    )
    runs = (
        run_summary(run_id="7f3a90c1", name="train_digits", ranks=1, started_at=10, uuids=("GPU-0",)),
        run_summary(
            run_id="7f40aaaa",
            name="train_digits",
            ranks=4,
            simulated=True,
            state=RunState.FAILED,
            started_at=10,
            ended_at=19,
            failure="rank 1: ValueError: NaN in batch 118\nmore",
        ),
        run_summary(
            run_id="7f41bbbb",
            name="sweep<b>",
            ranks=4,
            state=RunState.QUEUED,
            submitted_at=100,
            position=1,
            waiting_for="needs 1 more A10",
        ),
    )
    shown = runs if gpus else ()
    return pool_status(*shown, inventory=Inventory(host="box", devices=devices if gpus else ()))


@pytest.mark.parametrize("gpus", [True, False])
def test_status_is_as_drawn(gpus: bool) -> None:
    text = status_text(status_as_drawn(gpus), now=144.0) + "\n"
    file = GOLDEN / f"render_status_{'gpus' if gpus else 'cpu'}.txt"
    if os.environ.get("SGPU_UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()
    reader = read(status_html(status_as_drawn(gpus), now=144.0))
    assert reader.tags <= {"div", "b", "span", "table", "thead", "tbody", "tr", "th", "td"}
    assert reader.names <= {"class", "style", "colspan"}
    for word in re.findall(r"[^\s·]+", text):
        assert word in reader.text


def test_status_says_once_that_devices_are_simulated() -> None:
    status = status_as_drawn(True)
    devices = tuple(msgspec.structs.replace(each, simulated=True) for each in status.inventory.devices)
    h100 = Device(uuid="SIM-h100-0", type="h100", index=0, memory_bytes=80 * 10**9, simulated=True)
    inventory = msgspec.structs.replace(status.inventory, devices=(*devices, h100))
    runs = tuple(msgspec.structs.replace(run, simulated=True) for run in status.runs)
    for drawn in (status_text, status_html):
        text = drawn(msgspec.structs.replace(status, inventory=inventory, runs=runs), now=144.0)
        assert text.count("simulated") == 1
        assert "4 A10, 1 H100 (simulated) · " in text
    # among real devices, each simulated one is marked
    real = msgspec.structs.replace(h100, simulated=False)
    inventory = msgspec.structs.replace(inventory, devices=(*devices[:2], real))
    mixed = status_text(msgspec.structs.replace(status, inventory=inventory), now=144.0)
    assert "2 A10 (simulated), 1 H100 · " in mixed
    assert "\nA10 (simulated)" in mixed


@pytest.mark.parametrize("width", [70, 80, 100])
def test_status_fits_a_terminal(width: int) -> None:
    status = status_as_drawn(True)
    runs = tuple(
        msgspec.structs.replace(run, notebook="/home/ann/fine_tuning_of_everything.ipynb", name=run.name * 5)
        for run in status.runs
    )
    text = status_text(msgspec.structs.replace(status, runs=runs), now=144.0, width=width)
    tables = [line for line in text.split("\n\n", 1)[1].splitlines() if line]
    assert max(map(len, tables)) <= width
    for run in runs:
        assert f"\n{run.run_id[:4]}   {run.name[:7]}" in text
    below = next(line for line in tables if "NaN in batch 118" in line)
    assert below.startswith("       rank 1: ValueError")


def test_status_names_the_notebooks_of_runs() -> None:
    status = status_as_drawn(True)
    runs = tuple(
        msgspec.structs.replace(run, notebook=name)
        for run, name in zip(status.runs, ("/home/ann/train.ipynb", "eval.ipynb", ""), strict=True)
    )
    lines = status_text(msgspec.structs.replace(status, runs=runs), now=144.0).splitlines()
    assert [line.split()[:3] for line in lines[-4:]] == [
        ["run", "name", "notebook"],
        ["7f3a", "train_digits", "train.ipynb"],
        ["7f40", "train_digits", "eval.ipynb"],
        ["7f41", "sweep<b>", "4"],
    ]
    assert "notebook" not in status_text(status, now=144.0)


def test_a_pool_that_is_away_is_a_warning_only_where_somebody_has_to_do_something() -> None:
    assert "--jp-warn" not in away_html("local", "not running", is_problem=False)
    assert "--jp-warn" in away_html("team", "it does not admit your key", is_problem=True)


def test_status_says_when_an_idle_pool_ends_and_what_the_pool_wants_known() -> None:
    status = msgspec.structs.replace(status_as_drawn(False), idle_ends_at=400.0)
    assert "idle: ends its processes in 4 min" in status_text(status, now=144.0)
    assert "idle: ends its processes in 56 s" in status_text(status, now=344.0)
    assert "idle" not in status_text(status_as_drawn(False), now=144.0)
    assert "a <word>" in status_text(status, now=144.0, notice="a <word>")
    assert "a &lt;word&gt;" in status_html(status, now=144.0, notice="a <word>")


def test_a_view_that_is_left_says_what_goes_on() -> None:
    run = left_alone()
    text = read(render_html(run.view)).text
    assert "→ continues" in text
    assert "run 7f3a continues without this notebook" in text
    assert "running" not in text


def test_units() -> None:
    sizes = (0, 999, 1200, 999_960, 45_100_000, 1.07e9, 2e12)
    assert [format_bytes(size) for size in sizes] == [
        "0 B",
        "999 B",
        "1.2 kB",
        "1.0 MB",
        "45.1 MB",
        "1.1 GB",
        "2.0 TB",
    ]
    times = (0.0004, 0.038, 0.4, 0.9999, 12.4, 31, 134, 3900)
    assert [format_seconds(time_s) for time_s in times] == [
        "0 ms",
        "38 ms",
        "0.40 s",
        "1.0 s",
        "12.4 s",
        "31 s",
        "2 min 14 s",
        "1 h 05 min",
    ]
    # the same as in labextension/test/units.test.ts
    elapsed = {0.038: "38 ms", 0.314: "0.31 s", 0.997: "1 s", 12.9: "12 s", 99.9: "99 s", 3599.9: "59 min 59 s"}
    assert {seconds: format_elapsed(seconds) for seconds in elapsed} == elapsed
    assert format_elapsed(3900) == "1 h 05 min"
    durations = [(12.4, 25.2), (12.4, 0.9), (0.0, 0.9), (0.0, 0.0)]
    assert [format_duration(*each) for each in durations] == ["12 s · start 25 s", "12 s", "start 0.90 s", ""]


@pytest.mark.parametrize(("wall", "received"), [(100.0, 50.0), (100.03, 50.0), (200.03, -50.0), (40.03, 110.0)])
def test_only_a_clock_that_was_set_moves_an_event(monkeypatch: pytest.MonkeyPatch, wall: float, received: float):
    # another process ran for 30 ms
    steady = iter([100.0, 100.03])
    monkeypatch.setattr(units, "steady_time", lambda: next(steady))
    monkeypatch.setattr(units, "time", SimpleNamespace(time=lambda: wall))
    assert units.to_steady_time(50.0) == pytest.approx(received)


def test_a_start_is_as_long_as_its_node_has_measured_even_if_the_lease_was_noted_late():
    times = RunTimes()
    times.placed_at, times.started_at = 100.0, 100.0001
    times.ended = ev.RunEnded(state=RunState.SUCCEEDED, starting_s=0.04, running_s=0.0001, total_s=0.05)
    assert times.text() == "start 40 ms"
    assert format_ranks([3, 0, 2]) == "ranks 0, 2, 3"
    assert format_ranks(range(15)) == "ranks 0-14"
    assert format_ranks([1]) == "rank 1"


# ------------------------------------------------------------ several nodes


def test_ranks_are_listed_below_the_nodes_they_are_on() -> None:
    running = on_two_nodes()
    grid = ansi.plain(re.sub("<[^>]*>", "|", live_ranks_html(running.view)))
    assert [word for word in grid.split("|") if word.startswith(("ml-", "rank "))] == [
        *("ml-1", "rank 0", "rank 1"),
        *("ml-2", "rank 2", "rank 3"),
    ]
    assert [card.host for card in rank_cards(running.view)] == ["ml-1", "", "ml-2", ""]
    for step in range(30):
        running.say(step % 4, f"step {step}\n")
    listed = re.findall(r"ml-\d|rank \d", re.sub("<[^>]*>", "|", ended_ranks_html(running.end().view)))
    assert [word for at, word in enumerate(listed) if word not in listed[:at]] == [
        *("ml-1", "rank 0", "rank 1"),
        *("ml-2", "rank 2", "rank 3"),
    ]


def test_of_one_node_no_name_is_listed() -> None:
    share = NodeShare(node="n1", host="ml-1", ranks=4)
    run = Run().start("a10", shares=(share,)).say(0, "epoch 1\n")
    assert "ml-1" not in live_ranks_html(run.view) + render_text(run.view)
    assert {card.host for card in rank_cards(run.view)} == {""}
