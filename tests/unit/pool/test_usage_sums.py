"""`sgpu usage` against sums made by hand: in all its forms, without a pool, and on ledgers of other versions."""

from __future__ import annotations

import csv
import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from homes import Home
from scheduler_requests import spec
from status_rows import run_summary

from sgpu_magic.cli.json_records import Money
from sgpu_magic.cli.usage import comma_separated, report, table
from sgpu_magic.client.ledger import Usage, Use, recent_runs, usage, usage_within
from sgpu_magic.client.this_machine import agent_path
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.config.pool_terms import read_prices
from sgpu_magic.errors import UsageError
from sgpu_magic.pool.ledger import Ledger, Metered
from sgpu_magic.wire.base import RunKind, RunState
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.pool_status import RunSummary
from sgpu_magic.wire.run import Owner

DAY = 86400.0
NOW = 1_000_000.0
RESERVED = read_prices("a10=0.9,h100=3")


def row(run_id: str, **fields: object) -> RunSummary:
    base = run_summary(run_id=run_id, name="", ranks=4, state=RunState.SUCCEEDED, user="ann", notebook="digits.ipynb")
    return msgspec.structs.replace(base, **fields)


# an hour of 4 A10 at 1.20, half an hour of a session of 2 H100 at 4.50 that was idle for 20 of its 30 minutes, with a
# cell in it; a run that goes on; CPU slots with a price; one without a meter; one that never began; an old one
ROWS = (
    row(
        "000000a1", metered_at=NOW - 7200, started_at=NOW - 7199,
        ended_at=NOW - 3600, gpu_s=14400.0, cost=4.8, currency="USD",
    ),
    row(
        "5e550000", kind=RunKind.SESSION, name="work", device_type="h100", ranks=2, metered_at=NOW - DAY - 1800,
        started_at=NOW - DAY - 1800, ended_at=NOW - DAY, gpu_s=3600.0, cost=4.5, currency="USD", idle_s=1200.0,
        user="bob", notebook="work.ipynb",
    ),
    row(
        "000000c1", session="5e550000", device_type="h100", ranks=2, started_at=NOW - DAY - 1000,
        ended_at=NOW - DAY - 400, user="bob", notebook="work.ipynb",
    ),
    row(
        "000000d1", state=RunState.RUNNING, simulated=True, ranks=1,
        metered_at=NOW - 360.5, started_at=NOW - 360, hourly=1.2, currency="USD",
    ),
    row(
        "000000e1", device_type="cpu", ranks=2, metered_at=NOW - 3600,
        started_at=NOW - 3600, ended_at=NOW - 1800, gpu_s=3600.0, cost=0.04, currency="EUR",
    ),
    row("000000f1", started_at=NOW - 300, ended_at=NOW - 200),
    row("00000101", state=RunState.CANCELLED, ended_at=NOW - 100),
    row(
        "00000111", metered_at=NOW - 9 * DAY, started_at=NOW - 9 * DAY,
        ended_at=NOW - 8 * DAY, gpu_s=1e6, cost=99.0, currency="USD",
    ),
)  # fmt: skip


def used(by: str, since_days: float = 7.0, reserved: str = "a10=0.9,h100=3") -> Usage:
    return usage(ROWS, NOW - since_days * DAY, NOW, by, read_prices(reserved), "USD")


def test_sums_by_hand() -> None:
    found = used("type")
    groups = {use.name: use for use in found.groups}
    assert list(groups) == ["a10", "h100", "a10 (simulated)", "cpu"]
    a10, h100, simulated, cpu = groups.values()
    assert (a10.runs, a10.gpu_s, a10.cost) == (3, 14400.0, {"USD": 4.8})
    assert a10.reserved == pytest.approx(3.6)
    assert (h100.runs, h100.gpu_s, h100.cost) == (2, 3600.0, {"USD": 4.5})
    assert h100.idle_s == pytest.approx(2400.0)
    assert h100.idle_cost == {"USD": pytest.approx(3.0)}
    assert h100.reserved == pytest.approx(3.0)
    # the 361st second has begun, and counts
    assert (simulated.runs, simulated.gpu_s, simulated.simulated_s) == (1, 361.0, 361.0)
    assert simulated.cost == simulated.simulated_cost == {"USD": pytest.approx(361 * 1.2 / 3600)}
    assert (cpu.runs, cpu.gpu_s, cpu.slot_s, cpu.cost, cpu.reserved) == (1, 0.0, 3600.0, {"EUR": 0.04}, None)
    total = found.total
    assert (total.runs, total.gpu_s, total.slot_s) == (7, 18361.0, 3600.0)
    assert total.cost == {"USD": pytest.approx(9.3 + 361 * 1.2 / 3600), "EUR": 0.04}
    assert total.reserved == pytest.approx(6.6 + 361 * 0.9 / 3600)


