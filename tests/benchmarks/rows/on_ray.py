"""A Ray cluster: an all_reduce of four ranks by this package, by plain actors, and by `TorchTrainer`."""

from __future__ import annotations

import sys
import time
from importlib.metadata import version

from tests.benchmarks.environment import ROOT, SCRIPTS, Bench
from tests.benchmarks.measure import Check, MeasurementFailed, Row, Series, collect
from tests.benchmarks.processes import run_script

sys.path.append(str(ROOT / "tests" / "support"))

from pool_client import PoolClient
from ray_clusters import FakeCluster, ray_pool

ALL_REDUCE = "import torch, torch.distributed as dist\none = torch.ones(1)\ndist.all_reduce(one)\none.item()"


def all_reduce(bench: Bench) -> Row:
    row = Row("all_reduce of 4 ranks on a Ray cluster, fresh ranks each time, value back")
    row.notes.append(
        f"Ray {version('ray')}. One fake node with four GPUs that do not exist, everything on this machine. "
        "Ours: from the submit at the pool to the value, a placement group and fresh processes each time, its agent "
        "there already. Plain Ray: four new actors with one GPU each, `init_process_group`, all_reduce, the values, "
        "the actors killed; a process that is connected already. TorchTrainer: `fit()` of the same on CPUs, for its "
        "workers ask torch for the GPUs that Ray counts. No notebook in any of them."
    )
    cluster = FakeCluster((4,), cpus=8)
    try:
        with row.attempt(), ray_pool(cluster.address, ray_agent_idle_s="60") as pool:
            client = PoolClient(pool.home)
            try:
                _ours(client)
                row.ours = [collect("ours", lambda: _ours(client), bench.count(20, 3), pause_s=0.3)]
            finally:
                client.close()
        for label, way in (("plain Ray actors + torch.distributed", "actors"), ("Ray TorchTrainer", "trainer")):
            row.peers.append(_peer(bench, cluster.address, label, way))
    finally:
        cluster.close()
    ours, actors = row.series(0), row.peers[0]
    if ours.values and actors.values:
        row.checks = [
            Check("faster than plain actors", f"{actors.median / ours.median:.1f} times", ours.median < actors.median)
        ]
    return row


def _ours(client: PoolClient) -> float:
    began = time.perf_counter()
    values = client.begin(ALL_REDUCE, ranks=4, device_type="a10").values
    seconds = time.perf_counter() - began
    if values != [4.0] * 4:
        raise MeasurementFailed(f"wrong sums: {values!r}")
    return seconds


def _peer(bench: Bench, address: str, label: str, way: str) -> Series:
    # with the Python that has the cluster's version of Ray; `Bench.script` would also end the cluster
    command = [bench.python, SCRIPTS / "ray_all_reduce.py", address, way, str(bench.count(7, 2))]
    try:
        found = run_script(command, timeout_s=300, environment=bench.environment(bench.new_folder()))
    except MeasurementFailed as reason:
        return Series(label, (), failures=(str(reason),))
    return Series(label, tuple(float(value) for value in found["seconds"]))  # type: ignore[union-attr]
