"""Pools with simulated devices and stand-ins: placement, the queue, and what is said about it."""

from __future__ import annotations

import re

import pytest
from kernels import Kernel

from sgpu_magic.views.units import TIMES

HOME_VARIABLES = {"SGPU_SIMULATE": "a10:4,h100:2", "SGPU_PRICES": "a10=1.20"}

HOLD = "import os, time\nprint('holding', flush=True)\nwhile not os.path.exists('{go}'): time.sleep(0.01)"


def held(kernel: Kernel, line: str, go: str):
    """Start a run that holds its devices until the file `go` is there."""
    cell = kernel.start(f"%%distributed {line}\n" + HOLD.format(go=go))
    cell.until_shown("[0] holding")
    return cell


def release(kernel: Kernel, go: str) -> None:
    (kernel.home.work / go).touch()


def test_simulated_devices_are_leased_and_marked(kernel: Kernel):
    reply = kernel.check("%%distributed -n 2 --type h100\nprint(device)")
    assert f"2 {TIMES} H100 (simulated on cpu)" in reply.text
    assert reply.lines(1) == ["cpu"]
    assert "simulated" in kernel.check("%sgpu_status").text


def test_types_are_named_in_any_way(kernel: Kernel):
    for written in ("A10", "a10", "A10G", "'NVIDIA A10'"):
        assert f"1 {TIMES} A10 (simulated" in kernel.check(f"%%distributed -n 1 --type {written}\npass").text


def test_of_several_types_all_of_the_cheapest_are_taken_and_that_is_told(kernel: Kernel):
    kernel.check("%reload_ext sgpu_magic")
    shown = kernel.check("%%distributed\npass").text
    assert f"4 {TIMES} A10" in shown
    assert "A10: cheapest free type (--type to choose)" in shown


def test_a_run_without_a_type_gets_the_cheapest_that_is_free(kernel: Kernel):
    kernel.check(f"%%distributed -n 3 --type a10 --detach --name holder\n{HOLD.format(go='go-0')}")
    try:
        assert "H100: smallest free type" in kernel.check("%%distributed -n 2\npass").text
        kernel.check("import sgpu_magic")
        found = "sgpu_magic.distributed(gpus={}, ui='none')(lambda world_size: world_size).distributed()"
        assert kernel.value(found.format(1)) == [1]
        # the note stands at the first run only
        shown = kernel.check("%%distributed -n 2\npass").text
        assert (f"2 {TIMES} H100" in shown, "free type" in shown) == (True, False)
        assert f"1 {TIMES} A10" in kernel.check("%%distributed -n 1\npass").text
    finally:
        release(kernel, "go-0")


def test_type_alone_takes_all_of_it(kernel: Kernel):
    assert f"2 {TIMES} H100" in kernel.check("%%distributed --type h100\npass").text


def test_any_takes_one_type(kernel: Kernel):
    assert f"4 {TIMES} A10" in kernel.check("%%distributed -n 4 --type any\npass").text


def test_more_than_exist_says_how_many(kernel: Kernel):
    reply = kernel.run("%%distributed -n 5 --type a10\npass")
    assert reply.ename in ("UsageError", "CapacityError")
    assert "4" in reply.evalue
    assert "A10" in reply.evalue
    assert "sgpu_magic/" not in reply.traceback


def test_type_that_is_missing_lists_what_there_is(kernel: Kernel):
    reply = kernel.run("%%distributed -n 1 --type b200\npass")
    assert reply.ename == "UsageError"
    for word in ("no B200", "4 A10", "2 H100", "SGPU_STAND_IN=cpu"):
        assert word in reply.evalue, reply.evalue


def test_stand_in_runs_a_missing_type_on_cpu_and_says_so(kernel: Kernel):
    kernel.check("%env SGPU_STAND_IN=cpu")
    reply = kernel.check("%%distributed -n 2 --type b200\nprint(device)")
    assert reply.lines(0) == ["cpu"]
    assert f"2 {TIMES} B200 (simulated on cpu)" in reply.text
    kernel.check("import os; del os.environ['SGPU_STAND_IN']")


