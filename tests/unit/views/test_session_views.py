"""What a user sees of sessions: cells on some ranks, renewed groups, pushes and pulls, dead ranks, memory."""

from __future__ import annotations

import io
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from live_log import LiveRun
from status_rows import pool_status, run_summary
from stories import (
    FORMS,
    LABELS,
    NONE_SHIPPED,
    SESSION_ID,
    Run,
    cell_in_session,
    in_session,
    in_session_running,
    memory_of,
    out_of_memory,
    pushed,
    refused_by_session,
    released,
    render_text,
    renewed,
    sent_by_auto,
    session,
    session_connected,
    session_ended,
    session_mended,
    session_with_a_dead_rank,
    session_working,
    value_error,
)

from sgpu_magic.server.runs import cell_outputs
from sgpu_magic.views import ansi
from sgpu_magic.views.bundle import RUN_MIME, interrupted_bundle, mime_bundle, run_record
from sgpu_magic.views.failure import memory_lines
from sgpu_magic.views.html import render_html
from sgpu_magic.views.live.messages import AskLines, Refusal
from sgpu_magic.views.live.schema import Snapshot
from sgpu_magic.views.live.snapshot import snapshot_of
from sgpu_magic.views.output import Caption, TextSegment, segments
from sgpu_magic.views.pool_tables import status_html, status_text
from sgpu_magic.views.publisher import TerminalPublisher
from sgpu_magic.views.run_notes import cancelled_sentence
from sgpu_magic.views.units import TIMES
from sgpu_magic.wire import events as ev
from sgpu_magic.wire import rank_events
from sgpu_magic.wire.base import CancelReason, FailureKind, RunKind, RunState
from sgpu_magic.wire.devices import Device, Inventory
from sgpu_magic.wire.pool_status import PoolStatus, RunSummary
from sgpu_magic.wire.rank_events import Failure, TensorUse

GOLDEN = Path(__file__).parents[2] / "golden"
SESSIONS = [name for name in FORMS if "session" in name]


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A session shows the time of day since when it has been idle."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def plain(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html)).replace("&#x27;", "'")


# ------------------------------------------------------------ some of the ranks


def test_only_the_ranks_that_take_part_are_drawn_by_their_own_numbers() -> None:
    html = render_html(in_session_running().view)
    assert re.findall(r"<b[^>]*>rank (\d)</b>", html) == ["0", "2", "3"]
    assert "repeat(3," in html
    assert "3 of 4 ranks · session work" in plain(html)
    assert "A10" not in html, "where the session is, its own view says"


def test_the_ended_ranks_are_those_that_took_part() -> None:
    run = cell_in_session((1, 3)).start("a10", labels=LABELS).sample(3).end()
    assert re.findall(r"<b[^>]*>rank (\d)</b>", render_html(run.view)) == ["1", "3"]
    assert "on A10 · 3" in plain(render_html(run.view))


def test_names_come_from_the_first_rank_that_took_part() -> None:
    assert "returned history (1.0 kB)" in render_text(in_session().view)
    first = in_session().view.results[0]
    run = cell_in_session((2, 3), outputs=("history",)).start()
    run.end(results=tuple(msgspec.structs.replace(first, rank=rank) for rank in (2, 3)))
    assert "returned history (1.0 kB)" in render_text(run.view)


def test_a_display_of_the_only_rank_needs_no_caption() -> None:
    alone = cell_in_session((2,)).start().show(2, text_plain="plot")
    both = cell_in_session((2, 3)).start().show(2, text_plain="plot")

    def captions(run: Run) -> list[int]:
        return [part.rank for part in segments(run.view) if isinstance(part, Caption)]

    assert (captions(alone), captions(both)) == ([], [2])


def test_the_live_log_has_ranks_by_number_and_refuses_others(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, session=SESSION_ID, only=(0, 3)).start().write(3, b"a\nb\n")
    assert run.feed.totals == (0, 0, 0, 2)
    snapshot = snapshot_of(run.view, 1, run.feed.totals, run.at)
    assert ([card.rank for card in snapshot.ranks], snapshot.only) == ([0, 3], (0, 3))
    assert snapshot.devices == "2 of 4 ranks · session 5e55"
    answer = run.answers.answer(AskLines(n=1, first=0, count=5, rank=3))
    assert [row[2] for row in answer.rows] == ["a", "b"]
    refused = run.answers.answer(AskLines(n=1, first=0, count=5, rank=1))
    assert isinstance(refused, Refusal)
    assert refused.text == "run 7f3a has ranks 0, 3, not 1."


