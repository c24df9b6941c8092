"""Several GPUs: NCCL between ranks, hangs and failures in its collectives, sharded models, peer to peer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import real_gpus
from driver_errors import FAILED_ASSERT, WORKS
from kernels import Kernel, eventually
from time_limits import GRACE_S

from sgpu_magic.wire.devices import Device

pytestmark = pytest.mark.needs_gpu(2)

HOME_VARIABLES = {"SGPU_STALL_S": "2"}

IMPORTS = "import os, time, torch, torch.distributed as dist\n"
# line 1 is the magic's, line 2 the imports
MEET = (
    IMPORTS
    + "x = torch.ones(1, device=device)\ndist.all_reduce(x)\ntorch.cuda.synchronize()\nprint('up', flush=True)\n"
)
ONE_IS_MISSING = (
    MEET + "if rank == 1:\n"  # 7
    "    while not os.path.exists('go'): time.sleep(0.02)\n"  # 8
    "dist.all_reduce(x)\n"  # 9
    "torch.cuda.synchronize()"  # 10
)
ONE_RAISES = MEET + "if rank == 1:\n    raise ValueError('the culprit')\ndist.all_reduce(x)\ntorch.cuda.synchronize()"
SUM = IMPORTS + "x = torch.ones(1, device=device)\ndist.all_reduce(x)\nprint('sum', int(x.item()))"


@pytest.fixture
def pair(kernel: Kernel) -> Iterator[Kernel]:
    """The kernel, connected to two ranks."""
    kernel.check("s = %sgpu_connect -n 2\ns.wait(60)", 90)
    yield kernel
    kernel.run("%sgpu_disconnect")
    kernel.check("globals().pop('s', None)")


def reported(kernel: Kernel, options: str, body: str, timeout_s: float = 90.0) -> Any:
    """What the ranks leave as `told`, by rank."""
    kernel.check(f"%%distributed {options} --out told:all\n{IMPORTS}{body}", timeout_s)
    return kernel.value("told")


def sums(kernel: Kernel, ranks: int, options: str) -> None:
    """Every rank can reduce."""
    reply = kernel.check(f"%%distributed {options}\n{SUM}", 90)
    assert [reply.lines(rank)[-1] for rank in range(ranks)] == [f"sum {ranks}"] * ranks, reply.story


# ---------------------------------------------------------------- devices


def test_every_rank_has_a_gpu_of_its_own(kernel: Kernel, gpus: tuple[Device, ...]):
    count = len(gpus)
    found = reported(
        kernel,
        f"-n {count}",
        "told = [str(device), torch.cuda.current_device(), torch.cuda.device_count(),\n"
        "        os.environ['CUDA_VISIBLE_DEVICES'].split(','),\n"
        "        str(torch.cuda.get_device_properties(device).uuid)]",
    )
    assert [entry[:3] for entry in found] == [[f"cuda:{rank}", rank, count] for rank in range(count)]
    visible = found[0][3]
    assert all(entry[3] == visible for entry in found)
    assert visible == [gpu.uuid for gpu in gpus]
    if not visible[0].startswith("MIG-"):
        assert [f"GPU-{entry[4].removeprefix('GPU-')}" for entry in found] == visible


def test_two_runs_at_once_have_different_gpus(
    kernel: Kernel, new_kernel: Callable[..., Kernel], go: Callable[[], None]
):
    other = new_kernel()
    body = (
        "%%distributed -n 1 --out mine\nimport os, time\nmine = os.environ['CUDA_VISIBLE_DEVICES']\n"
        "print('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.02)"
    )
    cells = [each.start(body) for each in (kernel, other)]
    for cell in cells:
        cell.until_shown("up", 60)
    go()
    for cell in cells:
        assert cell.wait(60).status == "ok", cell.reply.story
    assert kernel.value("mine") != other.value("mine")


# ---------------------------------------------------------------- NCCL


def test_all_reduce_over_all(kernel: Kernel, gpus: tuple[Device, ...]):
    count = len(gpus)
    sums(kernel, count, f"-n {count}")
    found = reported(
        kernel,
        f"-n {count}",
        "x = torch.full((1 << 22,), float(rank), device=device)\n"
        "dist.all_reduce(x)\n"
        "y = torch.ones(4)\n"
        "dist.all_reduce(y)\n"
        "told = [x.unique().tolist(), y.tolist(), 'nccl' in str(dist.get_backend_config())]",
    )
    assert found == [[[sum(range(count))], [count] * 4, True]] * count


def test_a_rank_that_does_not_come_is_named(kernel: Kernel, go: Callable[[], None]):
    cell = kernel.start(f"%%distributed -n 2\n{ONE_IS_MISSING}")
    cell.until_shown("no progress for", 60)
    shown = [" ".join(line.split()) for line in cell.reply.text.splitlines()]
    assert any(re.search(r"rank 1 has not reached all_reduce #2", line) for line in shown), cell.reply.story
    go()
    cell.until(lambda: "no progress" not in cell.reply.text, 30, "it is taken back")
    assert cell.wait(60).status == "ok", cell.reply.story


def test_a_time_limit_says_where_the_ranks_were(kernel: Kernel):
    reply = kernel.run(f"%%distributed -n 2 --timeout 12s\n{ONE_IS_MISSING}", 90)
    assert reply.ename == "RunTimeout", reply.story
    assert "rank 1 has not reached all_reduce #2" in reply.evalue
    sums(kernel, 2, "-n 2")


def test_stacks_tell_who_waits_for_whom(kernel: Kernel, new_kernel: Callable[..., Kernel]):
    other = new_kernel()
    cell = kernel.start(f"%%distributed -n 2\n{ONE_IS_MISSING}")
    for rank in (0, 1):
        cell.until_shown(f"[{rank}] up", 60)
    eventually(lambda: "not reached all_reduce #2" in other.check("%sgpu_stacks").text, 20, "the diagnosis")
    kernel.interrupt()
    pressed = time.monotonic()
    assert cell.wait(30).ename == "RunCancelled", cell.reply.story
    assert time.monotonic() - pressed < GRACE_S


def test_a_checkpoint_is_not_overwritten_with_what_an_aborted_collective_left(kernel: Kernel, tmp_path: Path):
    checkpoint = tmp_path / "best"
    checkpoint.write_text("0.5")
    save = f"while True: open({str(checkpoint)!r}, 'w').write(str(x.item()))"
    reply = kernel.run(f"%%distributed -n 2\n{ONE_RAISES}\n{save}", 60)
    assert (reply.ename, reply.evalue) == ("ValueError", "the culprit"), reply.story
    assert checkpoint.read_text() == "0.5"


def test_a_rank_that_hangs_is_named_when_nccl_gives_up(kernel: Kernel, go: Callable[[], None]):
    """NCCL's watchdog ends the ranks that waited, which did nothing wrong."""
    limited = ONE_IS_MISSING.replace("dist.all_reduce(x)", "dist.all_reduce(x, group=short)")
    group = "from datetime import timedelta\nshort = dist.new_group([0, 1], timeout=timedelta(seconds=8))\n"
    reply = kernel.run(f"%%distributed -n 2\n{IMPORTS}{group}{limited}", 90)
    assert reply.ename == "WorkerDied", reply.story
    assert "not complete within 8 s" in reply.shown
    assert "rank 1 has not reached all_reduce" in reply.shown