@pytest.mark.parametrize(
    ("by", "runs"),
    [
        ("user", {"ann": 5, "bob": 2}),
        ("notebook", {"digits.ipynb": 5, "work.ipynb": 2}),
        ("session", {"(no session)": 5, "work (5e55)": 2}),
    ],
)
def test_groups(by: str, runs: dict[str, int]) -> None:
    assert {use.name: use.runs for use in used(by).groups} == runs


def test_days_are_those_of_the_ends_newest_first() -> None:
    days = [time.strftime("%Y-%m-%d", time.localtime(at)) for at in (NOW, NOW - DAY)]
    found = used("day")
    assert [use.name for use in found.groups] == days
    assert [use.runs for use in found.groups] == [5, 2]
    assert used("day", since_days=30).total.runs == 8


def test_a_session_that_goes_on_is_idle_until_now() -> None:
    session = row(
        "5e551111", kind=RunKind.SESSION, state=RunState.RUNNING, ranks=2, metered_at=NOW - 100, started_at=NOW - 100,
        hourly=7.2, currency="USD",
    )  # fmt: skip
    cells = (
        row("000000c2", session="5e551111", started_at=NOW - 90, ended_at=NOW - 60),
        row("000000c3", session="5e551111", state=RunState.RUNNING, started_at=NOW - 10),
    )
    found = usage((session, *cells), NOW - DAY, NOW, "session", read_prices(""), "USD").total
    assert (found.runs, found.gpu_s, found.reserved) == (3, 200.0, None)
    assert found.idle_s == pytest.approx(200.0 * 0.6)
    assert found.idle_cost == {"USD": pytest.approx(0.2 * 0.6)}


@pytest.fixture
def settings_with_agent(tmp_path: Path) -> Iterator[Settings]:
    """Settings of a pool that was killed, and whose agent still listens."""
    settings = load_settings({"SGPU_STATE_DIR": str(tmp_path), "SGPU_RUNTIME_DIR": str(tmp_path / "run")})
    path = agent_path(settings)
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(path))
        yield settings


def test_a_clock_that_was_set_changes_no_sums(tmp_path: Path, settings_with_agent: Settings) -> None:
    settings = settings_with_agent
    ledger, now, clock = Ledger(tmp_path / "ledger.sqlite3"), time.time(), time.monotonic()
    session = msgspec.structs.replace(spec("5e550000", 2), kind=RunKind.SESSION)
    ledger.record(session, RunState.RUNNING)
    # connected for 100 s and idle for all but 40 of them; then the clock was set forward by an hour
    meter = Metered(metered_at=now - 3700, metered_clock=clock - 100, hourly=7.2, currency="USD")
    ledger.update("5e550000", started_at=now - 3700, meter=meter)
    ledger.update("5e550000", meter=Metered(idle_s=30.0, idle_clock=clock - 30))
    lease = Lease(lease_id="1", device_type="a10", ranks=2, uuids=("a", "b"))
    ledger.update("5e550000", lease=lease)
    ledger.record(msgspec.structs.replace(spec("000000c1"), session="5e550000"), RunState.QUEUED)
    ledger.update("000000c1", started_at=now - 3650, ended_at=now - 10)

    def total() -> Use:
        return usage(recent_runs(settings, None), 0.0, time.time(), "user", read_prices(""), "USD").total

    assert total().gpu_s == pytest.approx(200.0, abs=20.0)
    assert total().idle_s == pytest.approx(120.0, abs=20.0)
    # not idle during a cell
    ledger.record(msgspec.structs.replace(spec("000000c2"), session="5e550000"), RunState.RUNNING)
    ledger.update("000000c2", started_at=now)
    assert total().idle_s == pytest.approx(60.0, abs=10.0)
    # after its end, the share is one of the billed hours
    bill = Metered(gpu_s=200.0, cost=0.2, idle_s=60.0)
    for run_id in ("000000c2", "5e550000"):
        ledger.update(run_id, state=RunState.CANCELLED, ended_at=now, meter=bill if run_id[0] == "5" else None)
    ledger.close()
    assert total().idle_s == pytest.approx(120.0)
    assert total().idle_cost == {"USD": pytest.approx(0.12)}