def test_a_terminal_shows_some_ranks_too() -> None:
    stream = io.StringIO()
    run = cell_in_session((0, 2)).start()
    publisher = TerminalPublisher(run.view, stream)
    run.say(0, "of 0\n").say(2, "of 2\n").end(seconds=1.2)
    publisher.tick(1.0, final=True)
    assert stream.getvalue().splitlines() == [
        "train_digits · 2 of 4 ranks in session work",
        "[0] of 0",
        "[2] of 2",
        "succeeded in 1 s · run 7f3a",
    ]


# ------------------------------------------------------------ cells in a session


def test_a_cell_that_auto_has_sent_says_so_before_anything_else(tmp_path: Path) -> None:
    view = sent_by_auto().view
    assert render_text(view).startswith("auto · cell 12 · ")
    assert plain(render_html(view)).strip().startswith("auto ✓ succeeded cell 12")
    run = LiveRun(tmp_path, session=SESSION_ID, auto=True).start()
    assert snapshot_of(run.view, 1, run.feed.totals, run.at).mark == "auto"
    assert "auto" not in render_text(in_session().view)


def test_a_cell_in_a_session_has_no_panel_of_what_is_starting(tmp_path: Path) -> None:
    def preparing(**spec: object) -> tuple[str, ...]:
        run = LiveRun(tmp_path, **spec).apply(ev.StateChanged(state=RunState.STARTING))
        return snapshot_of(run.view, 1, run.feed.totals, run.at).preparing

    assert preparing(session=SESSION_ID) == ()
    assert preparing(session=SESSION_ID, fresh=True)[-1] == "starting 4 ranks"
    waits = LiveRun(tmp_path, session=SESSION_ID).apply(ev.QueueMoved(position=1, reason="run 7f3a is before it"))
    reported = snapshot_of(waits.view, 1, waits.feed.totals, waits.at).preparing
    assert reported[0] == "position 1 in the queue: run 7f3a is before it"


@pytest.mark.parametrize("lost", ["", "the NCCL group of ranks 0 and 1 is lost"])
def test_renewed_groups_are_said_once_below_the_failure(lost: str) -> None:
    run = renewed(lost)
    text = plain(render_html(run.view))
    note = "the process groups were reconnected: rank 1 failed while the others were in all_reduce; "
    assert text.count(note) == 1
    assert text.index("NaN in batch 118") < text.index(note)
    assert (note + (lost or "models in DDP and FSDP, and your own groups, still work")) in text


def test_ranks_that_do_not_stop_are_named_with_the_way_out() -> None:
    run = cell_in_session().start().end(RunState.CANCELLED, unstopped=(1, 3))
    text = plain(render_html(run.view))
    assert "ranks 1, 3 have not stopped and still run this cell" in text
    assert "%sgpu_restart --rank 1,3" in text


def test_what_a_session_refuses_was_never_there() -> None:
    text = render_text(refused_by_session().view)
    assert "train_digits · failed · rank 2 of session work is dead." in text
    assert "0 ms" not in plain(render_html(refused_by_session().view))


# ------------------------------------------------------------ pushes, pulls, calls


def test_a_push_is_one_quiet_line_in_every_form() -> None:
    view = pushed().view
    line = "pushed cfg, loader (1.2 MB) to 4 ranks of session work"
    assert render_text(view) == line
    assert plain(render_html(view)).strip() == line
    bundle = mime_bundle(view, TextSegment((), 0))
    assert bundle["text/plain"] == line
    assert isinstance(bundle[RUN_MIME], dict)
    stream = io.StringIO()
    TerminalPublisher(view, stream).tick(1.0, final=True)
    assert stream.getvalue() == f"{line}\n"


def test_a_push_that_goes_wrong_is_drawn_as_every_failure() -> None:
    failure = Failure(kind=FailureKind.SESSION, message="session work has ended")
    run = cell_in_session(name="", kind=RunKind.PUSH).end(RunState.FAILED, failure=failure)
    assert "session work has ended" in plain(render_html(run.view))
    assert "✕ failed push" in plain(render_html(run.view))