def test_a_rank_that_raises_is_the_one_shown_and_the_others_are_freed(kernel: Kernel):
    reply = kernel.run(f"%%distributed -n 2\n{ONE_RAISES}", 60)
    assert (reply.ename, reply.evalue) == ("ValueError", "the culprit"), reply.story
    assert "rank 1 of 2" in reply.traceback
    eventually(real_gpus.is_free, 30, "the GPUs are free", poll_s=0.2)
    sums(kernel, 2, "-n 2")


def test_a_session_goes_on_after_a_rank_has_raised(pair: Kernel):
    make = (
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "torch.manual_seed(0)\n"
        "model = DDP(torch.nn.Linear(8, 2).to(device), device_ids=[local_rank])\n"
        "group = dist.new_group([0, 1])\n"
    )
    train = "model(torch.ones(4, 8, device=device) * rank).sum().backward()\n"
    weights = "told = model.module.weight.grad.tolist()"
    pair.check(f"%%distributed\n{IMPORTS}{make}{train}", 90)
    reply = pair.run(f"%%distributed\n{ONE_RAISES}", 60)
    assert (reply.ename, reply.evalue) == ("ValueError", "the culprit"), reply.story
    sums(pair, 2, "")
    found = reported(pair, "", f"{train}dist.all_reduce(x, group=group)\n{weights}")
    assert found[0] == found[1]


