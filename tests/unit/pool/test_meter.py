"""What runs cost: prices, billed seconds, idle sessions, cost limits and budgets, without a real clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_requests import Instruction, Scheduler, Warned, gpus, launched, node, running, spec, submit
from status_rows import run_summary

from sgpu_magic.config import load_settings
from sgpu_magic.config.pool_terms import read_prices
from sgpu_magic.config.submission_checks import unfit
from sgpu_magic.errors import UsageError
from sgpu_magic.formatting import format_money, format_rough_span
from sgpu_magic.pool.billing import Billing, IdleMeter, budget_of, budget_state
from sgpu_magic.pool.ledger import Ledger, Metered
from sgpu_magic.pool.scheduling.costs import DAY_S, Budget, Tariff, tariff_of
from sgpu_magic.pool.scheduling.run import Bill, Meter, ScheduledRun, bill
from sgpu_magic.pool.scheduling.stimuli import (
    EndUnstartedRun,
    LaunchRun,
    LeaseFreed,
    MoveRun,
    RanksReaped,
    RefuseRun,
    RunAdopted,
    RunMoved,
    StopRun,
    TimePassed,
)
from sgpu_magic.wire.base import FailureKind, RunKind, RunState
from sgpu_magic.wire.costs import Prices, billed_s, cost_so_far, gpu_s_so_far, idle_seconds
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.events import RunEnded
from sgpu_magic.wire.run import RunSpec

A, B, C = "aaaa0000", "bbbb0000", "cccc0000"
# 0.01 per device and second for an a10
TARIFF = Tariff(read_prices("a10=36,h100=72"))


def settings(tmp_path: Path, toml: str = "", **variables: str):
    file = tmp_path / "config.toml"
    file.write_text(toml)
    return load_settings({"SGPU_CONFIG": str(file), **variables})


# ---------------------------------------------------------------- prices


def test_prices_are_by_type_and_by_pool() -> None:
    prices = read_prices("a10=1.20, H100 = 4.5,team/h100=3.90,NVIDIA L4=0.5,cpu=0.04")
    assert prices.price_of("local", "a10") == 1.2
    assert (prices.price_of("local", "h100"), prices.price_of("team", "h100")) == (4.5, 3.9)
    assert (prices.price_of("team", "l4"), prices.price_of("local", "cpu"), prices.price_of("local", "t4")) == (
        0.5,
        0.04,
        None,
    )
    assert prices.types("local") == ["a10", "cpu", "h100", "l4"]
    assert not read_prices("")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a10", "'a10' is not a price"),
        ("a10=", "the price of 'a10' is ''"),
        ("a10=cheap", "is 'cheap'; it must be a number of 0 or more"),
        ("a10=-1", "is '-1'"),
        ("a10=nan", "is 'nan'"),
        ("a10=1,A10G=2", "'A10G' has more than one price"),
        ("any=1", "'any' can't have a price"),
        ("/a10=1", "is not a price"),
        ("h1000=1", "is not a device type"),
    ],
)
def test_bad_prices_are_a_usage_error_when_settings_are_read(tmp_path: Path, text: str, says: str) -> None:
    for name in ("prices", "reserved_prices"):
        with pytest.raises(UsageError) as raised:
            settings(tmp_path, **{f"SGPU_{name.upper()}": text})
        assert says in raised.value.message
        assert f"SGPU_{name.upper()} in the environment can't be read" in raised.value.message


def test_the_settings_file_may_have_tables_of_prices(tmp_path: Path) -> None:
    toml = '[prices]\na10 = 1.2\n"team/h100" = 3.9\n[prices.spot]\na10 = 0.4\n[reserved_prices]\na10 = 1\n'
    found = settings(tmp_path, toml)
    prices = read_prices(found.prices)
    assert [prices.price_of(pool, "a10") for pool in ("local", "spot")] == [1.2, 0.4]
    assert prices.price_of("team", "h100") == 3.9
    assert read_prices(found.reserved_prices).price_of("local", "a10") == 1.0
    # the variable overrides the file
    assert settings(tmp_path, toml, SGPU_PRICES="a10=2").prices == "a10=2"


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("[prices]\na10 = true\n", "is True, not a number"),
        ('[prices]\na10 = "1"\n', "is '1', not a number"),
        ("[prices.team.more]\na10 = 1\n", "not a number"),
        ("prices = 3\n", "'3' is not a price"),
        ("budget = -1.0\n", "the setting budget is -1"),
        ("budget_days = 0.0\n", "more than 0"),
        ('currency = "12"\n', "a word or sign"),
    ],
)
def test_a_bad_settings_file_is_a_usage_error(tmp_path: Path, toml: str, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        settings(tmp_path, toml)
    assert says in raised.value.message


@pytest.mark.parametrize(
    ("amount", "currency", "text"),
    [
        (0.37, "USD", "$0.37"),
        (1240, "USD", "$1,240.00"),
        (0.0042, "USD", "$0.0042"),
        (0.00995, "EUR", "€0.01"),
        (0.015, "USD", "$0.015"),
        (0.02, "USD", "$0.02"),
        (0.0996, "USD", "$0.10"),
        (0.000333, "USD", "$0.00033"),
        (1e-9, "USD", "under $0.000001"),
        (0, "USD", "$0.00"),
        (3.1, "CHF", "3.10 CHF"),
        (3.1, "₿", "₿3.10"),
    ],
)
def test_money_in_words(amount: float, currency: str, text: str) -> None:
    assert format_money(amount, currency) == text


# ---------------------------------------------------------------- billed seconds


def a_lease(kind: str = "a10", ranks: int = 4, simulated: bool = False, slots: int = 0) -> Lease:
    uuids = () if slots else tuple(f"GPU-{index}" for index in range(ranks))
    return Lease(lease_id="1", device_type=kind, ranks=ranks, uuids=uuids, simulated=simulated, cpu_slots=slots)


@pytest.mark.parametrize(("seconds", "billed"), [(0.0, 1), (0.02, 1), (1.0, 1), (1.001, 2), (59.0, 59), (59.5, 60)])
def test_each_second_that_has_begun_counts_whole(seconds: float, billed: int) -> None:
    assert billed_s(seconds) == billed


def test_a_bill_is_devices_times_seconds_times_the_price() -> None:
    # 4 devices for 90 s at 1.20 an hour each
    assert bill(a_lease(), 4.8, 89.2) == Bill(360.0, pytest.approx(0.12))
    assert bill(a_lease(), None, 89.2) == Bill(360.0, None)
    # simulated devices, and CPU slots that stand in for devices, cost as much as those devices
    assert bill(a_lease(simulated=True, slots=4), 4.8, 90) == Bill(360.0, pytest.approx(0.12))
    # CPU slots are not billed unless they have a price
    assert bill(a_lease("cpu", 2, slots=2), None, 90) == Bill(None, None)
    assert bill(a_lease("cpu", 2, slots=2), 0.08, 90) == Bill(180.0, pytest.approx(0.002))


def test_a_tariff_knows_a_lease() -> None:
    assert TARIFF.hourly(a_lease(ranks=3)) == 108.0
    assert TARIFF.hourly(a_lease("t4")) is None
    assert TARIFF.hourly(a_lease("h100", 2, simulated=True, slots=2)) == 144.0
    assert Tariff(read_prices("cpu=0.1")).hourly(a_lease("cpu", 3, slots=3)) == pytest.approx(0.3)
    assert tariff_of(load_settings({"SGPU_CONFIG": "/nowhere"})) == Tariff(Prices())


def test_a_run_that_goes_on_has_cost_what_it_has_cost_so_far() -> None:
    row = run_summary(run_id=A, ranks=4, metered_at=100.0, hourly=4.8)
    assert (cost_so_far(row, 189.5), gpu_s_so_far(row, 189.5)) == (pytest.approx(0.12), 360.0)
    ended = msgspec.structs.replace(row, state=RunState.SUCCEEDED, cost=0.5, gpu_s=7.0)
    assert (cost_so_far(ended, 1e6), gpu_s_so_far(ended, 1e6)) == (0.5, 7.0)
    # a row from before the meter existed
    old = msgspec.structs.replace(row, metered_at=None, hourly=None)
    assert (cost_so_far(old, 200.0), gpu_s_so_far(old, 200.0)) == (None, None)
    on_cpu = msgspec.structs.replace(row, device_type="cpu", hourly=None)
    assert (cost_so_far(on_cpu, 200.0), gpu_s_so_far(on_cpu, 200.0)) == (None, None)


# ---------------------------------------------------------------- idle sessions


@pytest.mark.parametrize(
    ("cells", "idle"),
    [
        ([], 100.0),
        ([(10.0, 30.0), (50.0, 60.0)], 70.0),
        ([(50.0, 60.0), (10.0, 30.0)], 70.0),
        ([(10.0, 40.0), (20.0, 30.0), (35.0, 50.0)], 60.0),
        ([(10.0, None)], 10.0),
        ([(0.0, 100.0)], 0.0),
        ([(-5.0, 20.0), (90.0, 130.0)], 70.0),
        ([(120.0, 130.0)], 100.0),
    ],
)
def test_a_session_is_idle_while_no_cell_runs(cells: Sequence[tuple[float, float | None]], idle: float) -> None:
    assert idle_seconds(0.0, 100.0, cells) == idle


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 40)), max_size=12))
def test_idle_seconds_are_those_that_no_cell_covers(begun: list[tuple[int, int]]) -> None:
    cells = [(float(at), float(at + lasts)) for at, lasts in begun]
    covered = {second for at, lasts in begun for second in range(at, at + lasts)}
    assert idle_seconds(0.0, 100.0, cells) == sum(second not in covered for second in range(100))


# ---------------------------------------------------------------- the budget


def test_a_budget_forgets_what_is_long_ago() -> None:
    budget = Budget(10.0, 2, [(0.0, 4.0), (DAY_S, 5.0)])
    assert budget.spent(DAY_S) == 9.0
    budget.add(1.5 * DAY_S, 2.0)
    assert budget.spent(1.5 * DAY_S) == 11.0
    assert budget.frees_at(1.5 * DAY_S) == 2 * DAY_S
    # with 6 more in progress, the second cost has to leave the window too
    assert budget.frees_at(1.5 * DAY_S, 6.0) == 3 * DAY_S
    assert budget.frees_at(1.5 * DAY_S, 60.0) is None
    assert budget.spent(2 * DAY_S) == 7.0
    assert budget.spent(9 * DAY_S) == 0


def test_the_ledger_says_what_was_spent(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "state" / "ledger.sqlite3")
    for run_id, at, cost, currency in ((A, 1000.0, 2.0, "USD"), (B, 90_000.0, 3.0, "USD"), (C, 90_001.0, 9.0, "EUR")):
        ledger.record(spec(run_id), RunState.QUEUED)
        ledger.update(run_id, ended_at=at, meter=Metered(cost=cost, currency=currency))
    chosen = settings(tmp_path, SGPU_BUDGET="10", SGPU_BUDGET_DAYS="1", SGPU_PRICES="a10=1")
    budget = budget_of(chosen, ledger, now=500.0, wall=90_100.0)
    assert budget is not None
    assert budget.spent(500.0) == 3.0
    assert budget.frees_at(500.0, 7.0) == 400.0 + DAY_S
    state = budget_state(budget, [], "USD", 500.0)
    assert state is not None
    assert (state.limit, state.days, state.spent, state.currency) == (10.0, 1.0, 3.0, "USD")
    assert budget_of(settings(tmp_path), ledger, 500.0, 90_100.0) is None
    ledger.close()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(39.6, "40 s"), (720, "12 min"), (18_600, "5 h 10 min"), (7200, "2 h"), (183_600, "2 d 3 h"), (86_400, "1 d")],
)
def test_rough_lengths_of_time(seconds: float, text: str) -> None:
    assert format_rough_span(seconds) == text


# ---------------------------------------------------------------- limits in the scheduler


def scheduler(budget: Budget | None = None, tariff: Tariff = TARIFF, devices: int = 8) -> Scheduler:
    return Scheduler(node(*gpus(devices)), tariff=tariff, budget=budget)


def limited(run_id: str, ranks: int = 2, max_cost: float | None = 1.0, **fields: object) -> RunSpec:
    return msgspec.structs.replace(spec(run_id, ranks), max_cost=max_cost, **fields)


def stops(instructions: Sequence[Instruction]) -> dict[str, str]:
    return {
        one.run_id: one.reason for one in instructions if isinstance(one, StopRun) and one.state is RunState.TIMED_OUT
    }


def remarks(instructions: Sequence[Instruction]) -> dict[str, str]:
    return {one.run_id: one.text for one in instructions if isinstance(one, Warned)}


def test_a_run_is_told_at_80_percent_of_its_cost_limit_and_stopped_at_100() -> None:
    machine = scheduler()
    submit(machine, limited(A), now=5.0)
    assert machine.next_deadline() is None
    # two devices at a cent per second each: 1.00 in 50 s, not counting the queue and the preparation
    running(machine, A, now=100.0)
    assert machine.next_deadline() == pytest.approx(140.0)
    assert machine.handle(TimePassed(), 139.0) == []
    reported = remarks(machine.handle(TimePassed(), 140.0))
    assert reported == {A: "80 % of its cost limit of $1.00 is used: it is stopped in 10 s"}
    assert machine.next_deadline() == pytest.approx(150.0)
    out = machine.handle(TimePassed(), machine.next_deadline() or 0.0)
    assert stops(out)[A] == (
        "its cost limit of $1.00 is reached (--max-cost 1): 2 A10 at $72.00 an hour cost $1.00 in 50 s. Raise "
        "--max-cost, or take fewer devices with --gpus or cheaper ones with --type"
    )
    assert MoveRun(A, RunState.CANCELLING, stops(out)[A]) in out
    # stopped once; after that the scheduler only waits
    assert machine.next_deadline() is None
    assert machine.handle(TimePassed(), 200.0) == []


def test_attempts_and_the_time_between_them_count() -> None:
    machine = scheduler()
    submit(machine, limited(A, retries=1))
    running(machine, A, now=0.0)
    machine.handle(RunMoved(A, RunState.STARTING), 30.0)
    machine.handle(RunMoved(A, RunState.RUNNING), 31.0)
    assert A in remarks(machine.handle(TimePassed(), 40.0))
    assert A in stops(machine.handle(TimePassed(), 50.0))


def test_a_session_keeps_its_cost_limit_and_its_cells_have_none() -> None:
    machine = scheduler()
    submit(machine, limited(A, kind=RunKind.SESSION))
    running(machine, A, now=0.0)
    cell = msgspec.structs.replace(spec(B, 2), session=A)
    assert B in launched(submit(machine, cell, now=20.0))
    running(machine, B, now=20.0)
    found = machine.run(B)
    assert found is not None
    assert found.meter.hourly is None
    assert remarks(machine.handle(TimePassed(), 40.0)).keys() == {A}
    assert stops(machine.handle(TimePassed(), 50.0)).keys() == {A}


@pytest.mark.parametrize("kind", ["t4", "cpu"])
def test_a_cost_limit_needs_a_price(kind: str) -> None:
    machine = Scheduler(node(*gpus(2, "t4")), tariff=TARIFF)
    (refused,) = submit(machine, msgspec.structs.replace(spec(A, 1, kind), max_cost=5.0))
    assert isinstance(refused, RefuseRun)
    assert refused.error == "UsageError"
    assert str(refused.reason).startswith(
        f"--max-cost 5 can't be enforced: this pool has no price for {kind} (it has one for a10, h100)."
    )
    assert machine.runs == ()


def test_cost_limits_that_mean_nothing_are_refused() -> None:
    assert "--max-cost takes a finite number greater than 0" in str(unfit(limited(A, max_cost=0.0)))
    assert "--max-cost takes a finite number greater than 0" in str(unfit(limited(A, max_cost=float("inf"))))
    assert "has no cost of its own" in str(unfit(limited(A, session=B)))
    assert unfit(limited(A)) is None


def test_a_run_has_a_bounded_number_of_ranks() -> None:
    assert [unfit(spec(A, ranks)) for ranks in (1, 4096)] == [None, None]
    assert unfit(spec(A, 4097)) == "a run has at most 4096 ranks, not 4097."


def test_a_run_that_was_taken_over_is_not_told_twice_and_is_stopped_in_time() -> None:
    machine = scheduler()
    lease = Lease(lease_id="1", device_type="a10", ranks=2, uuids=("GPU-a10-0", "GPU-a10-1"))
    out = machine.handle(RunAdopted(ScheduledRun(limited(A), RunState.RUNNING), lease, metered_at=0.0), 45.0)
    assert remarks(out) == {}
    assert machine.next_deadline() == pytest.approx(50.0)
    assert A in stops(machine.handle(TimePassed(), 50.0))


def test_a_budget_warns_every_run_and_stops_all_that_have_a_price() -> None:
    machine = Scheduler(node(*gpus(4), *gpus(2, "t4")), tariff=TARIFF, budget=Budget(10.0, 30, [(-5.0, 6.0)]))
    submit(machine, limited(A, 2, None))
    running(machine, A, now=0.0)
    submit(machine, limited(B, 1, None))
    running(machine, B, now=50.0)
    submit(machine, spec(C, 1, "t4"))
    running(machine, C, now=50.0)
    # 6 from before, 1 for A until B began, then 3 cents a second
    assert machine.next_deadline() == pytest.approx(50 + 1 / 0.03)
    out = machine.handle(TimePassed(), machine.next_deadline() or 0.0)
    assert remarks(out) == dict.fromkeys(
        (A, B), "80 % of the pool's budget of $10.00 in 30 d is used; runs with a price are stopped when it is used up"
    )
    assert machine.next_deadline() == pytest.approx(150.0)
    out = machine.handle(TimePassed(), machine.next_deadline() or 0.0)
    assert stops(out).keys() == {A, B}
    assert stops(out)[B].startswith(
        "the pool's budget of $10.00 in 30 d is used up: its runs have cost $10.00, this one $1.00 of it. Raise"
    )


def test_a_run_whose_devices_are_given_back_costs_nothing_more() -> None:
    budget = Budget(10.0, 30)
    machine = scheduler(budget)
    submit(machine, limited(A, 2))
    running(machine, A, now=0.0)
    machine.handle(LeaseFreed(A), 25.0)
    assert budget.spent(25.0) == pytest.approx(0.5)
    assert not stops(machine.handle(TimePassed(), 1000.0))
    machine.handle(RunMoved(A, RunState.SUCCEEDED), 1000.0)
    assert budget.spent(1000.0) == pytest.approx(0.5)


def test_a_budget_that_is_used_up_takes_no_priced_run_until_it_frees() -> None:
    budget = Budget(10.0, 1, [(0.0, 4.0), (100.0, 6.0)])
    machine = Scheduler(node(*gpus(2), *gpus(2, "t4")), tariff=TARIFF, budget=budget)
    (refused,) = submit(machine, spec(A), now=3600.0)
    assert isinstance(refused, RefuseRun)
    assert refused.error == "CapacityError"
    assert str(refused.reason) == (
        "the pool's budget of $10.00 in 1 d is used up: the pool's runs have cost $10.00 in that time. There is room "
        "again in 23 h; until then only devices without a price are granted. Raise the setting budget and restart "
        "the pool, or wait."
    )
    assert B in launched(submit(machine, spec(B, 1, "t4"), now=3600.0))
    assert C in launched(submit(machine, spec(C), now=DAY_S))


def test_runs_that_wait_end_when_the_budget_does() -> None:
    machine = scheduler(Budget(1.0, 1), devices=2)
    submit(machine, spec(A, 2))
    running(machine, A)
    submit(machine, spec(B, 2), now=1.0)
    out = machine.handle(TimePassed(), 50.0)
    assert stops(out).keys() == {A}
    ends = [one for one in out if isinstance(one, EndUnstartedRun)]
    assert [(one.run_id, one.state, one.kind) for one in ends] == [(B, RunState.FAILED, FailureKind.CAPACITY)]
    assert "is used up" in ends[0].reason
    # all of its cost is kept: in whole seconds, until it was over
    machine.handle(RunMoved(A, RunState.TIMED_OUT), 52.5)
    machine.handle(RanksReaped(A, RunState.TIMED_OUT), 53.0)
    (refused,) = submit(machine, spec(C), now=53.0)
    assert isinstance(refused, RefuseRun)
    assert "have cost $1.06 in that time. There is room again in 1 d;" in str(refused.reason)


def test_a_pool_without_prices_has_no_budget_to_keep() -> None:
    machine = scheduler(Budget(1e-9, 1), tariff=Tariff())
    assert A in launched(submit(machine, spec(A)))
    running(machine, A)
    assert machine.next_deadline() == 7200.0
    assert not [one for one in machine.handle(TimePassed(), 100.0) if not isinstance(one, LaunchRun)]


# ---------------------------------------------------------------- the meter in the ledger


LEASE = Lease(lease_id="l", device_type="a10", ranks=2, uuids=("u", "v"))


def metered(wanted: RunSpec, hourly: float | None, since: float) -> ScheduledRun:
    """A metered run, as the scheduler holds it."""
    return ScheduledRun(wanted, RunState.RUNNING, meter=Meter(LEASE, hourly, since))


def adopt(billing: Billing, run: ScheduledRun, launched_at: float, now: float) -> None:
    """Continue the run with the meter from the ledger."""
    since, hourly = billing.adopted(run, LEASE, launched_at, now)
    run.meter = Meter(LEASE, hourly, since)


@pytest.mark.parametrize("step_s", [0.0, 3600.0, -3600.0])
def test_no_step_of_the_wall_clock_changes_what_is_billed(tmp_path: Path, step_s: float) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite3")
    run, billing = metered(spec(A, 2), 72.0, 50.0), Billing(ledger, TARIFF)
    ledger.record(run.spec, RunState.QUEUED)
    ledger.update(A, meter=billing.price_lease(run, LEASE))
    wall = time.time()
    ledger.update(A, meter=billing.start_meter(run, RunState.STARTING, wall, 50.0))
    ended, _ = billing.ended(run, RunEnded(state=RunState.SUCCEEDED), 58.0)
    assert (ended.gpu_s, ended.cost) == (16.0, pytest.approx(0.16))
    # the next service reads the ledger, after the wall clock was set
    ledger.update(A, meter=Metered(metered_at=wall + step_s))
    again, later = ScheduledRun(run.spec, RunState.RUNNING), Billing(ledger, TARIFF)
    adopt(later, again, wall, 55.0)
    ended, meter = later.ended(again, RunEnded(state=RunState.SUCCEEDED), 58.0)
    assert (ended.gpu_s, ended.cost) == (16.0, pytest.approx(0.16))
    assert meter is not None
    assert (meter.gpu_s, meter.cost) == (ended.gpu_s, ended.cost)
    ledger.close()


def test_what_was_begun_before_the_machine_was_started_anew_goes_by_the_wall_clock(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite3")
    run, billing = metered(spec(A, 2), 72.0, 90_000.0), Billing(ledger, TARIFF)
    ledger.record(run.spec, RunState.QUEUED)
    ledger.update(A, meter=billing.start_meter(run, RunState.STARTING, time.time() - 100.0, 90_000.0))
    again = ScheduledRun(run.spec, RunState.RUNNING)
    adopt(billing, again, time.time(), 20.0)
    assert again.meter.since == pytest.approx(-80.0, abs=5.0)
    ledger.close()


def test_a_price_that_was_changed_is_not_that_of_a_run_that_goes_on(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite3")
    run, billing = metered(spec(A, 2), 72.0, 50.0), Billing(ledger, TARIFF)
    ledger.record(run.spec, RunState.QUEUED)
    ledger.update(A, meter=billing.price_lease(run, LEASE))
    ledger.update(A, meter=billing.start_meter(run, RunState.STARTING, time.time(), 50.0))
    again, dearer = ScheduledRun(run.spec, RunState.RUNNING), Tariff(read_prices("a10=360"))
    machine = scheduler(tariff=dearer)
    since, hourly = Billing(ledger, dearer).adopted(again, LEASE, time.time(), 55.0)
    machine.handle(RunAdopted(again, LEASE, since, hourly=hourly), 55.0)
    assert again.meter.bill(58.0) == Bill(16.0, pytest.approx(0.16))
    # its meter stops when its devices are freed, and nothing is billed twice
    machine.handle(LeaseFreed(A), 58.0)
    machine.handle(RunMoved(A, RunState.SUCCEEDED), 70.0)
    assert again.meter.bill(80.0) == Bill(16.0, pytest.approx(0.16))
    ledger.close()


def test_what_had_ended_before_another_service_came_is_not_paid_for_twice() -> None:
    budget = Budget(100.0, 1, [(0.0, 2.0)])
    machine = scheduler(budget)
    machine.handle(RunAdopted(ScheduledRun(spec(A, 2), RunState.SUCCEEDED), LEASE, 0.0), 50.0)
    for now in (60.0, 70.0):
        state = budget_state(budget, machine.runs, "USD", now)
        assert state is not None
        assert state.spent == 2.0
    machine.handle(RanksReaped(A, RunState.SUCCEEDED), 80.0)
    assert budget.spent(80.0) == 2.0


@pytest.mark.parametrize("step_s", [0.0, 3600.0, -3600.0])
@pytest.mark.parametrize("runs_on", [False, True], ids=["between cells", "in a cell"])
def test_no_step_of_the_wall_clock_changes_a_sessions_idle_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float, runs_on: bool
) -> None:
    ledger, true = Ledger(tmp_path / "ledger.sqlite3"), time.time
    session = metered(msgspec.structs.replace(spec(A, 2), kind=RunKind.SESSION), 72.0, 50.0)
    cell = metered(msgspec.structs.replace(spec(B, 2), session=A), None, 50.0)
    billing = Billing(ledger, TARIFF)
    for run in (session, cell):
        ledger.record(run.spec, RunState.QUEUED)
        ledger.update(run.run_id, started_at=true(), meter=billing.start_meter(run, RunState.STARTING, true(), 50.0))
    billing.ranks_started(session, 50.0)
    billing.ranks_started(cell, 60.0)
    if not runs_on:
        billing.ended(cell, RunEnded(state=RunState.SUCCEEDED), 65.0)
        ledger.update(B, ended_at=true() + 5)
    monkeypatch.setattr(time, "time", lambda: true() + step_s)
    session, cell = ScheduledRun(session.spec, RunState.RUNNING), ScheduledRun(cell.spec, RunState.RUNNING)
    later = Billing(ledger, TARIFF)
    adopt(later, session, true(), 70.0)
    if runs_on:
        adopt(later, cell, true(), 70.0)
        later.ended(cell, RunEnded(state=RunState.SUCCEEDED), 75.0)
    _, meter = later.ended(session, RunEnded(state=RunState.CANCELLED), 80.0)
    assert meter is not None
    assert meter.idle_s == (10.0 + 5.0 if runs_on else 10.0 + 15.0)
    ledger.close()


def test_a_meter_of_a_sessions_idle_time() -> None:
    idle = IdleMeter(10.0)
    idle.began("a", 12.0)
    idle.began("b", 13.0)
    idle.ended("a", 20.0)
    assert idle.seconds(30.0) == 2.0
    idle.ended("b", 31.0)
    idle.ended("unknown", 40.0)
    assert idle.seconds(35.0) == 6.0


def test_the_times_of_a_sessions_cells(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "state" / "ledger.sqlite3")
    for run_id, began, ended in ((A, 1.0, 2.0), (B, 3.0, None), (C, None, 4.0)):
        ledger.record(msgspec.structs.replace(spec(run_id), session="5e550000"), RunState.QUEUED)
        ledger.update(run_id, started_at=began, ended_at=ended)
    assert ledger.cell_times("5e550000") == [(1.0, 2.0), (3.0, None)]
    assert ledger.cell_times("5e551111") == []
    ledger.close()
