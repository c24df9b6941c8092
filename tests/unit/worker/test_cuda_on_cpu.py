"""Code for CUDA on a rank whose CPU stands in for a GPU. In a separate process, since the mapping is permanent."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import threading, torch
from torch import nn
from sgpu_magic.worker.process import cuda_on_cpu, stand_in
stand_in.map_cuda(4, 1)
cpu = torch.device("cpu")
"""
DEVICES = """
device = torch.device("cuda", 1)
assert device == cpu == torch.device("cuda:0") == torch.device(type="cuda", index=2) == torch.device(0), device
assert isinstance(device, torch.device)
assert (str(device), repr(device)) == ("cpu", "device(type='cpu')")
assert torch.device("meta").type == "meta"
x = torch.ones(2, device="cuda")
assert x.device == device
moved = [x.cuda(), x.cuda(1), x.to("cuda:1"), x.to(0), x.to(device, torch.float64), x.to(device="cuda"), x.pin_memory()]
assert {each.device for each in moved} == {cpu}
assert x.to(torch.float16).dtype is torch.float16
assert torch.zeros_like(x, device=device).device == x.new_zeros(2, device="cuda").device == cpu
assert torch.empty(2, pin_memory=True).device == cpu
assert torch.tensor([1.0], device=1).device == cpu
model = nn.Linear(2, 2).cuda().to("cuda:1").to(device)
assert next(model.parameters()).device == device
assert nn.Linear(2, 2, device="cuda").weight.device == cpu
assert nn.ModuleList([model]).to(0)[0] is model
with torch.device("cuda"):
    assert torch.ones(1).device == cpu
generator = torch.Generator("cuda").manual_seed(7)
assert torch.rand(2, generator=generator, device="cuda").device == cpu
assert isinstance(generator, torch.Generator)
seen = []
thread = threading.Thread(target=lambda: seen.append(torch.ones(1, device="cuda").device))
thread.start(); thread.join()
assert seen == [cpu]
"""
FUNCTIONS = """
cuda = torch.cuda
assert cuda.is_available() and cuda.device_count() == 4 and cuda.current_device() == 1
cuda.set_device(torch.device("cuda", 3)); assert cuda.current_device() == 1
cuda.set_device(2); assert cuda.current_device() == 2
cuda.set_device("cuda:0"); assert cuda.current_device() == 0
with cuda.device(3):
    assert cuda.current_device() == 3
assert cuda.current_device() == 0
try:
    cuda.set_device(4)
except RuntimeError as error:
    assert "invalid device ordinal" in str(error)
else:
    raise SystemExit("there is no device 4")
cuda.synchronize(); cuda.empty_cache(); cuda.reset_peak_memory_stats()
assert cuda.memory_allocated() == cuda.max_memory_allocated() == cuda.memory_reserved() == 0
free, total = cuda.mem_get_info()
assert 0 < free <= total == cuda.get_device_properties(0).total_memory
# torch.compile reads the last one for the key of its cache
assert cuda.get_device_properties(0).gcnArchName == ""
assert "CPU" in cuda.get_device_name() and cuda.is_bf16_supported()
start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
start.record(); end.record(); cuda.synchronize()
assert start.elapsed_time(end) >= 0
with cuda.stream(cuda.Stream()):
    torch.ones(1, device="cuda").record_stream(cuda.current_stream())
cuda.nvtx.range_push("x"); cuda.nvtx.range_pop()
cuda.manual_seed_all(1); cuda.set_rng_state(cuda.get_rng_state())
torch.manual_seed(3)
"""
ACCELERATOR = """
accelerator = torch.accelerator
assert accelerator.is_available() and accelerator.device_count() == 4 and accelerator.current_device_index() == 1
found = accelerator.current_accelerator()
assert found == cpu == torch.device(f"{found}:3"), found
assert torch.ones(1, device=f"{found}:2").device == nn.Linear(1, 1).to(f"{found}:2").weight.device == cpu
accelerator.set_device_index(3)
assert accelerator.current_device_index() == torch.cuda.current_device() == 3
with accelerator.device_index(2):
    assert accelerator.current_device_index() == 2
accelerator.synchronize(); accelerator.empty_cache()
assert accelerator.memory_allocated() == 0 and accelerator.get_memory_info()[0] > 0
assert torch.distributed.get_default_backend_for_device(found) == "gloo"
"""
CHILDREN = """
import cloudpickle, multiprocessing, pickle, subprocess, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
for function in (torch.load, dist.init_process_group, dist.barrier, init_device_mesh):
    # by reference
    assert pickle.loads(cloudpickle.dumps(function)) is function, function
seen = "(lambda torch: (torch.device('cuda', 0).type, torch.cuda.device_count()))(__import__('torch'))"
# in a child of the child
below = f"__import__('multiprocessing').get_context('spawn').Pool(1).apply(eval, ({seen!r},))"
for method in ("fork", "spawn", "forkserver"):
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(eval, (seen,)) == ("cpu", 4), method
with multiprocessing.get_context("spawn").Pool(1) as pool:
    pool.apply(exec, ("import multiprocessing; multiprocessing.current_process()._config['daemon'] = False",))
    assert pool.apply(eval, (below,)) == ("cpu", 4)
# another program is not changed
subprocess.run([sys.executable, "-c", "import torch; assert torch.device('cuda', 0).type == 'cuda'"], check=True)
"""
TRAINING = """
import io
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
device = torch.device("cuda", 0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scalers = [torch.amp.GradScaler("cuda"), torch.amp.GradScaler()]
data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
for scaler in scalers:
    for x, y in DataLoader(data, batch_size=8, pin_memory=True, num_workers=1):
        x, y = x.to(device, non_blocking=True), y.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16), torch.autocast(device_type="cuda"):
            out = checkpoint(model, x, use_reentrant=False)
            assert out.dtype is torch.bfloat16
            assert torch.is_autocast_enabled("cuda")
        loss = nn.functional.mse_loss(out.float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.isfinite(loss)
file = io.BytesIO()
torch.save(model.state_dict(), file)
for where in (None, "cuda", "cuda:1", device, {"cuda:0": "cuda:1"}, lambda storage, at: storage):
    file.seek(0)
    loaded = torch.load(file, map_location=where)
    assert loaded["0.weight"].device == cpu
"""
GROUP = """
import os
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
store = dist.HashStore()
dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
assert dist.get_backend() == "gloo"
dist.barrier(device_ids=[0])
dist.new_group([0], backend="nccl")
gathered, scattered = torch.empty(2), torch.empty(1, 2)
dist.all_gather_into_tensor(gathered, torch.ones(1, 2))
dist.reduce_scatter_tensor(scattered, gathered)
assert gathered.tolist() == [1.0, 1.0] and scattered.tolist() == [[1.0, 1.0]]
model = DistributedDataParallel(nn.Linear(2, 1).cuda(), device_ids=[0], output_device=0)
model(torch.ones(1, 2, device="cuda")).sum().backward()
assert model.module.weight.grad is not None
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
model.register_comm_hook(None, bf16_compress_hook)
model(torch.ones(1, 2, device="cuda")).sum().backward()
assert nn.DataParallel(nn.Linear(2, 1).cuda(), device_ids=[0, 1])(torch.ones(4, 2).cuda()).shape == (4, 1)
compiled = torch.compile(nn.Linear(2, 1).cuda(), backend="eager")
assert compiled(torch.ones(1, 2, device="cuda")).device == cpu
mesh = init_device_mesh("cuda", (1,))
assert mesh.device_type == "cpu"
from torch.distributed.fsdp import FullyShardedDataParallel
for options in ({}, {"device_id": 0}, {"device_id": torch.device("cuda", 0)}):
    sharded = FullyShardedDataParallel(nn.Linear(16, 8).to(0), **options)
    sharded(torch.rand(4, 16, device="cuda")).sum().backward()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "code",
    [
        # these share a process, since most of its time is spent importing torch
        pytest.param(DEVICES + FUNCTIONS, id="devices, functions"),
        pytest.param(ACCELERATOR, id="accelerator", marks=pytest.mark.slow),
        pytest.param(CHILDREN, id="children", marks=pytest.mark.slow),
        pytest.param(TRAINING, id="training", marks=pytest.mark.slow),
        pytest.param(GROUP, id="group", marks=pytest.mark.slow),
    ],
)
def test_code_for_cuda_runs_on_the_cpu(code: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BEGIN + code], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
