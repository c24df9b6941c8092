"""Sessions on a GPU: what stays on it between cells, and what travels to it and back."""

from __future__ import annotations

import pytest
import real_gpus
from kernels import Kernel, eventually

pytestmark = pytest.mark.needs_gpu

MAKE = (
    "import torch\n"
    "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    "torch.manual_seed(0)\n"
    "model = DDP(torch.nn.Linear(64, 2).to(device), device_ids=[local_rank])\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "data = torch.rand(256, 64, device=device)\n"
    "losses = []"
)
TRAIN = (
    "for _ in range(5):\n"
    "    loss = (model(data) - 1).square().mean()\n"
    "    optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
    "    losses.append(round(loss.item(), 5))\n"
    "print(len(losses), losses[-1] < losses[0])"
)


def test_tensors_stay_on_the_gpu_between_cells(session: Kernel):
    session.check("%%distributed\nimport torch\nx = torch.ones(1000, device=device)\nplace = x.data_ptr()")
    reply = session.check("%%distributed\nprint(x.device, x.data_ptr() == place, int(x.sum().item()))")
    assert reply.lines(0) == ["cuda:0 True 1000"]


def test_a_model_under_ddp_is_trained_over_cells(session: Kernel):
    session.check(f"%%distributed\n{MAKE}", 60)
    assert [session.check(f"%%distributed\n{TRAIN}").lines(0)[0] for _ in range(3)] == ["5 True", "10 True", "15 True"]


def test_an_error_costs_the_cell_and_not_the_model(session: Kernel):
    session.check(f"%%distributed\n{MAKE}", 60)
    session.check(f"%%distributed\n{TRAIN}")
    assert session.run("%%distributed\nhidden = model(data)\n1 / 0").ename == "ZeroDivisionError"
    assert session.check(f"%%distributed\n{TRAIN}").lines(0) == ["10 True"]


def test_groups_are_whole_again_after_a_cell_that_ended_them(session: Kernel):
    session.check(
        "%%distributed\nimport torch, torch.distributed as dist\n"
        "dist.all_reduce(torch.ones(1, device=device))\ndist.destroy_process_group()",
        60,
    )
    reply = session.check(
        "%%distributed\nx, y = torch.ones(1, device=device), torch.ones(1)\n"
        "dist.all_reduce(x); dist.all_reduce(y)\nprint(x.item(), y.item())",
        60,
    )
    assert reply.lines(0)[-1] == "1.0 1.0"


def test_names_are_pulled_and_pushed(session: Kernel):
    session.check("%%distributed\nimport torch\nx = torch.arange(4, device=device)", 60)
    session.check("%sgpu_pull x:all", 60)
    assert session.value("[[t.device.type, t.tolist()] for t in x]") == [["cpu", [0, 1, 2, 3]]]
    session.check("y = x[0] + 10\n%sgpu_push y", 60)
    reply = session.check("%%distributed\nprint(y.device.type, y.to(device).tolist())", 60)
    assert reply.lines(0) == ["cpu [10, 11, 12, 13]"]
    session.check("del x, y")


def test_what_the_notebook_changes_is_sent_again(session: Kernel):
    session.check("import torch\nscale = torch.ones(2)")
    assert session.check("%%distributed\nprint((scale.to(device) * 2).tolist())").lines(0) == ["[2.0, 2.0]"]
    session.check("scale = torch.full((2,), 5.0)")
    assert session.check("%%distributed\nprint((scale.to(device) * 2).tolist())").lines(0) == ["[10.0, 10.0]"]
    session.check("del scale")


def test_a_fresh_run_uses_the_sessions_gpu(session: Kernel):
    session.check("%%distributed --out mine\nimport os, torch\nmine = os.environ['CUDA_VISIBLE_DEVICES']")
    reply = session.check(
        "%%distributed --fresh --out theirs\nimport os, torch\ntheirs = os.environ['CUDA_VISIBLE_DEVICES']\n"
        "print(torch.ones(1, device=device).device, 'kept' in globals())",
        60,
    )
    assert reply.lines(0) == ["cuda:0 False"]
    assert session.value("mine == theirs") is True


def test_a_session_gives_its_memory_back(kernel: Kernel):
    kernel.check("s = %sgpu_connect -n 1\ns.wait(60)", 90)
    kernel.check("%%distributed\nimport torch\nheld = torch.ones(1 << 30, dtype=torch.uint8, device=device)", 60)
    eventually(lambda: real_gpus.used_bytes() > real_gpus.used_at_start() + (1 << 30), 10, "it is held")
    kernel.check("%sgpu_disconnect\ndel s")
    eventually(real_gpus.is_free, 30, "it is given back", poll_s=0.2)