def test_a_pull_says_from_whom() -> None:
    run = cell_in_session((1, 2), name="", kind=RunKind.PULL).start()
    spec = run.view.spec
    names = tuple(msgspec.convert(pair, tuple[str, bool]) for pair in (("a", False), ("b", True), ("c", False)))
    outputs = tuple(type(in_session().view.spec.outputs[0])(*pair) for pair in names)
    run.view.spec = msgspec.structs.replace(spec, outputs=outputs)
    assert render_text(run.view) == "pulling a, c from rank 1 and b from ranks 1, 2 of session work"


def test_a_calls_value_has_no_name_of_ours() -> None:
    view = FORMS["called"]().view
    for text in (render_text(view), render_html(view), json.dumps(run_record(view))):
        assert "__sgpu" not in text
    assert "train(...)" in render_html(view)
    assert "returned 4 values (1.2 kB)" in render_html(view)


@pytest.mark.parametrize("name", ["called", "pushed", "session_ended"])
def test_after_a_reload_only_a_cell_has_a_value(name: str, tmp_path: Path) -> None:
    kinds = [output["output_type"] for output in cell_outputs(FORMS[name]().view, tmp_path)]
    assert kinds == ["display_data"]
    returned = in_session().view.ended
    assert returned is not None
    for text, is_displayed, last in (("0.93", False, "execute_result"), ("x", True, "display_data")):
        view = in_session().view
        value = {"value_repr": text, "value_displayed": is_displayed}
        results = tuple(msgspec.structs.replace(each, **value) for each in returned.results)
        view.ended = msgspec.structs.replace(returned, results=results)
        assert cell_outputs(view, tmp_path)[-1]["output_type"] == last
    assert "error" not in [output["output_type"] for output in cell_outputs(FORMS["session_lost"]().view, tmp_path)]


# ------------------------------------------------------------ the session's own view


def drawn(run: Run, now: float = 900.0) -> Snapshot:
    return snapshot_of(run.view, 1, (0,) * run.view.ranks, now)


def test_a_session_goes_through_its_states_in_words() -> None:
    run = session()
    words = [drawn(run).state]
    run.apply(ev.QueueMoved(position=1, reason="needs 1 more A10"), ev.StateChanged(state=RunState.PREPARING))
    words.append(drawn(run).state)
    words.append(drawn(run.start("a10")).state)
    words.append(drawn(run.apply(ev.SessionMoved(cells=1, running=("train",)), at=300.0)).state)
    idle = drawn(run.apply(ev.SessionMoved(cells=1), at=360.0))
    words.append(idle.state)
    words.append(drawn(run.apply(ev.StateChanged(state=RunState.CANCELLING))).state)
    words.append(drawn(run.end(RunState.CANCELLED, 800.0, reason="nothing ran in it for 60 min (--idle)")).state)
    assert words == [
        "waits for devices", "starting", "connected", "runs train", "connected", "disconnecting", "cancelled",
    ]  # fmt: skip
    assert (idle.tone, idle.stop, idle.meta) == ("good", "End session", ("1 cell", "idle since 00:06"))
    assert idle.name == "session work"
    assert "nothing ran in it for 60 min (--idle)" in drawn(run).meta


def test_a_session_that_is_idle_since_yesterday_says_the_day() -> None:
    run = session().start().apply(ev.SessionMoved(cells=1, running=("a",)), ev.SessionMoved(cells=1), at=60.0)
    assert drawn(run, now=100_000.0).meta == ("1 cell", "idle since Jan 01, 00:01")


