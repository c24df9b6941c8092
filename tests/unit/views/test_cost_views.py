"""Costs, packages and MLflow in the views: nothing is shown where there is nothing to report."""

from __future__ import annotations

import re
import time

import msgspec
import pytest
from status_rows import pool_status, run_summary
from stories import FORMS, IN_A_FILE, STUCK, TRACKED, Run, cell_in_session, render_text, result, with_price

from sgpu_magic.cli.runs import runs_table
from sgpu_magic.views.bundle import run_record, summary_line
from sgpu_magic.views.format_run import packages_text, tracked_link, tracked_text
from sgpu_magic.views.format_summary import billed_text, cost_text
from sgpu_magic.views.html import render_html
from sgpu_magic.views.live.feed import Feed
from sgpu_magic.views.live.snapshot import snapshot_of
from sgpu_magic.views.pool_tables import status_html, status_text
from sgpu_magic.wire import events as ev
from sgpu_magic.wire.base import FailureKind, RunKind, RunLimit, RunState
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.pool_status import BudgetState, PoolStatus, RunSummary
from sgpu_magic.wire.rank_events import Failure


def test_what_a_run_costs_goes_by_the_views_clock() -> None:
    run = with_price(at=100.0)
    assert [cost_text(run.view, now) for now in (100.0, 100.2, 101.5, 374.2)] == [
        "$0.0013",
        "$0.0013",
        "$0.0027",
        "$0.37",
    ]
    assert cost_text(with_price(simulated=True).view, 374.2) == "$0.37 (simulated)"
    assert billed_text(run.view) == ""
    run.end(gpu_s=1100.0, cost=1100 * 1.2 / 3600, currency="USD")
    assert (cost_text(run.view, 500.0), billed_text(run.view)) == ("", "$0.37 for 0.31 GPU h")


def test_attempts_go_on_with_one_meter() -> None:
    run = with_price(at=100.0, retries=1)
    run.apply(ev.StateChanged(state=RunState.STARTING), ev.RanksStarted(pids=(1,), warm="cold"), at=200.0)
    assert cost_text(run.view, 374.2) == "$0.37"


def test_without_a_price_nothing_is_said_of_short_runs_and_hours_of_long_ones() -> None:
    run = Run(ranks=2).start("a10")
    assert cost_text(run.view, 1e6) == ""
    assert billed_text(run.end(gpu_s=24.0).view) == ""
    assert billed_text(Run(ranks=2).start("a10").end(gpu_s=7200.0).view) == "2.00 GPU h"
    on_cpu = Run(ranks=2).start("cpu").end(gpu_s=24.0, cost=0.5, currency="CHF")
    assert billed_text(on_cpu.view) == "0.50 CHF for 24 CPU s"


