"""A pool's status in the panel: devices, types, rows, texts, this month's use."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest
from status_rows import pool_status, run_summary

from sgpu_magic.client.ledger import Use
from sgpu_magic.client.pool_choosing import PriceBook
from sgpu_magic.client.pools import PoolStatusReply
from sgpu_magic.client.pools_file import PoolEntry
from sgpu_magic.config import Settings
from sgpu_magic.config.pool_terms import read_prices
from sgpu_magic.panel.device_rows import Durations, panel_histories
from sgpu_magic.panel.orders import CommandResult
from sgpu_magic.panel.past_runs import RunFilesOfPool, SimulatedUse, month_began, month_line, month_sums
from sgpu_magic.panel.poller import changes
from sgpu_magic.panel.pool_state import NO_GPU, RunDirectoryInfo, pool_choices, pool_snapshot, run_row
from sgpu_magic.panel.schema import PanelHistory, PanelPool, PoolUpdate, RunParameter, RunRow, RunsUpdate
from sgpu_magic.pool.run_log import RunLog
from sgpu_magic.server.panel_handlers import Outbox
from sgpu_magic.wire.base import RunKind, RunState
from sgpu_magic.wire.codec import frame
from sgpu_magic.wire.devices import Device, Inventory, Placement
from sgpu_magic.wire.events import Event, Submitted
from sgpu_magic.wire.pool_status import BudgetState, DeviceHistory, PoolStatus, RunSummary
from sgpu_magic.wire.rank_events import RankSample, Sampled
from sgpu_magic.wire.run import CellSource, Owner, RunSpec

NOW = 1_795_344_000.0
RATES = PriceBook(read_prices("a10=2.5,h100=7,cpu=0.04"), read_prices("b300=9,a10=1"), "USD")


def run(run_id: str = "00000001", state: RunState = RunState.RUNNING, **others: object) -> RunSummary:
    base: dict[str, object] = {
        "run_id": run_id,
        "name": "train_digits",
        "state": state,
        "submitted_at": NOW - 200.0,
        "started_at": None if state is RunState.QUEUED else NOW - 134.0,
        "ended_at": NOW - 10.0 if state.is_final else None,
        "metered_at": None if state is RunState.QUEUED else NOW - 135.0,
        "hourly": 5.0,
        "currency": "USD",
        "uuids": () if state is RunState.QUEUED else ("G0", "G1"),
        "notebook": "/home/ann/work/digits.ipynb",
        "kernel": "k-1",
        "user": "ann",
    }
    return run_summary(**base | others)


def device(number: int, kind: str = "a10", **others: object) -> Device:
    base: dict[str, object] = {"uuid": f"G{number}", "type": kind, "index": number, "memory_bytes": 24 * 10**9}
    return msgspec.convert(base | others, Device)


def status(*runs: RunSummary, devices: tuple[Device, ...] | None = None, **others: object) -> PoolStatus:
    found = tuple(device(at) for at in range(4)) if devices is None else devices
    base: dict[str, object] = {"inventory": Inventory(host="box", devices=found), "cpu_slots_free": 12}
    return pool_status(*runs, **base | others)


def snapshot(*runs: RunSummary, notice: str = "", **others: object) -> PanelPool:
    asked = status(*runs, **others)  # pyright: ignore[reportArgumentType]
    return pool_snapshot(asked, RATES, NOW, durations=Durations(runs), notice=notice)


def row(of: RunSummary, context: RunDirectoryInfo | None = None) -> RunRow:
    return run_row(of, context or RunDirectoryInfo())


# ------------------------------------------------------------ devices and their types


def test_devices_have_their_history_and_the_runs_that_held_them():
    train, idle = run("7f3a0000", RunState.RUNNING), run("9b200000", RunState.SUCCEEDED)
    history = DeviceHistory(uuid="G1", type="a10", utilization_pct=(5, None), memory_pct=(50, 60))
    histories = panel_histories((history, DeviceHistory(type="a10", utilization_pct=(9,))), (train, idle), NOW)
    assert histories.devices.keys() == {"G1"}
    asked = status(train, idle)
    drawn = pool_snapshot(asked, RATES, NOW, durations=Durations(()), histories=histories)
    assert [one.history is None for one in drawn.devices] == [True, False, True, True]
    runs = ("7f3a digits.ipynb", "9b20 digits.ipynb")
    assert drawn.devices[1].history == PanelHistory(utilization_pct=(5, None), memory_pct=(50, 60), runs=runs)
    later = panel_histories((history,), (train, idle), NOW + 600.0)
    assert later.devices["G1"].runs == ("7f3a digits.ipynb",)


def test_in_a_pool_of_very_many_devices_a_type_has_the_mean_of_its_devices():
    mean = DeviceHistory(type="a10", utilization_pct=(5, None), memory_pct=(50, 60))
    histories = panel_histories((mean,), (), NOW)
    drawn = pool_snapshot(status(), RATES, NOW, durations=Durations(()), histories=histories)
    assert {one.type: one.history for one in drawn.types} == {
        "a10": PanelHistory(utilization_pct=(5, None), memory_pct=(50, 60)),
        "cpu": None,
    }
    assert not any(one.history for one in drawn.devices)


def test_types_stand_dearest_first_and_cpu_last():
    devices = (device(0, "l4", memory_bytes=1), device(1), device(2, "t4", memory_bytes=9), device(3, "h100"))
    drawn = snapshot(devices=devices)
    assert [(one.type, one.label, one.price) for one in drawn.types] == [
        ("h100", "H100", 7.0),
        ("a10", "A10", 2.5),
        ("t4", "T4", None),
        ("l4", "L4", None),
        ("cpu", "CPU", 0.04),
    ]
    assert [one.type for one in drawn.devices] == ["h100", "a10", "t4", "l4"]
    assert drawn.about == "local · this machine · 1 core for 16 CPU ranks"
    assert (drawn.cpu_slots, drawn.cpu_slots_free) == (16, 12)


def test_a_type_that_has_only_a_reserved_price_is_reserved():
    drawn = snapshot(devices=(device(0, "b300"), device(1)))
    assert [(one.type, one.price, one.reserved) for one in drawn.types[:2]] == [
        ("b300", 9.0, True),
        ("a10", 2.5, False),
    ]


def test_devices_say_who_uses_them():
    session = run("00000002", kind=RunKind.SESSION, name="main", uuids=("G2",))
    cell = run("00000003", session="00000002", uuids=("G2",))
    drawn = snapshot(
        run(),
        session,
        cell,
        devices=(
            *(device(at) for at in range(4)),
            device(4, outside_use="process 77 (java)"),
            device(5, unavailable="its lock is a link. Have root remove it."),
        ),
    )
    assert [one.label for one in drawn.devices] == [f"A10 · {at}" for at in range(6)]
    assert [one.user for one in drawn.devices] == [
        "train_digits · rank 0",
        "train_digits · rank 1",
        "digits.ipynb",
        "free",
        "in use outside the pool: process 77 (java)",
        "unavailable: its lock is a link. Have root remove it.",
    ]
    assert [one.run_id for one in drawn.devices] == ["00000001", "00000001", "00000002", "", "", ""]
    assert [one.kernel for one in drawn.devices] == ["k-1", "k-1", "k-1", "", "", ""]
    assert [one.free for one in drawn.devices] == [False, False, False, True, False, False]
    (a10, _) = drawn.types
    assert (a10.total, a10.free) == (6, 1)


def test_a_session_without_a_notebook_is_called_by_its_name():
    drawn = snapshot(run(kind=RunKind.SESSION, name="work", notebook=""))
    assert drawn.devices[0].user == "session work"


def test_a_busy_type_says_when_so_many_will_be_free():
    ended = run("00000002", RunState.SUCCEEDED, metered_at=NOW - 1000.0, ended_at=NOW - 100.0)
    (a10, cpu) = snapshot(run(), ended).types
    # the former 900 s less the 135 s that have passed, in whole minutes
    assert a10.waits_s == (0.0, 0.0, 780.0, 780.0)
    assert cpu.waits_s == (0.0,) * 12 + (None,) * 4


def test_what_is_measured_is_passed_on_and_what_is_not_stays_unknown():
    drawn = snapshot(devices=(device(0, utilization_pct=91.0, used_bytes=18 * 10**9), device(1, simulated=True)))
    assert (drawn.devices[0].utilization_pct, drawn.devices[0].used_bytes) == (91.0, 18 * 10**9)
    assert (drawn.devices[1].utilization_pct, drawn.devices[1].used_bytes) == (None, None)
    assert drawn.devices[1].simulated


# ------------------------------------------------------------ notes


def test_without_a_gpu_it_is_said_that_ranks_run_on_cpu():
    assert snapshot(devices=()).notes == (NO_GPU,)
    assert snapshot(devices=(device(0, simulated=True),)).notes == (NO_GPU,)
    assert snapshot().notes == ()


def test_what_is_wrong_is_noted_as_sentences():
    budget = BudgetState(limit=300.0, days=30.0, spent=290.0, currency="USD")
    drawn = snapshot(
        notice="the pool has been idle for 55 min",
        problem="the ledger can't be used",
        idle_ends_at=NOW + 60,
        budget=budget,
    )
    assert drawn.notes == (
        "The ledger can't be used.",
        "Budget: $290.00 of $300.00 in 30 d.",
        "The pool has been idle for 55 min.",
    )
    assert snapshot(idle_ends_at=NOW + 300).notes == ("Idle: ends its processes in 5 min.",)
    assert snapshot(idle_ends_at=NOW + 3000).notes == ()


def test_the_local_pool_may_be_chosen():
    (pool,) = pool_choices(Settings())
    assert (pool.name, pool.about, pool.default) == ("local", "this machine", True)
    assert pool_choices(Settings(pool="team"))[0].default is False


@pytest.mark.parametrize(("setting", "default"), [("", "local"), ("on-demand", "local"), ("team", "team")])
def test_a_pool_that_does_not_answer_is_the_default_only_if_it_is_named(setting: str, default: str):
    entries = (PoolEntry(name="team", address="tcp://host:8700", key=""),)
    lost = PoolStatusReply("team", entries[0], None, "nothing answers at tcp://host:8700")
    before = pool_choices(Settings(pool=setting), entries)
    assert {pool.name: (pool.default, pool.reachable) for pool in before}["team"] == (True, True)
    pools = {pool.name: pool for pool in pool_choices(Settings(pool=setting), entries, [lost])}
    assert [name for name, pool in pools.items() if pool.default] == [default]
    assert (pools["team"].reachable, pools["team"].about) == (False, "on demand · can't be reached")


# ------------------------------------------------------------ rows


@pytest.mark.parametrize(
    ("of", "tone", "reason"),
    [
        (run(), "going", ""),
        (run(ranks=1), "going", ""),
        (
            run(state=RunState.QUEUED, waiting_for="needs 1 more a10", position=1),
            "waiting",
            "needs 1 more a10, position 1",
        ),
        (run(state=RunState.QUEUED), "waiting", ""),
        (run(state=RunState.CANCELLING), "going", ""),
        (run(state=RunState.SUCCEEDED), "good", ""),
        (run(state=RunState.FAILED, failure="\x1b[31mrank 1: KeyError\x1b[0m\nmore"), "bad", "rank 1: KeyError"),
        (run(state=RunState.FAILED), "bad", ""),
        (run(state=RunState.FAILED, failure="x" * 200), "bad", "x" * 100 + " ..."),
        (run(state=RunState.TIMED_OUT, failure="its time is over"), "bad", "its time is over"),
        (run(state=RunState.CANCELLED, failure="Cancel button"), "plain", "Cancel button"),
        (run(state=RunState.SUCCEEDED, kind=RunKind.SESSION), "plain", ""),
    ],
)
def test_a_row_says_what_its_run_does(of: RunSummary, tone: str, reason: str):
    drawn = row(of)
    assert (drawn.tone, drawn.reason) == (tone, reason)
    assert drawn.state == of.state.value
    assert drawn.final is of.state.is_final


def test_a_row_has_what_its_clock_and_its_buttons_need():
    drawn = row(run(idle_ends_at=NOW + 60), RunDirectoryInfo(here=True, tracked_url="https://mlflow/1"))
    assert (drawn.short_id, drawn.name, drawn.kind) == ("0000", "train_digits", "cell")
    assert (drawn.submitted_at, drawn.started_at, drawn.metered_at) == (NOW - 200, NOW - 134, NOW - 135)
    assert (drawn.hourly, drawn.cost, drawn.currency) == (5.0, None, "USD")
    assert (drawn.notebook, drawn.kernel, drawn.user) == ("digits.ipynb", "k-1", "ann")
    assert (drawn.here, drawn.tracked_url, drawn.idle_ends_at) == (True, "https://mlflow/1", NOW + 60)
    assert row(run(state=RunState.SUCCEEDED, cost=0.3)).cost == 0.3
    reported = (RunParameter(name="lr", value="0.1"),)
    assert row(run(), RunDirectoryInfo(here=True, parameters=reported)).parameters == reported
    assert drawn.parameters == ()


def test_only_what_differs_is_told():
    before = {one.run_id: row(one) for one in (run("00000001"), run("00000002"), run("00000003"))}
    after = before | {"00000002": row(run("00000002", RunState.FAILED)), "00000004": row(run("00000004"))}
    del after["00000003"]
    reported = changes("local", before, after)
    assert reported is not None
    assert [one.run_id for one in reported.changed] == ["00000002", "00000004"]
    assert (reported.gone, reported.whole) == (("00000003",), False)
    same = {run_id: row(run(run_id)) for run_id in before}
    assert changes("local", before, same) is None


def runs_told(*changed: RunRow, gone: tuple[str, ...] = (), whole: bool = False, pool: str = "local") -> RunsUpdate:
    return RunsUpdate(pool=pool, whole=whole, changed=changed, gone=gone)


def test_a_slow_page_is_told_the_newest_of_everything_at_once():
    outbox, first, second = Outbox(), snapshot(), snapshot(run())
    old, new = row(run("00000001")), row(run("00000001", RunState.FAILED))
    other, third = row(run("00000002")), row(run("00000003"))
    outbox.put(PoolUpdate(snapshot=first))
    outbox.put(runs_told(old, other, whole=True))
    outbox.put(PoolUpdate(snapshot=second))
    outbox.put(runs_told(third, new, gone=("00000002",)))
    outbox.put(CommandResult(text="done", ok=True))
    assert outbox.pop() == CommandResult(text="done", ok=True)
    assert outbox.pop() == PoolUpdate(snapshot=second)
    runs = outbox.pop()
    assert isinstance(runs, RunsUpdate)
    assert {one.run_id: one for one in runs.changed} == {"00000001": new, "00000003": third}
    assert (runs.whole, runs.gone) == (True, ())
    assert outbox.pop() is None
    outbox.put(runs_told(old, gone=("00000002",)))
    outbox.put(runs_told(other, gone=("00000001",)))
    assert outbox.pop() == runs_told(other, gone=("00000001",))
    outbox.put(runs_told(old))
    outbox.put(runs_told(other, pool="team", whole=True))
    assert outbox.pop() == runs_told(other, pool="team", whole=True)


# ------------------------------------------------------------ directories


def test_a_run_whose_directory_is_here_says_so_and_where_it_is_tracked(tmp_path: Path):
    clock = 100.0
    places = RunFilesOfPool(tmp_path / "runs", lambda: clock)
    mine, ended = run("0000000a"), run("0000000b", RunState.SUCCEEDED, ended_at=NOW - 3600)
    places.poll()
    assert places.directory_of(mine, NOW) == RunDirectoryInfo()
    for made in (mine, ended):
        (tmp_path / "runs" / made.run_id).mkdir(parents=True)
    log = RunLog(tmp_path / "runs" / ended.run_id, ended.run_id)
    spec = RunSpec(
        run_id=ended.run_id,
        name="cell",
        cell=CellSource(body="train(lr)"),
        placement=Placement(ranks=2),
        outputs=(),
        owner=Owner(pid=1, host="h", user="u"),
        timeout_s=60.0,
        parameters=(("lr", "0.1"),),
    )
    log.append(Submitted(spec=spec), 1.0)
    log.close()
    places.poll()
    reported = (RunParameter(name="lr", value="0.1"),)
    assert places.directory_of(mine, NOW) == RunDirectoryInfo(here=True)
    assert places.directory_of(ended, NOW) == RunDirectoryInfo(here=True, parameters=reported)
    for made in (mine, ended):
        written = json.dumps({"url": f"https://mlflow/{made.run_id}", "more": 1})
        (tmp_path / "runs" / made.run_id / "tracking.json").write_text(written)
    assert places.directory_of(mine, NOW) == RunDirectoryInfo(here=True)
    clock += 6.0
    assert places.directory_of(mine, NOW) == RunDirectoryInfo(here=True, tracked_url="https://mlflow/0000000a")
    # it ended long ago, and its files were looked up after that
    assert places.directory_of(ended, NOW) == RunDirectoryInfo(here=True, parameters=reported)
    (tmp_path / "runs" / mine.run_id / "tracking.json").unlink()
    assert places.directory_of(mine, NOW).tracked_url


@pytest.mark.parametrize("url", ["javascript:alert(1)", "file:///etc/passwd", "", "sqlite:///x"])
def test_only_web_pages_become_links(tmp_path: Path, url: str):
    (tmp_path / "0000000a").mkdir()
    (tmp_path / "0000000a" / "tracking.json").write_text(json.dumps({"url": url}))
    places = RunFilesOfPool(tmp_path)
    places.poll()
    assert places.directory_of(run("0000000a"), NOW) == RunDirectoryInfo(here=True)


# ------------------------------------------------------------ use of simulated devices


def sampled(run_id: str, seq: int, at: float, *samples: RankSample) -> bytes:
    return frame(Event(run_id=run_id, seq=seq, at=at, body=Sampled(seconds=1.0, samples=samples)))


def used(rank: int, cores: float | None, memory: int | None) -> RankSample:
    return RankSample(rank=rank, kind="cpu", cpu_cores=cores, rss_bytes=memory)


def test_simulated_devices_have_the_latest_use_of_their_ranks(tmp_path: Path):
    session = run("0000000a", kind=RunKind.SESSION, simulated=True)
    cell = run("0000000b", session=session.run_id, simulated=True)
    log = tmp_path / session.run_id / "events.msgpack"
    use = SimulatedUse(tmp_path)
    assert use.use_of([session], 4, NOW) == {}
    log.parent.mkdir()
    log.write_bytes(sampled(session.run_id, 1, NOW - 3, used(0, None, 1_000), used(1, 9.0, 404_000_000)))
    # two ranks share four cores
    assert use.use_of([session, cell], 4, NOW) == {"G0": (None, 0), "G1": (100.0, 400_000_000)}
    with log.open("ab") as file:
        file.write(sampled(session.run_id, 2, NOW - 1, used(0, 0.5, 1_000_000_000)))
    assert use.use_of([session], 4, NOW) == {"G0": (25.0, 1_000_000_000), "G1": (100.0, 400_000_000)}
    # rank 1 has not reported for too long
    assert use.use_of([session], 4, NOW + 13) == {"G0": (25.0, 1_000_000_000)}
    assert use.use_of([msgspec.structs.replace(session, state=RunState.CANCELLED)], 4, NOW) == {}


def test_only_simulated_devices_are_read_from_logs_and_a_damaged_log_reports_no_use(tmp_path: Path):
    for run_id in ("0000000a", "0000000b"):
        (tmp_path / run_id).mkdir()
        (tmp_path / run_id / "events.msgpack").write_bytes(sampled(run_id, 1, NOW, used(0, 1.0, 0)))
    (tmp_path / "0000000b" / "events.msgpack").write_bytes(b"no events" * 9)
    real, damaged = run("0000000a"), run("0000000b", simulated=True)
    assert SimulatedUse(tmp_path).use_of([real, damaged], 4, NOW) == {}


def test_the_use_of_ranks_is_drawn_at_their_devices():
    devices = (device(0, simulated=True), device(1, simulated=True))
    drawn = pool_snapshot(status(devices=devices), RATES, NOW, durations=Durations(()), use={"G1": (25.0, 10**9)})
    assert [(one.utilization_pct, one.used_bytes) for one in drawn.devices] == [(None, None), (25.0, 10**9)]


# ------------------------------------------------------------ this month


def use(hours: float = 0.0, cost: float = 0.0, simulated: float = 0.0) -> Use:
    return Use("total", gpu_s=hours * 3600, simulated_s=simulated * 3600, cost={"USD": cost} if cost else {})


def budget(spent: float, limit: float = 300.0) -> BudgetState:
    return BudgetState(limit=limit, days=30.0, spent=spent, currency="USD")


@pytest.mark.parametrize(
    ("used", "limit", "line"),
    [
        (use(), None, ""),
        (use(41.23, 118.2), None, "This month 41.2 GPU h · $118"),
        (use(41.23, 118.2), budget(118.2), "This month 41.2 GPU h · $118 of $300"),
        (use(41.23, 96.2), budget(118.2), "This month 41.2 GPU h · $96.20 · budget $118 of $300 in 30 d"),
        (use(0.25, 0.5), None, "This month 0.25 GPU h · $0.50"),
        (use(1234.5), None, "This month 1,234.5 GPU h"),
        (use(2.0, 5.0, 2.0), None, "This month 2.0 GPU h (simulated) · $5"),
        (use(2.0, 5.0, 1.0), None, "This month 2.0 GPU h, 1.0 simulated · $5"),
        (use(), budget(0.0, 50.0), "This month $0.00 of $50"),
    ],
)
def test_the_month_is_told_in_one_line(used: Use, limit: BudgetState | None, line: str):
    assert month_line(used, limit) == line


def test_the_calendar_month_counts():
    now = time.mktime((2026, 11, 22, 10, 0, 0, 0, 0, -1))
    began = month_began(now)
    assert time.localtime(began)[:6] == (2026, 11, 1, 0, 0, 0)
    before = run("0000000a", RunState.SUCCEEDED, ended_at=began - 1, gpu_s=3600.0, cost=5.0)
    within = run("0000000b", RunState.SUCCEEDED, ended_at=began + 1, gpu_s=7200.0, cost=10.0)
    running_run = run("0000000c", metered_at=now - 1800.0)
    sums = month_sums([before, within, running_run], began, now)
    assert sums.gpu_s == 7200.0 + 2 * 1800.0
    assert sums.cost == {"USD": pytest.approx(12.5)}
