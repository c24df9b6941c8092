"""Scripts that torchrun and accelerate run for the figures, and what a cell of ours does instead.

A script prints `FIGURE` and a number: seconds that it has measured itself, or the wall-clock time of a moment.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from free_ports import free_port
from real_gpus import script_environ

from tests.benchmarks.measure import MeasurementFailed

_FIGURE = re.compile(r"^FIGURE ([\d.e+-]+)$", re.MULTILINE)
_TIMEOUT_S = 180.0

# used as a cell, where `device` is defined, and as a script
FIRST_KERNEL = """
import time, torch
x = torch.ones(1, device=device)
x += 1
torch.cuda.synchronize()
moment = time.time()
"""

ALL_REDUCE = """
import time, torch, torch.distributed as dist
x = torch.ones(1 << 20, device=device)
dist.all_reduce(x)
torch.cuda.synchronize()
moment = time.time()
"""

TRAINING = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())]
model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device, torch.bfloat16), device_ids=[device.index])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
data = torch.rand(512, 2048, device=device, dtype=torch.bfloat16)
for step in range(-30, 300):
    if step == 0:
        torch.cuda.synchronize()
        loop_began = time.perf_counter()
    loss = (model(data) - data).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.cuda.synchronize()
moment = time.perf_counter() - loop_began
"""

_SCRIPT = """
import os, torch, torch.distributed as dist
# accelerate starts a single process as a plain script
alone = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}")
for name, value in alone.items(): os.environ.setdefault(name, value)
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
{joins}
{body}
if int(os.environ["RANK"]) == 0: print("FIGURE", repr(moment), flush=True)
{leaves}
"""


def has_accelerate() -> bool:
    return importlib.util.find_spec("accelerate") is not None


class Scripts:
    """Runs the bodies above as scripts.

    Args:
        folder: Where they are written.
        uuids: The GPUs, one rank each.
    """

    def __init__(self, folder: Path, uuids: Sequence[str]) -> None:
        self._folder = folder
        self._uuids = tuple(uuids)

    def torchrun(self, body: str, *, group: bool = True) -> tuple[float, float]:
        """Return when the command was started (wall-clock), and the script's figure."""
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(len(self._uuids))]
        return self._run(launcher, body, group)

    def accelerate(self, body: str, *, group: bool = True) -> tuple[float, float]:
        """The same with `accelerate launch`."""
        if not has_accelerate():
            raise MeasurementFailed("accelerate is not installed")
        count = len(self._uuids)
        options = ["--num_processes", str(count), "--num_machines", "1", "--mixed_precision", "no"]
        options += ["--dynamo_backend", "no", "--main_process_port", str(free_port())]
        options += ["--multi_gpu"] if count > 1 else []
        return self._run(["accelerate.commands.launch", *options], body, group)

    def _run(self, launcher: Sequence[str], body: str, group: bool) -> tuple[float, float]:
        script = self._folder / "script.py"
        joins = 'dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)' if group else ""
        leaves = "dist.destroy_process_group()" if group else ""
        script.write_text(_SCRIPT.format(port=free_port(), joins=joins, body=body, leaves=leaves))
        began = time.time()
        try:
            ended = subprocess.run(
                [sys.executable, "-m", *launcher, str(script)],
                env=script_environ(self._uuids),
                cwd=self._folder,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise MeasurementFailed(f"no end within {_TIMEOUT_S:g} s") from None
        found = _FIGURE.search(ended.stdout)
        if ended.returncode != 0 or found is None:
            last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            raise MeasurementFailed(f"exit status {ended.returncode}: {last[:200]}")
        return began, float(found[1])
