"""The parts of `@ray_launch` that need no Ray: its directories, ports and variables, and the refusal of Ray Serve."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import linecache
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from launches import placed_launch
from msgspec.structs import replace

from sgpu_magic.agent.runs import ray_directories
from sgpu_magic.config import Settings
from sgpu_magic.wire.base import new_id
from sgpu_magic.wire.devices import Lease
from sgpu_magic.wire.node import Launch, NodePart
from sgpu_magic.worker.ray import ray_processes
from sgpu_magic.worker.ray.driver import with_frames
from sgpu_magic.worker.ray.ray_processes import values_in, written_in

METRICS = """# HELP ray_node_cpu_utilization of the node
ray_node_cpu_utilization{Version="2.60.0",ip="10.0.0.1",IsHeadNode="true"} 12.5
ray_node_mem_used{ip="10.0.0.1"} 2.5e+09
ray_object_store_used_memory{Component="raylet"} 3.0e+06
ray_tasks{Source="executor",State="RUNNING"} 2.0
ray_tasks{Source="executor",State="RUNNING_IN_RAY_GET"} 1.0
ray_tasks{Source="executor",State="FINISHED"} 40.0
ray_tasks{Source="owner",State="RUNNING"} 9.0
ray_actors{Source="executor",State="IDLE"} 3.0
ray_actors{Source="executor",State="DEAD"} 5.0
ray_resources{Name="GPU",State="USED"} 2.0
ray_resources{Name="GPU",State="AVAILABLE"} 0.0
ray_resources{Name="memory",State="USED"} 7.0
ray_node_gpus_utilization NaN
no metric at all
"""


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    (tmp_path / "r").mkdir()
    made = Settings(state_dir=str(tmp_path / "s"), runtime_dir=str(tmp_path / "r"))
    yield made
    # the test's directory can be too long for sockets, which then have another one
    ray_directories.sweep(made, [])


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    made = placed_launch(tmp_path, is_remote=False)
    spec = msgspec.structs.replace(made.spec, run_id=new_id(), ray=True)
    return msgspec.structs.replace(made, spec=spec, run_dir=str(tmp_path / "run"))


def test_nothing_is_kept_of_a_run_whose_lease_is_dropped(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("ray")
    beside_ray = importlib.import_module("sgpu_magic.nodes.ray.__main__")
    connected, removed, at_once = threading.Event(), list[str](), list[str]()

    def remove(name: str) -> None:
        assert name not in at_once, "two calls for one run at once"
        at_once.append(name)
        time.sleep(0.001)
        at_once.remove(name)
        removed.append(name)

    monkeypatch.setattr(beside_ray.cluster, "connect", lambda *_: connected.wait())
    monkeypatch.setattr(beside_ray.cluster, "remove", remove)

    async def drop() -> int:
        ours, theirs = socket.socketpair()
        process = beside_ray.ClusterProcess(ours, "address", "namespace", "pool-")
        await asyncio.gather(*(process._drop(f"{number % 20:08x}") for number in range(60)))
        kept = len(process._turns)
        for task in process._tasks:
            task.cancel()
        connected.set()
        process.close()
        theirs.close()
        return kept

    assert asyncio.run(drop()) == 0
    assert len(removed) == 60


def test_the_nodes_numbers_are_read_from_prometheus_format():
    assert values_in(METRICS) == {
        "ray_cpu_utilization_percentage": 12.5,
        "ray_memory_usage_megabytes": 2500.0,
        "ray_object_store_megabytes": 3.0,
        "ray_tasks_running": 3.0,
        "ray_actors": 3.0,
        "ray_gpus_in_use": 2.0,
    }


def test_its_directories_are_private_and_go(settings: Settings, launch: Launch):
    made = ray_directories.make(launch, settings)
    for directory in (made.directory, made.disk_directory):
        assert os.stat(directory).st_mode & 0o777 == 0o700
    # leftovers of the run's previous attempt do not matter
    Path(made.directory, "session").mkdir()
    assert ray_directories.make(launch, settings) == made
    assert not Path(made.directory, "session").exists()
    ray_directories.remove(launch.spec.run_id, settings)
    assert not Path(made.directory).exists()
    assert not Path(made.disk_directory).exists()


def test_a_sweep_leaves_what_goes_on_and_what_is_a_link(settings: Settings, launch: Launch, tmp_path: Path):
    made = ray_directories.make(launch, settings)
    dead = [settings.runtime_path / "ray-00000000", settings.state_path / "ray" / "00000000"]
    for directory in dead:
        directory.mkdir()
    (tmp_path / "mine").mkdir()
    (settings.runtime_path / "ray-11111111").symlink_to(tmp_path / "mine")
    ray_directories.sweep(settings, [launch.spec.run_id])
    assert Path(made.directory).is_dir()
    assert Path(made.disk_directory).is_dir()
    assert not any(directory.exists() for directory in dead)
    assert (tmp_path / "mine").is_dir()


def test_sockets_have_short_paths_wherever_the_runtime_directory_is(settings: Settings, launch: Launch, tmp_path: Path):
    deep = tmp_path / ("x" * 60)
    deep.mkdir(parents=True)
    settings = replace(settings, runtime_dir=str(deep))
    found = Path(ray_directories.make(launch, settings).directory)
    assert len(f"{found}/r/session_2026-11-22_18-41-05_080720_1234567/sockets/dash_MetricsHead") <= 107
    # nothing is left there either of a run whose agent was killed
    ray_directories.sweep(settings, [launch.spec.run_id])
    assert found.is_dir()
    ray_directories.sweep(settings, [])
    assert not found.exists()


def test_objects_take_what_is_asked_but_never_more_than_their_share(settings: Settings, launch: Launch):
    few = ray_directories.make(launch, replace(settings, ray_object_bytes=200_000_000)).object_store_bytes
    many = ray_directories.make(launch, replace(settings, ray_object_bytes=10**15)).object_store_bytes
    assert few == 200_000_000
    assert few < many < 0.31 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_simulated_devices_are_said_to_be_that(settings: Settings, launch: Launch):
    lease = Lease(lease_id="l", device_type="a10", ranks=2, uuids=("SIM-1", "SIM-2"), simulated=True)
    part = NodePart(index=1, nodes=2, first_rank=2, ranks=2, address="10.0.0.2")
    made = ray_directories.make(msgspec.structs.replace(launch, lease=lease, part=part), settings)
    assert (made.simulated, made.gpus, made.address) == (True, 2, "10.0.0.2")
    assert made.cpus >= 2


def test_tasks_are_no_ranks_and_another_clusters_variables_are_not_theirs():
    rank = {
        "RANK": "0",
        "MASTER_PORT": "1",
        "RAY_ADDRESS": "ray://x:1",
        "RAY_JOB_ID": "7",
        "HOME": "/h",
        "HF_TOKEN": "t",
        # set by the user
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300",
    }
    ray = {"RAY_AUTH_MODE": "token"}
    found = ray_processes.of_processes(rank, ray, ["/code"], "/package")
    assert found == {
        "HOME": "/h",
        "HF_TOKEN": "t",
        "RAY_AUTH_MODE": "token",
        "PYTHONPATH": "/code:/package",
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300",
        "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "75",
    }
    found = ray_processes.of_processes(rank, ray, ["/code"], "/package", maps_cuda=True)
    assert "sgpu_magic.worker.process.stand_in.map_cuda_in_task" in found.values()


def test_lines_of_workers_are_counted_without_rays_marks(tmp_path: Path):
    (tmp_path / "worker-1-01000000-9.out").write_text(":job_id:01000000\n:actor_name:A\none\n\ntwo\nhalf")
    (tmp_path / "worker-1-01000000-9.err").write_text(":job_id:01000000\noops\n")
    (tmp_path / "raylet.out").write_text("no worker\n")
    assert written_in(tmp_path) == 5


SERVE = """
import sys
sys.path.insert(0, sys.argv[1])
from sgpu_magic.worker.ray import driver
driver.refuse_serve()
try:
    from ray import serve
    serve.run(object())