def test_a_session_goes_on_after_an_interrupt_in_a_collective(pair: Kernel):
    cell = pair.start(f"%%distributed\n{ONE_IS_MISSING}")
    for rank in (0, 1):
        cell.until_shown(f"[{rank}] up", 60)
    pressed = time.monotonic()
    pair.interrupt()
    assert cell.wait(30).ename == "RunCancelled", cell.reply.story
    assert time.monotonic() - pressed < GRACE_S
    sums(pair, 2, "")


def test_a_rank_whose_context_is_lost_is_replaced(pair: Kernel):
    sums(pair, 2, "")
    reply = pair.run(f"%%distributed --ranks 1\n{FAILED_ASSERT}", 60)
    assert "This error destroyed the CUDA context of rank 1" in reply.traceback, reply.story
    assert "`%sgpu_restart --rank 1`" in reply.traceback
    pair.check("%sgpu_restart --rank 1", 90)
    assert pair.check(f"%%distributed\n{WORKS}", 60).lines(1) == ["works 8"]
    sums(pair, 2, "")


# ---------------------------------------------------------------- sharded models, peer to peer


def test_fsdp2_ends_where_one_gpu_does(kernel: Kernel, gpus: tuple[Device, ...]):
    count = len(gpus)
    found = reported(
        kernel,
        f"-n {count}",
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "def make():\n"
        "    torch.manual_seed(0)\n"
        "    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)\n"
        "def train(model, data):\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for _ in range(5):\n"
        "        (model(data) - 1).square().mean().backward()\n"
        "        optimizer.step(); optimizer.zero_grad()\n"
        "torch.manual_seed(1)\n"
        "data = torch.rand(8 * world_size, 32, device=device)\n"
        "alone, sharded = make(), make()\n"
        "mesh = init_device_mesh('cuda', (world_size,))\n"
        "for layer in (sharded[0], sharded[2]): fully_shard(layer, mesh=mesh)\n"
        "fully_shard(sharded, mesh=mesh)\n"
        "train(alone, data)\n"
        "train(sharded, data[8 * rank : 8 * rank + 8])\n"
        "pairs = list(zip(alone.parameters(), sharded.parameters()))\n"
        "told = [all(torch.allclose(one, many.full_tensor(), atol=1e-4) for one, many in pairs),\n"
        "        sum(many.to_local().numel() for _, many in pairs) < sum(one.numel() for one, _ in pairs)]",
    )
    assert found == [[True, True]] * count


def test_tensors_go_round_from_gpu_to_gpu(kernel: Kernel, gpus: tuple[Device, ...]):
    count = len(gpus)
    found = reported(
        kernel,
        f"-n {count}",
        "x = torch.full((1 << 20,), float(rank), device=device)\n"
        "y = torch.empty_like(x)\n"
        "to, source = (rank + 1) % world_size, (rank - 1) % world_size\n"
        "steps = [dist.P2POp(dist.isend, x, to), dist.P2POp(dist.irecv, y, source)]\n"
        "for work in dist.batch_isend_irecv(steps): work.wait()\n"
        "told = y.unique().tolist()",
    )
    assert found == [[(rank - 1) % count] for rank in range(count)]


def test_a_rank_reaches_its_neighbours_gpu(kernel: Kernel):
    found = reported(
        kernel,
        "-n 2",
        "other = torch.device('cuda', 1 - local_rank)\n"
        "x = torch.arange(1 << 20, device=device)\n"
        "y = x.to(other)\n"
        "told = [bool((y.to(device) == x).all()), str(y.device), torch.cuda.can_device_access_peer(device, other)]",
    )
    assert [entry[:2] for entry in found] == [[True, "cuda:1"], [True, "cuda:0"]]
    assert found[0][2] == found[1][2]
