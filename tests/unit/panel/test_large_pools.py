"""The panel and lists for pools with many nodes and users: types and nodes in few lines, and each run's user."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from simulated_cluster import cluster
from status_rows import pool_status, run_summary

from sgpu_magic.config import Settings
from sgpu_magic.panel.device_rows import Durations
from sgpu_magic.panel.pool_state import pool_snapshot, rates_of
from sgpu_magic.views.pool_tables import status_html, status_text
from sgpu_magic.views.units import TIMES
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.devices import Inventory
from sgpu_magic.wire.pool_status import PoolStatus, RunSummary


def run(run_id: str, uuids: Sequence[str], user: str = "alice", kernel: str = "", **more: object) -> RunSummary:
    row = run_summary(
        run_id=run_id,
        ranks=max(1, len(uuids)),
        device_type="h100",
        submitted_at=100.0,
        started_at=110.0,
        uuids=tuple(uuids),
        user=user,
        kernel=kernel,
    )
    return msgspec.structs.replace(row, **more)


def status(inventory: Inventory, *runs: RunSummary) -> PoolStatus:
    return pool_status(*runs, pool="team", inventory=inventory, cpu_slots_free=inventory.cpu_slots, clients=2)


def devices(node: str, *indexes: int) -> list[str]:
    return [f"GPU-{node}-{index}" for index in indexes]


def test_types_and_nodes_have_a_line_each() -> None:
    inventory = cluster({"n1": ("h100", 8), "n2": ("h100", 8), "n3": ("a10", 2)}, elastic=[("h100", 32), ("l4", 8)])
    shown = status(inventory, run("aaaa0000", [*devices("n1", 0, 1, 2, 3, 4), *devices("n2", 0)]))
    assert status_text(shown, now=144.0).splitlines() == [
        "team · 16 H100, 2 A10 · 3 cores for 12 CPU ranks · team · 3 nodes",
        "h100: 10 of 16 free on 2 nodes, largest free node 7, up to 32 with those that the cluster may add",
        "a10: 2 of 2 free on 1 node",
        "l4: none available now, up to 8 with those that the cluster may add",
        "",
        "node      devices   free   use   runs",
        "host-n1   8 H100       3     -   aaaa has 5",
        "host-n2   8 H100       7     -   aaaa has 1",
        "host-n3   2 A10        2     -",
        "",
        "run    name    ranks      state     duration",
        f"aaaa   train   6 {TIMES} H100   running       34 s",
    ]


def test_ten_thousand_devices_are_few_lines() -> None:
    inventory = cluster({f"n{number:04d}": ("h100", 8) for number in range(1250)})
    shown = status(inventory, run("aaaa0000", devices("n0000", *range(8))))
    lines = status_text(shown, now=144.0).splitlines()
    assert "h100: 9,992 of 10,000 free on 1,250 nodes, largest free node 8" in lines
    assert "and 1,234 more nodes             9,864" in lines
    assert len(lines) < 30
    assert len(status_html(shown, now=144.0)) < 20_000


def test_whose_runs_these_are_is_told_where_there_are_several() -> None:
    inventory = cluster({"n1": ("h100", 8)})
    waits = run(
        "bbbb0000", [], "bob", state=RunState.QUEUED, started_at=None, position=1, waiting_for="needs 8 H100", ranks=8
    )
    text = status_text(status(inventory, run("aaaa0000", devices("n1", 0)), waits), now=144.0)
    assert "waiting: bob's train, 8 ranks, needs 8 H100, position 1" in text
    assert "run    name    user    ranks      state     duration" in text
    assert f"bbbb   train   bob     8 {TIMES} H100   queued        44 s" in text
    alone = status_text(status(inventory, run("aaaa0000", devices("n1", 0), "bob"), waits), now=144.0)
    assert "user" not in alone
    assert "waiting: train, 8 ranks, needs 8 H100, position 1" in alone


def test_a_long_queue_and_many_runs_are_cut() -> None:
    inventory = cluster({"n1": ("h100", 8)})
    waits = [
        run(f"b{number:07d}", [], state=RunState.QUEUED, started_at=None, position=number + 1) for number in range(500)
    ]
    lines = status_text(status(inventory, *waits), now=144.0).splitlines()
    assert len([line for line in lines if line.startswith("waiting: train")]) == 20
    assert "waiting: 480 more runs" in lines
    assert "and 440 more runs" in lines[-1]


@pytest.mark.parametrize("nodes", [4, 1250])
def test_the_panel_draws_each_device_of_a_small_pool_and_the_nodes_of_a_large_one(nodes: int) -> None:
    inventory = cluster({f"n{number}": ("h100", 8) for number in range(nodes)})
    session = run("aaaa0000", devices("n0", 0, 1), kernel="k1")
    snapshot = pool_snapshot(status(inventory, session), rates_of(Settings()), 144.0, durations=Durations([]))
    drawn = [(one.label, one.user, one.free) for one in snapshot.devices]
    if nodes == 4:
        assert len(drawn) == 32
        assert drawn[:3] == [
            ("H100 · 0 · host-n0", "train · rank 0", False),
            ("H100 · 1 · host-n0", "train · rank 1", False),
            ("H100 · 2 · host-n0", "free", True),
        ]
    else:
        # a notebook's own devices are always listed
        assert [one.kernel for one in snapshot.devices[:2]] == ["k1", "k1"]
        assert drawn[2] == ("host-n1 · 8 H100", "8 of 8 free", True)
        assert len(drawn) == 2 + 32
    assert (snapshot.types[0].total, snapshot.types[0].free) == (8 * nodes, 8 * nodes - 2)
