"""The Ray engine on a real Ray cluster of fake nodes: leases, agents, failures, and nothing that stays."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool_client import PoolClient
from process_table import process_table
from ray_clusters import FakeCluster, RayPool
from waiting import eventually

from sgpu_magic.protocol.events import AttemptFailed, Placed, RanksStarted
from sgpu_magic.protocol.states import FailureKind, RunState

ALL_REDUCE = """
import os, torch, torch.distributed as dist
t = torch.ones(1) * (int(os.environ["RANK"]) + 1)
dist.all_reduce(t)
print("sum", int(t), os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"], os.environ["WORLD_SIZE"])
int(t)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    cluster = FakeCluster((2, 2))
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def pool(cluster: FakeCluster) -> Iterator[RayPool]:
    pool = RayPool(cluster.address)
    try:
        yield pool
    finally:
        pool.close()
        assert cluster.left() == {}


@pytest.fixture
def client(pool: RayPool) -> Iterator[PoolClient]:
    client = PoolClient(pool.home)
    try:
        yield client
    finally:
        client.close()


def test_a_run_on_one_node(client: PoolClient, pool: RayPool):
    run = client.begin(ALL_REDUCE, ranks=2, device_type="a10")
    ended = run.ended()
    assert ended.state is RunState.SUCCEEDED, ended
    assert run.values == [3, 3]
    (placed,) = [event for event in run.events if isinstance(event, Placed)]
    assert placed.lease.device_type == "a10"
    assert len(placed.lease.shares) == 1


def test_a_run_on_two_nodes(client: PoolClient, pool: RayPool):
    run = client.begin(ALL_REDUCE, ranks=4, device_type="a10")
    ended = run.ended()
    assert ended.state is RunState.SUCCEEDED, ended
    assert run.values == [10, 10, 10, 10]


def test_the_agents_leave_when_they_are_idle(client: PoolClient, pool: RayPool, cluster: FakeCluster):
    assert client.begin("1", ranks=1, device_type="a10").ended().state is RunState.SUCCEEDED
    eventually(lambda: not pool.home.agent_pids(), 15, "an agent stays although nobody needs it")
    assert cluster.left() == {}
    # and comes again
    assert client.begin("1", ranks=1, device_type="a10").ended().state is RunState.SUCCEEDED


def test_a_run_on_cpus(client: PoolClient):
    run = client.begin(ALL_REDUCE, ranks=3, device_type="cpu")
    assert run.ended().state is RunState.SUCCEEDED
    assert run.values == [6, 6, 6]


def test_a_dead_agent_is_named(client: PoolClient, pool: RayPool):
    run = client.begin("import time; time.sleep(600)", ranks=4, device_type="a10")
    run.wait_for(RanksStarted)
    (first, _) = pool.home.agent_pids()
    os.kill(first, signal.SIGKILL)
    ended = run.ended()
    assert ended.state is RunState.FAILED
    assert ended.failure is not None
    assert ended.failure.kind is FailureKind.NODE_LOST
    assert "SIGKILL" in ended.failure.message
    eventually(lambda: not pool.home.rank_pids(), 10, "ranks of a lost run go on")


def test_a_dead_actor_ends_its_ranks(client: PoolClient, pool: RayPool):
    run = client.begin("import time; time.sleep(600)", ranks=2, device_type="a10")
    run.wait_for(RanksStarted)
    (agent,) = pool.home.agent_pids()
    actor = process_table()[agent].parent
    began = time.monotonic()
    os.kill(actor, signal.SIGKILL)
    ended = run.ended()
    assert ended.failure is not None
    assert ended.failure.kind is FailureKind.NODE_LOST
    assert time.monotonic() - began < 6
    eventually(lambda: not pool.home.rank_pids(), 10, "ranks outlive their actor")


def test_a_killed_service_finds_its_runs_again(client: PoolClient, pool: RayPool):
    body = "import time, os, pathlib\nwhile not pathlib.Path('go').exists(): time.sleep(0.05)\nprint('on'); 7"
    run = client.begin(body, ranks=4, device_type="a10")
    run.wait_for(RanksStarted)
    ranks = pool.home.rank_pids()
    pool.kill()
    pool.start()
    client.find_again(run.run)
    for pid in ranks:
        (Path("/proc") / str(pid) / "cwd" / "go").touch()
    assert run.ended().state is RunState.SUCCEEDED
    assert run.values == [7] * 4


def test_nobody_comes(cluster: FakeCluster):
    pool = RayPool(cluster.address, {"SGPU_ADOPT_TIMEOUT_S": "3"})
    client = PoolClient(pool.home)
    try:
        run = client.begin("import time; time.sleep(600)", ranks=4, device_type="a10")
        run.wait_for(RanksStarted)
        pool.kill()
        eventually(lambda: not pool.home.agent_pids() and not pool.home.rank_pids(), 30, "ranks that nobody wants go on")
        eventually(lambda: cluster.left() == {}, 30, lambda: f"left in the cluster: {cluster.left()}", poll_s=1.0)
    finally:
        client.close()
        pool.close()


def test_a_killed_node_is_named_and_the_run_goes_elsewhere(pool: RayPool, client: PoolClient, cluster: FakeCluster):
    body = """
import os, pathlib, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(600)
int(os.environ["RANK"])
"""
    run = client.begin(body, ranks=2, device_type="a10", retries=1)
    placed = run.wait_for(Placed)
    run.wait_for(RanksStarted)
    (share,) = placed.lease.shares
    began = time.monotonic()
    (node,) = [node for node in cluster.nodes if node.node_id == share.node]
    cluster.kill(node)
    failed = run.wait_for(AttemptFailed)
    assert time.monotonic() - began < 6
    assert failed.failure.kind is FailureKind.NODE_LOST
    ended = run.ended()
    cluster.add(2)
    assert ended.state is RunState.SUCCEEDED, ended
    again = run.wait_for(Placed, 2)
    assert again.lease.shares[0].node != share.node
