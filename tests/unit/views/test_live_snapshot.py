"""Everything shown of a run except its lines, in every state, and that it always fits into a message."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from live_log import LiveRun
from stories import TRACKED, points

from sgpu_magic.views.live.messages import json_bytes
from sgpu_magic.views.live.schema import Snapshot
from sgpu_magic.views.live.snapshot import snapshot_of
from sgpu_magic.views.units import TIMES
from sgpu_magic.wire import events as ev
from sgpu_magic.wire import rank_events
from sgpu_magic.wire.attachments import InlinePayload, PackedLayout, Payload
from sgpu_magic.wire.base import FailureKind, RunKind, RunState
from sgpu_magic.wire.devices import Lease, SharedCores
from sgpu_magic.wire.events import as_warning
from sgpu_magic.wire.rank_events import (
    Collective,
    Death,
    Failure,
    RankMemory,
    RankSample,
    RankStack,
    StackFrame,
    TensorUse,
)
from sgpu_magic.wire.run import CellSource, OutputName, RankResult, Shipped

GOLDEN = Path(__file__).parents[2] / "golden" / "snapshots.json"
TRACEBACK = """\
---------------------------------------------------------------------------
ValueError                                Traceback (most recent call last)
Cell In[7], line 14
     12 for x, y in loader:
     13     if x.isnan().any():
---> 14         check(x, step)
     15     loss = step_fn(x, y)

File /home/u/checks.py:3, in check(x, step)
      2 def check(x, step):
----> 3     raise ValueError(f"NaN in batch {step}")