def test_the_table() -> None:
    lines = table(used("type")).splitlines()
    assert lines[0].split("   ")[0] == "type"
    assert lines[0].split()[1:] == [
        "runs", "GPU-hours", "CPU-hours", "cost", "idle", "GPU-hours", "idle", "cost", "reserved",
    ]  # fmt: skip
    assert lines[1].split() == ["a10", "3", "4.00", "0.00", "$4.80", "0.00", "$3.60"]
    assert lines[2].split() == ["h100", "2", "1.00", "0.00", "$4.50", "0.67", "$3.00", "$3.00"]
    assert lines[5].split() == ["total", "7", "5.10", "1.00", "€0.04", "+", "$9.42", "0.67", "$3.00", "$6.69"]
    text = "\n".join(lines)
    assert "simulated: 0.10 of the GPU-hours and $0.12 of the cost; it is not charged" in text
    assert "reserved: what the same hours cost at the reserved prices, for types that have one" in text
    # empty columns are left out
    plain = table(usage(ROWS[5:7], 0.0, NOW, "user", read_prices(""), "USD"))
    assert plain.splitlines()[0].split() == ["user", "runs", "GPU-hours"]
    assert table(usage((), 0.0, NOW, "user", read_prices(""), "USD")).startswith("no runs since ")


def test_csv() -> None:
    records = list(csv.DictReader(io.StringIO(comma_separated(used("type")))))
    assert [record["type"] for record in records] == ["a10", "h100", "a10 (simulated)", "cpu"]
    assert records[1] == {
        "type": "h100", "runs": "2", "gpu_hours": "1.0", "slot_hours": "0.0", "idle_gpu_hours": "0.666667",
        "simulated_gpu_hours": "0.0", "cost_EUR": "0.0", "idle_cost_EUR": "0.0", "simulated_cost_EUR": "0.0",
        "cost_USD": "4.5", "idle_cost_USD": "3.0", "simulated_cost_USD": "0.0", "reserved_cost_USD": "3.0",
    }  # fmt: skip
    assert records[3]["reserved_cost_USD"] == ""
    formula = usage((row("000000a1", notebook="=1+1,2"),), -1.0, NOW, "notebook", read_prices(""), "USD")
    assert comma_separated(formula).splitlines()[-1].startswith('"\'=1+1,2",')


def test_json() -> None:
    found = report(used("user"))
    assert (found.by, found.until.timestamp()) == ("user", NOW)
    bob = found.groups[1]
    assert (bob.name, bob.runs, bob.gpu_s, bob.slot_s, bob.simulated_s) == ("bob", 2, 3600.0, 0.0, 0.0)
    assert bob.idle_s == pytest.approx(2400.0)
    assert (bob.cost, bob.simulated_cost) == ((Money(amount=4.5, currency="USD"),), ())
    assert bob.reserved_cost == Money(amount=3.0, currency="USD")
    assert [(cost.currency, round(cost.amount, 6)) for cost in found.total.cost] == [("EUR", 0.04), ("USD", 9.420333)]


# ---------------------------------------------------------------- the command


@pytest.fixture
def kept_home() -> Iterator[Home]:
    made = Home({"SGPU_RESERVED_PRICES": "a10=0.9"})
    yield made
    made.close()


def sgpu(home: Home, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sgpu_magic.cli", *arguments]
    return subprocess.run(command, env=home.environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_the_command_reads_the_ledger(kept_home: Home) -> None:
    ledger = Ledger(kept_home.state / "ledger.sqlite3")
    mine = msgspec.structs.replace(spec("000000a1", 2), owner=Owner(pid=1, host="h", user="ann"))
    ledger.record(mine, RunState.QUEUED)
    lease = Lease(lease_id="1", device_type="a10", ranks=2, uuids=("a", "b"))
    ledger.update("000000a1", state=RunState.SUCCEEDED, lease=lease, started_at=1.0, ended_at=time.time() - 60)
    ledger.update("000000a1", meter=Metered(metered_at=1.0, hourly=2.4, currency="USD", gpu_s=1800.0, cost=0.6))
    # the ledger is open at the same time, as in a pool
    done = sgpu(kept_home, "usage", "--by", "user", "--since", "1h", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    total = json.loads(done.stdout)["total"]
    assert (total["runs"], total["gpu_s"], total["cost"]) == (1, 1800.0, [{"amount": 0.6, "currency": "USD"}])
    assert total["reserved_cost"] == {"amount": 0.45, "currency": "USD"}
    ledger.close()
    done = sgpu(kept_home, "usage", "--by", "type")
    assert done.stdout.splitlines()[1].split() == ["a10", "1", "0.50", "$0.60", "$0.45"]
    assert os.listdir(kept_home.state) == ["ledger.sqlite3"]
    assert sgpu(kept_home, "usage", "--since", "30s").stdout.startswith("no runs since ")
    for bad in (("--since", "soon"), ("--since", "0d"), ("--by", "colour"), ("--format", "xml")):
        done = sgpu(kept_home, "usage", *bad)
        assert (done.returncode, done.stdout) == (2, "")
        # the command's parser knows what to write instead, other errors have a page of help
        assert len(done.stderr.splitlines()) == (2 if bad[0] == "--since" else 1)
    with pytest.raises(UsageError, match="--since 'soon' is not a length of time: write one such as 7d, 12h"):
        usage_within(load_settings(kept_home.environ), [], "soon", "day")