@pytest.mark.slow
def test_cuda_is_mapped_to_the_cpu_where_asked_for(kernel: Kernel):
    """A notebook for GPUs, unchanged; the run says it, the notebook's own torch is left alone, and a session has it."""
    kernel.check("%env SGPU_STAND_IN=cpu,cuda")
    begin = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl', device_id=torch.device('cuda', local_rank))\n"
        "torch.cuda.set_device(local_rank)\n"
    )
    train = (
        "from torch.nn.parallel import DistributedDataParallel\n"
        "model = DistributedDataParallel(torch.nn.Linear(2, 1).cuda(), device_ids=[local_rank])\n"
        "with torch.autocast('cuda', dtype=torch.bfloat16):\n"
        "    model(torch.ones(4, 2, device=f'cuda:{local_rank}')).sum().backward()\n"
        "dist.barrier(device_ids=[local_rank])\n"
    )
    say = (
        "print(torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.current_device(), dist.get_backend())\n"
    )
    reply = kernel.check(f"%%distributed -n 2 --type b200\n{begin}{train}{say}")
    assert reply.lines(1) == ["True 2 1 gloo"]
    assert "cuda is mapped to the CPU (SGPU_STAND_IN=cpu,cuda)" in reply.text
    kernel.check("import torch\nassert not torch.cuda.is_available()\nassert torch.device('cuda').type == 'cuda'")
    kernel.check("%sgpu_connect -n 2 --type b200")
    again = "dist.destroy_process_group()\ndist.init_process_group('nccl')\nprint(dist.get_backend())"
    assert kernel.check(f"%%distributed\n{begin}{say}{again}").lines(0) == ["True 2 0 gloo", "gloo"]
    kernel.check("%sgpu_disconnect")
    kernel.check("%env SGPU_STAND_IN=cpu")
    reply = kernel.run("%%distributed -n 2 --type b200\nimport torch\ntorch.cuda.set_device(local_rank)")
    assert reply.status == "error"
    assert "`%env SGPU_STAND_IN=cpu,cuda` maps cuda to the CPU" in reply.traceback
    kernel.check("import os; del os.environ['SGPU_STAND_IN']")


def test_second_kernel_waits_its_turn_and_runs(kernel: Kernel, neighbour: Kernel):
    first = held(kernel, "-n 2 --type h100", "go-1")
    second = neighbour.start("%%distributed -n 2 --type h100 --name second\nprint('my turn')")
    second.until_shown("queued")
    assert "position 1" in second.reply.text
    assert "my turn" not in second.reply.text
    release(kernel, "go-1")
    assert first.wait().status == "ok"
    reply = second.wait()
    assert reply.status == "ok"
    assert reply.lines(1) == ["my turn"]


@pytest.mark.slow
def test_a_later_run_that_fits_passes_one_that_does_not(kernel: Kernel, neighbour: Kernel, new_kernel):
    big, small = new_kernel(), neighbour
    first = held(kernel, "-n 3 --type a10", "go-2")
    waiting = big.start("%%distributed -n 4 --type a10\nprint('all four')")
    waiting.until_shown("queued")
    assert small.check("%%distributed -n 1 --type a10\nprint('passed')").lines(0) == ["passed"]
    assert small.check("%%distributed -n 2 --type h100\nprint('other type')").lines(0) == ["other type"]
    release(kernel, "go-2")
    assert first.wait().status == "ok"
    assert waiting.wait().lines(3) == ["all four"]


def test_wait_0_fails_at_once_when_busy(kernel: Kernel, neighbour: Kernel):
    first = held(kernel, "-n 2 --type h100", "go-3")
    reply = neighbour.run("%%distributed -n 1 --type h100 --wait 0\nprint('never')")
    assert reply.ename == "CapacityError"
    assert "--wait" in reply.evalue or "free" in reply.evalue
    assert "sgpu_magic/" not in reply.traceback
    reply = neighbour.run("%%distributed -n 1 --type h100 --wait 200ms\nprint('never')")
    assert reply.ename == "CapacityError"
    assert reply.seconds < 5
    release(kernel, "go-3")
    assert first.wait().status == "ok"


def test_interrupt_takes_a_waiting_run_out_of_the_queue(kernel: Kernel, neighbour: Kernel):
    first = held(kernel, "-n 2 --type h100", "go-4")
    second = neighbour.start("%%distributed -n 2 --type h100\nprint('never')")
    second.until_shown("queued")
    neighbour.interrupt()
    reply = second.wait(5)
    assert reply.status == "error"
    assert "sgpu_magic/" not in reply.traceback
    assert "waiting" not in kernel_status(neighbour)
    release(kernel, "go-4")
    assert first.wait().status == "ok"


def kernel_status(kernel: Kernel) -> str:
    """What `%sgpu_status` says."""
    return kernel.check("%sgpu_status").text


def test_status_shows_devices_and_who_holds_them(kernel: Kernel, neighbour: Kernel):
    first = held(kernel, "-n 1 --type h100 --name holder", "go-5")
    text = kernel_status(neighbour)
    assert "holder" in text
    assert re.search(r"H100 +2 +\d +\d .* holder on \d", text), text
    assert "free" in text
    release(kernel, "go-5")
    assert first.wait().status == "ok"