except BaseException as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("init", "kind"),
    [
        pytest.param("from .api import run", "UsageError", id="installed"),
        pytest.param(
            "raise ImportError('no grpc_reflection')", "ImportError", id="without packages", marks=pytest.mark.slow
        ),
    ],
)
def test_serve_is_refused_in_a_sentence(tmp_path: Path, init: str, kind: str):
    package = tmp_path / "ray" / "serve"
    package.mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").touch()
    (package / "api.py").write_text("def run(app): print('served')\n")
    (package / "__init__.py").write_text(f"{init}\n")
    done = subprocess.run([sys.executable, "-c", SERVE, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"{kind} Ray Serve can't be started in a @ray_launch run (rank 0): "), done
    assert "served\n" not in done.stdout


TASK = """import math
class Model:
    def check(self, number):
        if number:
            raise ValueError(number)
def outer():
    Model().check(1)
"""


def test_a_tasks_frames_have_their_lines_again():
    name = "/nowhere/ipykernel_1/12.py"
    linecache.cache[name] = (len(TASK), None, TASK.splitlines(keepends=True), name)
    try:
        error = with_frames(
            ValueError("no"), [(name, 7, "outer"), (name, 5, "Model.check"), ("/gone.py", 3, "<lambda>")]
        )
        frames = traceback.extract_tb(error.__traceback__)
        assert [(frame.filename, frame.lineno, frame.name) for frame in frames] == [
            (name, 7, "outer"),
            (name, 5, "check"),
            ("/gone.py", 3, "<lambda>"),
        ]
        # IPython looks up a cell's source from the function's first line
        assert error.__traceback__.tb_frame.f_code.co_firstlineno == 6
        assert error.__traceback__.tb_next.tb_frame.f_code.co_firstlineno == 3
        assert (
            inspect.getsourcelines(error.__traceback__.tb_next.tb_frame)[0][-1]
            == "            raise ValueError(number)\n"
        )
    finally:
        del linecache.cache[name]
