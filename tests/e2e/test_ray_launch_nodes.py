"""`@ray_launch` on several nodes: one cluster over all of the run's, each at its own address, and none of it stays."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from homes import Home
from many_agents import ManyAgents
from pool_client import FollowedRun, PoolClient
from process_table import listening
from ray_clusters import FakeCluster, RayPool
from ray_traces import check_gone, directories, ray_processes
from tracking_writers import Runs
from waiting import eventually

from sgpu_magic.client.run import Attachments
from sgpu_magic.files.tracking_progress import load_progress
from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.events import AttemptFailed, Noted, RunEnded
from sgpu_magic.wire.tracking import Tracking

VARIABLES = {"SGPU_SIMULATE": "a10:2", "SGPU_STAND_IN": "cpu", "SGPU_RAY_DASHBOARD": "false", "SGPU_TRACK": "all"}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PATIENCE_S = 240.0

WHERE = """
import ray
from pathlib import Path
ray.init()
@ray.remote(num_gpus=1)
class Holder:
    def where(self):
        print("held here")
        return ray.util.get_node_ip_address()
holders = [Holder.remote() for _ in range(4)]
where = sorted(ray.get([holder.where.remote() for holder in holders]))
Path(GO + "-up").touch()
import time
while not Path(GO).exists(): time.sleep(0.05)
[where, ray.cluster_resources()["GPU"], len(ray.nodes())]
"""


@pytest.fixture
def pool() -> Iterator[ManyAgents]:
    home = Home(VARIABLES)
    pool = ManyAgents(home, 2)
    yield pool
    pool.close()
    home.close()


@pytest.fixture
def client(pool: ManyAgents) -> Iterator[PoolClient]:
    client = PoolClient(pool.home)
    yield client
    client.close()


def test_the_head_is_at_rank_0s_node_and_the_other_joins(pool: ManyAgents, client: PoolClient):
    go = pool.home.path / "go"
    along = Attachments(tracking=Tracking(experiment="nb"))
    names = {"GO": str(go)}
    run = client.begin(WHERE, ranks=4, device_type="a10", names=names, ray=True, along=along, tracked=True)
    _wait_for_file(run, pool.home, f"{go}-up")
    ports = listening(ray_processes(pool.home))
    assert ports
    store = Runs(f"sqlite:///{pool.home.state}/mlflow/mlflow.db")
    # Ray updates its figures every ten seconds: one actor with a GPU for each of the node's ranks
    expected = {"gpus_in_use": [2, 2], "actors": [2, 2]}
    eventually(lambda: _most_told(store, run.run_id) == expected, 90, lambda: f"{_most_told(store, run.run_id)}")
    go.touch()
    ended = _ended(run)
    assert ended.state is RunState.SUCCEEDED, (ended, run.printed)
    where, gpus, nodes = run.values[0]
    assert (where, gpus, nodes) == (["127.0.0.1"] * 2 + ["127.0.0.2"] * 2, 4.0, 2)
    # the other ranks have run nothing, and the other node's lines are all there
    assert set(run.printed) == {0}
    assert run.printed[0].count("held here") == 4, run.printed
    assert any("runs on 2 nodes for this run alone" in _text(event) for event in run.events)
    check_gone(pool.home, ports)
    _check_metrics(pool.home, run.run_id)


def _most_told(store: Runs, run_id: str) -> dict[str, list[float]]:
    """The highest that each node has told."""
    (found,) = store.of(run_id) or [None]
    if found is None:
        return {}

    def most(node: int, name: str) -> float:
        history = store.history(found.info.run_id, f"system/node{node}/ray_{name}")
        return max((value for _, value in history), default=0.0)

    return {name: [most(node, name) for node in (0, 1)] for name in ("gpus_in_use", "actors")}


def _check_metrics(home: Home, run_id: str) -> None:
    """Each node's numbers are in the MLflow run."""
    store = Runs(f"sqlite:///{home.state}/mlflow/mlflow.db")

    def complete() -> bool:
        found = load_progress(home.run_dir(run_id))
        return found is not None and found.complete

    eventually(complete, 60, "the MLflow run is not complete")
    metrics = store.one(run_id).data.metrics
    for node in (0, 1):
        prefix = f"system/node{node}/ray_"
        found = {key.removeprefix(prefix) for key in metrics if key.startswith(prefix)}
        assert {"cpu_utilization_percentage", "memory_usage_megabytes", "object_store_megabytes", "actors"} <= found


def test_a_node_that_is_lost_ends_the_run_and_its_cluster(pool: ManyAgents, client: PoolClient):
    go = pool.home.path / "go"
    run = client.begin(WHERE, ranks=4, device_type="a10", names={"GO": str(go)}, ray=True)
    _wait_for_file(run, pool.home, f"{go}-up")
    os.kill(pool.agent_pid(1), signal.SIGKILL)
    ended = _ended(run)
    assert ended.state is RunState.FAILED, ended
    failures = [event for event in run.events if isinstance(event, AttemptFailed | RunEnded)]
    assert any(getattr(event.failure, "kind", None) is FailureKind.NODE_LOST for event in failures if event.failure), (
        failures
    )
    # files on the lost node's own disk are removed by its next agent
    eventually(lambda: not ray_processes(pool.home), 20, lambda: f"{ray_processes(pool.home)}")


@pytest.mark.slow
def test_in_a_pool_on_ray_the_outer_cluster_is_another_one():
    cluster = FakeCluster((2,))
    try:
        pool = RayPool(cluster.address, {"SGPU_RAY_DASHBOARD": "false"})
        try:
            client = pool.client()
            try:
                body = (
                    "import os, ray\nray.init(namespace='sgpu-outer')\n"
                    "@ray.remote(num_gpus=1)\ndef one(): return 1\n"
                    "[os.environ['RAY_ADDRESS'], len(ray.nodes()), ray.get([one.remote(), one.remote()]),\n"
                    " ray.cluster_resources()['GPU'], len(ray.util.list_named_actors(all_namespaces=True))]"
                )
                run = client.begin(body, ranks=2, device_type="a10", ray=True)
                eventually(lambda: _has_ended(run), PATIENCE_S, lambda: f"{run.events} {run.printed}")
                assert _ended(run).state is RunState.SUCCEEDED, (run.events[-1], run.printed)
                address, nodes, ones, gpus, actors = run.values[0]
                assert address != cluster.address
                assert (nodes, ones, gpus, actors) == (1, [1, 1], 2.0, 0)
                eventually(lambda: not directories(pool.home), 20, lambda: f"{directories(pool.home)}")
                # the pool's own cluster continues: the next run is placed there
                assert client.begin("1", ranks=1, device_type="a10").ended().state is RunState.SUCCEEDED
            finally:
                client.close()
        finally:
            pool.close()
        assert cluster.left(pool.name) == {}
    finally:
        cluster.close()


def _has_ended(run: FollowedRun) -> bool:
    item = run.run.next_event(0.05)
    if item is not None:
        run.events.append(item[0].body)
        if isinstance(item[0].body, RunEnded):
            run._frames = item[1]
    return any(isinstance(event, RunEnded) for event in run.events)


def _wait_for_file(run: FollowedRun, home: Home, path: str) -> None:
    def there() -> bool:
        assert not _has_ended(run), (run.events[-1].failure, run.printed)
        return os.path.exists(path)

    eventually(there, PATIENCE_S, lambda: f"{run.events} {run.printed} {ray_processes(home)}")


def _ended(run: FollowedRun) -> RunEnded:
    return run.wait_for(RunEnded)


def _text(event: object) -> str:
    return str(getattr(event, "text", "")) if isinstance(event, Noted) else str(event)
