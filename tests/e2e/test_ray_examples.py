"""Ray Tune, Ray Data and Ray Train in a run's own Ray cluster; the node's numbers reach the MLflow run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernels import Home, Kernel
from ray_traces import check_gone

HOME_VARIABLES = {"SGPU_SIMULATE": "a10:4,h100:8", "SGPU_STAND_IN": "cpu", "SGPU_RAY_DASHBOARD": "false"}

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
PATIENCE_S = 500.0


@pytest.fixture(autouse=True)
def nothing_of_ray_is_left(home: Home) -> Iterator[None]:
    yield
    check_gone(home)


def test_tune_finds_the_best_trial(kernel: Kernel):
    kernel.check(
        "from sgpu_magic import ray_launch\n"
        "@ray_launch(gpus=2, gpu_type='a10')\n"
        "def tune_it(space):\n"
        "    import os, ray\n"
        "    from ray import tune\n"
        "    ray.init()\n"
        "    def objective(config):\n"
        "        return {'loss': (config['x'] - 3) ** 2}\n"
        "    tuner = tune.Tuner(\n"
        "        tune.with_resources(objective, {'gpu': 1}),\n"
        "        param_space={'x': tune.grid_search(space)},\n"
        "        tune_config=tune.TuneConfig(metric='loss', mode='min'),\n"
        "        run_config=tune.RunConfig(storage_path=os.path.abspath('tuned'), verbose=0),\n"
        "    )\n"
        "    best = tuner.fit().get_best_result()\n"
        "    return best.config['x'], best.metrics['loss']\n"
        "\n"
        "best = tune_it.distributed([1, 3, 5])\n",
        PATIENCE_S,
    )
    assert kernel.value("best") == [3, 0]


def test_data_maps_over_the_cluster(kernel: Kernel):
    kernel.check(
        "%%ray_launch -n 2 --type a10 --out total\n"
        "import ray\n"
        "ray.init()\n"
        "def double(batch):\n"
        "    return {'id': batch['id'] * 2}\n"
        "total = int(ray.data.range(100).map_batches(double).sum('id'))\n",
        PATIENCE_S,
    )
    assert kernel.value("total") == 9900


@pytest.mark.slow
def test_tasks_that_say_cuda_run_on_the_cpu(kernel: Kernel):
    kernel.check("%env SGPU_STAND_IN=cpu,cuda")
    kernel.check(
        "%%ray_launch -n 2 --type a10 --out found\n"
        "import ray\n"
        "@ray.remote(num_gpus=1)\n"
        "def double(value):\n"
        "    import torch\n"
        "    return (2 * torch.tensor(value).cuda()).item(), torch.cuda.get_device_name(0), torch.cuda.device_count()\n"
        "found = ray.get([double.remote(value) for value in (1, 2)])\n",
        PATIENCE_S,
    )
    kernel.check("%env SGPU_STAND_IN=cpu")
    assert kernel.value("found") == [[2, "CPU in place of a GPU", 1], [4, "CPU in place of a GPU", 1]]


def test_train_reduces_over_its_workers(kernel: Kernel):
    kernel.check(
        "%%ray_launch -n 2 --type a10 --out loss,total\n"
        "import os, ray, tempfile\n"
        "from ray.train import Checkpoint, RunConfig, ScalingConfig\n"
        "from ray.train.torch import TorchTrainer\n"
        "ray.init()\n"
        "def train():\n"
        "    import torch, torch.distributed as dist\n"
        "    from ray import train\n"
        "    from ray.train.torch import prepare_model\n"
        "    torch.manual_seed(train.get_context().get_world_rank())\n"
        "    model = prepare_model(torch.nn.Linear(4, 1))\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for _ in range(5):\n"
        "        loss = model(torch.rand(8, 4)).square().mean()\n"
        "        optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
        "    total = torch.tensor(float(train.get_context().get_world_rank() + 1))\n"
        "    dist.all_reduce(total)\n"
        "    with tempfile.TemporaryDirectory() as folder:\n"
        "        torch.save(model.state_dict(), os.path.join(folder, 'model.pt'))\n"
        "        kept = Checkpoint.from_directory(folder) if train.get_context().get_world_rank() == 0 else None\n"
        "        train.report({'loss': loss.item(), 'total': total.item()}, checkpoint=kept)\n"
        "trainer = TorchTrainer(\n"
        "    train,\n"
        "    scaling_config=ScalingConfig(num_workers=2, use_gpu=False),\n"
        "    run_config=RunConfig(storage_path=os.path.abspath('trained')),\n"
        ")\n"
        "result = trainer.fit()\n"
        "loss, total = result.metrics['loss'], result.metrics['total']\n",
        PATIENCE_S,
    )
    assert kernel.value("total") == 3.0
    assert kernel.value("loss") < 2
