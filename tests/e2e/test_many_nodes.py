"""Runs whose ranks are on several nodes: lost nodes, nodes that come back, and what only such runs have."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from homes import Home
from many_agents import ManyAgents
from pool_client import FollowedRun, PoolClient
from process_table import is_alive
from waiting import eventually

from sgpu_magic.client.run import Attachments
from sgpu_magic.errors import SessionError
from sgpu_magic.wire.base import FailureKind, RunKind, RunState
from sgpu_magic.wire.events import AttemptFailed, Placed, QueueMoved, RanksStarted, Tracked
from sgpu_magic.wire.rank_events import OutputWritten, Sampled, Stalled
from sgpu_magic.wire.tracking import Tracking

RANKS = 4
WAIT = "import threading\nprint('here', flush=True)\nthreading.Event().wait()"


class Cluster:
    """Three nodes of two slots each, and a client."""

    def __init__(self) -> None:
        self.home = Home({"SGPU_CPU_SLOTS": "2", "SGPU_STALL_S": "1"})
        self.service = ManyAgents(self.home, 3)
        self.client = PoolClient(self.home)
        self.client.begin("pass", ranks=6).ended()

    def begin(self, body: str = "", ranks: int = RANKS, **fields: Any) -> FollowedRun:
        return self.client.begin(body, ranks=ranks, **fields)

    def restore_nodes(self) -> None:
        """Every node is there again."""
        for node in range(3):
            try:
                alive = is_alive(self.service.agent_pid(node))
            except KeyError:
                alive = False
            if not alive:
                self.service.order("bring", node)

        self.wait_for_nodes()

    def wait_for_nodes(self) -> None:
        def whole() -> bool:
            status = self.client.pool.status()
            return status is not None and len(status.inventory.nodes) == 3

        eventually(whole, 20, "not all nodes are there again")

    def close(self) -> None:
        self.client.close()
        self.service.close()
        self.home.close()


@pytest.fixture(scope="module")
def one_cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(one_cluster: Cluster) -> Iterator[Cluster]:
    yield one_cluster
    one_cluster.restore_nodes()
    one_cluster.home.check_leaks()


def nodes_of(run: FollowedRun) -> list[int]:
    """The numbers of the nodes that its lease is on, of the newest."""
    placed = [event for event in run.events if isinstance(event, Placed)]
    return [int(share.node[-1]) for share in placed[-1].lease.shares]


def queue_moves(run: FollowedRun) -> int:
    """How often it was told its place so far: once before it began where another run's ranks were still leaving."""
    return sum(isinstance(event, QueueMoved) for event in run.events)


def pids_of(run: FollowedRun) -> tuple[int, ...]:
    started = [event for event in run.events if isinstance(event, RanksStarted)]
    return started[-1].pids


# ---------------------------------------------------------------- lost nodes


def test_a_dead_node_is_named_within_5_s_and_the_ranks_on_others_end(cluster: Cluster):
    run = cluster.begin(WAIT)
    run.wait_for(OutputWritten, RANKS)
    first, second = nodes_of(run)
    cluster.service.kill_agent(second)
    began = time.monotonic()
    ended = run.ended()
    assert time.monotonic() - began < 5
    assert ended.state is RunState.FAILED
    assert ended.failure is not None
    assert (ended.failure.kind, ended.failure.host) == (FailureKind.NODE_LOST, f"node-{second}")
    assert f"node-{second}" in ended.failure.message
    eventually(lambda: not any(is_alive(pid) for pid in pids_of(run)), 5, "ranks are left")
    again = cluster.begin("rank", ranks=2)
    assert again.values == [0, 1]
    assert first != second


@pytest.mark.slow
def test_a_run_with_retries_is_placed_elsewhere(cluster: Cluster, tmp_path: Path):
    name = tmp_path / "again"
    run = cluster.begin(
        "import os, pathlib, torch, torch.distributed as dist\n"
        "print('here', flush=True)\n"
        f"if not pathlib.Path({str(name)!r}).exists():\n    import threading; threading.Event().wait()\n"
        "one = torch.ones(1)\ndist.all_reduce(one)\n(one.item(), os.environ['TORCHELASTIC_RESTART_COUNT'], data)",
        retries=1,
        names={"data": b"x" * 1000},
    )
    run.wait_for(OutputWritten, RANKS)
    before = nodes_of(run)
    name.touch()
    cluster.service.kill_agent(before[1])
    assert run.values == [(RANKS, "1", b"x" * 1000)] * RANKS
    after = nodes_of(run)
    assert before[1] not in after
    assert len(set(after)) == 2
    (failed,) = [event for event in run.events if isinstance(event, AttemptFailed)]
    assert (failed.failure.kind, failed.failure.host) == (FailureKind.NODE_LOST, f"node-{before[1]}")
    assert run.ended().failure is None


@pytest.mark.slow
def test_a_run_that_has_no_other_node_waits_for_one_and_says_why(cluster: Cluster, tmp_path: Path):
    name = tmp_path / "again"
    run = cluster.begin(
        "import pathlib\nprint('here', flush=True)\n"
        f"if not pathlib.Path({str(name)!r}).exists():\n    import threading; threading.Event().wait()\nrank",
        ranks=6,
        retries=1,
    )
    run.wait_for(OutputWritten, 6)
    name.touch()
    before = queue_moves(run)
    cluster.service.kill_agent(1)
    waits = run.wait_for(QueueMoved, before + 1)
    assert waits.reason
    cluster.service.order("bring", 1)
    assert run.values == list(range(6))


