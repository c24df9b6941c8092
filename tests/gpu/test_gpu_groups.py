"""Process groups of one rank on a GPU: NCCL for its tensors, gloo beside it for those of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from kernels import Kernel

pytestmark = pytest.mark.needs_gpu

IMPORTS = "import torch, torch.distributed as dist\n"


def reported(kernel: Kernel, body: str) -> Any:
    """What a cell of one rank leaves as `told`; NCCL may print what it likes."""
    kernel.check(f"%%distributed -n 1 --out told\n{IMPORTS}{body}", 90)
    return kernel.value("told")


def test_nccl_and_gloo_are_one_group(kernel: Kernel):
    config, *values = reported(
        kernel,
        "told = [str(dist.get_backend_config())]\n"
        "for where in (device, 'cpu'):\n"
        "    x = torch.full((3,), 2.0, device=where)\n"
        "    dist.all_reduce(x)\n"
        "    gathered = [torch.empty_like(x)]\n"
        "    dist.all_gather(gathered, x)\n"
        "    dist.broadcast(x, 0)\n"
        "    told += [x.device.type, x.tolist(), gathered[0].tolist()]\n"
        "dist.barrier()\n"
        "objects = [None]\n"
        "dist.all_gather_object(objects, {'rank': rank})\n"
        "told += [objects]",
    )
    assert "cpu:gloo" in config
    assert "cuda:nccl" in config
    assert values == ["cuda", [2, 2, 2], [2, 2, 2], "cpu", [2, 2, 2], [2, 2, 2], [{"rank": 0}]]


@pytest.mark.parametrize("backend", ["nccl", "gloo", "cpu:gloo,cuda:nccl"])
def test_a_second_initialisation_is_harmless(kernel: Kernel, backend: str):
    body = (
        f"dist.init_process_group({backend!r})\nx = torch.ones(1, device=device)\ndist.all_reduce(x)\ntold = x.item()"
    )
    assert reported(kernel, body) == 1


@pytest.mark.parametrize(("backend", "where"), [("nccl", "device"), ("gloo", "'cpu'")])
def test_further_groups(kernel: Kernel, backend: str, where: str):
    body = (
        f"group = dist.new_group(backend={backend!r})\n"
        f"x = torch.ones(1, device={where})\n"
        "dist.all_reduce(x, group=group)\n"
        "told = [x.item(), dist.get_backend(group)]"
    )
    assert reported(kernel, body) == [1, backend]


def test_a_group_may_be_ended_and_begun_anew(kernel: Kernel):
    body = (
        "dist.destroy_process_group()\n"
        "dist.init_process_group('nccl', device_id=device)\n"
        "x = torch.ones(1, device=device)\n"
        "dist.all_reduce(x)\n"
        "told = [x.item(), dist.get_backend()]"
    )
    assert reported(kernel, body) == [1, "nccl"]


def test_nccl_ends_ranks_of_a_run_and_leaves_those_of_a_session(kernel: Kernel):
    """A session promises to keep the ranks that an aborted collective frees; of a run they end, as with torchrun."""
    body = "import os\ntold = os.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING']"
    assert reported(kernel, body) == "1"
    kernel.check("s = %sgpu_connect -n 1\ns.wait(60)", 90)
    try:
        kernel.check(f"%%distributed --out told\n{body}")
        assert kernel.value("told") == "0"
    finally:
        kernel.run("%sgpu_disconnect")
        kernel.check("del s")


def test_the_group_that_the_ranks_have_is_the_one_shown(kernel: Kernel):
    reply = kernel.check("%%distributed -n 1\nprint('up')", 90)
    assert "nccl" in reply.shown, reply.story
    reply = kernel.check("%%distributed -n 1 --type cpu\nprint('up')", 90)
    assert "nccl" not in reply.shown, reply.story


def test_fsdp2_on_one_gpu(kernel: Kernel):
    body = (
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "mesh = init_device_mesh('cuda', (world_size,))\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)\n"
        "for layer in (model[0], model[2]): fully_shard(layer, mesh=mesh)\n"
        "fully_shard(model, mesh=mesh)\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
        "data = torch.rand(64, 32, device=device)\n"
        "told = []\n"
        "for _ in range(10):\n"
        "    loss = (model(data) - 1).square().mean()\n"
        "    loss.backward(); optimizer.step(); optimizer.zero_grad()\n"
        "    told.append(loss.item())"
    )
    losses = reported(kernel, body)
    assert losses[-1] < losses[0]
