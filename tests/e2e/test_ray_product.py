"""The whole way: a notebook, a pool served near a Ray cluster, and ranks that have the notebook's packages."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from ray_clusters import FakeCluster
from served_pools import ServedPool
from two_machines import two_machines
from waiting import eventually

from sgpu_magic.client.pools_file import add_pool
from sgpu_magic.system.secure_sockets import new_key_pair, write_key_pair

pytestmark = [pytest.mark.needs_root, pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_notebooks_cell_runs_on_a_ray_cluster_with_its_packages_and_variables(tmp_path: Path):
    if os.getuid() or shutil.which("ip") is None:
        pytest.skip("needs root and ip(8): its notebook is on a machine of its own")
    cluster = FakeCluster((1, 1))
    settings = {
        "SGPU_RAY_ADDRESS": cluster.address,
        "SGPU_RAY_NODE_LISTEN": "tcp://127.0.0.1:0",
        "SGPU_RAY_AGENT_IDLE_S": "3",
        "SGPU_ENVIRONMENT_DIR": str(tmp_path / "environments"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    try:
        with two_machines(tmp_path / "machines", notebook=("toolz==0.12.1",)) as machines:
            machines.fill_cache_for_notebook()
            pool = ServedPool(settings, engine="ray", arguments=())
            try:
                keys = new_key_pair()
                write_key_pair(machines.home.path / "client.key", keys)
                add_pool(pool.entry, machines.home.path / "pools.toml")
                pool.command("authorize", "ann", keys.public)
                kernel = machines.kernel()
                try:
                    kernel.check("numbers = list(range(5))")
                    reply = kernel.check(
                        f"%%distributed --pool {pool.home.name} --gpus 2 --out where\n"
                        "import sys, toolz, torch, torch.distributed as dist\n"
                        "one = torch.ones(1) * sum(numbers)\n"
                        "dist.all_reduce(one)\n"
                        "print(toolz.__version__, int(one))\n"
                        "where = [sys.prefix, 'ray' in sys.modules]\n",
                        timeout_s=240,
                    )
                    for rank in (0, 1):
                        assert "0.12.1 20" in reply.lines(rank), reply.story
                    prefix, has_ray = kernel.value("where")
                    assert prefix.startswith(str(tmp_path / "environments"))
                    assert not has_ray
                finally:
                    kernel.close()
                eventually(lambda: cluster.left(pool.home.name) == {}, 30, lambda: str(cluster.left(pool.home.name)))
            finally:
                pool.close()
    finally:
        cluster.close()