def test_a_dead_rank_is_marked_in_the_grid_until_it_is_restarted() -> None:
    picture = drawn(session_with_a_dead_rank())
    dead = picture.ranks[2]
    assert (dead.state, dead.tone, dead.last) == ("dead", "bad", "%sgpu_restart --rank 2")
    assert [card.state for card in picture.ranks] == ["alive", "alive", "dead", "alive"]
    assert picture.tone == "warn"
    assert picture.failure is None, "the session goes on"
    assert picture.idle == ("rank 2 is dead; %sgpu_restart --rank 2 replaces it, and the others keep their state",)
    text = plain(render_html(session_with_a_dead_rank().view))
    assert "rank 2 ✕ dead %sgpu_restart --rank 2" in text
    restarted = session_with_a_dead_rank().apply(ev.RanksRestarted(ranks=(2,), pids=(4712,)))
    assert drawn(restarted).ranks[2].state == "alive", "before the session's next word"
    mended = drawn(session_mended())
    assert [card.state for card in mended.ranks] == ["alive"] * 4
    assert mended.notes[0] == "rank 2 restarted (pid 4712): its variables and what was on its GPU are lost"
    assert mended.idle == ()


def test_idle_gpus_of_a_session_are_no_news() -> None:
    run = session_connected().apply(rank_events.DeviceIdle(rank=0, seconds=60.0))
    assert drawn(run).idle == ()
    assert "under 5 %" not in render_text(run.view)
    assert "under 5 %" not in render_html(run.end(RunState.CANCELLED, 900.0).view)


def test_an_ended_session_says_what_it_was() -> None:
    text = plain(render_html(session_ended().view))
    assert (
        f"■ cancelled session work 4 {TIMES} A10, nccl · team · 12 min 14 s · 14 cells · 0.82 GPU h · GPUs busy 90 % · "
        "disconnected" in text
    )
    assert text.count("<title>") == 0
    assert render_html(session_ended().view).count("<svg") == 4, "its GPUs over its whole life"


def test_who_ended_with_their_kernel_are_not_attached_to() -> None:
    gone = session_working().end(RunState.CANCELLED, 9.0, reason=CancelReason.OWNER_GONE)
    assert CancelReason.OWNER_GONE in render_text(gone.view)
    assert "%sgpu_attach" not in render_text(gone.view)


@pytest.mark.parametrize("detach", [False, True])
def test_what_is_saved_of_a_living_session_stays_true(detach: bool) -> None:
    run = session(detach=detach, submitted_at=1_790_000_000.0).start("a10")
    saved = interrupted_bundle(run.view)
    text = saved["text/plain"]
    assert isinstance(text, str)
    assert text.splitlines()[0] == f"session work · 4 ranks on team (4 {TIMES} A10, nccl)"
    assert "It started on 2026-09-21 at 14:13" in text
    assert "%sgpu_attach 5e55" in text
    assert ("%sgpu_connect starts a new one" in text) != detach
    assert "session work" in str(saved["text/html"])


def test_a_terminal_tells_of_dead_ranks_once() -> None:
    stream = io.StringIO()
    run = session().start()
    publisher = TerminalPublisher(run.view, stream)
    publisher.tick(1.0)
    run.apply(ev.SessionMoved(cells=1, dead=(2,)))
    publisher.tick(2.0)
    publisher.tick(3.0)
    run.apply(ev.RanksRestarted(ranks=(2,), pids=(9,))).end(RunState.CANCELLED, 60.0, reason="%sgpu_disconnect")
    publisher.tick(4.0, final=True)
    assert stream.getvalue().splitlines() == [
        "session work · 4 ranks on team (cpu, gloo)",
        "note: rank 2 is dead; %sgpu_restart --rank 2 replaces it, and the others keep their state",
        "note: rank 2 restarted (pid 9)",
        "session work ended after 60 s · 1 cell · %sgpu_disconnect · run 5e55",
    ]


@pytest.mark.parametrize("name", SESSIONS)
def test_what_is_saved_reads_alike_as_html_and_as_text(name: str) -> None:
    view = FORMS[name]().view
    html, text = plain(render_html(view)), render_text(view)
    for word in re.findall(r"session work|%sgpu_\w+ --rank [\d,]+|\d+ cells|idle since", text):
        assert word in html


def test_what_ranks_and_reasons_say_is_escaped() -> None:
    evil = "<script>\x1b[31m"
    run = session(name=evil).start().apply(ev.SessionMoved(cells=1, running=(evil,)), ev.GroupRenewed(reason=evil))
    run.apply(ev.RanksRestarted(ranks=(0,), pids=(1,), lost=evil))
    for html in (render_html(run.view), render_html(run.end(RunState.CANCELLED, reason=evil).view)):
        assert "<script" not in html
    quiet = cell_in_session(kind=RunKind.PUSH, shipped=msgspec.structs.replace(NONE_SHIPPED, names=(evil,)))
    assert "<script" not in render_html(quiet.view)