ValueError: NaN in batch 118
"""
VALUE_ERROR = Failure(
    kind=FailureKind.USER_CODE, message="NaN in batch 118", rank=1, host="gpu-node-2",
    type_name="builtins.ValueError", traceback_text=TRACEBACK, line=14,
)  # fmt: skip
LABELS = ("A10 · 0", "A10 · 1", "A10 · 2", "A10 · 3")


def released(*ranks: int) -> tuple[Failure, ...]:
    return tuple(
        Failure(
            kind=FailureKind.USER_CODE, message="Connection reset by peer", rank=rank, type_name="RuntimeError",
            where="all_reduce #118", line=15, is_consequence=True,
        )
        for rank in ranks
    )  # fmt: skip


def gpu(rank: int, busy: float = 94.0, **fields: object) -> RankSample:
    return RankSample(
        rank=rank, kind="gpu", uuid=f"GPU-{rank}", utilization_pct=busy, used_bytes=18_200_000_000,
        total_bytes=24_000_000_000, power_w=141.0, temperature_c=64.0, cpu_cores=1.2, rss_bytes=2_100_000_000, **fields,
    )  # fmt: skip


def waiting(rank: int) -> RankStack:
    frames = (StackFrame("/env/torch/_tensor.py", 630, "backward"), StackFrame("<ipython-input-7-a>", 8, "<module>"))
    return RankStack(rank=rank, frames=frames, collective=Collective(name="all_reduce", seq=41, pending=True))


def loading(rank: int) -> RankStack:
    frames = (StackFrame("<ipython-input-7-a>", 4, "load_batch"), StackFrame("<ipython-input-7-a>", 8, "<module>"))
    return RankStack(rank=rank, frames=frames, collective=Collective(name="all_reduce", seq=40, pending=False))


def queued(directory: Path) -> LiveRun:
    run = LiveRun(directory, wait_s=300.0)
    return run.apply(ev.QueueMoved(position=2, reason="needs 1 more A10"), at=1108.0)


def starting(directory: Path) -> LiveRun:
    lease = Lease(lease_id="l", device_type="h100", ranks=4, simulated=True, shared_cores=SharedCores(2, 2))
    return LiveRun(directory).apply(
        ev.StateChanged(state=RunState.PREPARING, reason="building the environment: 3 of 12 packages"),
        ev.Placed(lease=lease, host="gpu-node-2"),
        ev.StateChanged(state=RunState.STARTING),
        at=1020.0,
    )


def running(directory: Path) -> LiveRun:
    run = LiveRun(directory, timeout_s=600.0, retries=2).start(labels=LABELS, at=1010.0)
    run.write(0, b"epoch 6 done\n").write(3, b"\x1b[31mred\x1b[0m <b>not bold</b>\n")
    for rank, percent in enumerate((62, 62, 61)):
        bar = f"\repoch 7/10:  {percent}%|██████▏   | {percent}/100 [00:02<00:01, 25.1it/s]"
        run.write(rank, bar.encode(), stream="stderr")
    for at in range(3):
        run.apply(rank_events.Sampled(seconds=1.0, samples=tuple(gpu(rank) for rank in range(4))), at=1011.0 + at)
    run.apply(rank_events.DeviceIdle(rank=3, seconds=60.0, waits_in="the DataLoader"))
    return run.apply(ev.Noted(text="variable `rank` of the notebook hides sgpu_magic's"), at=1030.0)


def stalled(directory: Path) -> LiveRun:
    stacks = (waiting(0), loading(1), waiting(2), waiting(3))
    return LiveRun(directory).start("cpu").apply(rank_events.Stalled(seconds=30.0, stacks=stacks), at=1042.0)


def stopping(directory: Path) -> LiveRun:
    run = LiveRun(directory).start(labels=LABELS).write(0, b"step 118\n")
    for failure in (*released(0), VALUE_ERROR):
        run.apply(rank_events.RankFailed(failure=failure))
    return run


def failed(directory: Path) -> LiveRun:
    return stopping(directory).end(RunState.FAILED, failure=VALUE_ERROR, others=released(0, 2, 3))


def died(directory: Path) -> LiveRun:
    message = "was killed by SIGKILL: most likely out of memory (it held 21.8 of 24 GB)"
    failure = Failure(
        kind=FailureKind.WORKER_DIED,
        message=message,
        death=Death(what=message),
        rank=2,
        line=4,
        where="load_batch",
        exit_status=-9,
    )
    stopped = Failure(
        kind=FailureKind.USER_CODE, message="", rank=3, type_name="builtins.KeyboardInterrupt", line=7, after_stop=True
    )
    run = LiveRun(directory).start().write(2, b"step 1180  loss 0.22\n")
    return run.end(RunState.FAILED, failure=failure, others=(*released(0, 1), stopped))


def cancelled(directory: Path) -> LiveRun:
    run = LiveRun(directory).start()
    run.apply(ev.StateChanged(state=RunState.CANCELLING, reason="interrupted"))
    return run.end(RunState.CANCELLED, reason="interrupted")


def succeeded(directory: Path) -> LiveRun:
    layout = PackedLayout(pickle_size=1200, buffers=(), mac=b"")
    results = (
        RankResult(rank=0, payload=Payload(source=InlinePayload(), layout=layout)),
        RankResult(rank=1, value_problem="it holds a lock"),
    )
    run = LiveRun(directory, ranks=2, outputs=(OutputName("history"),)).start().write(0, b"epoch 10  loss 0.06\n")
    run.apply(rank_events.Sampled(seconds=1.0, samples=(gpu(0, 91.0), gpu(1, 91.0))), at=1001.0)
    return run.end(RunState.SUCCEEDED, results=results, queued_s=31.0)


def started_again(directory: Path) -> LiveRun:
    failure = Failure(
        kind=FailureKind.WORKER_DIED,
        message="was killed by SIGKILL",
        death=Death(what="was killed by SIGKILL"),
        rank=2,
        exit_status=-9,
    )
    run = LiveRun(directory, retries=2).start("cpu").write(2, b"step 7\n")
    run.apply(ev.AttemptFailed(attempt=1, attempts=3, failure=failure), at=1009.0)
    return run.start("cpu", at=1010.0)


def left_alone(directory: Path) -> LiveRun:
    run = LiveRun(directory).start().write(0, b"epoch 1\n")
    run.view.stop_following("run 7f3a continues without this notebook")
    return run


def in_session(directory: Path) -> LiveRun:
    run = LiveRun(directory, session="5e551234", session_name="work", only=(0, 2, 3), shipped=Shipped())
    run.start(labels=LABELS).write(3, b"step 1\n")
    return run.apply(rank_events.Sampled(seconds=1.0, samples=tuple(gpu(rank) for rank in (0, 2, 3))), at=1001.0)


def renewed_after_auto(directory: Path) -> LiveRun:
    run = LiveRun(directory, session="5e551234", session_name="work", auto=True).start(labels=LABELS)
    run.apply(rank_events.RankFailed(failure=VALUE_ERROR))
    run.apply(ev.GroupRenewed(reason="rank 1 failed while the others were in all_reduce"))
    return run.end(RunState.FAILED, failure=VALUE_ERROR, others=released(0, 2, 3))


def session_that_waits(directory: Path) -> LiveRun:
    run = LiveRun(directory, name="work", kind=RunKind.SESSION, shipped=Shipped())
    return run.apply(ev.QueueMoved(position=2, reason="needs 1 more A10"), at=1108.0)


def session_with_a_dead_rank(directory: Path) -> LiveRun:
    run = LiveRun(directory, name="work", kind=RunKind.SESSION, shipped=Shipped(), idle_s=3600.0)
    run.start(labels=LABELS).apply(ev.SessionMoved(cells=14, running=("train",)), at=1700.0)
    run.apply(rank_events.Sampled(seconds=1.0, samples=tuple(gpu(rank) for rank in range(4))), at=1701.0)
    killed = Failure(
        kind=FailureKind.WORKER_DIED,
        message="was killed by SIGKILL",
        death=Death(what="was killed by SIGKILL"),
        rank=2,
        exit_status=-9,
    )
    run.apply(rank_events.DeviceIdle(rank=3, seconds=60.0), rank_events.RankFailed(failure=killed))
    return run.write(1, b"said between two cells\n").apply(ev.SessionMoved(cells=14, dead=(2,)), at=1720.0)


def session_at_work(directory: Path) -> LiveRun:
    run = session_with_a_dead_rank(directory)
    run.apply(ev.RanksRestarted(ranks=(2,), pids=(4712,), lost="its variables are lost"), at=1800.0)
    return run.apply(ev.SessionMoved(cells=15, running=("train", "eval")), at=1801.0)


def session_ended(directory: Path) -> LiveRun:
    return session_at_work(directory).end(RunState.CANCELLED, reason="End session button")


def out_of_memory(directory: Path) -> LiveRun:
    tensor = TensorUse(name="cache[3]", shape=(8, 4096), dtype="float32", device="cuda:1", size_bytes=536_870_912)
    held = RankMemory(
        device="cuda:1", used_bytes=21_000_000_000, reserved_bytes=22_000_000_000, free_bytes=1_000_000_000,
        total_bytes=24_000_000_000, largest=(tensor,),
    )  # fmt: skip
    failure = msgspec.structs.replace(VALUE_ERROR, out_of_memory=True, memory=held)
    peer = RankMemory(device="cuda:0", used_bytes=6_000_000_000, free_bytes=18_000_000_000, total_bytes=24_000_000_000)
    others = (msgspec.structs.replace(released(0)[0], memory=peer), *released(2, 3))
    return LiveRun(directory).start(labels=LABELS).end(RunState.FAILED, failure=failure, others=others)


def making_packages(directory: Path) -> LiveRun:
    run = LiveRun(directory, environment_label="ai-4").apply(ev.StateChanged(state=RunState.PREPARING))
    moved = ev.EnvironmentMoved(host="gpu-node-2", step="installing", done=41, packages=80, seconds=12.0)
    return run.apply(moved, at=1012.0)


def with_price(directory: Path) -> LiveRun:
    run = LiveRun(directory)
    lease = Lease(lease_id="l", device_type="a10", ranks=run.view.ranks, simulated=True)
    run.apply(ev.Placed(lease=lease, host="gpu-node-2", hourly=4.8, currency="USD"))
    run.apply(ev.StateChanged(state=RunState.STARTING), at=1000.0)
    run.apply(ev.RanksStarted(pids=(1, 2, 3, 4), warm="cold"), ev.StateChanged(state=RunState.RUNNING), at=1003.5)
    return run.write(0, b"epoch 1\n").apply(rank_events.Resumed(), at=1274.25)


def priced_and_tracked(directory: Path) -> LiveRun:
    run = with_price(directory).apply(ev.Tracked(tracked=TRACKED))
    return run.end(gpu_s=1096.0, cost=1096 * 1.2 / 3600, currency="USD")


def logged_metrics(directory: Path) -> LiveRun:
    run = LiveRun(directory, ranks=2).start()
    for rank in range(2):
        losses = [2.0 / (step + 1) + rank / 10 for step in range(5)]
        run.apply(rank_events.MetricsLogged(rank=rank, metrics=points("train/loss", losses)))
    run.apply(rank_events.MetricsLogged(rank=0, metrics=points("grad norm", [0.5, math.nan, 3.25, math.inf])))
    return run.apply(rank_events.MetricsLogged(rank=0, metrics=points("rows/s", [1200.0, 1250.5], step=0)))


STATES = {
    state.__name__: state
    for state in (
        queued, starting, running, stalled, stopping, failed, died, cancelled, succeeded, started_again, left_alone,
        in_session, renewed_after_auto, session_that_waits, session_with_a_dead_rank, session_at_work, session_ended,
        out_of_memory, making_packages, with_price, priced_and_tracked, logged_metrics,
    )
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A session shows the time of day since when it has been idle."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def drawn(run: LiveRun) -> Snapshot:
    return snapshot_of(run.view, 1, run.feed.totals, run.at)


@pytest.mark.parametrize("name", STATES)
def test_snapshots_are_as_written_down(name: str, tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    snapshot = json.loads(msgspec.json.encode(drawn(STATES[name](tmp_path))))
    if os.environ.get("SGPU_UPDATE_GOLDEN"):
        golden[name] = snapshot
        GOLDEN.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")
    assert snapshot == golden[name]


def test_no_snapshot_is_written_down_in_vain() -> None:
    assert set(json.loads(GOLDEN.read_text())) == set(STATES)


def test_a_run_that_waits_says_for_what_and_for_how_long(tmp_path: Path) -> None:
    assert drawn(queued(tmp_path)).preparing == (
        "position 2 in the queue: needs 1 more A10",
        "gives up in 3 min 12 s (--wait)",
        "shipped model, loader (45.1 MB in 38 ms)",
    )
    snapshot = drawn(starting(tmp_path))
    assert snapshot.preparing[-2:] == (
        "shipped model, loader (45.1 MB in 38 ms)",
        "starting 4 ranks: processes, torch, then the gloo process group",
    )
    assert snapshot.devices == f"4 {TIMES} H100 (simulated on cpu), gloo"
    assert [card.state for card in snapshot.ranks] == ["waiting"] * 4


@pytest.mark.parametrize(
    ("timeout_s", "after_s", "left"),
    [
        (600.0, 168.0, ("7 min 12 s left",)),
        (600.0, 700.0, ("0 s left",)),
        (7 * 24 * 3600.0, 3600.0, ()),
        (7 * 24 * 3600.0, 6 * 24 * 3600.0, ("24 h 00 min left",)),
    ],
)
def test_the_time_that_is_left_is_said_when_it_matters(
    timeout_s: float, after_s: float, left: tuple[str, ...], tmp_path: Path
) -> None:
    run = LiveRun(tmp_path, timeout_s=timeout_s).start(at=1000.0)
    assert snapshot_of(run.view, 1, (0,) * 4, 1000.0 + after_s).meta == left
    run.apply(ev.AttemptFailed(attempt=1, attempts=2, failure=VALUE_ERROR)).start(at=1100.0)
    assert snapshot_of(run.view, 1, (0,) * 4, 1000.0 + after_s).meta == left, "another attempt gets no more time"


def test_the_first_failure_is_drawn_while_the_others_still_stop(tmp_path: Path) -> None:
    snapshot = drawn(stopping(tmp_path))
    assert not snapshot.final
    block = snapshot.failure
    assert block is not None
    assert block.rank == 1
    assert [(line.kind, line.text) for line in block.lines] == [
        ("title", "ValueError on rank 1 · gpu-node-2"),
        ("code", "Cell In[7], line 14"),
        ("code", "     12 for x, y in loader:"),
        ("code", "     13     if x.isnan().any():"),
        ("culprit", "---> 14         check(x, step)"),
        ("code", "     15     loss = step_fn(x, y)"),
        ("error", "ValueError: NaN in batch 118"),
    ]
    assert any("checks.py" in line.text for line in block.whole)
    assert [card.state for card in snapshot.ranks] == ["released", "failed", "running", "running"]


def test_the_view_has_the_cells_lines_also_where_the_cell_raises_the_error(tmp_path: Path) -> None:
    run = stopping(tmp_path)
    run.view.error_follows = True
    before = drawn(run).failure
    run.end(RunState.FAILED, failure=VALUE_ERROR)
    assert drawn(run).failure == before


def test_notes_that_ask_for_something_are_apart(tmp_path: Path) -> None:
    run = LiveRun(
        tmp_path, shipped=Shipped(notes=("on a10, the cheapest type", as_warning("`rank` is hidden")))
    ).start()
    run.view.set_silence("reconnecting")
    snapshot = drawn(run)
    assert snapshot.warnings == ("`rank` is hidden",)
    assert snapshot.notes == ("on a10, the cheapest type", "reconnecting")
    assert snapshot.idle == ()
    assert "reconnecting" not in drawn(run.end()).notes


def test_nothing_but_plain_text_is_in_a_snapshot(tmp_path: Path) -> None:
    evil = "\x1b[31m<script>\x00\x1b]0;title\x07\x9b\u009b</script>\r\b"
    run = LiveRun(
        tmp_path, name=evil, cell=CellSource(body=f"{evil}\n" * 20, execution_count=7),
        shipped=Shipped(names=(evil,), notes=(evil,), total_bytes=1), outputs=(OutputName(evil),),
    )  # fmt: skip
    run.apply(ev.QueueMoved(position=1, reason=evil))
    snapshots = [drawn(run)]
    run.start(labels=(evil,) * 4).write(0, evil.encode()).apply(ev.Noted(text=evil))
    run.apply(
        rank_events.Sampled(seconds=1.0, samples=(gpu(0, problem=evil),)),
        rank_events.DeviceIdle(rank=0, seconds=60, waits_in=evil),
        rank_events.MetricsLogged(rank=0, metrics=points(evil, [1.0])),
    )
    frame = StackFrame("<ipython-input-7-a>", 3, evil)
    run.apply(rank_events.Stalled(seconds=30.0, stacks=(RankStack(rank=0, frames=(frame,)),)))
    failure = Failure(
        kind=FailureKind.USER_CODE, message=evil, rank=0, host=evil, type_name=evil,
        traceback_text=f"Cell In[7], line 3\n{evil}\n\nFile x\n{evil}\n\n{evil}: {evil}",
    )  # fmt: skip
    run.apply(rank_events.RankFailed(failure=failure), ev.StateChanged(state=RunState.CANCELLING, reason=evil))
    snapshots.append(drawn(run))
    other = Failure(kind=FailureKind.WORKER_DIED, message=evil, rank=1)
    results = (RankResult(rank=0, value_problem=evil),)
    snapshots.append(drawn(run.end(RunState.FAILED, failure=failure, others=(other,), reason=evil, results=results)))
    for snapshot in snapshots:
        text = json.dumps(msgspec.to_builtins(snapshot), ensure_ascii=False)
        assert "<script>" in text, "it is the front end that escapes"
        assert not re.search(r"\\u00[01]|\\[rbt]|[\x7f-\x9f]", text)


def test_a_snapshot_of_64_busy_ranks_that_fail_fits_into_a_message(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, 64).start(labels=tuple(f"NVIDIA H100 80GB HBM3 · {rank}" for rank in range(64)))
    for at in range(150):
        samples = tuple(gpu(rank, (at * 7 + rank) % 100 + 0.3, own_bytes=10**9 + at * 10**7) for rank in range(64))
        run.apply(rank_events.Sampled(seconds=1.0, samples=samples), at=1001.0 + at)
    for rank in range(64):
        run.apply(
            rank_events.DeviceIdle(rank=rank, seconds=60.0, waits_in=f"the DataLoader of a long name, number {rank}")
        )
        run.write(rank, f"\repoch 7/10:  62%|{'█' * 300}| 62/100 [00:02<00:01, 25.1it/s]".encode())
        for number in range(30):
            values = points(f"gradients of the layer/{number}", [rank + 1 / (at + 7) for at in range(200)])
            run.apply(rank_events.MetricsLogged(rank=rank, metrics=values))
    running = drawn(run)
    assert json_bytes(running) <= 60_000
    assert len(running.ranks) == 64
    assert all(card.curves and card.curves[0].values and card.use and card.bar for card in running.ranks)
    for number in range(60):
        run.apply(ev.Noted(text=f"note {number} " + "é" * 5_000))
    stacks = tuple(
        RankStack(rank=rank, frames=(StackFrame(f"/lib/{'x' * 500}{rank}.py", rank, "y" * 500),)) for rank in range(64)
    )
    run.apply(rank_events.Stalled(seconds=30.0, stacks=stacks))
    body = "".join(f"Cell In[7], line {number}\n---> {'🎉' * 900}\n\nFile z\n{'w' * 900}\n\n" for number in range(90))
    for rank in range(64):
        failure = Failure(
            kind=FailureKind.USER_CODE, message="é" * 9_000, rank=rank, host="h", type_name="ValueError",
            traceback_text=body + "ValueError: " + "é" * 9_000,
        )  # fmt: skip
        run.apply(rank_events.RankFailed(failure=failure))
    snapshot = drawn(run)
    assert json_bytes(snapshot) <= 60_000
    assert len(snapshot.ranks) == 64
    assert snapshot.failure is not None
    others = tuple(failure for rank, failure in run.view.rank_failures.items() if rank)
    run.end(RunState.FAILED, failure=run.view.rank_failures[0], others=others)
    assert json_bytes(drawn(run)) <= 60_000


def test_of_a_thousand_ranks_those_are_drawn_that_have_something_to_say(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, 1_000).start()
    run.apply(
        rank_events.RankFailed(
            failure=Failure(kind=FailureKind.USER_CODE, message="no", rank=777, type_name="KeyError")
        )
    )
    run.apply(rank_events.DeviceIdle(rank=888, seconds=60.0))
    snapshot = drawn(run)
    assert json_bytes(snapshot) <= 60_000
    drawn_ranks = [card.rank for card in snapshot.ranks]
    assert {0, 777, 888} <= set(drawn_ranks)
    assert drawn_ranks == sorted(drawn_ranks)
    assert snapshot.notes[-1] == (f"{1_000 - len(drawn_ranks)} of 1000 ranks are not drawn: too many for one view")
    assert len(snapshot.lines) == 1_000


def test_a_hang_stays_in_the_view_of_a_run_that_was_cancelled(tmp_path: Path) -> None:
    run = stalled(tmp_path).end(RunState.CANCELLED)
    drawn = snapshot_of(run.view, 1, [0, 0, 0, 0])
    assert drawn.stall == ()
    assert any("rank 1 has not reached all_reduce #41" in note for note in drawn.notes), drawn.notes
