"""A rank on its GPU: its device, tensors on their way to it and back, and that nobody else makes a CUDA context."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import real_gpus
from kernels import Kernel, eventually
from watched_runs import WatchedRun

from sgpu_magic.wire.devices import Device

pytestmark = pytest.mark.needs_gpu


def test_a_rank_stands_on_its_own_gpu(kernel: Kernel, gpus: tuple[Device, ...]):
    kernel.check(
        "%%distributed -n 1 --out told\n"
        "import os, torch\n"
        "from sgpu_magic import runtime\n"
        "assert runtime.get_device() == device\n"
        "told = [str(device), torch.cuda.current_device(), torch.cuda.device_count(),\n"
        "        str(torch.ones(1).cuda().device), os.environ['CUDA_VISIBLE_DEVICES'],\n"
        "        os.environ['CUDA_DEVICE_ORDER'], str(torch.cuda.get_device_properties(0).uuid)]"
    )
    device, current, count, default, visible, order, uuid = kernel.value("told")
    assert (device, current, count, default, order) == ("cuda:0", 0, 1, "cuda:0", "PCI_BUS_ID")
    assert visible in {gpu.uuid for gpu in gpus}
    if not visible.startswith("MIG-"):
        assert visible == f"GPU-{uuid.removeprefix('GPU-')}"


def test_cpu_ranks_see_no_gpu(kernel: Kernel):
    kernel.check(
        "%%distributed -n 2 --type cpu --out told:all\nimport torch\ntold = [str(device), torch.cuda.is_available()]"
    )
    assert kernel.value("told") == [["cpu", False]] * 2


def test_only_ranks_make_a_cuda_context(kernel: Kernel, go: Callable[[], None]):
    """Not the pool, the agent or the zygote: each would hold memory of the GPU as long as it lives."""
    run = WatchedRun(
        kernel,
        "%%distributed -n 1\nimport os, time, torch\nx = torch.ones(1, device=device)\n"
        "print('pid', os.getpid(), flush=True)\nwhile not os.path.exists('go'): time.sleep(0.02)",
    )
    run.cell.until_shown("pid")
    of_this_home = real_gpus.smi_processes().keys() & kernel.home.processes().keys()
    rank = run.pids[0]
    go()
    assert run.cell.wait(60).status == "ok"
    if not of_this_home:
        pytest.skip("the driver lists no process of this machine")
    assert of_this_home == {rank}


# ---------------------------------------------------------------- tensors on their way


def test_cpu_tensors_are_captured_as_they_are(kernel: Kernel):
    # one thread: torch's others would stay in the kernel
    kernel.check("import torch\ntorch.set_num_threads(1)\nweight = torch.arange(1_000_000, dtype=torch.float32)")
    reply = kernel.check(
        "%%distributed -n 1 --out total\n"
        "assert weight.device.type == 'cpu'\n"
        "total = weight.to(device).double().sum().item()"
    )
    assert kernel.value("total") == sum(range(1_000_000)), reply.story
    kernel.check("globals().pop('weight')")


def test_cuda_tensors_of_the_notebook_arrive_on_the_ranks_own_gpu(cuda_kernel: Kernel):
    cuda_kernel.check(
        "import torch\n"
        "x = torch.arange(8.0, device='cuda')\n"
        "part = x[2:5]\n"
        "model = torch.nn.Linear(4, 2).cuda().to(torch.bfloat16)\n"
        "many = {'bool': torch.tensor([True, False], device='cuda'), 'int8': torch.ones(3, dtype=torch.int8).cuda(),\n"
        "        'empty': torch.empty(0, device='cuda')}",
        120,
    )
    # the notebook now uses the GPU as well as the pool
    cuda_kernel.check(
        "%%distributed -n 1 --allow-busy --out told\n"
        "assert all(value.device == device for value in (x, part, *many.values(), *model.parameters()))\n"
        "part += 100\n"
        "told = [x.tolist(), str(model.weight.dtype), many['bool'].tolist(), many['int8'].tolist(), len(many['empty'])]"
    )
    assert cuda_kernel.value("told") == [
        # the view still shares its memory
        [0, 1, 102, 103, 104, 5, 6, 7],
        "torch.bfloat16",
        [True, False],
        [1, 1, 1],
        0,
    ]
    assert cuda_kernel.value("x.tolist()") == list(range(8))


BACK = (
    "import torch\n"
    "y = torch.full((1000, 1000), 7.0, device=device, dtype=torch.bfloat16)\n"
    "state = torch.nn.Linear(4, 2).to(device).state_dict()"
)
TOLD = "[y.device.type, str(y.dtype), float(y.float().mean()), [v.device.type for v in state.values()]]"


def test_cuda_tensors_come_back_onto_the_cpu_of_a_notebook_that_does_not_use_cuda(kernel: Kernel):
    kernel.check(f"%%distributed -n 1 --out y,state\n{BACK}", 120)
    assert kernel.value(TOLD) == ["cpu", "torch.bfloat16", 7.0, ["cpu", "cpu"]]
    # the notebook occupies no GPU
    kernel.check(f"%%distributed -n 1 --wait 0 --out y,state\n{BACK}", 60)
    kernel.check("del y, state")


def test_cuda_tensors_come_back_onto_the_gpu_that_the_notebook_uses(cuda_kernel: Kernel):
    cuda_kernel.check("import torch\nx = torch.ones(1, device='cuda')", 120)
    cuda_kernel.check(f"%%distributed -n 1 --allow-busy --out y,state\n{BACK}", 120)
    assert cuda_kernel.value(TOLD) == ["cuda", "torch.bfloat16", 7.0, ["cuda", "cuda"]]


def test_the_value_of_a_cell_may_be_a_cuda_tensor(kernel: Kernel):
    reply = kernel.check(
        "result = get_ipython().run_cell_magic('distributed', '-n 1', 'import torch\\ntorch.arange(3, device=device)')",
        120,
    )
    assert "tensor([0, 1, 2]" in kernel.check("result").result, reply.story
    assert kernel.value("result[0].tolist()") == [0, 1, 2]
    kernel.check("del result")


def test_a_data_loader_with_workers_and_pinned_memory_feeds_the_gpu(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 1\n"
        "import torch\n"
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Numbers(Dataset):\n"
        "    def __len__(self): return 64\n"
        "    def __getitem__(self, index): return torch.full((16,), float(index))\n"
        "total = torch.zeros((), device=device)\n"
        "for batch in DataLoader(Numbers(), batch_size=8, num_workers=2, pin_memory=True):\n"
        "    total += batch.to(device, non_blocking=True).sum()\n"
        "print(int(total.item()))",
        120,
    )
    assert reply.lines(0)[-1] == str(16 * sum(range(64)))


def test_a_function_gets_and_returns_tensors(kernel: Kernel):
    kernel.check(
        "import torch\n"
        "from sgpu_magic import distributed\n"
        "@distributed(gpus=1)\n"
        "def double(x):\n"
        "    from sgpu_magic import runtime\n"
        "    doubled = 2 * x.to(runtime.get_device())\n"
        "    return doubled.device.type, doubled\n"
        "((where, doubled),) = double.distributed(torch.arange(3))",
        120,
    )
    assert kernel.value("[where, doubled.device.type, doubled.tolist()]") == ["cuda", "cpu", [0, 2, 4]]
    kernel.check("del doubled")


def test_the_run_goes_on_under_torchrun(kernel: Kernel):
    """The run's directory has all that it takes, GPUs included."""
    kernel.check("base = 40")
    kernel.check(
        "%%distributed -n 1\nimport torch\ntotal = torch.ones(2, device=device).sum() + base\n"
        "print('sum', int(total.item()), device)"
    )
    directory = kernel.home.run_dir(kernel.home.runs[-1])
    eventually((directory / "_air.py").exists, 10, "the run's script")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    reported = subprocess.run(
        [*command, str(directory / "_air.py")], env=kernel.home.environ, capture_output=True, text=True, timeout=100
    )
    assert reported.returncode == 0, reported.stderr
    assert "sum 42 cuda:0" in reported.stdout
