"""Notebooks written for Databricks' documented Serverless GPU API, cell by cell as that documentation has them.

Nothing is changed in them: their GPU types are simulated, and their code asks torch for the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernels import Home, Kernel

HOME_VARIABLES = {"SGPU_SIMULATE": "a10:4,h100:8", "SGPU_STAND_IN": "cpu", "SGPU_RAY_DASHBOARD": "false"}

POOL_VARIABLES = ("DATABRICKS_USE_RESERVED_GPU_POOL", "DATABRICKS_REMOTE_GPU_POOL_ID", "DATABRICKS_USE_POOL")


@pytest.fixture
def no_pool_chosen(kernel: Kernel) -> Iterator[None]:
    """Afterwards the notebook chooses no pool."""
    yield
    kernel.check(f"import os\nfor name in {POOL_VARIABLES}: os.environ.pop(name, None)")


def test_hello_world_returns_a_value_from_each_gpu(kernel: Kernel):
    kernel.check("from serverless_gpu import distributed\nfrom serverless_gpu import runtime as rt")
    reply = kernel.check(
        "@distributed(gpus=8, gpu_type='H100')\n"
        "def hello_world(name: str) -> list[int]:\n"
        "    if rt.get_local_rank() == 0:\n"
        "        print('hello world', name)\n"
        "    return rt.get_global_rank()\n"
        "\n"
        "result = hello_world.distributed('there')\n"
    )
    assert kernel.value("result") == list(range(8))
    assert reply.lines(0) == ["hello world there"], reply.story
    assert "H100" in reply.text


@pytest.mark.slow
def test_rank_and_world_size_are_given_to_a_function_that_names_them(kernel: Kernel):
    kernel.check(
        "import torch\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "from serverless_gpu import distributed\n"
        "\n"
        "class MyModel(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(4, 1)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x).square().mean()\n"
    )
    kernel.check(
        "@distributed(num_gpus=4, gpu_type='A10')\n"
        "def train(rank, world_size):\n"
        "    # This function runs on all GPUs simultaneously\n"
        "    device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "    model = MyModel().to(device)\n"
        "    model = DDP(model, device_ids=[rank] if device == 'cuda' else None)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    torch.manual_seed(rank)\n"
        "    for batch in torch.rand(5, 8, 4):\n"
        "        loss = model(batch.to(device))\n"
        "        loss.backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        "    return rank, world_size, model.module.layer.weight.tolist()\n"
        "\n"
        "done = train.distributed()\n"
    )
    assert kernel.value("[place[:2] for place in done]") == [[0, 4], [1, 4], [2, 4], [3, 4]]
    assert kernel.value("len({str(place[2]) for place in done})") == 1


def test_types_from_the_enum_and_from_the_launcher_module(kernel: Kernel):
    kernel.check(
        "from serverless_gpu.launcher import distributed\n"
        "from serverless_gpu.compute import GPUType\n"
        "\n"
        "@distributed(gpus=2, gpu_type=GPUType.A10, remote=True)\n"
        "def run_train(cfg):\n"
        "    import os\n"
        "    from serverless_gpu import runtime\n"
        "    return cfg['lr'], runtime.get_world_size(), runtime.get_node_rank(), int(os.environ['RANK'])\n"
        "\n"
        "result = run_train.distributed({'lr': 0.1})\n"
    )
    assert kernel.value("result") == [[0.1, 2, 0, 0], [0.1, 2, 0, 1]]


@pytest.mark.slow
def test_a_training_that_makes_its_own_group(kernel: Kernel):
    """The documented multi-layer perceptron: setup, training, cleanup, with the backend that the device has."""
    kernel.check(
        "import os\n"
        "import torch\n"
        "import torch.distributed as dist\n"
        "import serverless_gpu\n"
        "from serverless_gpu import distributed\n"
        "\n"
        "def setup():\n"
        "    dist.init_process_group('nccl' if torch.cuda.is_available() else 'gloo')\n"
        "    if torch.cuda.is_available():\n"
        "        torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        "\n"
        "def cleanup():\n"
        "    dist.destroy_process_group()\n"
        "\n"
        "@distributed(gpus=4, gpu_type='A10', remote=True)\n"
        "def run_train(num_epochs: int, batch_size: int) -> float:\n"
        "    setup()\n"
        "    total = torch.tensor(float(num_epochs * batch_size))\n"
        "    dist.all_reduce(total)\n"
        "    assert serverless_gpu.runtime.get_world_size() == dist.get_world_size()\n"
        "    cleanup()\n"
        "    return total.item()\n"
        "\n"
        "result = run_train.distributed(num_epochs=3, batch_size=2)\n"
    )
    assert kernel.value("result") == [24.0] * 4


def test_the_first_rank_that_fails_is_raised_here(kernel: Kernel):
    reply = kernel.run(
        "from serverless_gpu import distributed\n"
        "@distributed(gpus=2, gpu_type='A10')\n"
        "def train(rank):\n"
        "    if rank == 1:\n"
        "        raise ValueError('NaN in batch 118')\n"
        "train.distributed()\n"
    )
    assert (reply.ename, reply.evalue) == ("ValueError", "NaN in batch 118")


def test_async_runs_are_there_at_once(kernel: Kernel):
    kernel.check(
        "from serverless_gpu import distributed\n"
        "@distributed(gpus=2, gpu_type='A10', remote=True, run_async=True)\n"
        "def twice(value):\n"
        "    return 2 * value\n"
        "runs = [twice.distributed(value) for value in (1, 2)]\n"
        "results = [run.result() for run in runs]\n"
    )
    assert kernel.value("results") == [[2, 2], [4, 4]]


CALL = """
from serverless_gpu import distributed
@distributed(gpus=1, gpu_type='A10', remote={remote})
def where():
    return 'here'