def test_a_cell_says_its_part_of_what_its_session_costs() -> None:
    run = cell_in_session()
    lease = Lease(lease_id="l", device_type="a10", ranks=4)
    run.apply(ev.Placed(lease=lease, host="h", hourly=36.0, currency="USD"), at=100.0)
    run.apply(ev.RanksStarted(pids=(1,), warm="session"), ev.StateChanged(state=RunState.RUNNING), at=100.0)
    assert [cost_text(run.view, now) for now in (100.3, 105.0)] == ["", "$0.05 of its session"]
    run.end(running_s=12.0, seconds=12.0)
    assert billed_text(run.view) == "$0.12 of its session"
    assert "· $0.12 of its session ·" in render_text(run.view)


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_no_step_of_the_wall_clock_changes_what_a_run_costs_so_far(
    step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = time.time
    run = with_price(at=true())
    feed = Feed(run.view)
    monkeypatch.setattr(time, "time", lambda: true() + step_s)
    for _ in range(2):
        assert 0.0 < run.view.times.running_s() < 60.0
        assert 0.0 < (run.view.times.metered_s() or 0.0) < 60.0
        assert cost_text(run.view).startswith("$0.0"), "a minute costs $0.08"
        drawn = snapshot_of(run.view, 1, ())
        assert drawn.cost is not None
        assert (drawn.elapsed_s < 60.0, drawn.cost.seconds < 60.0) == (True, True)
        assert re.fullmatch(r"\d+ s left", drawn.meta[0]), "its 90 seconds"
        assert feed.hello(1).snapshot.elapsed_s < 60.0
        # the next attempt starts after the time step
        run.apply(ev.AttemptFailed(attempt=1, attempts=2, failure=Failure(kind=FailureKind.WORKER_DIED, message="")))
        again = (ev.StateChanged(state=RunState.STARTING), ev.RanksStarted(pids=(1, 2, 3, 4), warm="zygote"))
        run.apply(*again, at=time.time())


def test_a_session_that_has_ended_says_what_it_cost() -> None:
    run = with_price(kind=RunKind.SESSION, name="work")
    run.apply(ev.SessionMoved(cells=3))
    run.end(RunState.CANCELLED, seconds=1800, reason="%sgpu_disconnect", gpu_s=7200.0, cost=2.4, currency="USD")
    assert "· 3 cells · 2.00 GPU h · $2.40 · %sgpu_disconnect ·" in summary_line(run.view)
    assert "2.40" in render_html(run.view)


@pytest.mark.parametrize(
    ("limit", "message", "word", "then"),
    [
        (
            RunLimit.COST,
            "its cost limit of $0.02 is reached (--max-cost 0.02): 4 A10 cost $0.02 in 15 s",
            "cost limit reached",
            "when its cost limit was reached:",
        ),
        (
            RunLimit.BUDGET,
            "the pool's budget of $50.00 in 30 d is used up: its runs have cost $50.00",
            "budget used up",
            "when the pool's budget was used up:",
        ),
        (RunLimit.TIME, "reached its 90 s time limit", "timed out", "when its time limit was reached:"),
        (None, "", "timed out", "when its time limit was reached:"),
    ],
)
@pytest.mark.parametrize("kind", [RunKind.CELL, RunKind.SESSION])
def test_a_run_that_a_limit_ended_is_headed_by_that_limit(
    kind: RunKind, limit: RunLimit | None, message: str, word: str, then: str
) -> None:
    run = with_price(kind=kind)
    run.end(RunState.TIMED_OUT, 15.2, Failure(kind=FailureKind.TIMEOUT, message=message), stacks=STUCK, limit=limit)
    text, html, live = render_text(run.view), render_html(run.view), snapshot_of(run.view, 1, ())
    assert f" · {word} after " in text
    assert f"\n{then}\n" in text
    assert f"✕ {word}</b>" in html
    assert then in html
    assert live.state == word
    assert live.failure is not None
    assert then in [line.text for line in live.failure.lines]
    for other in {"cost limit reached", "budget used up", "timed out"} - {word}:
        assert other not in f"{text}{html}{live.state}"


def test_cost_and_mlflow_stand_in_the_static_output() -> None:
    view = FORMS["priced_and_tracked"]().view
    html = render_html(view)
    assert "7 min 29 s</span> · <span>$</span>2.40 for 0.50 GPU h" in html
    assert f'<a href="{TRACKED.url}" target="_blank" rel="noopener noreferrer"' in html
    assert ">MLflow run digits/train_digits</a>" in html
    # without a server, the id for mlflow.get_run is shown
    html = render_html(FORMS["priced_in_a_file_store"]().view)
    assert "<a " not in html
    assert f"MLflow run digits/{IN_A_FILE.mlflow_run_id}" in html
    assert "packages ai-4" in html


@pytest.mark.parametrize(
    "url",
    [
        "javascript:alert(1)",
        "http://",
        "file:///etc/passwd",
        "http://a b/",
        "http://[::1",
        "http://x/\x1b[31m",
        "x" * 9000,
        "",
    ],
)
def test_only_a_page_is_a_link(url: str) -> None:
    view = Run().apply(ev.Tracked(tracked=msgspec.structs.replace(TRACKED, url=url))).start().end().view
    assert tracked_link(view) is None
    assert tracked_text(view) == f"MLflow run digits/{TRACKED.mlflow_run_id}"
    assert "<a " not in render_html(view)


def test_a_link_is_escaped() -> None:
    tracked = msgspec.structs.replace(TRACKED, url='https://m/"><script>', experiment="<b>digits</b>")
    html = render_html(Run().apply(ev.Tracked(tracked=tracked)).start().end().view)
    assert 'href="https://m/&quot;&gt;&lt;script&gt;"' in html
    assert "&lt;b&gt;digits&lt;/b&gt;/train_digits" in html
    assert "<script" not in html


def test_packages_are_told_while_they_are_made() -> None:
    run = Run().apply(ev.StateChanged(state=RunState.PREPARING))
    assert packages_text(run.view) == ""
    run.apply(ev.EnvironmentMoved(host="n2", step="resolving"))
    assert packages_text(run.view) == "packages: resolving · 0 ms · n2"
    run.apply(ev.EnvironmentMoved(host="n2", step="downloading", done=0, packages=1, seconds=3.25))
    assert packages_text(run.view) == "packages: downloading, 0 of 1 · 3.2 s · n2"
    run.apply(ev.EnvironmentMoved(host="n2", packages=1, seconds=4.0, ready=True, built=True))
    assert packages_text(run.view) == "packages: ready after 4.0 s"
    run.start()
    assert packages_text(run.view) == ""
    there = Run().apply(ev.StateChanged(state=RunState.PREPARING), ev.EnvironmentMoved(host="n2", ready=True))
    assert packages_text(there.view) == ""


def test_the_record_has_cost_packages_and_mlflow() -> None:
    record = run_record(FORMS["priced_and_tracked"]().view)
    assert record["gpu_s"] == 1800.0
    assert record["cost"] == {"amount": 2.4, "currency": "USD"}
    assert record["mlflow"] == {
        "run_id": TRACKED.mlflow_run_id, "experiment_id": "7", "experiment": "digits", "uri": TRACKED.uri,
        "url": TRACKED.url,
    }  # fmt: skip
    assert "environment" not in record
    run = Run(environment="d1", environment_label="ai-4")
    run.apply(ev.EnvironmentMoved(host="n", packages=80, seconds=12.25, ready=True, built=True))
    environment = {"digest": "d1", "label": "ai-4", "built": True, "seconds": 12.25, "packages": 80}
    assert run_record(run.start().end().view)["environment"] == environment
    plain = run_record(Run().start().end(results=(result(0, 1),)).view)
    assert plain.keys().isdisjoint({"gpu_s", "cost", "mlflow", "environment"})


# ---------------------------------------------------------------- lists of runs


def a_row(run_id: str, state: RunState = RunState.RUNNING, **fields: object) -> RunSummary:
    return run_summary(run_id=run_id, ranks=4, state=state, started_at=10.0, **fields)


ROWS = (
    a_row("7f3a0000", metered_at=10.0, hourly=4.8, currency="USD"),
    a_row(
        "7f400000", RunState.FAILED, ended_at=30.0, metered_at=9.0, hourly=4.8, currency="USD", cost=0.0213, gpu_s=64.0
    ),
    a_row("7f410000", RunState.SUCCEEDED, ended_at=30.0),
)


def a_status(rows: tuple[RunSummary, ...] = ROWS, budget: BudgetState | None = None) -> PoolStatus:
    return pool_status(*rows, budget=budget)


def test_the_status_shows_what_runs_cost_by_its_own_clock() -> None:
    lines = status_text(a_status(), now=283.2).splitlines()
    head, live, ended, free = lines[-4:]
    assert head.split() == ["run", "name", "ranks", "state", "duration", "cost"]
    at = head.index("cost") + 4
    assert [line[:at].rsplit(maxsplit=1)[-1] for line in (live, ended)] == ["$0.37", "$0.021"]
    assert len(free) < at
    assert "<td" in status_html(a_status(), now=283.2)
    assert "><span>$</span>0.37</td>" in status_html(a_status(), now=283.2)
    # without prices there is no cost column
    assert "cost" not in status_text(a_status(ROWS[2:]), now=283.2)
    assert "cost" not in status_html(a_status(ROWS[2:]), now=283.2)


def test_the_status_says_what_is_used_of_a_budget() -> None:
    budget = BudgetState(limit=50.0, days=30.0, spent=12.4, currency="USD")
    assert "budget: $12.40 of $50.00 in 30 d" in status_text(a_status(budget=budget)).splitlines()
    assert "color:var(--jp-warn" not in status_html(a_status(budget=budget))
    nearly = msgspec.structs.replace(budget, spent=41.0)
    assert "var(--jp-warn" in status_html(a_status(budget=nearly))
    assert status_text(a_status(budget=nearly)).count("budget: $41.00 of $50.00 in 30 d") == 1


def test_the_list_of_runs_has_costs_where_there_are_any() -> None:
    head, live, ended, free = runs_table(ROWS, 283.2).splitlines()
    assert "cost" in head
    assert live.endswith("$0.37")
    assert ended.endswith("$0.021")
    assert not free.endswith("$")
    assert "cost" not in runs_table(ROWS[2:], 283.2)


def test_sums_of_money_are_no_mathematics() -> None:
    """JupyterLab would typeset `$0.02 is reached ...: it has cost $` as a formula."""
    htmls = [
        render_html(FORMS["too_dear"]().view),
        status_html(a_status(budget=BudgetState(limit=50.0, days=30.0, spent=12.4, currency="USD")), now=283.2),
    ]
    for html in htmls:
        # preformatted text is not typeset
        html = re.sub(r"<pre.*?</pre>", "", html, flags=re.S)
        texts = re.split(r"<[^>]*>", html)
        assert "$" in texts
        assert not [text for text in texts if text.count("$") and text != "$"]