@pytest.mark.slow
def test_a_run_that_waits_for_another_node_can_be_cancelled(cluster: Cluster):
    run = cluster.begin(WAIT, ranks=6, retries=1)
    run.wait_for(OutputWritten, 6)
    before = queue_moves(run)
    cluster.service.kill_agent(2)
    run.wait_for(QueueMoved, before + 1)
    run.run.cancel("the test")
    assert run.ended().state is RunState.CANCELLED


# ---------------------------------------------------------------- links


def test_a_link_that_breaks_costs_nothing(cluster: Cluster, tmp_path: Path):
    go = tmp_path / "go"
    run = cluster.begin(
        "import os, time\nprint('before', flush=True)\n"
        f"while not os.path.exists({str(go)!r}):\n    time.sleep(0.02)\nprint('after')\nrank"
    )
    run.wait_for(OutputWritten, RANKS)
    pids = pids_of(run)
    node = nodes_of(run)[1]
    cluster.service.order("cut", node)
    go.touch()
    cluster.service.order("bring", node)
    assert run.values == list(range(RANKS))
    assert run.printed == dict.fromkeys(range(RANKS), "before\nafter\n")
    assert pids_of(run) == pids


@pytest.mark.slow
def test_a_launch_that_was_lost_with_a_link_is_ordered_again(cluster: Cluster):
    cluster.service.order("cut", 1)
    run = cluster.begin("rank", ranks=6)
    run.wait_for(Placed)
    cluster.service.order("bring", 1)
    assert run.values == list(range(6))


@pytest.mark.slow
def test_a_cancel_reaches_a_node_that_was_away(cluster: Cluster):
    run = cluster.begin(WAIT, ranks=6)
    run.wait_for(OutputWritten, 6)
    cluster.service.order("cut", 0)
    run.run.cancel("the test")
    cluster.service.order("bring", 0)
    ended = run.ended()
    assert (ended.state, ended.reason) == (RunState.CANCELLED, "the test")


@pytest.mark.slow
def test_a_node_that_was_given_up_and_comes_back_is_cleaned_before_it_is_used(cluster: Cluster):
    run = cluster.begin(WAIT)
    run.wait_for(OutputWritten, RANKS)
    node = nodes_of(run)[1]
    pids = pids_of(run)
    cluster.service.order("lose", node)
    failure = run.ended().failure
    assert failure is not None
    assert failure.kind is FailureKind.NODE_LOST
    eventually(lambda: not any(is_alive(pid) for pid in pids[:2]), 5, "ranks of the node that is there are left")
    assert all(is_alive(pid) for pid in pids[2:])
    cluster.service.order("bring", node)
    eventually(lambda: not any(is_alive(pid) for pid in pids), 5, "ranks of the node that came back are left")
    cluster.wait_for_nodes()
    assert cluster.begin("rank", ranks=6).values == list(range(6))


# ---------------------------------------------------------------- the service


@pytest.mark.slow
def test_a_node_that_is_missing_after_the_services_death_is_lost(cluster: Cluster):
    run = cluster.begin(WAIT)
    run.wait_for(OutputWritten, RANKS)
    node = nodes_of(run)[0]
    cluster.service.kill()
    cluster.service.kill_agent(node)
    cluster.service.restart()
    ended = run.ended()
    assert ended.failure is not None
    assert (ended.failure.kind, ended.failure.host) == (FailureKind.NODE_LOST, f"node-{node}")
    eventually(lambda: not any(is_alive(pid) for pid in pids_of(run)), 5, "ranks are left")


# ---------------------------------------------------------------- what is told


def test_a_session_of_several_nodes_is_refused_with_the_way_out(cluster: Cluster):
    with pytest.raises(SessionError, match="without a session") as refused:
        cluster.begin(kind=RunKind.SESSION, name="work")
    assert "\n" not in str(refused.value)
    session = cluster.client.connect(2)
    assert session.do("x = rank").ended().state is RunState.SUCCEEDED
    assert session.do("x").values == [0, 1]
    session.end()


@pytest.mark.slow
def test_samples_are_of_the_ranks_of_all_nodes(cluster: Cluster):
    run = cluster.begin(WAIT)
    run.wait_for(Sampled)

    def sampled() -> set[int]:
        return {sample.rank for event in run.events if isinstance(event, Sampled) for sample in event.samples}

    while sampled() != set(range(RANKS)):
        run.wait_for(Sampled, _count(run) + 1)
    run.run.cancel("the test")
    assert run.ended().state is RunState.CANCELLED


def _count(run: FollowedRun) -> int:
    return len([event for event in run.events if isinstance(event, Sampled)])


def test_a_run_stalls_only_where_all_its_nodes_do(cluster: Cluster):
    run = cluster.begin(
        "import torch.distributed as dist\nprint('here', flush=True)\nif rank != 3:\n    dist.barrier()\n"
        "import threading\nthreading.Event().wait()"
    )
    stalled = run.wait_for(Stalled)
    assert [stack.rank for stack in stalled.stacks] == list(range(RANKS))
    run.run.cancel("the test")
    run.ended()


@pytest.mark.slow
def test_ranks_of_all_nodes_log_to_one_mlflow_run(cluster: Cluster, tmp_path: Path):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    run = cluster.begin(
        "import mlflow\nmlflow.log_metric(f'own_{rank}', rank)\nmlflow.active_run().info.run_id",
        along=Attachments(tracking=Tracking(uri=uri, experiment="nodes")),
        tracked=True,
    )
    ids = set(run.values)
    assert len(ids) == 1
    assert run.wait_for(Tracked).tracked.mlflow_run_id in ids
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:

        def logged() -> bool:
            rows = database.execute("SELECT key, run_uuid FROM metrics WHERE key LIKE 'own_%'").fetchall()
            return {key for key, _ in rows} == {f"own_{rank}" for rank in range(RANKS)} and {
                own for _, own in rows
            } == ids

        eventually(logged, 20, "the metrics of some rank are missing")