found = where.distributed()
"""


@pytest.mark.parametrize(
    ("variable", "value", "output"),
    [
        ("DATABRICKS_REMOTE_GPU_POOL_ID", "team-7", "names the pool 'team-7', which is not known here"),
        ("DATABRICKS_USE_RESERVED_GPU_POOL", "True", "asks for a reserved pool, and none is known here"),
        ("DATABRICKS_USE_POOL", "1", "asks for an on-demand pool, and none is known here"),
    ],
)
@pytest.mark.usefixtures("no_pool_chosen")
def test_a_pool_that_is_not_here_is_told_once_and_the_run_goes_on(
    kernel: Kernel, variable: str, value: str, output: str
):
    kernel.check(f"import os\nos.environ[{variable!r}] = {value!r}")
    assert output not in kernel.check(CALL.format(remote=False)).text
    reply = kernel.check(CALL.format(remote=True))
    assert f"sgpu: {variable} {output}; the run goes to the pool 'local'." in reply.streams, reply.story
    assert kernel.value("found") == ["here"]
    assert output not in kernel.check(CALL.format(remote=True)).text


def test_a_cell_finds_the_names_on_its_ranks_too(kernel: Kernel):
    reply = kernel.check(
        "%%distributed --gpus 2 --type a10\n"
        "from serverless_gpu import runtime as rt\n"
        "from serverless_gpu.compute import GPUType\n"
        "print(rt.get_global_rank(), 'of', rt.get_world_size(), GPUType.A10)"
    )
    assert [reply.lines(rank) for rank in (0, 1)] == [["0 of 2 a10"], ["1 of 2 a10"]]


def test_enum_members_travel_by_name(kernel: Kernel):
    kernel.check("from serverless_gpu.compute import GPUType\nkind = GPUType.H100")
    kernel.check("%%distributed --gpus 2 --type a10 --out back:all\nback = kind, kind.name")
    assert kernel.value("back == [(GPUType.H100, 'H100')] * 2 and back[0][0] is GPUType.H100") is True


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ray_launch_drives_a_cluster_on_the_leased_devices(kernel: Kernel):
    kernel.check(
        "from serverless_gpu.ray import ray_launch\n"
        "@ray_launch(gpus=2, gpu_type='A10', remote=True)\n"
        "def tune(times):\n"
        "    import ray\n"
        "    ray.init()\n"
        "    return ray.cluster_resources()['GPU'] * times\n"
        "tuned = tune.distributed(3)\n",
        timeout_s=240,
    )
    assert kernel.value("tuned") == 6.0


@pytest.mark.slow
def test_a_program_without_a_notebook(home: Home, tmp_path):
    import subprocess
    import sys

    program = tmp_path / "program.py"
    program.write_text(
        "import sgpu_magic.functions.compat\n"
        "from serverless_gpu import distributed\n"
        "from serverless_gpu import runtime as rt\n"
        "\n"
        "@distributed(gpus=2, gpu_type='A10')\n"
        "def place():\n"
        "    return rt.get_global_rank()\n"
        "\n"
        "if __name__ == '__main__':\n"
        "    print(place.distributed())\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], env=home.environ, capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert "[0, 1]" in done.stdout.splitlines(), done.stdout + done.stderr
