"""Real runs on simulated devices that have prices: bills, cost limits, budgets, idle sessions."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from homes import Home
from pool_client import PoolClient
from waiting import eventually

from sgpu_magic.client.ledger import recent_runs
from sgpu_magic.config import load_settings
from sgpu_magic.errors import CapacityError, SgpuError, UsageError
from sgpu_magic.options.table import as_argument
from sgpu_magic.wire.base import FailureKind, RunLimit, RunState
from sgpu_magic.wire.events import AttemptFailed, Noted, Placed, RanksStarted
from sgpu_magic.wire.pool_status import RunSummary
from sgpu_magic.wire.rank_events import OutputWritten

# per device and second, 0.01
PRICES = "a10=36,cpu=3.6"
SLEEP = "import time\ntime.sleep({})"
# reports SIGTERM, and takes some time to end
HANDLES_TERM = """
import signal, sys, time
def end(*_):
    print("TERM", flush=True)
    time.sleep(0.4)
    print("saved", flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(60)
"""


# ends only when the file is there
ENDS_WITH_FILE = """
import signal, sys, time
from pathlib import Path
def end(*_):
    print("TERM", flush=True)
    while not Path({!r}).exists():
        time.sleep(0.01)
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
time.sleep(60)
"""

# lets the test set the pool's wall clock: it is that many seconds off
STEPPED_CLOCK = """
import time
from pathlib import Path
true, step = time.time, Path(__file__).with_name("step")
time.time = lambda: true() + float(step.read_text())
"""

VARIABLES = {"SGPU_SIMULATE": "a10:4,t4:2", "SGPU_PRICES": PRICES}


def warm_client(home: Home) -> PoolClient:
    """What is measured below are not a cold machine's imports."""
    client = PoolClient(home)
    client.begin("1", ranks=1, device_type="t4").ended()
    return client


@pytest.fixture(scope="module")
def client() -> Iterator[PoolClient]:
    """A pool with prices."""
    home = Home(VARIABLES)
    made = warm_client(home)
    yield made
    made.close()
    home.close()


@pytest.fixture
def clients(new_home: Callable[..., Home]) -> Iterator[Callable[..., PoolClient]]:
    """Makes pools with prices and more: `clients(SGPU_BUDGET="1")`."""
    made: list[PoolClient] = []

    def make(**variables: str) -> PoolClient:
        made.append(warm_client(new_home(VARIABLES | variables)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def row(client: PoolClient, run_id: str) -> RunSummary:
    """The run's row, read beside the pool."""
    return next(run for run in recent_runs(load_settings(client.home.environ), None) if run.run_id == run_id)


def final_row(client: PoolClient, run_id: str) -> RunSummary:
    # the end time and the state are written separately
    eventually(lambda: row(client, run_id).ended_at is not None, 10, "the ledger does not hear of the end")
    eventually(lambda: row(client, run_id).state.is_final, 10, "the ledger does not hear of the state")
    return row(client, run_id)


def times(run: RunSummary) -> tuple[float, float, float]:
    """When its meter began, when its ranks were there, when it ended."""
    assert run.metered_at
    assert run.started_at
    assert run.ended_at
    return run.metered_at, run.started_at, run.ended_at


def billed_s(client: PoolClient, run_id: str) -> int:
    """The whole seconds from the start of a run's meter to its end."""
    metered_at, _, ended_at = times(final_row(client, run_id))
    return math.ceil(ended_at - metered_at)


def notes(run: object) -> list[str]:
    return [event.text for event in run.events if isinstance(event, Noted)]  # pyright: ignore


def test_a_run_is_billed_whole_seconds_of_its_devices(client: PoolClient) -> None:
    run = client.begin(SLEEP.format(1.2), ranks=3, device_type="a10")
    ended = run.ended()
    placed: Placed = run.wait_for(Placed)
    assert (placed.hourly, placed.currency) == (108.0, "USD")
    seconds = (ended.gpu_s or 0) / 3
    assert seconds in (2.0, 3.0)
    assert (ended.cost, ended.currency) == (pytest.approx(seconds * 0.03), "USD")
    found = final_row(client, run.run_id)
    assert (found.gpu_s, found.cost, found.currency, found.hourly) == (ended.gpu_s, ended.cost, "USD", 108.0)
    assert found.user == run.run.spec.owner.user != ""
    metered_at, started_at, ended_at = times(found)
    assert found.submitted_at <= metered_at <= started_at
    # the ranks begin before the pool receives their start
    assert metered_at <= ended_at - 1.2
    assert seconds == billed_s(client, run.run_id)
    # a type without a price has seconds and no cost; CPU slots have a price here
    run = client.begin("1", ranks=1, device_type="t4")
    other = run.ended()
    assert (other.gpu_s, other.cost, other.currency) == (billed_s(client, run.run_id), None, "")
    run = client.begin("1", ranks=2, device_type="cpu")
    on_cpu = run.ended()
    seconds = billed_s(client, run.run_id)
    assert (on_cpu.gpu_s, on_cpu.cost) == (2 * seconds, pytest.approx(seconds * 0.002))


@pytest.mark.slow
def test_without_prices_nothing_is_said_of_money(clients: Callable[..., PoolClient]) -> None:
    client = clients(SGPU_PRICES="")
    run = client.begin("1", ranks=2, device_type="cpu")
    ended = run.ended()
    placed: Placed = run.wait_for(Placed)
    assert (placed.hourly, placed.currency) == (None, "")
    assert (ended.gpu_s, ended.cost, ended.currency) == (None, None, "")
    assert client.begin("1", ranks=2, device_type="a10").ended().gpu_s == 2.0
    with pytest.raises(UsageError, match="has no price for a10 \\(it has one for nothing\\)"):
        client.begin("1", ranks=1, device_type="a10", max_cost=1.0)


def test_a_cost_limit_warns_and_stops_with_term_and_grace(client: PoolClient) -> None:
    # two cents per second allow a second and a half
    run = client.begin(HANDLES_TERM, ranks=2, device_type="a10", max_cost=0.03, grace_s=3.0)
    ended = run.ended()
    assert notes(run) == ["80 % of its cost limit of $0.03 is used: it is stopped in 0 s"]
    assert ended.state is RunState.TIMED_OUT
    assert ended.failure is not None
    assert ended.failure.kind is FailureKind.TIMEOUT
    assert ended.limit is RunLimit.COST
    assert ended.failure.message.startswith(
        "its cost limit of $0.03 is reached (--max-cost 0.03): 2 A10 (simulated) at $72.00 an hour cost $0.04 in 2 s."
    )
    assert ended.failure.text is not None
    assert "(max_cost=0.03)" in ended.failure.text.spelled(as_argument)
    assert "Raise --max-cost" in ended.failure.message
    assert {rank: text.split() for rank, text in run.printed.items()} == {
        rank: ["ready", "TERM", "saved"] for rank in (0, 1)
    }
    # the grace is billed, too
    assert 0.04 <= (ended.cost or 0) <= 0.1
    assert final_row(client, run.run_id).state is RunState.TIMED_OUT


@pytest.mark.slow
def test_a_pool_that_is_replaced_while_it_stops_a_run_still_says_which_limit_it_was(
    clients: Callable[..., PoolClient], tmp_path: Path
) -> None:
    client = clients(SGPU_ADOPT_TIMEOUT_S="20")
    code = ENDS_WITH_FILE.format(str(tmp_path / "end"))
    run = client.begin(code, ranks=1, device_type="a10", max_cost=0.01, grace_s=60.0)
    run.wait_for(OutputWritten)
    first = client.home.pool_pid()
    os.kill(first or 0, signal.SIGKILL)

    def end_rank_under_the_next_pool() -> None:
        eventually(lambda: client.home.pool_pid() not in (None, first), 20, "no other pool started")
        (tmp_path / "end").touch()

    with ThreadPoolExecutor(1) as beside:
        replaced = beside.submit(end_rank_under_the_next_pool)
        # only who follows a run starts the next pool
        ended = run.ended()
        replaced.result()
    assert (ended.state, ended.limit) == (RunState.TIMED_OUT, RunLimit.COST)


@pytest.fixture
def stepped_client(clients: Callable[..., PoolClient], tmp_path: Path) -> PoolClient:
    """A pool whose wall clock is as many seconds off as the test's file `step` says."""
    (tmp_path / "sitecustomize.py").write_text(STEPPED_CLOCK)
    (tmp_path / "step").write_text("0")
    return clients(PYTHONPATH=str(tmp_path))


@pytest.mark.slow
def test_a_step_of_the_clock_changes_no_limit_cost_or_time(stepped_client: PoolClient, tmp_path: Path) -> None:
    client, step = stepped_client, tmp_path / "step"
    for step_s in (3600, 0):
        run = client.begin(SLEEP.format(60), ranks=1, device_type="a10", max_cost=0.02)
        run.wait_for(RanksStarted)
        step.with_suffix(".new").write_text(str(step_s))
        step.with_suffix(".new").replace(step)
        ended = run.ended()
        assert ended.state is RunState.TIMED_OUT
        assert ended.failure is not None
        assert "(--max-cost 0.02): 1 A10 (simulated) at $36.00 an hour cost $0.03 in 2 s" in ended.failure.message
        assert 0.02 <= (ended.cost or 0) <= 0.06
        assert 1.9 < ended.total_s < 20
        assert 0 <= ended.queued_s < 20


@pytest.mark.slow
def test_a_cost_limit_that_is_not_reached_changes_nothing(client: PoolClient) -> None:
    run = client.begin("6 * 7", ranks=2, device_type="a10", max_cost=5.0)
    assert run.ended().state is RunState.SUCCEEDED
    assert notes(run) == []
    assert run.values == [42, 42]


@pytest.mark.slow
def test_attempts_are_one_bill(client: PoolClient) -> None:
    flag = str(client.home.work / "again")
    body = f"import os, signal, time\nif not os.path.exists({flag!r}):\n    open({flag!r}, 'w').close()\n"
    body += "    time.sleep(1.1)\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(0.2)"
    run = client.begin(body, ranks=1, device_type="a10", retries=1)
    ended = run.ended()
    run.wait_for(AttemptFailed)
    assert ended.state is RunState.SUCCEEDED
    found = final_row(client, run.run_id)
    metered_at, started_at, ended_at = times(found)
    assert started_at - metered_at > 1.1
    assert ended.gpu_s == -(-(ended_at - metered_at) // 1)


@pytest.mark.slow
def test_a_session_pays_for_its_cells_and_its_idle_time_is_told_apart(client: PoolClient) -> None:
    session = client.connect(2, device_type="a10")
    cells = [session.do(SLEEP.format(0.6)), session.do("1", fresh=True)]
    for cell in cells:
        placed: Placed = cell.wait_for(Placed)
        assert placed.hourly == 72.0
        assert (cell.ended().gpu_s, cell.ended().cost) == (None, None)
    time_left = time.monotonic() + 1.5
    eventually(lambda: time.monotonic() > time_left, 5, "time stands still")
    ended = session.end()
    found = final_row(client, session.run_id)
    rows = [final_row(client, cell.run_id) for cell in cells]
    assert [(each.cost, each.gpu_s, each.metered_at, each.hourly) for each in rows] == [(None,) * 4] * 2
    metered_at, started_at, ended_at = times(found)
    ran = sum((each.ended_at or 0) - (each.started_at or 0) for each in rows)
    assert 0.6 <= ran < 5
    # the pool meters by its monotonic clock; the rows have the agent's times
    assert found.idle_s == pytest.approx(ended_at - started_at - ran, abs=0.1)
    assert (found.idle_s or 0) > 1.4
    seconds = -(-(ended_at - metered_at) // 1)
    assert (ended.gpu_s, ended.cost) == (2 * seconds, pytest.approx(0.02 * seconds))


def test_a_sessions_cost_limit_ends_it_with_what_runs_in_it(client: PoolClient) -> None:
    session = client.connect(1, device_type="a10", max_cost=0.015)
    cell = session.begin(SLEEP.format(30))
    ended = session.run.ended()
    assert ended.state is RunState.TIMED_OUT
    assert ended.failure is not None
    assert ended.failure.message.startswith("its cost limit of $0.015 is reached (--max-cost 0.015): 1 A10 (sim")
    assert cell.ended().state is RunState.CANCELLED
    assert "cost limit" in cell.ended().reason
    with pytest.raises(UsageError, match="has no cost of its own"):
        session.begin("1", max_cost=3.0)


@pytest.mark.slow
def test_a_budget_is_kept_across_runs_and_services(clients: Callable[..., PoolClient]) -> None:
    client = clients(SGPU_BUDGET="0.08", SGPU_BUDGET_DAYS="2", SGPU_ADOPT_TIMEOUT_S="20")
    first = client.begin(SLEEP.format(0.5), ranks=4, device_type="a10").ended()
    assert first.cost == pytest.approx(0.04)
    status = client.pool.status()
    assert status is not None
    assert status.budget is not None
    assert (status.budget.limit, status.budget.days, status.budget.currency) == (0.08, 2.0, "USD")
    assert status.budget.spent == pytest.approx(0.04)
    # the next service reads the amount spent, and continues to meter the run
    run = client.begin(SLEEP.format(60), ranks=1, device_type="a10", grace_s=0.1)
    run.wait_for(Placed)
    eventually(lambda: row(client, run.run_id).started_at is not None, 10)
    began = row(client, run.run_id).metered_at
    os.kill(client.home.pool_pid() or 0, signal.SIGKILL)
    ended = run.ended()
    assert row(client, run.run_id).metered_at == began
    assert ended.state is RunState.TIMED_OUT
    assert ended.failure is not None
    assert ended.failure.message.startswith("the pool's budget of $0.08 in 2 d is used up: its runs have cost $0.08")
    assert any(text.startswith("80 % of the pool's budget of $0.08 in 2 d is used") for text in notes(run))
    assert 0.04 <= (ended.cost or 0) <= 0.09
    with pytest.raises(CapacityError) as refused:
        client.begin("1", ranks=1, device_type="a10")
    assert "the pool's budget of $0.08 in 2 d is used up: the pool's runs have cost $0." in refused.value.message
    assert "There is room again in 1 d 23 h" in refused.value.message or "in 2 d" in refused.value.message
    # devices without a price are not limited
    assert client.begin("1", ranks=1, device_type="t4").ended().state is RunState.SUCCEEDED


@pytest.mark.slow
def test_a_run_that_was_lost_with_everything_is_billed_for_as_long_as_it_was_heard_of(
    clients: Callable[..., PoolClient],
) -> None:
    client = clients()
    run = client.begin(SLEEP.format(60), ranks=2, device_type="a10", detach=True)
    run.wait_for(Placed)
    eventually(lambda: row(client, run.run_id).started_at is not None, 10)
    pids = [client.home.pool_pid() or 0, *client.home.agent_pids()]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    looked_at: list[object] = []

    def successor() -> bool:
        with contextlib.suppress(SgpuError):
            looked_at.append(client.pool.status())
        return any(looked_at)

    eventually(successor, 20, "no pool takes its place")
    found = final_row(client, run.run_id)
    assert found.state is RunState.FAILED
    gpu_s = found.gpu_s or 0
    assert 2 <= gpu_s <= 20
    assert found.cost == pytest.approx(gpu_s * 0.01)