def test_groups_that_could_not_be_reconnected_are_not_told_as_reconnected() -> None:
    run = session().start().apply(ev.GroupRenewed(reason="rank 1 failed", problem="rank 2 died in the meantime"))
    text = " ".join(render_text(run.view).split())
    assert "could not be reconnected (rank 1 failed): rank 2 died in the meantime; %sgpu_restart" in text
    assert "were reconnected" not in text


# ------------------------------------------------------------ out of memory


def test_the_table_of_memory_comes_after_the_traceback_and_before_the_rest() -> None:
    for text in (render_text(out_of_memory().view), plain(render_html(out_of_memory().view))):
        at = [
            text.index(part)
            for part in ("CUDA out of memory", "memory when it failed", "largest tensors of rank 1", "released")
        ]
        assert at == sorted(at)
        assert "cuda:1" in text
        assert "21.8 GB" in text
        assert "(8, 4096, 4096)" in text


def test_every_peers_memory_is_there_and_the_culprit_is_first() -> None:
    rows = [line.split()[0] for line in memory_lines(out_of_memory().view, out_of_memory().view.failure)[2:6]]
    assert rows == ["1", "0", "2", "3"]
    stream = io.StringIO()
    run = out_of_memory()
    TerminalPublisher(run.view, stream).tick(1.0, final=True)
    assert "largest tensors of rank 1" in stream.getvalue(), "also where only a line says the failure"


def test_the_memory_of_many_ranks_and_tensors_is_bounded(tmp_path: Path) -> None:
    evil = "<b>\x1b[31m" * 500
    tensors = tuple(
        TensorUse(name=f"{evil}{at}", shape=(1,) * 500, dtype=evil, device=evil, size_bytes=at) for at in range(500)
    )
    failure = msgspec.structs.replace(value_error(), out_of_memory=True, memory=memory_of(1, 10**10, tensors, evil))
    others = tuple(
        msgspec.structs.replace(each, memory=memory_of(each.rank or 0, 10**9)) for each in released(*range(2, 66))
    )
    run = LiveRun(tmp_path, 66).start().end(RunState.FAILED, failure=failure, others=others)
    snapshot = snapshot_of(run.view, 1, run.feed.totals, run.at)
    assert snapshot.failure is not None
    memory = snapshot.failure.memory
    assert memory is not None
    assert (len(memory.rows), len(memory.tensors), memory.more) == (16, 10, "and 49 more ranks")
    assert len(msgspec.json.encode(memory)) < 8_000
    assert len("\n".join(memory_lines(run.view, run.view.failure))) < 8_000
    html = render_html(run.view)
    assert "and 49 more ranks" in html
    assert "<b>\x1b" not in html
    assert not re.search(r"[\x00-\x08\x1b]", html)


def test_a_device_that_does_not_say_how_large_it_is_has_an_empty_bar() -> None:
    memory = msgspec.structs.replace(memory_of(1, 10**9), total_bytes=0, free_bytes=0)
    failure = msgspec.structs.replace(value_error(), out_of_memory=True, memory=memory)
    run = cell_in_session().start().end(RunState.FAILED, failure=failure)
    assert memory_lines(run.view, failure)[2].endswith("-   ░░░░░░░░░░░░░░░░░░░░")


def test_other_failures_have_no_table() -> None:
    failure = msgspec.structs.replace(value_error(), memory=memory_of(1, 10**9))
    run = cell_in_session().start().end(RunState.FAILED, failure=failure)
    assert "memory when it failed" not in render_text(run.view) + render_html(run.view)


# ------------------------------------------------------------ %sgpu_status


def summary(run_id: str, name: str, state: RunState, at: float, **fields: object) -> RunSummary:
    return run_summary(run_id=run_id, name=name, state=state, submitted_at=at, started_at=at, **fields)


def status(*runs: RunSummary) -> PoolStatus:
    devices = tuple(Device(uuid=f"GPU-{index}", type="a10", index=index) for index in range(3))
    return pool_status(*runs, inventory=Inventory(host="box", devices=devices))


WORK = summary(
    SESSION_ID, "work", RunState.RUNNING, 0.0, kind=RunKind.SESSION, uuids=("GPU-0", "GPU-1"),
)  # fmt: skip
CELLS = tuple(
    summary(f"7f4{at}0000", f"cell {at}", RunState.SUCCEEDED, 100.0 + at, ended_at=110.0 + at, session=SESSION_ID)
    for at in reversed(range(6))
)


def test_status_lists_a_session_with_its_newest_cells() -> None:
    fresh = summary("7f500000", "eval", RunState.RUNNING, 130.0, session=SESSION_ID, uuids=("GPU-0",))
    failed = summary("7f510000", "old", RunState.FAILED, 50.0, ended_at=51.0, failure="rank 1: ValueError: no")
    text = status_text(status(fresh, *CELLS, failed, WORK), now=144.0) + "\n"
    text += "\n" + status_text(status(*CELLS[4:], WORK), now=144.0) + "\n"
    file = GOLDEN / "render_status_session.txt"
    if os.environ.get("SGPU_UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def test_what_status_says_of_a_session() -> None:
    def sent(*runs: RunSummary) -> str:
        text, html = status_text(status(*runs), now=144.0), plain(status_html(status(*runs), now=144.0))
        assert all(word in html for word in re.findall(r"session work|idle since \d\d:\d\d|└", text))
        return text

    assert "5e55 session work on 0, 1" in sent(WORK)
    assert re.search(rf"session work +2 {TIMES} A10 +connected +2 min 24 s", sent(WORK))
    assert "idle since 00:01" in sent(*CELLS, WORK)
    running = summary("7f600000", "train", RunState.RUNNING, 140.0, session=SESSION_ID)
    assert "runs train" in sent(running, *CELLS, WORK)
    assert "and 4 more cells" in sent(running, *CELLS, WORK)
    many = tuple(msgspec.structs.replace(CELLS[0], run_id=f"{at:08x}") for at in range(30))
    assert "└ and more cells" in sent(*many, WORK), "the pool has told of the newest runs only"
    waiting = msgspec.structs.replace(WORK, state=RunState.QUEUED, uuids=(), position=1, waiting_for="needs 1 more A10")
    assert "waiting: session work, 2 ranks, needs 1 more A10, position 1" in sent(waiting)
    assert "waits for devices" in sent(waiting)
    kept = msgspec.structs.replace(waiting, state=RunState.CANCELLED, waiting_for="rank 1 (process 9) does not end")
    assert "session work: rank 1 (process 9) does not end, its devices stay leased" in sent(kept)
    ended = msgspec.structs.replace(WORK, state=RunState.CANCELLED, uuids=(), ended_at=140.0)
    assert re.search(rf"session work +2 {TIMES} A10 +cancelled", sent(ended))
    orphan = sent(*CELLS)
    assert "└" not in orphan, "a cell whose session is not told of stands alone"
    assert ansi.plain(orphan) == orphan


# ---------------------------------------------------------------- why a run was cancelled


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        (CancelReason.INTERRUPT, "Run 9173 was interrupted."),
        (CancelReason.SECOND_INTERRUPT, "Run 9173 was interrupted twice, and its ranks were killed."),
        (CancelReason.CANCEL_BUTTON, "Run 9173 was cancelled with the Cancel button."),
        (CancelReason.COMMAND, "Run 9173 was cancelled by `sgpu cancel`."),
        ("the pool was stopped", "Run 9173 was cancelled: the pool was stopped."),
    ],
)
def test_a_cancelled_run_says_how(reason: str, sentence: str):
    # as it comes from a pool
    assert cancelled_sentence("9173aaaa", str(reason)) == sentence


# ---------------------------------------------------------------- renewals over NCCL


@pytest.mark.parametrize(("devices", "is_untried"), [("a10", True), ("cpu", False)])
def test_a_renewal_over_nccl_is_called_untried(devices: str, is_untried: bool):
    run = cell_in_session().start(devices, labels=LABELS)
    run.apply(ev.GroupRenewed(reason="rank 1 failed"))
    (note,) = run.view.notes
    assert ("over NCCL this is untried" in note) is is_untried
